"""Models whose state is not keys and values alone: the same promises, with transformers' own cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Lfm2Config,
    MambaConfig,
    MiniMaxConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.local import own_cache
from agentrl.engine.local.local_engine import EngineCore, LocalEngine
from agentrl.engine.local.own_cache import OwnCacheModel, TurnScheduler
from agentrl.engine.local.process import ProcessEngine
from agentrl.engine.local.slots import BatchRequest
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Completion, Sampling
from tests.engine.engine_models import VOCABULARY, logprobs_of
from tests.learner.train_models import SHAPE as TINY

Make = Callable[..., LocalEngine]
PROMPT = [7, 3, 250, 9, 9, 41, 100, 2]
GREEDY = Sampling(temperature=0.0, max_tokens=8)
SHAPE = {**TINY, "vocab_size": VOCABULARY, "initializer_range": 0.15}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
FAMILIES: dict[str, PretrainedConfig] = {
    "convolutions": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "linear attention": Qwen3_5TextConfig(**SHAPE, **LINEAR),
    "state spaces": MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        initializer_range=0.15,
        max_position_embeddings=512,
        **{key: None for key in SHAPE if key.endswith("_token_id")},
    ),
    "sinks": GptOssConfig(
        **SHAPE,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("own-cache")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).save_pretrained(directory)
    return directory


@pytest_asyncio.fixture
async def make(folder: Path) -> AsyncIterator[Make]:
    engines: list[LocalEngine] = []

    def build(**options: int) -> LocalEngine:
        engines.append(LocalEngine.from_directory(folder, **options))
        assert isinstance(engines[-1]._scheduler, TurnScheduler)
        return engines[-1]

    yield build
    for engine in engines:
        await engine.close()


def reference(path: Path) -> PreTrainedModel:
    """The same model with the attention that transformers writes out."""
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


async def test_logprobs_are_those_of_the_model_and_seeds_give_the_same_tokens(make: Make, folder: Path):
    """Prompts of many lengths at once, in parts of 16 tokens, and one of them alone."""
    engine, model = make(prefill_chunk=16), reference(folder)
    sampling = [Sampling(temperature=1.0, max_tokens=20, seed=seed) for seed in range(6)]
    prompts = [prompt(1 + 9 * seed, seed) for seed in range(6)]
    found = await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, sampling, strict=True)))
    for given, completion in zip(prompts, found, strict=True):
        assert completion.logprobs == pytest.approx(logprobs_of(model, given, completion.ids), abs=1e-4)
        assert completion.finish == "length"
    assert (await make().generate(prompts[4], sampling[4])).ids == found[4].ids


async def test_a_stop_id_ends_the_completion_and_is_its_last_id(make: Make):
    engine = make()
    free = await engine.generate(PROMPT, GREEDY)
    stop = Sampling(temperature=0.0, max_tokens=8, stop_ids=frozenset({free.ids[4], 299}))
    stopped = await engine.generate(PROMPT, stop)
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: free.ids.index(free.ids[4]) + 1]


async def test_a_session_goes_on_from_its_cache_where_the_family_can(make: Make):
    """Some families cannot continue a cache by several tokens: those compute the context again."""
    engine = make()
    first = await engine.generate(prompt(50), GREEDY, session="a")
    longer = [*prompt(50), *first.ids, *prompt(10, 1)]
    second = await engine.generate(longer, GREEDY, session="a")
    assert isinstance(engine._model, OwnCacheModel)
    assert second.cached_tokens == (57 if engine._model.chunks else 0)
    assert second.ids == (await make().generate(longer, GREEDY)).ids
    other = await engine.generate([*longer[:30], 1, 2, 3], GREEDY, session="a")
    assert other.cached_tokens == 0
    assert other.ids == (await make().generate([*longer[:30], 1, 2, 3], GREEDY)).ids
    one = await engine.generate(prompt(20), Sampling(temperature=0.0, max_tokens=1), session="b")
    more = await engine.generate([*prompt(20), *one.ids], GREEDY, session="b")
    assert more.cached_tokens == 20, "a single token always continues"
    assert more.ids == (await make().generate([*prompt(20), *one.ids], GREEDY)).ids


def test_equal_prompts_that_arrive_together_are_computed_once(folder: Path):
    core, model = EngineCore.from_directory(folder, prefill_chunk=40), reference(folder)
    found = list[Completion]()
    for seed in range(5):
        request = BatchRequest(np.array(prompt(100)), Sampling(max_tokens=10), seed, None, found.append)  # type: ignore[arg-type]
        core.scheduler.submit(request)
    with torch.inference_mode():
        while core.scheduler.busy:
            core.scheduler.step()
    assert sorted(completion.cached_tokens for completion in found) == [0, *[99] * 4]
    for completion in found:
        assert completion.logprobs == pytest.approx(logprobs_of(model, prompt(100), completion.ids), abs=1e-4)


async def test_memory_and_slots_bound_what_runs_and_all_are_served(make: Make):
    alone = make()
    assert isinstance(alone._model, OwnCacheModel)
    for bounds in ({"max_slots": 2}, {"cache_mb": 1, "max_context": 200}):
        engine, most = make(**bounds), 0
        step = engine._scheduler.step

        def counted(engine: LocalEngine = engine, step: Callable[[], None] = step) -> None:
            nonlocal most
            step()
            most = max(most, len(engine._scheduler._running) + len(engine._scheduler._kept))

        engine._scheduler.step = counted  # type: ignore[method-assign]
        found = await asyncio.gather(*(engine.generate(prompt(60, s), GREEDY, session=str(s)) for s in range(40)))
        assert found[31].ids == (await alone.generate(prompt(60, 31), GREEDY)).ids
        each = alone._model.bytes_per_sequence + 60 * alone._model.bytes_per_token
        assert most <= (bounds.get("max_slots") or (1 << 20) // each + 1)


async def test_weights_change_in_flight_and_every_token_belongs_to_its_version(make: Make, folder: Path):
    engine, old, new = make(), reference(folder), reference(folder)
    changed = {name: 1.3 * value if "norm" in name else value for name, value in old.state_dict().items()}
    new.load_state_dict(changed)
    await engine.generate(prompt(30, 50), Sampling(temperature=0.0, max_tokens=1), session="kept")
    tasks = [
        asyncio.create_task(engine.generate(prompt(30, s), Sampling(max_tokens=60, seed=s))) for s in range(3)
    ]
    async with asyncio.timeout(20):
        while not any(len(each.logprobs) > 20 for each in engine._scheduler._running):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await engine.update_weights(changed, 5)
    for number, completion in enumerate(await asyncio.gather(*tasks)):
        switch = completion.versions.index(5)
        assert completion.versions == (0,) * switch + (5,) * (60 - switch)
        before = logprobs_of(old, prompt(30, number), completion.ids)
        after = logprobs_of(new, prompt(30, number), completion.ids)
        assert completion.logprobs == pytest.approx([*before[:switch], *after[switch:]], abs=1e-4)
    again = await engine.generate([*prompt(30, 50), 1], GREEDY, session="kept")
    assert again.cached_tokens == 0
    await engine.update_weights({name: value * float("nan") for name, value in changed.items()}, 6)
    with pytest.raises(EngineError, match=r"not finite \(policy version 6\)"):
        await engine.generate(PROMPT, GREEDY)
    await engine.update_weights(old.state_dict(), 7)
    assert len((await engine.generate(PROMPT, GREEDY)).ids) == 8


def test_equal_sequences_that_lose_their_caches_count_their_prompt_alone(folder: Path):
    """One computes all tokens again and the other copies: of those, sampled ones are not cached tokens."""
    core, found = EngineCore.from_directory(folder), list[Completion]()
    for _ in range(2):
        core.scheduler.submit(BatchRequest(np.array(PROMPT), GREEDY, 0, None, found.append))  # type: ignore[arg-type]
    with torch.inference_mode():
        for _ in range(3):
            core.scheduler.step()
        core.update(core.model.module.state_dict(), 1)
        while core.scheduler.busy:
            core.scheduler.step()
    assert [completion.versions for completion in found] == [(0, 0, 0, 1, 1, 1, 1, 1)] * 2
    assert [completion.cached_tokens for completion in found] == [0, len(PROMPT) - 1]


async def test_cancelled_and_closed(make: Make):
    engine = make(max_slots=1)
    long = Sampling(max_tokens=400, seed=1)
    running, waiting = (asyncio.create_task(engine.generate(prompt(20 + s), long)) for s in range(2))
    async with asyncio.timeout(20):
        while not engine._scheduler._running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    def second_goes_on() -> bool:
        return any(each.request.prompt == 21 and len(each.logprobs) > 3 for each in engine._scheduler._running)

    async with asyncio.timeout(20):
        while not second_goes_on():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    queued = asyncio.create_task(engine.generate(PROMPT, GREEDY))
    await asyncio.sleep(0)
    await engine.close()
    begun = await waiting
    assert begun.finish == "abort"
    assert len(begun.ids) == len(begun.logprobs) > 3
    assert (await queued) == Completion(ids=(), logprobs=(), versions=(), finish="abort")


class Only:
    """A mask that allows two ids, and fails on the wrong one."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.taken = ids, list[int]()

    def allowed(self) -> np.ndarray:
        return np.isin(np.arange(VOCABULARY), self.ids)

    def take(self, id: int) -> None:
        self.taken.append(id)


