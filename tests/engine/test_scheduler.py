"""What enters each forward pass: the scheduler over a real model, step by step, without a thread."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.local.attention import AttentionPlan
from agentrl.engine.local.batching import WORTH_SHARING, Batcher, BatchLimits
from agentrl.engine.local.cache import CachedAttention
from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.sampler import ROUNDING
from agentrl.engine.local.slots import BatchRequest
from agentrl.types import Completion, Sampling
from tests.engine.engine_models import VOCABULARY, logprobs_of, reference


class Steps:
    """A scheduler whose passes are recorded: `passes[i]` is the number of tokens of the i-th."""

    def __init__(self, path: Path, *, alone: bool = False, noise: float = 0.0, **limits: int) -> None:
        """`noise` is added to the logits of every pass, with random signs; `alone`: as the engine does."""
        self.model = FlatModel(load_model(path, dtype="float32", device="cpu"))
        self.noise, self.random = noise, torch.Generator().manual_seed(5)
        bounds = {"max_slots": 64, "max_context": 512, "budget_tokens": 100_000, "prefill_chunk": 64} | limits
        self.scheduler = Batcher(
            self._forward, self.model.shape, BatchLimits(**bounds), alone=self.model.alone if alone else None
        )
        self.passes: list[int] = []
        self.answers: dict[BatchRequest, Completion | Exception] = {}

    def _forward(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, plan: AttentionPlan, keep_k: torch.Tensor
    ) -> torch.Tensor:
        self.passes.append(len(ids_N))
        logits = self.model(ids_N, positions_N, plan, keep_k)
        return logits + self.noise * (2 * torch.randint(0, 2, logits.shape, generator=self.random) - 1)

    def submit(self, ids: list[int], sampling: Sampling, session: str | None = None) -> BatchRequest:
        request = BatchRequest(
            np.array(ids), sampling, sampling.seed or 0, session, lambda r: self.answers.update({request: r})
        )
        self.scheduler.submit(request)
        return request

    @torch.inference_mode()
    def step(self) -> None:
        self.scheduler.step()

    def run(self) -> None:
        while self.scheduler.busy:
            self.step()

    def sampled(self, request: BatchRequest) -> int:
        slot = request.slot
        assert slot is not None
        return int(self.scheduler.table.known[slot]) - request.prompt


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def test_a_long_prompt_is_computed_in_chunks_while_others_decode(models: dict[str, Path]):
    steps = Steps(models["qwen3"])
    short = steps.submit(prompt(5), Sampling(max_tokens=200, seed=1))
    steps.step()
    long = steps.submit(prompt(200, 1), Sampling(max_tokens=5, seed=2))
    for passed in range(1, 4):
        steps.step()
        assert (steps.sampled(short), steps.sampled(long)) == (1 + passed, 0)
    steps.step()
    assert (steps.sampled(short), steps.sampled(long)) == (5, 1)
    assert steps.passes == [5, 65, 65, 65, 9]
    steps.run()
    answer = steps.answers[long]
    assert isinstance(answer, Completion)
    assert answer.logprobs == pytest.approx(
        logprobs_of(reference(models["qwen3"]), prompt(200, 1), answer.ids), abs=1e-4
    )


def test_a_group_costs_one_prompt(models: dict[str, Path]):
    steps = Steps(models["qwen3"], prefill_chunk=512)
    for seed in range(8):
        steps.submit(prompt(100), Sampling(max_tokens=1, seed=seed))
    steps.run()
    assert steps.passes == [100]


@pytest.mark.parametrize(("lasts", "own"), [([[1], [2], [3]], 2), ([[], [], []], 0)])
def test_followers_go_on_alone_when_their_leader_is_cancelled(
    models: dict[str, Path], lasts: list[list[int]], own: int
):
    steps = Steps(models["qwen3"], prefill_chunk=32)
    requests = [
        steps.submit([*prompt(100), *last], Sampling(max_tokens=3, seed=n)) for n, last in enumerate(lasts)
    ]
    steps.step()
    steps.scheduler.cancel(requests[0])
    steps.run()
    assert set(steps.answers) == set(requests[1:])
    assert sum(steps.passes) == 100 + own + 2 * 2  # what the leader had computed (32 tokens) was not lost


def test_running_sequences_move_together_when_most_have_ended(models: dict[str, Path]):
    steps = Steps(models["qwen2"], prefill_chunk=4096)
    lasting = {
        number: steps.submit(prompt(30, number), Sampling(max_tokens=60, seed=number), f"s{number}")
        if number % 4 == 3
        else steps.submit(prompt(30, number), Sampling(max_tokens=2, seed=number), f"s{number}")
        for number in range(48)
    }
    for _ in range(4):
        steps.step()
    active = np.flatnonzero(steps.scheduler.table.active)
    assert active.tolist() == list(range(12))
    steps.run()
    model = reference(models["qwen2"])
    for number, request in lasting.items():
        answer = steps.answers[request]
        assert isinstance(answer, Completion)
        assert answer.logprobs == pytest.approx(logprobs_of(model, prompt(30, number), answer.ids), abs=1e-4)
    for number, request in lasting.items():  # the sessions that were moved away still have their keys and values
        answer = steps.answers[request]
        assert isinstance(answer, Completion)
        longer = [*prompt(30, number), *answer.ids, 5, 6]
        again = steps.submit(longer, Sampling(temperature=0.0, max_tokens=3), f"s{number}")
        steps.run()
        result = steps.answers[again]
        assert isinstance(result, Completion)
        assert result.cached_tokens == len(longer) - 3
        assert result.logprobs == pytest.approx(logprobs_of(model, longer, result.ids), abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])  # two of them with sliding windows
def test_a_common_prefix_is_read_once_for_all_that_decode(
    models: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
):
    shared: list[tuple[int, int]] = []
    scores = CachedAttention._scores_of_prefix

    def counted(plan: CachedAttention, layer: int, query_nKGD: torch.Tensor) -> torch.Tensor:
        shared.append((plan.high, plan.prefix))
        return scores(plan, layer, query_nKGD)

    monkeypatch.setattr(CachedAttention, "_scores_of_prefix", counted)
    steps = Steps(models[kind], prefill_chunk=4096)
    prompts = [[*prompt(70), 7, number % 3, *prompt(1 + number % 5, number)] for number in range(40)]
    assert len(set(map(tuple, prompts))) == 40
    requests = [
        steps.submit(ids, Sampling(temperature=0.0, max_tokens=3 + 9 * (number % 4)), f"s{number}")
        for number, ids in enumerate(prompts)
    ]
    steps.run()
    model = reference(models[kind])
    for ids, request in zip(prompts, requests, strict=True):
        answer = steps.answers[request]
        assert isinstance(answer, Completion)
        assert answer.logprobs == pytest.approx(logprobs_of(model, ids, answer.ids), abs=1e-4)
    if kind == "mistral":  # its window hides the prefix from some rows
        assert shared == []
    else:
        assert max(shared) == (40, 71)
        assert min(rows * prefix for rows, prefix in shared) >= WORTH_SHARING


def test_the_youngest_gives_way_and_its_tokens_are_kept(models: dict[str, Path]):
    steps = Steps(models["qwen3"], budget_tokens=300, max_context=256, max_slots=4)
    first = steps.submit(prompt(60), Sampling(max_tokens=90, seed=1))
    second = steps.submit(prompt(60, 1), Sampling(max_tokens=90, seed=2))
    while steps.scheduler.table.capacity == 128:
        steps.step()
    assert (first.slot, second.slot) == (0, None)
    assert len(second.ids) > second.prompt
    steps.run()
    model = reference(models["qwen3"])
    for request, seed in ((first, 0), (second, 1)):
        answer = steps.answers[request]
        assert isinstance(answer, Completion)
        assert (len(answer.ids), answer.finish) == (90, "length")
        assert answer.logprobs == pytest.approx(logprobs_of(model, prompt(60, seed), answer.ids), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_rounding_of_the_batch_changes_no_token(models: dict[str, Path], temperature: float):
    """Three times the rounding that was measured, and another batch and other chunks.

    With the other way of sampling, twenty times as much changes tokens on every processor; this much on some.

    For greedy sampling, each logit occurs twice, so that every token is a tie.
    """
    length = 150 if temperature else 10

    def tokens(alone: bool, noise: float, **limits: int) -> list[tuple[int, ...]]:
        steps = Steps(models["qwen3"], alone=alone, noise=noise, **limits)
        if not temperature:
            with torch.no_grad():
                weight = steps.model.module.get_output_embeddings().weight
                weight[1::2] = weight[::2]
        requests = [
            steps.submit(prompt(5 + i % 20, i), Sampling(temperature, max_tokens=length, seed=i))
            for i in range(40)
        ]
        steps.run()
        answers = [steps.answers[request] for request in requests]
        return [answer.ids for answer in answers if isinstance(answer, Completion)]

    noise = 0.5 * ROUNDING
    expected = tokens(True, 0.0)
    assert len(expected) == 40
    assert tokens(True, noise) == expected
    assert tokens(True, noise, max_slots=7, prefill_chunk=16) == expected
    assert tokens(False, 20 * noise) != expected, "the noise changes nothing: the test does not show anything"
