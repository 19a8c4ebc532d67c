"""What the engine promises to the tasks that call it: order, memory, cancellation, weights, failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import pytest_asyncio
import torch

from agentrl.engine.base import GenerateOptions
from agentrl.engine.local.flat_model import FlatModel
from agentrl.engine.local.local_engine import LocalEngine, _limits
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Completion, Sampling
from tests.engine.engine_models import VOCABULARY, assert_follows, logprobs_of, reference

Make = Callable[..., LocalEngine]
PROMPT = [7, 3, 250, 9, 9, 41, 100, 2]
GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest_asyncio.fixture
async def make(models: dict[str, Path]) -> AsyncIterator[Make]:
    """Makes engines over the Qwen3 model and closes them."""
    engines: list[LocalEngine] = []

    def build(**options: int) -> LocalEngine:
        engines.append(LocalEngine.from_directory(models["qwen3"], **options))
        return engines[-1]

    yield build
    for engine in engines:
        await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens on the engine's thread."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the engine's thread has no event of this loop to set
            await asyncio.sleep(0.001)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


async def test_a_stop_id_ends_the_completion_and_is_its_last_id(make: Make):
    engine = make()
    free = await engine.generate(PROMPT, GREEDY)
    assert (len(free.ids), free.finish) == (8, "length")
    stop = free.ids[4]
    stopped = await engine.generate(
        PROMPT, Sampling(temperature=0.0, max_tokens=8, stop_ids=frozenset({stop, 299}))
    )
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.versions) == len(stopped.ids)


async def test_the_context_ends_a_completion(make: Make):
    engine = make(max_context=40)
    completion = await engine.generate(prompt(35), Sampling(max_tokens=100, seed=1))
    assert (len(completion.ids), completion.finish) == (5, "length")
    with pytest.raises(ValueError, match="the prompt has 40 tokens and max_context is 40"):
        await engine.generate(prompt(40), GREEDY)


@pytest.mark.parametrize(
    ("ids", "message"), [([], "ids is empty"), ([3, VOCABULARY], "token id 300 is outside"), ([-1], "token id -1")]
)
async def test_ids_that_the_model_cannot_read_are_refused(make: Make, ids: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        await make().generate(ids, GREEDY)


async def test_a_seed_gives_the_same_tokens_in_any_batch(make: Make):
    sampling = [Sampling(temperature=0.9, top_p=0.95, max_tokens=12, seed=seed) for seed in range(10)]
    engine = make()
    together = await asyncio.gather(*(engine.generate(prompt(20 + s, s), sampling[s]) for s in range(10)))
    alone = [await make().generate(prompt(20 + s, s), sampling[s]) for s in (9, 4)]
    assert [completion.ids for completion in alone] == [together[9].ids, together[4].ids]
    unseeded = await asyncio.gather(*(engine.generate(PROMPT, Sampling(max_tokens=12)) for _ in range(2)))
    assert unseeded[0].ids != unseeded[1].ids


async def test_first_tokens_follow_the_model_on_a_fixed_context(make: Make, models: dict[str, Path]):
    engine, count = make(), 3000
    sampling = [Sampling(temperature=1.5, top_k=40, max_tokens=1, seed=seed) for seed in range(count)]
    completions = await asyncio.gather(*(engine.generate(PROMPT, one) for one in sampling))
    with torch.no_grad():
        logits = reference(models["qwen3"])(torch.tensor([PROMPT])).logits[0, -1] / 1.5
    logits[logits < logits.topk(40).values[-1]] = -torch.inf
    assert_follows(np.array([c.ids[0] for c in completions]), torch.softmax(logits.double(), -1).numpy())


async def test_a_session_computes_only_what_is_new(make: Make):
    engine = make()
    first = await engine.generate(prompt(50), GREEDY, session="a")
    longer = [*prompt(50), *first.ids, *prompt(10, 1)]
    second = await engine.generate(longer, GREEDY, session="a")
    assert (first.cached_tokens, second.cached_tokens) == (0, 57)  # the last sampled token is not computed yet
    branch = await engine.generate([*longer[:30], 1, 2, 3], GREEDY, session="a")
    assert branch.cached_tokens == 30
    assert branch.ids == (await make().generate([*longer[:30], 1, 2, 3], GREEDY)).ids


async def test_running_sequences_bound_by_slots_and_all_are_served(make: Make):
    engine = make(max_slots=3)
    table = engine._scheduler.table
    completions = await asyncio.gather(*(engine.generate(prompt(30, s), GREEDY) for s in range(20)))
    assert len(completions) == 20
    assert table.slots <= 3
    assert completions[13].ids == (await make().generate(prompt(30, 13), GREEDY)).ids


async def test_the_session_idle_for_longest_gives_way(make: Make):
    engine = make(max_slots=2)
    turns = {name: prompt(40, seed) for seed, name in enumerate("abc")}
    for name in "abc":
        await engine.generate(turns[name], GREEDY, session=name)
    assert set(engine._scheduler.sessions) == {"b", "c"}
    again = {name: await engine.generate([*turns[name], 5], GREEDY, session=name) for name in "ba"}
    assert again["b"].cached_tokens == 40
    assert again["a"].cached_tokens == 0
    await engine.release("b")
    await engine.release("never heard of")
    await until(lambda: "b" not in engine._scheduler.sessions)


async def test_cancellation_frees_the_slot_and_leaves_the_others_alone(make: Make):
    engine = make(max_slots=2)
    long = Sampling(max_tokens=450, seed=1)
    running = [asyncio.create_task(engine.generate(prompt(20, s), long)) for s in range(2)]
    waiting = asyncio.create_task(engine.generate(PROMPT, GREEDY))
    dropped = asyncio.create_task(engine.generate(PROMPT, GREEDY))
    await until(lambda: int(engine._scheduler.table.active.sum()) == 2 and len(engine._scheduler.waiting) == 2)
    running[0].cancel()
    dropped.cancel()
    assert (await waiting).ids == (await make().generate(PROMPT, GREEDY)).ids
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    assert not running[1].done()
    running[1].cancel()
    await until(lambda: not engine._scheduler.busy)


async def test_equal_prompts_that_arrive_together_are_computed_once(make: Make, models: dict[str, Path]):
    engine = make()
    completions = await asyncio.gather(
        *(engine.generate(prompt(100), Sampling(max_tokens=10, seed=seed)) for seed in range(8))
    )
    assert sorted(completion.cached_tokens for completion in completions) == [0, *[99] * 7]
    model = reference(models["qwen3"])
    for completion in completions:
        assert completion.logprobs == pytest.approx(logprobs_of(model, prompt(100), completion.ids), abs=1e-4)


async def test_a_common_beginning_is_copied_from_any_slot(make: Make, models: dict[str, Path]):
    engine = make()
    await engine.generate(prompt(80), GREEDY, session="other")
    other = [*prompt(80)[:64], *prompt(30, 9)]
    completion = await engine.generate(other, GREEDY)
    assert completion.cached_tokens == 64
    assert completion.logprobs == pytest.approx(
        logprobs_of(reference(models["qwen3"]), other, completion.ids), abs=1e-4
    )


def changed(models: dict[str, Path], factor: float = 1.3) -> dict[str, torch.Tensor]:
    """Other weights for the Qwen3 model, without the name of the tied head."""
    state = reference(models["qwen3"]).state_dict()
    del state["lm_head.weight"]
    return {name: tensor * (factor if "mlp" in name else 1.0) for name, tensor in state.items()}


async def test_weights_change_in_flight_and_every_token_belongs_to_its_version(
    make: Make, models: dict[str, Path]
):
    engine = make()
    await engine.generate(prompt(30, 50), GREEDY, session="kept")
    tasks = [
        asyncio.create_task(engine.generate(prompt(30, s), Sampling(max_tokens=150, seed=s))) for s in range(4)
    ]
    await until(lambda: int(engine._scheduler.table.known.max()) > 60)
    await engine.update_weights(changed(models), 5)
    assert engine.policy_version == 5
    completions = await asyncio.gather(*tasks)
    assert (await engine.generate([*prompt(30, 50), 4], GREEDY, session="kept")).cached_tokens == 0
    old, new = reference(models["qwen3"]), reference(models["qwen3"])
    new.load_state_dict(changed(models), strict=False)
    for number, completion in enumerate(completions):
        assert set(completion.versions) == {0, 5}
        switch = completion.versions.index(5)
        assert completion.versions == (0,) * switch + (5,) * (150 - switch)
        before = logprobs_of(old, prompt(30, number), completion.ids)
        after = logprobs_of(new, prompt(30, number), completion.ids)
        assert completion.logprobs == pytest.approx([*before[:switch], *after[switch:]], abs=1e-4)
        assert before[switch:] != pytest.approx(after[switch:], abs=1e-2)


async def test_weights_that_do_not_fit_change_nothing(make: Make, models: dict[str, Path]):
    engine, good = make(), changed(models)
    before = await engine.generate(PROMPT, GREEDY)
    name = next(iter(good))
    wrong = {
        "no parameter 'model.heads'": good | {"model.heads": torch.zeros(1)},
        "has shape": good | {name: torch.zeros(3, 3)},
        f"weights lack '{name}'": {key: tensor for key, tensor in good.items() if key != name},
    }
    for message, weights in wrong.items():
        with pytest.raises(ValueError, match=message):
            await engine.update_weights(weights, 1)
    after = await engine.generate(PROMPT, GREEDY)
    assert (after.ids, after.versions) == (before.ids, before.versions)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


async def test_logits_that_are_not_finite_fail_the_request_and_good_weights_heal(
    make: Make, models: dict[str, Path]
):
    engine = make()
    healthy = await engine.generate(prompt(60), GREEDY)
    await engine.update_weights(changed(models, float("nan")), 1)
    with pytest.raises(EngineError, match=r"not finite \(policy version 1\)"):
        await engine.generate(prompt(60), GREEDY)
    await engine.update_weights(changed(models, 1.0), 2)
    assert (await engine.generate(prompt(60), GREEDY)).ids == healthy.ids


async def test_a_small_cache_pre_empts_and_still_answers_right(make: Make, models: dict[str, Path]):
    bytes_per_token = make()._model.shape.bytes_per_token
    engine = make(cache_mb=1, max_slots=8)
    assert engine._scheduler.limits.budget_tokens == (1 << 20) // bytes_per_token == 682
    sampling = [Sampling(max_tokens=150, seed=seed) for seed in range(8)]
    completions = await asyncio.gather(*(engine.generate(prompt(60, s), sampling[s]) for s in range(8)))
    table = engine._scheduler.table
    assert table.slots * table.capacity <= 682
    model = reference(models["qwen3"])
    for number, completion in enumerate(completions):
        expected = logprobs_of(model, prompt(60, number), completion.ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_crash_of_the_thread_fails_everything(make: Make):
    engine = make(max_slots=1)
    tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=400, seed=s))) for s in range(3)]
    await until(lambda: engine._scheduler.busy)
    engine._scheduler.cache.keys.clear()  # what a bug would do
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "thread died: IndexError" in str(result)
    calls: list[Awaitable[object]] = [engine.generate(PROMPT, GREEDY), engine.update_weights({}, 1)]
    for call in calls:
        with pytest.raises(EngineError, match="thread died"):
            await call
    await engine.release("x")


async def test_closing_hands_out_what_there_is(make: Make):
    engine = make(max_slots=1)
    tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=490, seed=s))) for s in range(2)]
    await until(lambda: int(engine._scheduler.table.known.max()) > len(PROMPT) + 3)
    await engine.close()
    first, second = [await task for task in tasks]
    assert first.finish == second.finish == "abort"
    assert len(first.ids) == len(first.logprobs) > 3
    assert second == Completion(ids=(), logprobs=(), versions=(), finish="abort")
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(PROMPT, GREEDY)


async def test_an_engine_computes_with_its_own_number_of_threads_and_changes_no_other(make: Make):
    """In the whole process, the number that was set last holds for each thread that has not asked for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def made_elsewhere() -> LocalEngine:
        torch.get_num_threads()
        found = make(threads=1)
        assert torch.get_num_threads() == 2
        return found

    try:
        for engine in (make(threads=1), await asyncio.to_thread(made_elsewhere)):
            assert await engine._call(torch.get_num_threads) == 1
            assert torch.get_num_threads() == 2
            with ThreadPoolExecutor(1) as fresh:
                assert fresh.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


