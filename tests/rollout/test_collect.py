"""Groups: complete, in order, refilled one by one, and gone at once when they cannot be completed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agentrl.chat.template import Renderer
from agentrl.env.env import Env, StepInfo
from agentrl.errors import InfraError, SandboxError
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.seeds import draw_seed
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.types import Episode, Message, Sampling, StopReason, Task

TASKS = [Task(name) for name in "abc"]


class World:
    """Makes envs and says, by task and by how often it was asked, what happens in them."""

    def __init__(self, plan: Callable[[str, int], Any] = lambda task, number: None) -> None:
        self.plan = plan
        self.open: set[int] = set()
        self.closed: list[int] = []
        self.seen: dict[str, itertools.count[int]] = {}
        self._numbers = itertools.count()

    def make(self) -> Env:
        return Room(self, next(self._numbers))


class Room(Env):
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number

    async def reset(self, task: Task) -> tuple[Sequence[Message], dict[str, Any]]:
        self.world.open.add(self.number)
        count = self.world.seen.setdefault(task.id, itertools.count())
        self.what = self.world.plan(task.id, next(count))
        return [Message("user", task.id)], {}

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        if isinstance(self.what, Exception):
            raise self.what
        await asyncio.sleep(self.what or 0)
        return [], 0.0, True, False, StepInfo()

    async def score(self, episode: Episode) -> dict[str, float]:
        return {"solved": 1.0}

    async def close(self) -> None:
        self.world.open.discard(self.number)
        self.world.closed.append(self.number)


def make_player(renderer: Renderer, world: World, timeout_s: float = 5.0) -> Player:
    return Player(
        ScriptedEngine(renderer, [say("yes")]),
        renderer,
        world.make,
        EpisodeLimits(timeout_s=timeout_s),
        Sampling(),
    )


async def test_groups_come_in_the_order_of_their_tasks_whoever_ends_first(renderer: Renderer):
    rng = random.Random(0)
    world = World(lambda task, number: rng.uniform(0, 0.05))
    ended: list[str] = []
    groups = await collect(
        make_player(renderer, world),
        TASKS,
        group_size=4,
        label="s3",
        seed=1,
        on_episode=lambda e: ended.append(e.id),
    )
    assert [g.task.id for g in groups] == ["a", "b", "c"]
    ids = [[e.id for e in g.episodes] for g in groups]
    assert ids == [[f"s3/g{g}/e{i}" for i in range(4)] for g in range(3)]
    assert sorted(ended) == sorted(itertools.chain(*ids))
    assert ended != sorted(ended), "they were played at the same time"
    assert (world.open, len(world.closed)) == (set(), 12)


async def test_a_dead_env_is_recorded_and_refilled_and_its_siblings_finish(renderer: Renderer):
    world = World(lambda task, number: SandboxError("gone") if task == "b" and number in (1, 2) else None)
    ended: list[str | None] = []
    groups = await collect(
        make_player(renderer, world),
        TASKS,
        group_size=4,
        label="s",
        seed=0,
        on_episode=lambda e: ended.append(e.error),
    )
    assert [[e.reward for e in g.episodes] for g in groups] == [[1.0] * 4] * 3
    assert [len(g.failed) for g in groups] == [0, 2, 0]
    assert [(e.id, e.error, e.reward) for e in groups[1].failed] == [
        (f"s/g1/e{i}", "SandboxError: gone", None) for i in (1, 2)
    ]
    assert [e.id for e in groups[1].episodes] == ["s/g1/e0", "s/g1/e1r1", "s/g1/e2r1", "s/g1/e3"]
    assert ended.count("SandboxError: gone") == 2
    assert len(ended) == 14


@pytest.mark.parametrize("retries", [0, 2])
async def test_one_that_can_never_be_played_stops_everything_with_its_last_error(renderer: Renderer, retries: int):
    def plan(task: str, number: int) -> Any:
        return SandboxError(f"gone {number}") if task == "b" else 1e9

    world = World(plan)
    with pytest.raises(InfraError) as caught:
        await collect(
            make_player(renderer, world, timeout_s=1e6),  # the others are not waited for
            TASKS,
            group_size=1,
            label="s",
            seed=0,
            infra_retries=retries,
        )
    assert str(caught.value) == (
        f"task b: {retries + 1} episodes in a row could not be played; the last one: SandboxError: gone {retries}"
    )
    assert (world.open, len(world.closed)) == (set(), 3 + retries)


async def test_one_of_64_that_hangs_is_a_timeout_in_its_place(renderer: Renderer):
    world = World(lambda task, number: 1e9 if task == "t5" and number == 3 else 0.01)
    tasks = [Task(f"t{n}") for n in range(8)]
    groups = await collect(make_player(renderer, world, timeout_s=0.7), tasks, group_size=8, label="s", seed=0)
    stops = [[e.stop_reason for e in g.episodes] for g in groups]
    assert stops[5].count(StopReason.TIMEOUT) == 1
    assert sum(row.count(StopReason.TERMINATED) for row in stops) == 63
    assert not world.open


async def test_cancelling_closes_every_env(renderer: Renderer):
    world = World(lambda task, number: 1e9)
    collecting = asyncio.ensure_future(
        collect(make_player(renderer, world, timeout_s=60), TASKS, group_size=5, label="s", seed=0)
    )
    await asyncio.sleep(0.2)
    assert len(world.open) == 15
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert (world.open, len(world.closed)) == (set(), 15)
    assert len(asyncio.all_tasks()) == 1


class TestSeeds:
    async def drawn(
        self, renderer: Renderer, *, label: str = "s1", seed: int = 0, fails: bool = False
    ) -> list[int]:
        class Seeds(ScriptedEngine):
            asked: list[int] = []  # noqa: RUF012  # of this one class

            async def generate(self, ids, sampling, *, session=None):
                self.asked.append(sampling.seed)
                return await super().generate(ids, sampling, session=session)

        world = World(lambda task, number: SandboxError("x") if fails and number == 0 else None)
        engine = Seeds(renderer, [say("yes")])
        player = Player(engine, renderer, world.make, EpisodeLimits(), Sampling())
        await collect(player, TASKS, group_size=3, label=label, seed=seed)
        return engine.asked

    async def test_every_draw_has_its_own_and_the_same_in_every_run(self, renderer: Renderer):
        first = await self.drawn(renderer)
        assert sorted(first) == sorted(await self.drawn(renderer))
        assert len(set(first)) == 9
        for other in (await self.drawn(renderer, label="s2"), await self.drawn(renderer, seed=1)):
            assert not set(first) & set(other)

    async def test_a_refill_is_another_draw(self, renderer: Renderer):
        plain, refilled = await self.drawn(renderer), await self.drawn(renderer, fails=True)
        assert set(plain) < set(refilled)
        assert len(set(refilled)) == 12

    def test_they_are_the_same_on_every_machine(self):
        assert draw_seed(0, "s1", 2, 3, 0) == 681817007924747329
        assert draw_seed(0, "s1", 2, 3, 1) != draw_seed(0, "s1", 2, 3, 0)
        assert all(0 <= draw_seed(n) < 2**63 for n in range(1000))
