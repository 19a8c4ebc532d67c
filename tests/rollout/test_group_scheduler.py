"""The scheduler: what is in flight while the loop is busy, what becomes of failures, and who is waited for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.chat.template import Renderer
from agentrl.env.curriculum import TaskSampler
from agentrl.env.env import Env, StepInfo
from agentrl.errors import InfraError, SandboxError
from agentrl.rollout.admission import Admission
from agentrl.rollout.episode import Player
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.scheduler import Scheduler, Stall
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.types import Completion, Message, Sampling, Task

TASKS = [Task(f"t{i}") for i in range(100)]


class Stage:
    """Envs whose steps end when the test says so, task by task; `held` are those that wait."""

    def __init__(self, *held: str) -> None:
        self.gates = {name: asyncio.Event() for name in held}
        self.waiting: list[str] = []
        self.failing: set[str] = set()
        self.open = 0
        self.arrived = asyncio.Event()

    def make(self) -> Env:
        return Act(self)

    async def until_waiting(self, num: int) -> None:
        while len(self.waiting) < num:
            self.arrived.clear()
            await self.arrived.wait()


class Act(Env):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def reset(self, task: Task) -> tuple[Sequence[Message], dict[str, Any]]:
        self.task = task.id
        self.stage.open += 1
        return [Message("user", task.id)], {}

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        if self.task in self.stage.gates:
            self.stage.waiting.append(self.task)
            self.stage.arrived.set()
            await self.stage.gates[self.task].wait()
        if self.task in self.stage.failing:
            raise SandboxError("gone")
        return [], 0.0, True, False, StepInfo()

    async def score(self, episode: Any) -> dict[str, float]:
        return {"solved": float(episode.id.endswith("e0"))}

    async def close(self) -> None:
        self.stage.open -= 1


class Versioned(ScriptedEngine):
    """Notes its policy version on every token, as an engine does."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        found = await super().generate(ids, sampling, session=session)
        return Completion(found.ids, found.logprobs, (self.policy_version,) * len(found.ids), found.finish)


def make(renderer: Renderer, stage: Stage, stall: Stall | None = None, **more: Any) -> tuple[Scheduler, Versioned]:
    engine = Versioned(renderer, [say("yes")])
    player = Player(engine, renderer, stage.make, EpisodeLimits(timeout_s=3600), Sampling())
    admission = Admission(TaskSampler(TASKS), groups_per_step=2, last_step=4, **more)
    groups = GroupPlayer(player, group_size=2, seed=0, infra_retries=1)
    return Scheduler(groups, admission, version=lambda: engine.policy_version, stall=stall), engine


def versions(group: Any) -> set[int]:
    return {v for e in group.episodes for s in e.segments for v in s.versions}


async def test_synchronous_means_nothing_in_flight_during_an_update(renderer: Renderer):
    scheduler, engine = make(renderer, Stage())
    seen = []
    async with scheduler:
        async for batch in scheduler.batches():
            assert batch.metrics["in_flight/episodes"] == 0
            await asyncio.sleep(0.02)
            assert not scheduler.groups.playing
            await engine.update_weights({}, version=batch.step)
            seen += [(batch.step, [g.task.id for g in batch.groups], [versions(g) for g in batch.groups])]
    assert seen == [(n + 1, [f"t{2 * n}", f"t{2 * n + 1}"], [{n}, {n}]) for n in range(4)]


async def test_episodes_are_named_by_their_step_and_their_place_in_it(renderer: Renderer):
    scheduler, engine = make(renderer, Stage())
    seen = []
    async with scheduler:
        async for batch in scheduler.batches():
            await engine.update_weights({}, version=batch.step)
            seen += [e.id for g in batch.groups for e in g.episodes]
    assert seen == [f"s{step}/g{g}/e{e}" for step in (1, 2, 3, 4) for g in (0, 1) for e in (0, 1)]


async def test_one_step_ahead_episodes_are_played_during_the_update(renderer: Renderer):
    stage = Stage("t2", "t3")
    scheduler, engine = make(renderer, stage, max_staleness=1)
    staleness = []
    async with scheduler:
        async for batch in scheduler.batches():
            if batch.step == 1:
                await stage.until_waiting(4)
                assert batch.metrics["in_flight/episodes"] >= 4
                for gate in stage.gates.values():
                    gate.set()
                async with asyncio.TaskGroup() as wait:  # they end while the loop is here
                    for task in scheduler._running:
                        wait.create_task(asyncio.wait([task]))
            staleness += [batch.step - 1 - v for g in batch.groups for v in versions(g)]
            await engine.update_weights({}, version=batch.step)
    assert set(staleness) == {0, 1}
    assert not stage.open


