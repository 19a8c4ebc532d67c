"""What an env says is clean where it enters the transcript, the record and the metrics."""

from __future__ import annotations

from agentrl.chat.template import Renderer
from agentrl.env import ToolEnv, reward, tool
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.records import EpisodeRecord, decode, encode
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Episode, Sampling, Task

NASTY = "a\x1b[2J\x9b\u202e\u200b\ud800z"
CLEAN = r"a\u001b[2J\u009b\u202e\u200b\ud800z"


class Nasty(ToolEnv):
    """Nasty."""

    def setup(self) -> str:
        return f"Read {NASTY}"

    @tool
    def look(self) -> str:
        """Look."""
        return NASTY

    @tool
    def fail(self) -> str:
        """Fail."""
        raise OSError(NASTY)

    @reward(name="good")
    def good(self, episode: Episode) -> float:
        raise ValueError(NASTY)


async def test_observations_errors_and_faults_are_clean(renderer: Renderer):
    engine = ScriptedEngine(renderer, [call("look"), call("fail"), say("done")], tools=Nasty().tools)
    player = Player(engine, renderer, Nasty, EpisodeLimits(), Sampling())
    episode = await run_episode(player, Task("t"), episode_id="e", seed=0)
    said = [message.content for message in episode.messages if message.role in ("user", "tool")]
    assert said == [f"Read {CLEAN}", CLEAN, f"Error: OSError: {CLEAN}"]
    assert [c.result for turn in episode.turns for c in turn.calls] == [CLEAN, f"Error: OSError: {CLEAN}"]
    assert CLEAN in episode.faults["good"]
    assert NASTY not in episode.faults["good"]
    decoded = renderer.decode([i for s in episode.segments if s.origin == "observation" for i in s.ids])
    assert CLEAN in decoded
    assert decode(encode(EpisodeRecord(1, 0, episode))).episode.faults == episode.faults
