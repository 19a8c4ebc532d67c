"""Time in which no server could answer is nobody's fault: the episode is played again instead of trained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentrl.chat.template import Renderer
from agentrl.envs.calculator import Calculator
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Completion, Sampling, StopReason, Task

TASK = Task("chain", {"start": 2, "operations": [["+", 3]]})


class Stuck(ScriptedEngine):
    """Does not answer; counts an outage where there is one."""

    def __init__(self, renderer: Renderer, *, outage: bool) -> None:
        super().__init__(renderer, [])
        self._outage_s, self._outage = 12.0, outage

    @property
    def outage_s(self) -> float:
        return self._outage_s

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        self._outage_s += 1.0 if self._outage else 0.0
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("outage", "stop"), [(True, StopReason.INFRA), (False, StopReason.TIMEOUT)])
async def test_running_out_of_time_during_an_outage_is_an_infrastructure_failure(
    renderer: Renderer, outage: bool, stop: StopReason
) -> None:
    player = Player(Stuck(renderer, outage=outage), renderer, Calculator, EpisodeLimits(timeout_s=1.0), Sampling())
    episode = await run_episode(player, TASK, episode_id="e", seed=0)
    assert episode.stop_reason is stop, episode.error
    assert (episode.reward is None) == outage
    assert not outage or "no server could answer" in (episode.error or "")