async def neighbors(engine: LocalEngine, other: Awaitable[object]) -> object:
    """What the other request raises, while one of ours is running; ours and a later one are answered."""
    running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=60, seed=1)))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        [found] = await asyncio.gather(other, return_exceptions=True)
        assert len((await running).ids) == 60
        assert len((await engine.generate(PROMPT, GREEDY)).ids) == 8
    return found


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_k": 2**63}, "top_k must be"),
        ({"stop_ids": frozenset({2**64})}, "stop_ids must be token ids"),
        ({"stop_ids": frozenset({"a"})}, "stop_ids must be token ids"),
        ({"temperature": 1e-40, "top_p": 0.9}, "temperature must be 0"),
    ],
)
async def test_a_request_that_cannot_be_is_its_own_error(make: Make, sampling: dict[str, object], message: str):
    engine = make()
    found = await neighbors(engine, engine.generate(PROMPT, Sampling(max_tokens=4, **sampling)))
    assert isinstance(found, ValueError)
    assert message in str(found)


class BadMask:
    def __init__(self, *, allows: object = None, takes: bool = True) -> None:
        self.allows, self.takes = allows, takes

    def allowed(self) -> np.ndarray:
        if self.allows is None:
            raise RuntimeError("no grammar")
        return np.asarray(self.allows, dtype=np.bool_)

    def take(self, id: int) -> None:
        if not self.takes:
            raise RuntimeError("no such token")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (BadMask(), "RuntimeError: no grammar"),
        (BadMask(allows=[False] * VOCABULARY), "allows no token"),
        (BadMask(allows=[False] * VOCABULARY + [True]), "allows no token"),
        (BadMask(allows=[True] * VOCABULARY, takes=False), "RuntimeError: no such token"),
    ],
)
async def test_a_mask_that_fails_ends_its_own_request(make: Make, mask: BadMask, said: str):
    engine = make()
    options = GenerateOptions(mask=mask)
    for top_p in (1.0, 0.9):
        sampling = Sampling(max_tokens=4, seed=2, top_p=top_p)
        found = await neighbors(engine, engine.generate_streaming(PROMPT, sampling, options))
        assert isinstance(found, EngineError)
        assert said in str(found)


