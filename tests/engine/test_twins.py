"""Slots with the same tokens share the rows of a forward pass, and no token changes by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.local.batching import Batcher, BatchLimits, DecodeRecording
from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.slots import BatchRequest, IntArray, SlotTable, Twins
from agentrl.types import Completion, Sampling
from tests.engine.engine_models import VOCABULARY, logprobs_of, reference
from tests.engine.test_scheduler import Steps, prompt


def apart(slots: IntArray) -> Twins:
    return Twins(np.arange(len(slots)), np.arange(len(slots)))


class Apart(Steps):
    """A scheduler that computes each slot alone."""

    def __init__(self, path: Path, **options: object) -> None:
        super().__init__(path, **options)  # type: ignore[arg-type]
        self.scheduler._twins = apart  # type: ignore[method-assign]


def turn(steps: Steps, prompts: Sequence[Sequence[int]], sampling: Sampling, number: int = 0) -> list[Completion]:
    """Send each prompt in its own session, with its own seed."""
    requests = [
        steps.submit(list(ids), replace(sampling, seed=1000 * number + n), f"s{n}")
        for n, ids in enumerate(prompts)
    ]
    steps.run()
    answers = [steps.answers[request] for request in requests]
    found = [answer for answer in answers if isinstance(answer, Completion)]
    assert len(found) == len(prompts)
    return found


def groups(num: int, size: int, length: int = 30) -> list[list[int]]:
    """Of each group the same prompt, behind a beginning that all have; members of groups are not neighbors."""
    return [[*prompt(length, 99), *prompt(5 + n % num, n % num)] for n in range(num * size)]


SAMPLINGS = {
    "plain": Sampling(max_tokens=30),
    "cold": Sampling(0.3, max_tokens=40),
    "greedy": Sampling(0.0, max_tokens=40),
    "filtered": Sampling(0.6, top_p=0.8, top_k=20, max_tokens=30),
    "stopping": Sampling(0.4, max_tokens=40, stop_ids=frozenset(range(0, VOCABULARY, 15))),
}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "mistral"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_twins_change_no_token(models: dict[str, Path], kind: str, name: str):
    sampling, played = SAMPLINGS[name], []
    both = [made(models[kind], alone=True, prefill_chunk=4096) for made in (Steps, Apart)]
    for steps in both:
        first = turn(steps, groups(4, 6), sampling)
        observed = [[*ids, *answer.ids, *prompt(20, 7)] for ids, answer in zip(groups(4, 6), first, strict=True)]
        played.append(first + turn(steps, observed, sampling, number=1))
    for one, other in zip(*played, strict=True):
        assert (one.ids, one.finish, one.versions) == (other.ids, other.finish, other.versions)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    shared, alone = (sum(steps.passes) for steps in both)
    assert shared < (0.35 if name == "greedy" else 1.0) * alone


def test_a_group_that_agrees_costs_one_row_in_each_step(models: dict[str, Path]):
    steps = Steps(models["qwen3"], prefill_chunk=4096)
    steps.scheduler.drafts = None
    first = turn(steps, groups(1, 8), Sampling(0.0, max_tokens=10))
    assert steps.passes == [35, *[1] * 9]
    assert sorted(answer.cached_tokens for answer in first) == [0, *[34] * 7]
    assert len({answer.ids for answer in first}) == 1
    steps.passes.clear()
    again = [[*groups(1, 1)[0], *answer.ids, *prompt(20, 7)] for answer in first]
    turn(steps, again, Sampling(0.0, max_tokens=3), number=1)
    assert steps.passes == [21, 1, 1]  # the last token of the first turn, and what was observed


def test_a_long_prompt_that_twins_continue_is_computed_in_chunks(models: dict[str, Path]):
    steps = Steps(models["qwen3"], prefill_chunk=64)
    first = turn(steps, groups(1, 3), Sampling(0.0, max_tokens=2))
    steps.passes.clear()
    again = [[*groups(1, 1)[0], *answer.ids, *prompt(150, 7)] for answer in first]
    answers = turn(steps, again, Sampling(max_tokens=5), number=1)
    assert steps.passes[:3] == [64, 64, 151 - 128]
    model = reference(models["qwen3"])
    for ids, answer in zip(again, answers, strict=True):
        assert answer.logprobs == pytest.approx(logprobs_of(model, ids, answer.ids), abs=1e-4)


def test_others_go_on_when_the_one_that_is_computed_is_cancelled(models: dict[str, Path]):
    steps = Steps(models["qwen2"], alone=True)
    wanted = turn(Apart(models["qwen2"], alone=True), groups(2, 4), Sampling(0.3, max_tokens=30))
    requests = [steps.submit(ids, Sampling(0.3, max_tokens=30, seed=n)) for n, ids in enumerate(groups(2, 4))]
    for _ in range(4):
        steps.step()
    for gone in requests[:2]:
        steps.scheduler.cancel(gone)
    steps.run()
    for request, answer in list(zip(requests, wanted, strict=True))[2:]:
        found = steps.answers[request]
        assert isinstance(found, Completion)
        assert found.ids == answer.ids


def test_new_weights_reach_all_twins(models: dict[str, Path]):
    steps = Steps(models["qwen3"], alone=True)
    requests = [steps.submit(ids, Sampling(0.0, max_tokens=30)) for ids in groups(2, 4)]
    for _ in range(6):
        steps.step()
    model, generator = reference(models["qwen3"]), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    steps.model.update(model.state_dict())
    steps.scheduler.drop_states(1)
    steps.passes.clear()
    steps.step()
    assert steps.passes[0] <= 64, "two sequences of about 40 tokens in one chunk"
    steps.run()
    for ids, request in zip(groups(2, 4), requests, strict=True):
        answer = steps.answers[request]
        assert isinstance(answer, Completion)
        switch = answer.versions.index(1)
        new = logprobs_of(model, ids, answer.ids)
        assert answer.logprobs[switch:] == pytest.approx(new[switch:], abs=1e-4)


def test_sequences_that_give_way_are_twins_again(models: dict[str, Path]):
    bounds = {"budget_tokens": 300, "max_context": 256, "max_slots": 4}
    steps, alone = (made(models["qwen3"], alone=True, **bounds) for made in (Steps, Apart))
    prompts = [prompt(60)] * 4
    found, wanted = (turn(one, prompts, Sampling(0.2, max_tokens=90)) for one in (steps, alone))
    assert [answer.ids for answer in found] == [answer.ids for answer in wanted]


def test_recorded_steps_share_no_rows(models: dict[str, Path]):
    model = FlatModel(load_model(models["qwen3"], dtype="float32", device="cpu"))
    recorded = Batcher(model, model.shape, BatchLimits(8, 64, 4096, 64), DecodeRecording(VOCABULARY, None))
    for n in range(3):
        request = BatchRequest(np.arange(5), Sampling(), n, None, lambda answer: None)
        recorded.table.occupy(n, request, computed=4, limit=9, stamp=n)
    twins = recorded._twins(np.arange(3))
    assert (twins.first.tolist(), twins.kind.tolist()) == ([0, 1, 2], [0, 1, 2])


# The table


def occupied(*rows: Sequence[int], computed: Sequence[int] | None = None, capacity: int = 16) -> SlotTable:
    table = SlotTable(len(rows), capacity)
    for slot, ids in enumerate(rows):
        request = BatchRequest(np.array(ids), Sampling(), 0, None, lambda answer: None)
        done = len(ids) - 1 if computed is None else computed[slot]
        table.occupy(slot, request, computed=done, limit=capacity, stamp=slot)
    return table


def kinds(table: SlotTable, *slots: int) -> tuple[list[int], list[int]]:
    twins = table.twins(np.array(slots))
    return twins.first.tolist(), twins.kind.tolist()


def test_only_equal_sequences_are_twins():
    table = occupied([1, 2], [2, 1], [1, 2], [1, 2, 0], [1], [2, 1])
    assert kinds(table, 0, 1, 2, 3, 4, 5) == ([0, 1, 3, 4], [0, 1, 0, 2, 3, 1])
    assert kinds(table, 1, 3, 5) == ([0, 1], [0, 1, 0])


def test_sequences_that_are_computed_up_to_different_places_are_no_twins():
    table = occupied([1, 2, 3], [1, 2, 3], [1, 2, 3], computed=[1, 0, 1])
    assert kinds(table, 0, 1, 2) == ([0, 1], [0, 1, 0])


def test_twins_part_with_the_first_token_that_differs():
    table = occupied([1, 2], [1, 2], [1, 2])
    slots, zeros = np.arange(3), np.zeros(3, dtype=np.int64)
    table.append(slots, zeros, np.array([7, 8, 7]), np.zeros(3, dtype=np.float32), 0)
    assert kinds(table, 0, 1, 2) == ([0, 1], [0, 1, 0])
    table.append(
        np.array([0, 0, 2, 2]), np.array([0, 1, 0, 1]), np.array([4, 5, 5, 4]), np.zeros(4, np.float32), 0
    )
    assert kinds(table, 0, 1, 2) == ([0, 1, 2], [0, 1, 2])


def test_twins_stay_twins_where_the_table_changes():
    table = occupied([1, 2], [9, 9], [1, 2], [9, 9])
    table.swap([0], [1])
    assert kinds(table, 0, 1, 2, 3) == ([0, 1], [0, 1, 1, 0])
    table.rebuild([3, 1, 0, 2], 5, 64)
    assert kinds(table, 0, 1, 2, 3) == ([0, 1], [0, 1, 0, 1])
    table.append(np.array([1, 3]), np.zeros(2, np.int64), np.array([4, 4]), np.zeros(2, np.float32), 0)
    table.computed[[1, 3]] += 1
    other = BatchRequest(np.array([1, 2, 4]), Sampling(), 0, None, lambda answer: None)
    table.occupy(4, other, computed=2, limit=64, stamp=9)
    assert kinds(table, 1, 3, 4) == ([0], [0, 0, 0]), "a prompt that is as long as what others have sampled"


def test_contexts_with_one_digest_are_compared():
    table = occupied([1, 2], [3, 4], [1, 2])
    table.digest[:] = 5
    assert kinds(table, 0, 1, 2) == ([0, 1, 2], [0, 1, 2])
    assert kinds(table, 0, 2) == ([0], [0, 0])
