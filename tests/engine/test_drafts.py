"""Draft tokens: what is guessed, and that guesses change how many passes it takes and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.local.drafts import MOST, Drafts
from agentrl.engine.local.slots import BatchRequest, IntArray, SlotTable
from agentrl.types import Completion, Sampling
from tests.engine.engine_models import VOCABULARY, logprobs_of, reference
from tests.engine.test_scheduler import Steps, prompt


def learned(*sequences: Sequence[int], times: int = 3) -> Drafts:
    drafts = Drafts()
    for _ in range(times):
        for ids in sequences:
            for end in range(3, len(ids)):
                drafts.learn(np.array([ids[end - 3 : end]]), np.array([ids[end]]))
    return drafts


def guess(drafts: Drafts, *contexts: Sequence[int], room: int = 100, least: int = 1) -> list[list[int]]:
    found: list[list[int]] = drafts.guess(np.array(contexts), np.full(len(contexts), room), least).tolist()
    return found


def test_what_followed_three_times_is_guessed_as_far_as_it_is_known():
    assert guess(learned([1, 2, 3, 4, 5, 6], times=2), [1, 2, 3]) == [[]]
    drafts = learned([1, 2, 3, 4, 5, 6])
    assert guess(drafts, [1, 2, 3], [2, 3, 4], [9, 9, 9]) == [[4, 5, 6], [5, 6, -1], [-1, -1, -1]]
    assert guess(drafts, [1, 2, 3], room=2) == [[4, 5]]
    assert guess(drafts, [1, 2, 3], [2, 3, 4], [9, 9, 9], least=2) == [[4, 5], [5, 6], [-1, -1]]
    circle = learned([1, 2, 3] * 5)
    assert guess(circle, [1, 2, 3]) == [([1, 2, 3] * MOST)[:MOST]]
    assert drafts.guess(np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.int64), 1).shape == (0, 0)


def test_a_token_that_often_differs_is_not_guessed():
    drafts = learned([1, 2, 3, 4])
    drafts.learn(np.array([[1, 2, 3]]), np.array([5]))
    assert guess(drafts, [1, 2, 3]) == [[]]
    random = np.random.default_rng(0)

    def share(right: float) -> float:
        """How often a token is guessed that comes with this probability."""
        drafts, guessed = Drafts(), 0
        for _ in range(2000):
            guessed += guess(drafts, [1, 2, 3], room=1) == [[4]]
            drafts.learn(np.array([[1, 2, 3]]), np.array([4 if random.random() < right else 5]))
        return guessed / 2000

    assert share(0.98) > 0.85
    assert share(0.4) < 0.15
    for _ in range(30):
        drafts.learn(np.array([[1, 2, 3]]), np.array([6]))
    assert guess(drafts, [1, 2, 3]) == [[6]]  # and another one takes its place


def test_contexts_that_share_an_entry_are_not_confused():
    drafts = Drafts()
    contexts = np.random.default_rng(1).integers(0, 200_000, (100_000, 3))  # more than there are entries
    for _ in range(4):
        drafts.learn(contexts, contexts.sum(1))
    found = drafts.guess(contexts, np.ones(len(contexts), dtype=np.int64), 1)[:, 0]
    assert (found >= 0).sum() > 10_000
    assert set(found[found >= 0] - contexts.sum(1)[found >= 0]) == {0}


def test_tokens_behind_a_wrong_draft_or_the_end_are_not_kept():
    table = SlotTable(3, 16)
    for slot, stops in enumerate((frozenset(), frozenset({8}), frozenset())):
        request = BatchRequest(np.arange(4), Sampling(stop_ids=stops), 0, None, lambda answer: None)
        table.occupy(slot, request, computed=3, limit=16, stamp=slot)
    table.tokens[0, 4:7] = [7, 8, 9]
    table.tokens[1, 4:7] = [7, 8, 9]
    slots, ahead = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2]), np.array([0, 1, 2, 3, 0, 1, 2, 3, 0])
    ids = np.array([7, 8, 5, 9, 7, 8, 9, 6, 3])
    kept = table.kept(slots, ahead, ids)
    assert kept.tolist() == [True, True, True, False, True, True, False, False, True]
    finished = table.append(slots[kept], ahead[kept], ids[kept], np.arange(6, dtype=np.float32), version=2)
    assert finished.tolist() == [1]
    assert [table.tokens[slot, 4 : table.known[slot]].tolist() for slot in range(3)] == [[7, 8, 5], [7, 8], [3]]
    assert table.logprobs[1, 4:6].tolist() == [3.0, 4.0]
    assert table.versions[0, 4:7].tolist() == [2, 2, 2]


def played(steps: Steps, sampling: Sampling, many: int = 12) -> list[Completion]:
    """The same prompts four times with the same seeds, so that drafts are right, and once with others."""
    found = []
    for round in range(5):
        seeds = [100 * (round == 4) + n for n in range(many)]
        requests = [
            steps.submit(prompt(4 + 3 * n, n), replace(sampling, seed=seed), f"s{n}")
            for n, seed in enumerate(seeds)
        ]
        steps.run()
        answers = [steps.answers[request] for request in requests]
        found += [answer for answer in answers if isinstance(answer, Completion)]
    assert len(found) == 5 * many
    return found


SAMPLINGS = {
    "plain": Sampling(max_tokens=40),
    "cold": Sampling(0.3, max_tokens=60),
    "greedy": Sampling(0.0, max_tokens=60),
    "filtered": Sampling(0.9, top_p=0.8, top_k=20, max_tokens=40),
    "stopping": Sampling(max_tokens=60, stop_ids=frozenset(range(0, VOCABULARY, 15))),
    "one token": Sampling(max_tokens=1),
    "two tokens": Sampling(max_tokens=2),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_token(models: dict[str, Path], name: str):
    sampling, kind = SAMPLINGS[name], "mistral" if name == "cold" else "qwen3"
    with_drafts, without = (Steps(models[kind], alone=True, prefill_chunk=4096) for _ in range(2))
    without.scheduler.drafts = None
    found, wanted = played(with_drafts, sampling), played(without, sampling)
    assert [(one.ids, one.finish, one.versions) for one in found] == [
        (one.ids, one.finish, one.versions) for one in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    if sampling.max_tokens > 2:
        assert len(with_drafts.passes) < len(without.passes), "nothing was drafted"
        assert sum(with_drafts.passes) > sum(without.passes), "every draft was right"


@pytest.mark.parametrize("limits", [{"max_context": 64}, {"budget_tokens": 500, "max_context": 200}])
def test_drafts_end_where_the_cache_ends(models: dict[str, Path], limits: dict[str, int]):
    with_drafts, without = (Steps(models["qwen3"], alone=True, **limits) for _ in range(2))
    without.scheduler.drafts = None
    found, wanted = (played(steps, Sampling(0.0, max_tokens=500), many=4) for steps in (with_drafts, without))
    assert [(one.ids, one.finish) for one in found] == [(one.ids, one.finish) for one in wanted]
    assert len(with_drafts.passes) < len(without.passes)


def test_a_request_that_tells_each_token_gets_no_drafts_and_the_same_tokens(models: dict[str, Path]):
    steps = Steps(models["llama"], alone=True)
    expected = played(steps, Sampling(0.0, max_tokens=30), many=4)[-4:]
    told: list[TokenLogprob] = []
    answers: dict[int, Completion | Exception] = {}
    for n in range(4):
        options = GenerateOptions(on_token=told.append, top=2) if n == 2 else None
        sampling = Sampling(0.0, max_tokens=30)
        steps.scheduler.submit(
            BatchRequest(
                np.array(prompt(4 + 3 * n, n)), sampling, n, None, lambda a, n=n: answers.update({n: a}), options
            )
        )
    before = len(steps.passes)
    steps.run()
    assert [answers[n].ids for n in range(4) if isinstance(answers[n], Completion)] == [
        one.ids for one in expected
    ]
    assert tuple(token.id for token in told) == expected[2].ids
    assert len(steps.passes) - before >= 30, "the one that tells took a pass for each token"
    assert max(steps.passes[before:]) > 4, "the others were drafted for"


def test_weights_that_change_between_drafts(models: dict[str, Path]):
    steps = Steps(models["qwen3"], alone=True)
    sampling = Sampling(0.0, max_tokens=60)
    played(steps, sampling, many=6)
    requests = [steps.submit(prompt(4 + 3 * n, n), sampling) for n in range(6)]
    for _ in range(4):
        steps.step()
    assert max(steps.passes[-3:]) > 6, "nothing was drafted"
    generator = torch.Generator().manual_seed(3)
    model = reference(models["qwen3"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    steps.model.update(model.state_dict())
    steps.scheduler.drop_states(1)
    steps.run()
    for n, request in enumerate(requests):
        answer = steps.answers[request]
        assert isinstance(answer, Completion)
        switch = answer.versions.index(1)
        assert switch > 4
        assert set(answer.versions[switch:]) == {1}
        new = logprobs_of(model, prompt(4 + 3 * n, n), answer.ids)
        assert answer.logprobs[switch:] == pytest.approx(new[switch:], abs=1e-4)


def test_a_cancelled_sequence_leaves_its_drafts_to_nobody(models: dict[str, Path]):
    steps = Steps(models["qwen3"], alone=True)
    sampling = Sampling(0.0, max_tokens=40)
    expected = played(steps, sampling, many=6)[-6:]
    requests = [steps.submit(prompt(4 + 3 * n, n), sampling, f"s{n}") for n in range(6)]
    for _ in range(3):
        steps.step()
    for request in requests[::2]:
        steps.scheduler.cancel(request)
    again = {n: steps.submit(prompt(4 + 3 * n, n), sampling, f"s{n}") for n in (0, 2, 4)}
    steps.run()
    for n in range(6):
        answer = steps.answers[again.get(n, requests[n])]
        assert isinstance(answer, Completion)
        assert answer.ids == expected[n].ids


@pytest.mark.parametrize("max_context", [2, 3, 4, 5])
def test_a_context_as_short_as_one_of_a_draft(models: dict[str, Path], max_context: int):
    with_drafts, without = (Steps(models["qwen3"], alone=True, max_context=max_context) for _ in range(2))
    without.scheduler.drafts = None
    answers = []
    for steps in (with_drafts, without):
        request = steps.submit([5], Sampling(0.0, max_tokens=10))
        steps.run()
        answers.append(steps.answers[request])
    assert isinstance(answers[0], Completion)
    assert answers[0].ids == answers[1].ids
    assert len(answers[0].ids) == max_context - 1


class Wrong(Drafts):
    """Drafts one token again and again."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def guess(self, contexts_BC: IntArray, room_B: IntArray, least: int) -> IntArray:
        columns = np.arange(min(MOST, int(room_B.max(initial=0))))
        return np.where(columns < room_B[:, None], self.token, -1)


