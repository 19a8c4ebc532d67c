"""Routes of a model with experts: what its routers chose for each token, as in transformers' forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engine.local.batching import Batcher, BatchLimits, DecodeRecording
from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.local.process import ProcessEngine
from agentrl.engine.local.slots import BatchRequest
from agentrl.errors import ConfigError
from agentrl.types import Completion, Routes, Sampling
from bench.families import FAMILIES as ALL
from bench.families import VOCABULARY, Family, config_of

FAMILIES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "deepseek_v3")


def family(kind: str) -> Family:
    return next(family for family in ALL if family.model_type == kind and "sliding" not in family.about)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, kind in enumerate(FAMILIES):
        torch.manual_seed(seed)
        found[kind] = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config_of(family(kind))).save_pretrained(found[kind])
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def table(routes: Routes | None) -> np.ndarray:
    """[T, L, k], the experts of a token in ascending order."""
    assert routes is not None
    found = np.frombuffer(routes.data, f"i{routes.width}").reshape(-1, routes.layers, routes.top_k)
    return np.sort(found, -1)


def chosen(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """What the routers of a plain model choose."""
    seen: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[2])) for router in routers]
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(seen, 1).numpy(), -1)


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", FAMILIES)
async def test_a_completion_has_the_routes_of_its_whole_context(folders: dict[str, Path], kind: str):
    engine = LocalEngine.from_directory(folders[kind], routes=True, max_slots=3, prefill_chunk=16)
    assert engine.capabilities.routes
    prompts = [[*prompt(30), *prompt(5 + 7 * n, n)] for n in range(6)]
    first = await asyncio.gather(
        *(engine.generate(p, Sampling(max_tokens=6 + n, seed=n), session=str(n)) for n, p in enumerate(prompts))
    )
    longer = [[*p, *c.ids, *prompt(9, 40 + n)] for n, (p, c) in enumerate(zip(prompts, first, strict=True))]
    second = [
        await engine.generate(longer[n], Sampling(max_tokens=4, seed=n), session=str(n))
        for n in reversed(range(6))
    ][::-1]  # the latest sessions first: their state is still there
    await engine.close()
    assert any(completion.cached_tokens > 40 for completion in second), "a session keeps its state"
    model = plain(folders[kind])
    for ids, completion in zip([*prompts, *longer], [*first, *second], strict=True):
        wanted = chosen(model, [*ids, *completion.ids])
        assert completion.routes is not None
        assert completion.routes.width == 1
        assert (table(completion.routes) == wanted[:-1]).all()
        assert len({tuple(row.flat) for row in wanted}) > 3, "tokens take different experts"


async def test_routes_are_those_of_the_weights_that_sampled_the_next_token(folders: dict[str, Path]):
    before = plain(folders["qwen3_moe"])
    weights = {name: value * 1.3 for name, value in before.state_dict().items()}
    after = plain(folders["qwen3_moe"])
    after.load_state_dict(weights)
    engine = LocalEngine.from_directory(folders["qwen3_moe"], routes=True)
    ids = prompt(20)
    playing = asyncio.create_task(engine.generate(ids, Sampling(max_tokens=400, seed=0)))
    await asyncio.sleep(0.2)
    await engine.update_weights(weights, 1)
    completion = await playing
    await engine.close()
    switch = completion.versions.index(1)
    assert 0 < switch < 400
    whole = [*ids, *completion.ids]
    found, old, new = table(completion.routes), chosen(before, whole), chosen(after, whole)
    at = len(ids) + switch - 1  # the token after it was sampled with the new weights
    assert (found[:at] == old[:at]).all()
    assert (found[at:] == new[at:-1]).all()
    assert (old != new).any()


class Steps:
    """A scheduler without a thread."""

    def __init__(self, folder: Path, recording: DecodeRecording | None = None, **limits: int) -> None:
        self.model = FlatModel(load_model(folder, dtype="float32", device="cpu"), routes=True)
        bounds = {"max_slots": 4, "max_context": 512, "budget_tokens": 100_000, "prefill_chunk": 64} | limits
        self.scheduler = Batcher(self.model, self.model.shape, BatchLimits(**bounds), recording)
        self.answers: dict[int, Completion | Exception] = {}

    @torch.inference_mode()
    def play(self, prompts: Sequence[list[int]], tokens: int) -> list[Completion]:
        for n, ids in enumerate(prompts):
            self.scheduler.submit(
                BatchRequest(
                    np.array(ids),
                    Sampling(max_tokens=tokens),
                    n,
                    str(n),
                    lambda answer, n=n: self.answers.update({n: answer}),
                )
            )
        while self.scheduler.busy:
            self.scheduler.step()
        found = [self.answers[n] for n in range(len(prompts))]
        return [answer for answer in found if isinstance(answer, Completion)]


def test_requests_that_give_up_their_slot_keep_their_routes(folders: dict[str, Path]):
    steps = Steps(folders["olmoe"], budget_tokens=300, max_context=256)  # two sequences, while they are short
    prompts = [prompt(100 + n, n) for n in range(3)]
    answers = steps.play(prompts, 100)
    model = plain(folders["olmoe"])
    for ids, answer in zip(prompts, answers, strict=True):
        assert (table(answer.routes) == chosen(model, [*ids, *answer.ids])[:-1]).all()


def test_decode_steps_of_fixed_shape_keep_routes(folders: dict[str, Path]):
    """Those that CUDA graphs record."""
    prompts = [prompt(5 + n, n) for n in range(4)]
    wanted = Steps(folders["qwen3_moe"]).play(prompts, 12)
    found = Steps(folders["qwen3_moe"], DecodeRecording(VOCABULARY, None)).play(prompts, 12)
    assert [(one.ids, one.routes) for one in found] == [(one.ids, one.routes) for one in wanted]


async def test_a_process_returns_the_same_routes(folders: dict[str, Path]):
    sampling = Sampling(max_tokens=8, seed=3)
    engine = LocalEngine.from_directory(folders["mixtral"], routes=True)
    wanted = await engine.generate(prompt(9), sampling)
    await engine.close()
    apart = await ProcessEngine.start(folders["mixtral"], routes=True)
    assert apart.capabilities.routes
    assert (await apart.generate(prompt(9), sampling)).routes == wanted.routes
    await apart.close()


@pytest.mark.parametrize("kind", FAMILIES)
async def test_16_bits_change_routes_and_are_not_refused(folders: dict[str, Path], kind: str):
    found = []
    for _ in range(2):
        engine = LocalEngine.from_directory(folders[kind], dtype="bfloat16", routes=True)
        found.append(await engine.generate(prompt(60), Sampling(max_tokens=60, seed=1)))
        await engine.close()
    assert found[0].routes == found[1].routes
    wanted = chosen(plain(folders[kind]), [*prompt(60), *found[0].ids])[:-1]
    differ = (table(found[0].routes) != wanted).mean()
    assert 0 < differ < 0.2


async def test_nothing_is_kept_unless_asked_for(folders: dict[str, Path]):
    engine = LocalEngine.from_directory(folders["qwen3_moe"])
    assert not engine.capabilities.routes
    assert (await engine.generate(prompt(9), Sampling(max_tokens=3))).routes is None
    await engine.close()


def test_a_model_without_experts_is_refused(models: dict[str, Path]):
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no routers that return the experts they choose"):
        LocalEngine.from_directory(models["qwen3"], routes=True)


def test_routes_of_drafted_tokens(folders: dict[str, Path]):
    prompts = [prompt(5 + n, n) for n in range(4)]
    drafting, plainly = Steps(folders["olmoe"]), Steps(folders["olmoe"])
    plainly.scheduler.drafts = None
    passes = {id(steps): 0 for steps in (drafting, plainly)}
    for steps in (drafting, plainly):
        forward = steps.scheduler.forward

        def counted(*given: Any, steps: Steps = steps, forward: Any = forward) -> torch.Tensor:
            passes[id(steps)] += 1
            return forward(*given)

        steps.scheduler.forward = counted
    for _ in range(6):  # what is sampled again and again is drafted
        found, wanted = drafting.play(prompts, 30), plainly.play(prompts, 30)
        assert [(one.ids, one.routes) for one in found] == [(one.ids, one.routes) for one in wanted]
    assert passes[id(drafting)] < 0.8 * passes[id(plainly)]


def test_sequences_with_the_same_tokens_have_the_same_routes(folders: dict[str, Path]):
    steps = Steps(folders["olmoe"])
    answers = steps.play([prompt(20)] * 4, 10)
    model = plain(folders["olmoe"])
    assert len({answer.ids for answer in answers}) > 1
    for answer in answers:
        assert (table(answer.routes) == chosen(model, [*prompt(20), *answer.ids])[:-1]).all()
