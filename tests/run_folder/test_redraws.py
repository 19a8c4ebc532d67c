"""What is lost to the infrastructure: counted by reason and task, bounded, and examined for a bias."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import AgentRLError, EnvError
from agentrl.run_folder.redraws import (
    Moments,
    RedrawGuard,
    Redraws,
    read_redraws,
    redraws_file,
    redraws_line,
)
from agentrl.types import SANDBOX_FAULT, Episode, Group, Message, StopReason, Task, Turn

TURN = Turn(Message("assistant", "x"), (), 0.0, "stop", 1, 0.0, 0.0)


def episode(task: str, reward: float | None, error: str | None = None, **more) -> Episode:
    stop = StopReason.INFRA if error else StopReason.ANSWERED
    return Episode("e", Task(task), (), (TURN,), (), stop, reward, error=error, **more)


def group(task: str, rewards: list[float], lost: int = 0, why: str = "SandboxDied: gone") -> Group:
    failed = tuple(episode(task, None, why) for _ in range(lost))
    return Group(Task(task), tuple(episode(task, reward) for reward in rewards), failed)


def test_what_is_lost_is_counted_by_reason_and_by_task():
    found = Redraws.of([group("a", [1.0, 0.0], 2), group("b", [1.0, 1.0], 1, "JudgeError: x"), group("c", [0.0])])
    assert (found.episodes, found.redrawn, found.acted) == (8, 3, 3)
    assert found.reasons == {"SandboxDied": 2, "JudgeError": 1}
    assert found.worst_tasks(1) == {"a": {"played": 4, "SandboxDied": 2}}
    assert found.why() == "2 SandboxDied, 1 JudgeError; most on the tasks a (2 of 4), b (1 of 3)"


def test_tasks_of_two_envs_with_one_id_are_two_tasks():
    groups = [replace(group("0", [1.0], lost), task=Task("0", env=env)) for env, lost in (("a", 2), ("b", 1))]
    assert {name: counts["SandboxDied"] for name, counts in Redraws.of(groups).tasks.items()} == {
        "a/0": 2,
        "b/0": 1,
    }


def test_the_steps_of_a_run_add_up_and_torn_lines_are_left_out(tmp_path: Path):
    one, two = Redraws.of([group("a", [1.0], 1)]), Redraws.of([group("a", [0.0], 2), group("b", [1.0])])
    text = redraws_line(1, one) + redraws_line(2, two) + '{"step": 3, "redr' + "\n" + "[" * 100_000 + "\n[1]\n"
    redraws_file(tmp_path).write_text(text)
    read = read_redraws(tmp_path)
    assert read == {1: one, 2: two}
    assert Redraws.together(read.values()) == Redraws.of(
        [group("a", [1.0], 1), group("a", [0.0], 2), group("b", [1.0])]
    )


def test_broken_sandboxes_are_counted_by_task_and_kept(tmp_path: Path):
    broke = replace(episode("a", 0.0), stop_reason=StopReason.SANDBOX_BROKEN)
    found = Redraws.of([Group(Task("a"), (broke, broke, episode("a", 1.0))), group("b", [1.0])])
    assert (found.redrawn, found.broken) == (0, {"a": 2})
    redraws_file(tmp_path).write_text(redraws_line(1, found) + redraws_line(2, found))
    assert Redraws.together(read_redraws(tmp_path).values()).broken == {"a": 4}


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_is_blind_is_not_called_biased(seed: int):
    rng = random.Random(seed)
    groups = [group(f"t{i % 100}", [float(rng.random() < 0.7)] * 4, int(rng.random() < 0.1)) for i in range(400)]
    assert Redraws.of(groups).findings() == {}


def test_a_blind_loss_is_not_called_biased_where_tasks_are_played_again_and_again():
    for seed in range(20):
        rng = random.Random(seed)
        groups = [group(f"t{i % 12}", [0.5] * 8, sum(rng.random() < 0.02 for _ in range(8))) for i in range(400)]
        found = Redraws.of(groups)
        assert found.findings() == {}, seed
        assert sum(found.played.values()) == found.episodes
        name, counts = next(iter(found.worst_tasks(1).items()))
        assert counts["played"] == sum(len(g.episodes) + len(g.failed) for g in groups if g.task.id == name)


def test_lines_of_an_earlier_version_are_read(tmp_path: Path):
    found = Redraws.of([group("a", [1.0, 0.0], 2), group("b", [1.0])])
    data = json.loads(redraws_line(1, found))
    data["redraws"]["tasks"]["a"]["played"] = data["redraws"].pop("played")["a"]
    redraws_file(tmp_path).write_text(json.dumps(data) + "\n")
    assert read_redraws(tmp_path)[1].worst_tasks(3) == {"a": {"played": 4, "SandboxDied": 2}}


def test_a_loss_that_follows_low_reward_or_one_task_is_told():
    rng = random.Random(0)
    groups = []
    for number in range(200):
        hard = number % 2
        rewards = [float(rng.random() < (0.2 if hard else 0.9)) for _ in range(4)]
        groups.append(group(f"t{number}", rewards, sum(rng.random() < 0.3 * hard for _ in range(4))))
    found = Redraws.of(groups).findings()
    assert list(found) == ["reward"]
    assert "the episodes that remain are a biased sample" in found["reward"]
    assert "the policy had acted before" in found["reward"]
    alone = Redraws.of([*[group(f"t{n}", [1.0] * 4) for n in range(100)], group("bad", [1.0] * 4, 6)])
    assert "task bad was lost to the infrastructure in 6 of 10 episodes" in alone.findings()["task"]


def test_a_run_that_loses_too_many_is_stopped_with_counts_and_reasons():
    guard = RedrawGuard(redrawn_above=0.1)
    for number in range(300):
        guard.ended(episode(f"t{number}", 1.0))
    for number in range(33):
        guard.ended(episode(f"t{number % 3}", None, "SandboxDied: gone"))
    with pytest.raises(AgentRLError) as caught:
        guard.ended(episode("t0", None, "SandboxDied: gone"))
    said = str(caught.value)
    assert said.startswith("34 of the last 334 episodes (10%) were lost to the infrastructure")
    assert "rollout.redrawn_stop_above = 0.1: SandboxDied (34); tasks: t0 (12), t1 (11), t2 (11)" in said
    assert said.endswith("The last one: SandboxDied: gone")


def test_episodes_in_flight_count_in_the_share_of_lost_ones():
    guard = RedrawGuard(redrawn_above=0.1)
    for number in range(30):  # 30 of 600 fail in their first turn, before any other has ended
        guard.ended(episode(f"t{number}", None, "InfraError: down"), playing=600 - number)
    with pytest.raises(AgentRLError, match=r"31 of the last 131 episodes \(24%\)"):
        guard.ended(episode("t", None, "InfraError: down"), playing=100)


def test_the_first_line_of_an_error_of_each_class_is_kept():
    found = Redraws.of([group("t", [1.0], lost=2, why="InfraError: the shop is down\nTraceback")])
    assert found.examples == {"InfraError": "the shop is down"}
    again = Redraws.of_data(json.loads(redraws_line(1, Redraws.together([found, Redraws()])))["redraws"])
    assert again.examples == found.examples


def test_a_few_losses_stop_no_small_run():
    guard = RedrawGuard(redrawn_above=0.0, faults_above=0.0)
    for _ in range(19):
        guard.ended(episode("t", None, "SandboxDied: gone"))
        guard.scored([episode("t", 0.0, faults={"solved": "reward 'solved' raised"})])
    with pytest.raises(AgentRLError, match="20 of the last 20 episodes"):
        guard.ended(episode("t", None, "SandboxDied: gone"))


def test_a_share_of_faults_may_be_as_large_as_set_and_a_policy_that_breaks_files_stops_no_run():
    guard, faulty = RedrawGuard(faults_above=0.5), episode("t", 0.0, faults={"solved": "raised KeyError"})
    guard.scored([*[episode("t", 1.0)] * 21, *[faulty] * 21])
    with pytest.raises(EnvError, match="'solved' failed in 22 of the last 43 episodes"):
        guard.scored([faulty])
    RedrawGuard(faults_above=0.0).scored([episode("t", 0.0, faults={SANDBOX_FAULT: "no such file"})] * 100)


def test_the_error_of_a_mean_is_that_of_its_sample():
    moments = Moments()
    for value in (0.0, 1.0, 1.0, 2.0):
        moments.add(value)
    assert (moments.mean, moments.variance_of_mean) == (1.0, pytest.approx(0.5 / 3))


def test_a_reward_that_keeps_raising_stops_the_run_with_its_traceback_and_a_rare_one_is_told_once():
    told: list[str] = []
    guard, faulty = (
        RedrawGuard(faults_above=0.5, tell=told.append),
        {"solved": "raised KeyError: 'x'\nTraceback ..."},
    )
    for number in range(400):
        guard.scored([episode("t", 0.0, faults=faulty if number % 3 == 0 else {})])
    assert len(told) == 1
    assert "raised KeyError" in told[0]
    with pytest.raises(EnvError, match=r"(?s)'solved' failed in .* rollout.faults_stop_above = 0.5.*Traceback"):
        guard.scored([episode("t", 0.0, faults=faulty)] * 300)


@pytest.mark.parametrize(
    ("name", "effect"),
    [("right", "it counts 0"), ("teacher_hint", "it has no hint"), ("solved_at", "it is not solved")],
)
def test_what_a_fault_means_for_its_episode_is_told(name: str, effect: str):
    told: list[str] = []
    RedrawGuard(tell=told.append).scored([episode("t", 0.0, faults={name: "no answer"})])
    assert told == [f"episode e: no answer\n{effect}; more of {name!r} are only counted"]


def line(step: float = 2, **redraws: object) -> bytes:
    empty = {"episodes": 1, "reasons": {}, "acted": 0, "tasks": {}, "hit": {}, "clean": {}}
    return json.dumps({"step": step, "redraws": empty | redraws}).encode()


@pytest.mark.parametrize(
    "bad",
    [
        line(step=float("inf")),
        line(episodes=float("inf")),
        line(reasons={"a": "b"}),
        line(hit={"num": "x"}),
        line(tasks={"t": 3}),
        b"[" * 100_000,
        b"x" * (5 << 20),
    ],
)
def test_a_damaged_line_is_left_out_and_the_others_are_read(tmp_path: Path, bad: bytes):
    good = redraws_line(7, Redraws(episodes=3, reasons=Counter(SandboxError=2))).encode()
    redraws_file(tmp_path).write_bytes(bad + b"\n" + good)
    assert {step: found.redrawn for step, found in read_redraws(tmp_path).items()} == {7: 2}