def test_a_token_that_cannot_be_computed_fails_no_sequence_as_a_draft(models: dict[str, Path]):
    never, answers = VOCABULARY - 1, []
    for drafts in (Wrong(never), None):
        steps = Steps(models["llama"], alone=True)
        with torch.no_grad():
            steps.model.module.get_input_embeddings().weight[never] = torch.nan
        steps.scheduler.drafts = drafts
        requests = [steps.submit(prompt(4 + n, n), Sampling(0.0, max_tokens=12), f"s{n}") for n in range(3)]
        steps.run()
        answers.append([steps.answers[request] for request in requests])
        assert steps.scheduler.drafts is None
    for one, other in zip(*answers, strict=True):
        assert isinstance(one, Completion)
        assert isinstance(other, Completion)
        assert never not in other.ids
        assert one.ids == other.ids


def test_logits_of_drafts_are_limited(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.engine.local.batching.DRAFT_LOGITS", 30 * VOCABULARY)
    steps = Steps(models["qwen3"], alone=True)
    steps.scheduler.drafts = Wrong(7)
    forward, rows = steps.scheduler.forward, []

    def counted(ids: Tensor, positions: Tensor, plan: object, keep: Tensor) -> Tensor:
        rows.append(len(keep))
        return forward(ids, positions, plan, keep)  # type: ignore[arg-type]

    steps.scheduler.forward = counted  # type: ignore[assignment]
    for n in range(6):
        steps.submit(prompt(4 + n, n), Sampling(max_tokens=20))
    steps.run()
    assert max(rows) == 30, "four drafts for each of six"


def test_of_contexts_that_share_an_entry_the_last_counts():
    drafts = learned([1, 2, 3, 7], times=5)
    drafts.learn(np.array([[1, 2, 3]] * 3), np.array([9, 9, 7]))
    assert guess(drafts, [1, 2, 3], room=1) == [[7]]
    for _ in range(2):
        drafts.learn(np.array([[1, 2, 3]] * 2), np.array([7, 9]))
    assert guess(drafts, [1, 2, 3], room=1) != [[9]], "seen twice is not enough"


def test_no_draw_is_repeated_for_drafts_that_are_dropped(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.engine.local.sampler.ROUNDING", 10.0)  # every draw is unsure
    steps, repeated = Steps(models["qwen3"], alone=True), []
    alone = steps.scheduler.alone
    assert alone is not None

    def counted(ids: IntArray) -> torch.Tensor:
        repeated.append(len(ids))
        return alone(ids)

    steps.scheduler.alone = counted
    steps.scheduler.drafts = Wrong(7)
    requests = [steps.submit(prompt(4 + n, n), Sampling(max_tokens=20, seed=n)) for n in range(3)]
    steps.run()
    sampled = sum(
        len(answer.ids) for request in requests if isinstance(answer := steps.answers[request], Completion)
    )
    assert max(steps.passes) == 3 * (1 + MOST)
    assert sampled == 60
    assert sampled <= len(repeated) < 1.2 * sampled
