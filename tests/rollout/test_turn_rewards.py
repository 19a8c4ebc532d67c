"""Rewards of a turn by their names, in the record of the episode."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl import ToolEnv, ToolResult, reward, tool
from agentrl.run_folder.records import EpisodeRecord, decode, encode
from agentrl.testing import ScriptedPolicy, play
from agentrl.types import Message, Task, ToolCall


class Steps(ToolEnv):
    """Walk."""

    def setup(self) -> str:
        return "Walk."

    @tool(inline=True)
    def walk(self) -> ToolResult:
        """Take a step."""
        return ToolResult("a step", reward=0.25)

    @reward(per="turn", weight=2.0)
    def speed(self) -> float:
        return 0.5

    @reward
    def arrived(self) -> bool:
        return True


def test_a_turn_has_its_rewards_by_name(tmp_path: Path):
    policy = ScriptedPolicy(
        [Message("assistant", "", (ToolCall("c0", "walk", {}),)), Message("assistant", "done")]
    )
    episode = asyncio.run(play(Steps(), Task("t", {}), policy))
    assert [turn.rewards for turn in episode.turns] == [{"tools": 0.25, "speed": 1.0}, {"speed": 1.0}]
    assert [turn.reward for turn in episode.turns] == [1.25, 1.0]
    assert decode(encode(EpisodeRecord(1, 0, episode))).episode.turns == episode.turns
    old = encode(EpisodeRecord(1, 0, episode)).replace(b',"rewards":{"speed":1.0}', b"", 1)
    assert decode(old).episode.turns[1].rewards == {}  # records of runs before this was there
