"""What a step's line says of staleness, and of groups that were put aside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.algo.entries import Signal
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.rollout.episode_metrics import (
    episode_metrics,
    group_has_signal,
    passed,
    passed_at,
    set_aside,
    solved,
    staleness,
)
from agentrl.types import Episode, Group, Message, Segment, StopReason, Task, Turn

TASK = Task("t")


def episode(versions: Sequence[int] = (0,), error: str | None = None) -> Episode:
    turn = Turn(Message("assistant", "x"), (), 0.0, "stop", len(versions), 0.0, 0.0)
    count = len(versions)
    segments = (
        Segment((1, 2), "prompt", -1, 0),
        Segment((3,) * count, "sampled", 0, 1, (0.0,) * count, tuple(versions)),
    )
    reward = None if error else 1.0
    return Episode("e", TASK, (), (turn,), segments, StopReason.ANSWERED, reward, error=error)


def test_staleness_counts_updates_by_token():
    groups = [Group(TASK, (episode((3, 3, 4)), episode((5,)))), Group(TASK, (episode(()),))]
    found = staleness(groups, 5)
    assert found["staleness/mean"] == pytest.approx((2 + 2 + 1 + 0) / 4)
    assert (found["staleness/max"], found["staleness/episodes_mixed"]) == (2, 1)
    assert staleness([Group(TASK, (episode(()),))], 5) == {}


def test_rewards_of_turns_are_means_under_their_names():
    one = replace(episode(), rewards={"solved": 1.0}, metrics={"reward/tidy": 3.0, "looked": 2.0})
    found = episode_metrics([Group(TASK, (one, episode()))])
    assert (found["reward/solved"], found["reward/tidy"], found["env/looked"]) == (0.5, 1.5, 2.0)
    assert "env/reward/tidy" not in found


def test_a_signal_is_what_the_advantage_of_the_env_compares():
    parts = [replace(episode(), reward=0.0, rewards={"up": x, "down": -x}) for x in (0.25, 0.5)]
    groups = [Group(Task("t", env=name), tuple(parts)) for name in ("sums", "parts")]
    assert episode_metrics(groups)["groups_with_signal"] == 0
    assert episode_metrics(groups, signals={"parts": Signal("parts")})["groups_with_signal"] == 1
    assert not group_has_signal(groups[0], Signal("parts", frozenset({"up", "down"}))), "they have no weight"
    gdpo = AlgorithmConfig(advantage={"name": "gdpo", "weights": {"bonus": 0.0, "length": -1.0}})
    assert gdpo.signal == Signal("parts", frozenset({"bonus"}))
    bonus = Group(TASK, tuple(replace(episode(), reward=x, rewards={"bonus": x}) for x in (0.25, 0.5)))
    assert group_has_signal(bonus, Signal("parts"))
    assert not group_has_signal(bonus, Signal("parts", frozenset({"bonus"})))
    longer = Group(TASK, (episode(), replace(episode(), turns=episode().turns * 2)))
    assert not group_has_signal(longer, Signal("turns")), "another number of turns is no reward"
    rounded = Group(TASK, (replace(episode(), reward=0.1 + 0.2), replace(episode(), reward=0.3)))
    assert episode_metrics([rounded])["groups_with_signal"] == 0, "rollout.refill_zero_signal replaces it"


def test_solved_is_what_was_declared_and_left_out_where_nothing_was():
    rewarded = replace(episode(), rewards={"correct": 0.875})
    groups = [Group(TASK, (rewarded, rewarded))]
    assert (solved(groups), "solved" in episode_metrics(groups)) == (None, False)
    groups = [Group(TASK, (replace(rewarded, solved=False), replace(rewarded, solved=True), rewarded, rewarded))]
    assert (solved(groups), episode_metrics(groups)["solved"], passed(groups)) == (0.25, 0.25, 1.0)
    assert (solved([]), passed([])) == (None, 0)


def test_an_env_that_does_not_declare_what_is_solved_does_not_lower_the_share_of_the_others():
    judged, other = Task("t", env="judged"), Task("t", env="other")
    right, wrong, unknown = (replace(episode(), solved=verdict) for verdict in (True, False, None))
    groups = [Group(judged, (right, right)), Group(judged, (wrong, wrong)), Group(other, (unknown, unknown))]
    assert (solved(groups), passed(groups), passed_at(2, groups)) == (0.5, 0.5, 0.5)
    assert episode_metrics(groups)["solved"] == 0.5
    broken = replace(unknown, faults={"solved": "reward 'solved' raised"})
    groups[2] = Group(other, (broken, broken))
    assert (solved(groups), passed(groups)) == (pytest.approx(1 / 3), pytest.approx(1 / 3)), "it may declare it"


def test_what_was_put_aside_is_counted_and_enters_no_mean():
    trained = Group(TASK, (episode((0, 0)), episode((0,))))
    aside = Group(TASK, (episode((0,) * 5), episode((0,) * 5)), (episode(error="SandboxError: gone"),))
    alone, both = episode_metrics([trained]), episode_metrics([trained], [aside])
    assert (alone["episodes"], both["episodes"]) == (2, 5)
    assert (alone["infra_failures"], both["infra_failures"]) == (0, 1)
    assert (alone["sampled_tokens"], both["sampled_tokens"]) == (3, 13)
    assert (alone.get("redrawn/SandboxError"), both["redrawn/SandboxError"]) == (None, 1)
    changed = {"episodes", "infra_failures", "sampled_tokens", "redrawn/SandboxError"}
    assert {k: v for k, v in both.items() if k not in changed} == {
        k: v for k, v in alone.items() if k not in changed
    }
    assert set_aside([aside]) == {"refilled_groups": 1, "refilled_episodes": 3}