async def test_masks_alternatives_and_scores(make: Make, folder: Path):
    engine, model, told = make(), reference(folder), list[TokenLogprob]()
    mask = Only(5, 17)
    options = GenerateOptions(mask=mask, on_token=told.append, top=2)
    found = await engine.generate_streaming(PROMPT, Sampling(max_tokens=6, seed=1), options)
    assert set(found.ids) <= {5, 17}
    assert mask.taken == list(found.ids) == [token.id for token in told]
    assert found.logprobs == pytest.approx(logprobs_of(model, PROMPT, found.ids), abs=1e-4), "unrestricted"
    assert all(len(token.top) == 2 for token in told)
    with pytest.raises(EngineError, match="mask of tokens failed"):
        await engine.generate_streaming(PROMPT, GREEDY, GenerateOptions(mask=Only()))
    ((row,),) = (await engine.logprobs_by_server([[*PROMPT, *found.ids]])).values()
    assert row[len(PROMPT) - 1 :] == pytest.approx(found.logprobs, abs=1e-4)
    scored = await engine.prompt_logprobs(PROMPT, top=3)
    assert [len(token.top) for token in scored] == [3] * (len(PROMPT) - 1)


async def test_long_rows_are_scored_in_parts(make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The logits of a row never exist at once beyond a bound."""
    row, engine = prompt(40), make()
    ((whole,),) = (await engine.logprobs_by_server([row])).values()
    monkeypatch.setattr(own_cache, "LOGITS_AT_ONCE", 16 * VOCABULARY)
    assert isinstance(engine._model, OwnCacheModel)
    with torch.inference_mode():
        assert [len(part) for part in engine._model.scores(row)] == [16, 16, 7]
    ((parts,),) = (await engine.logprobs_by_server([row])).values()
    assert parts == pytest.approx(whole, abs=1e-5)
    assert parts == pytest.approx(logprobs_of(reference(folder), row[:1], row[1:]), abs=1e-4)


async def test_prompts_may_be_read_only(make: Make):
    """Rendered prompts are; PyTorch warns about such arrays, once per process unless told otherwise."""
    ids = np.array(PROMPT)
    ids.flags.writeable = False
    engine = make()
    torch.set_warn_always(True)
    try:
        found = await engine.generate(ids, GREEDY)  # type: ignore[arg-type]
    finally:
        torch.set_warn_always(False)
    assert found.ids == (await engine.generate(PROMPT, GREEDY)).ids


async def test_another_process_runs_it_too(folder: Path):
    engine = await ProcessEngine.start(folder)
    try:
        found = await engine.generate(PROMPT, GREEDY)
        assert found.logprobs == pytest.approx(logprobs_of(reference(folder), PROMPT, found.ids), abs=1e-4)
    finally:
        await engine.close()


def test_a_cache_that_is_wrong_is_refused(tmp_path: Path):
    """Tokens one at a time give something else than the whole row in this family of transformers."""
    config = MiniMaxConfig(
        **SHAPE, num_local_experts=2, num_experts_per_tok=1, layer_types=["linear_attention", "full_attention"]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="computes different results with a cache than on separate rows"):
        LocalEngine.from_directory(tmp_path)
    with pytest.raises(ConfigError, match="linear_attention"):
        LocalEngine.from_directory(tmp_path, routes=True)