async def test_a_listener_that_raises_ends_its_own_request(make: Make):
    def listen(token: object) -> None:
        raise RuntimeError("cannot listen")

    engine = make()
    options = GenerateOptions(on_token=listen)
    found = await neighbors(engine, engine.generate_streaming(PROMPT, Sampling(max_tokens=60, seed=3), options))
    assert isinstance(found, RuntimeError)


async def test_what_cannot_be_computed_is_told_to_its_caller(make: Make, monkeypatch):
    engine = make()
    for bad in (None, np.zeros(3), torch.empty(3, device="meta")):
        weights = dict.fromkeys(engine._model._state, bad)
        assert "must be a dense tensor" in str(await neighbors(engine, engine.update_weights(weights, 1)))
    assert isinstance(await neighbors(engine, engine.prompt_logprobs(PROMPT, top=-1)), ValueError)

    def no_memory(*_: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(engine._model, "scores", no_memory)
    assert "not enough memory" in str(await neighbors(engine, engine.prompt_logprobs(PROMPT)))


async def test_logits_that_are_not_finite_are_an_error_with_filters_too(make: Make):
    engine = make()
    state = {name: tensor.clone() for name, tensor in engine._model._state.items()}
    await engine.update_weights({name: tensor * torch.nan for name, tensor in state.items()}, 1)
    with pytest.raises(EngineError, match="not finite"):
        await engine.generate(PROMPT, Sampling(max_tokens=4, top_p=0.9))
    await engine.update_weights(state, 2)
    assert len((await engine.generate(PROMPT, GREEDY)).ids) == 8


async def test_a_long_row_is_scored_in_parts(make: Make, monkeypatch):
    engine = make()
    row = prompt(50)
    whole = await engine.prompt_logprobs(row, top=2)
    monkeypatch.setattr("agentrl.engine.local.flat_model.LOGITS_AT_ONCE", 7 * VOCABULARY)
    parts = await engine.prompt_logprobs(row, top=2)
    assert [t.id for t in parts] == [t.id for t in whole] == row[1:]
    assert [t.logprob for t in parts] == pytest.approx([t.logprob for t in whole], abs=1e-5)


async def test_logprobs_of_rows_are_those_of_transformers(make: Make, models: dict[str, Path]):
    rows = [prompt(40), prompt(3, 1), [8]]
    (scores,) = (await make().logprobs_by_server(rows)).values()
    model = reference(models["qwen3"])
    for row, score in zip(rows[:2], scores[:2], strict=True):
        assert score == pytest.approx(logprobs_of(model, row[:1], tuple(row[1:])), abs=1e-4)
    assert scores[2] == []


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, models: dict[str, Path]):
    with pytest.raises(ConfigError, match="does not exist; give the path"):
        LocalEngine.from_directory(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LocalEngine.from_directory(tmp_path)
    (tmp_path / "config.json").write_text((models["qwen3"] / "config.json").read_text())
    with pytest.raises(ConfigError, match="cannot load a causal language model"):
        LocalEngine.from_directory(tmp_path)
    for damaged in (b"", b"junk"):
        (tmp_path / "pytorch_model.bin").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot load a causal language model: (EOFE|e)rror"):
            LocalEngine.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_slots": 0}, "max_slots must be at least 1"),
        ({"max_context": 1024}, "max_context is 1024, but the model's max_position_embeddings is 512"),
        ({"dtype": "float8"}, "dtype must be one of float32"),
        ({"device": "cuda"}, "torch finds no CUDA device"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(models: dict[str, Path], options: dict[str, int], message: str):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match=message):
        LocalEngine.from_directory(models["qwen3"], **options)


def test_memory_that_pytorch_keeps_counts_as_free(monkeypatch: pytest.MonkeyPatch):
    free = [10 << 20]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(100 << 20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[-1], 200 << 20))
    model = SimpleNamespace(
        device=torch.device("cuda"), max_positions=512, bytes_per_sequence=0, bytes_per_token=1024
    )
    assert _limits(cast(FlatModel, model), {}, 1).budget_tokens == 50 << 10
