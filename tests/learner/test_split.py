"""The work of a step, dealt out by hand: which rank computes what, with which counts, and how results add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.algo.aggregate import Totals
from agentrl.algo.correction import LogprobDrift
from agentrl.algo.metrics import Metric
from agentrl.learner.split import (
    MicroBatches,
    Passes,
    RankResult,
    Rows,
    StepRows,
    balanced,
    merge_results,
    rank_timing,
    split_rows,
    split_step,
)
from agentrl.types import Sample


def row(episode: str, group: int, length: int, trained: int = 1, **more: Any) -> Sample:
    """A row that begins unlike all others, so that nothing is shared; its last tokens are trained."""
    seed = sum(map(ord, episode)) * 1000
    return Sample(
        ids=tuple(range(seed, seed + length)),
        loss_mask=(False,) * (length - trained) + (True,) * trained,
        logprobs=(0.0,) * length,
        advantages=(1.0,) * length,
        versions=(0,) * length,
        episode_id=episode,
        group=group,
        **more,
    )


def names(shares: Sequence[Sequence[Sample]]) -> list[list[str]]:
    return [[sample.episode_id for sample in share] for share in shares]


def test_the_largest_groups_go_first_and_each_to_the_rank_with_the_fewest_tokens():
    sizes = {0: 2, 1: 9, 2: 3, 3: 10}  # largest first: 3 to the first rank, 1 and 2 to the second, 0 to the first
    rows = [row(f"{group}{episode}", group, size) for group, size in sizes.items() for episode in "ab"]
    assert names(balanced(rows, 2)) == [["3a", "3b", "0a", "0b"], ["1a", "1b", "2a", "2b"]]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((11, 11, 9, 9), [["a", "b"], ["c", "d"]]),  # 22 of 40 tokens: a tenth more than the mean of 20
        ((11, 12, 9, 8), [["b", "d"], ["a", "c"]]),  # 23 are too many: episode by episode
    ],
)
def test_groups_are_torn_apart_where_a_rank_would_get_over_a_tenth_more_than_the_mean(
    sizes: Sequence[int], wanted: list[list[str]]
):
    rows = [row(name, number // 2, size) for number, (name, size) in enumerate(zip("abcd", sizes, strict=True))]
    assert names(balanced(rows, 2)) == wanted


def test_the_rows_of_an_episode_stay_on_one_rank():
    rows = [row("a", 0, 10), row("b", 0, 6), row("a", 0, 7), row("c", 0, 5)]
    assert names(balanced(rows, 2)) == [["a", "a"], ["b", "c"]]


def test_every_rank_has_as_many_micro_batches_and_some_are_empty():
    rows = [row("a", 0, 10), *(row(name, 1, 4) for name in "bcd")]
    shares = split_rows(rows, ranks=2, max_tokens=10)
    assert [names(share) for share in shares] == [[["b", "c"], ["d"]], [["a"], []]]
    assert [names(share) for share in split_rows(rows, ranks=1, max_tokens=22)] == [[["b", "c", "d", "a"]]]


def test_each_update_counts_its_own_episodes_over_all_ranks():
    rows = [
        row("a", 0, 9, 3, columns={"values": (0.0,) * 3}, observed=(False,) * 4 + (True, True) + (False,) * 3),
        row("b", 0, 8, 2, columns={"values": (0.0,) * 2}),
        row("c", 1, 7, 4),  # idle: it has neither columns nor a pass
        row("a", 0, 6, 1, columns={"values": (0.0,)}, observed=(False,) * 4 + (True, False)),
        row("d", 1, 5, 1, columns={"values": (0.0,)}),
    ]
    step = StepRows(rows, idle=frozenset("c"), kl_coef=0.3, record=True)
    first, second = split_step(step, Passes(2), ranks=2, max_tokens=100)
    for one, other in zip(first, second, strict=True):
        assert replace(one, rows=()) == replace(other, rows=())
    totals = [Totals(8, 2, 3), Totals(3, 2, 0)]  # a and c with 4 + 4 tokens, b and d with 2 + 1
    wanted = [MicroBatches((), total, 0.3, ("values",), True) for total in totals]
    assert [replace(part, rows=()) for part in first] == wanted
    assert [[names(part.rows) for part in rank] for rank in (first, second)] == [
        [[["a", "a"]], [["b"]]],
        [[[]], [["d"]]],
    ]


def test_the_rows_of_an_update_keep_their_order():
    rows = [row("a", 0, 9), row("b", 0, 8), row("c", 0, 7), row("a", 0, 6), row("d", 0, 5)]
    (updates,) = split_step(StepRows(rows), Passes(2), ranks=1, max_tokens=100)
    assert [[len(one.ids) for part in update.rows for one in part] for update in updates] == [[9, 7, 6], [8, 5]]


def test_only_the_updates_of_the_first_pass_are_recorded():
    rows = [row(name, 0, 4) for name in "abcd"]
    (updates,) = split_step(StepRows(rows, record=True), Passes(2, 3), ranks=1, max_tokens=100)
    assert [update.record for update in updates] == [True, True, False, False, False, False]
    (updates,) = split_step(StepRows(rows), Passes(2, 3), ranks=1, max_tokens=100)
    assert not any(update.record for update in updates)


def test_an_update_of_idle_episodes_is_a_gradient_of_zero_and_one_of_no_token_is_none():
    rows = [row("a", 0, 4), row("b", 0, 4)]
    (updates,) = split_step(StepRows(rows, idle=frozenset("ab")), Passes(), ranks=1, max_tokens=100)
    assert [(update.rows, update.totals) for update in updates] == [(((),), Totals(2, 2))]
    masked = [replace(each, loss_mask=(False,) * 4) for each in rows]
    (updates,) = split_step(StepRows(masked, idle=frozenset("ab")), Passes(), ranks=1, max_tokens=100)
    assert [(update.rows, update.totals) for update in updates] == [((), Totals(0, 0))]
    (updates,) = split_step(StepRows([]), Passes(), ranks=1, max_tokens=100)
    assert [(update.rows, update.totals) for update in updates] == [((), Totals(0, 0))]


def result(number: int, **more: Any) -> RankResult:
    """Of one of two ranks, after two updates."""
    losses = [{"loss": Metric("sum", value)} for value in ((1.0, 4.0), (2.0, 9.0))[number]]
    both = {
        "loss": Metric("sum", sum(float(each["loss"].value) for each in losses)),
        "kl": Metric("mean", 6.0, 3.0),
    }
    drift = LogprobDrift(tokens=2.0, sequences=1.0, sum_abs_d=0.5 + number, max_abs_d=0.5 + number)
    return RankResult(both, drift, 0.7, 0.01, losses, **more)


def test_the_results_of_the_ranks_are_those_of_one_step():
    rows = [row("a", 0, 9, 3), row("b", 0, 8, 2)]
    before = LogprobDrift(tokens=4.0, sequences=2.0, sum_abs_d=1.0, max_abs_d=0.8)
    step = StepRows(rows, idle=frozenset("b"), metrics={"kl": Metric("mean", 5.0, 2.0)}, drift=before)
    critic = [{"critic/value": Metric("mean", 1.0, 2.0)}, {"critic/value": Metric("mean", 2.0, 2.0)}]
    found = merge_results(step, [result(0), result(1)], critic, epochs=2)
    assert (found.tokens, found.trained) == (18, 5)
    known = {name: found.metrics[name] for name in ("loss", "kl", "critic/value", "grad_norm", "lr")}
    assert known == {"loss": 8.0, "kl": 2.125, "critic/value": 0.75, "grad_norm": 0.7, "lr": 0.01}
    assert [found.metrics[f"update/{n}/loss"] for n in (1, 2)] == [3.0, 13.0]
    assert "update/0/loss" not in found.metrics
    assert found.metrics["drift/mean_abs"] == pytest.approx(3.0 / 8)
    assert found.metrics["drift/max_abs"] == 1.5


def test_the_time_of_each_rank_is_named_by_its_first_neighbor():
    work: list[Rows] = [(row("a", 0, 9), row("b", 0, 8)), (row("c", 0, 5),)]
    updates = [[MicroBatches((rows,), Totals(1, 1))] * 2 for rows in work]
    results = [result(0, forward_seconds=1.5), result(1, forward_seconds=0.5)]
    assert rank_timing(updates, results, times=2) == {
        "rank/0/forward_seconds": 1.5,
        "rank/0/tokens": 34.0,
        "rank/2/forward_seconds": 0.5,
        "rank/2/tokens": 10.0,
    }
    assert rank_timing(updates[:1], results[:1]) == {}