async def test_a_slow_group_is_carried_over_while_others_are_trained(renderer: Renderer):
    stage = Stage("t0")
    scheduler, engine = make(renderer, stage, max_staleness=2, groups_ahead=1)
    tasks = []
    async with scheduler:
        async for batch in scheduler.batches():
            if batch.step == 2:
                stage.gates["t0"].set()
            tasks.append([g.task.id for g in batch.groups])
            await engine.update_weights({}, version=batch.step)
    assert tasks == [["t1", "t2"], ["t3", "t4"], ["t0", "t5"], ["t6", "t7"]]


async def test_taking_a_batch_begins_the_groups_that_it_makes_room_for(renderer: Renderer):
    scheduler, engine = make(renderer, Stage(), max_staleness=2, groups_ahead=1)
    under_way = []
    async with scheduler:
        async for batch in scheduler.batches():
            under_way.append(len(scheduler.admission.under_way))
            await engine.update_weights({}, version=batch.step)
    assert under_way == [3, 3, 2, 0], "all that later steps need and the bound allows"


async def test_a_group_that_cannot_be_played_stops_the_run_where_the_next_batch_is_asked_for(renderer: Renderer):
    stage = Stage("t2", "t3")
    stage.failing.add("t3")
    scheduler, engine = make(renderer, stage, max_staleness=1)
    trained = []

    async def loop() -> None:
        async with scheduler:
            async for batch in scheduler.batches():
                await stage.until_waiting(4)
                stage.gates["t3"].set()
                await asyncio.sleep(0.05)
                await engine.update_weights({}, version=batch.step)
                trained.append(batch.step)

    with pytest.raises(InfraError, match="task t3: 2 episodes in a row could not be played"):
        await loop()
    assert trained == [1], "the step in flight was finished, and t2 was not waited for"
    assert not stage.open
    assert len(asyncio.all_tasks()) == 1


async def test_leaving_the_loop_closes_what_is_in_flight(renderer: Renderer):
    stage = Stage("t2", "t3")
    scheduler, _ = make(renderer, stage, max_staleness=1)

    async def loop() -> None:
        async with scheduler:
            async for _ in scheduler.batches():
                await stage.until_waiting(4)
                assert stage.open == 4
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await loop()
    assert not stage.open
    assert len(asyncio.all_tasks()) == 1


async def test_a_step_that_waits_for_long_names_the_oldest_episode_and_where_it_waits(renderer: Renderer):
    stage, told = Stage("t1"), []

    def tell(text: str) -> None:
        told.append(text)
        if len(stage.waiting) == 2 and len(told) > 1:  # both episodes of t1 have come to their step
            stage.gates["t1"].set()

    scheduler, engine = make(renderer, stage, Stall(0.05, tell))
    async with scheduler:
        async for batch in scheduler.batches():
            await engine.update_weights({}, version=batch.step)
    assert len(told) > 1
    said = r"step 1 has waited for \d+ s; 1 of 2 groups are not complete; the oldest: "
    where = r"episode s1/g1/e0 \(task t1\), started \d+ s ago, has been waiting for env\.step \(turn 0\) for \d+ s"
    assert any(re.fullmatch(said + where, note) for note in told)


async def test_rewards_are_amended_once_and_before_the_loop_sees_them(renderer: Renderer):
    scheduler, engine = make(renderer, Stage())
    amended = []

    def amend(group: Any) -> Any:
        amended.append(group.task.id)
        return group

    scheduler._amend = amend
    async with scheduler:
        async for batch in scheduler.batches():
            assert amended == [f"t{i}" for i in range(2 * batch.step)]
            await engine.update_weights({}, version=batch.step)


async def test_a_group_whose_amended_rewards_differ_has_a_signal_and_one_whose_do_not_is_replaced(
    renderer: Renderer,
):
    """As with `overlong: penalise` and `refill_zero_signal`."""
    scheduler, engine = make(renderer, Stage(), refill=2)

    def amend(group: Any) -> Any:  # raw rewards are 1 and 0; only t0's still differ
        even = group.task.id in ("t1", "t2")
        return replace(group, episodes=tuple(replace(e, reward=0.0) if even else e for e in group.episodes))

    scheduler._amend = amend
    async with scheduler:
        batch = await anext(scheduler.batches())
        await engine.update_weights({}, version=1)
    assert [group.task.id for group in batch.groups] == ["t0", "t3"]
    assert [[e.reward for e in group.episodes] for group in batch.aside] == [[0.0, 0.0], [0.0, 0.0]]
