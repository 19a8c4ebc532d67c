"""A sandbox that dies under an episode: the episode neither trains nor votes, and its place is filled again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.chat.template import Renderer
from agentrl.env import ToolEnv, reward, tool
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player
from agentrl.rollout.limits import EpisodeLimits
from agentrl.sandbox import Sandbox, close_pools, pool_for
from agentrl.testing import call, say
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import SANDBOX_FAULT, Sampling, StopReason, Task


class Worker(ToolEnv):
    """Work."""

    sandbox = Sandbox()
    deaths = 0
    """How many of the next calls lose their sandbox."""

    def setup(self) -> str:
        self.answer = ""
        return "Work."

    @tool
    async def work(self) -> str:
        """Do it."""
        if Worker.deaths:
            Worker.deaths -= 1
            assert self.box._process is not None
            await self.box._process.kill()
        self.answer = (await self.box.python("print(6 * 7)")).text().strip()
        return self.answer

    @reward
    def solved(self) -> bool:
        return self.answer == "42"


@pytest.fixture
async def player(tmp_path: Path) -> AsyncIterator[Player]:
    words = ["Work. Do it. work 42 done", "<tool_call>", '{"name": "work", "arguments": {}}']
    make_tokenizer(tmp_path, words * 20, vocab=320, max_context=4096)
    renderer = Renderer.from_directory(tmp_path)
    engine = ScriptedEngine(renderer, [call("work"), say("done")], tools=Worker().tools)
    yield Player(engine, renderer, Worker, EpisodeLimits(timeout_s=30), Sampling())
    await close_pools()


class Reads(Worker):
    """Work."""

    @reward
    async def solved(self) -> bool:
        try:
            return bool(await self.box.read_file("answer"))
        except OSError as error:
            raise ValueError("there is no answer") from error


async def test_what_a_reward_does_not_find_in_the_sandbox_is_not_a_bug_of_the_reward(player: Player) -> None:
    """The policy decides what is there, so that the run does not end because of it."""
    (group,) = await collect(replace(player, make_env=Reads), [Task("t")], group_size=1, label="s0", seed=1)
    (episode,) = group.episodes
    assert (episode.reward, list(episode.faults)) == (0.0, [SANDBOX_FAULT])
    assert "there is no answer" in episode.faults[SANDBOX_FAULT]


async def test_dead_sandboxes_are_refilled_and_do_not_vote(player: Player) -> None:
    Worker.deaths = 2
    (group,) = await collect(player, [Task("t")], group_size=4, label="s0", seed=1)
    assert [episode.reward for episode in group.episodes] == [1.0] * 4
    assert len(group.failed) == 2
    for episode in group.failed:
        assert episode.reward is None
        assert episode.stop_reason is StopReason.INFRA
        assert episode.error is not None
        assert "sandbox" in episode.error
    names = {episode.id for episode in group.episodes}
    # Two deaths are two refills, of two places or of one place twice.
    assert sum(int(name.rpartition("r")[2]) for name in names if "r" in name.rpartition("/")[2]) == 2
    assert pool_for(Worker.sandbox).metrics()["leased"] == 0
