"""What a verl-style `compute_score` is given of an episode with tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentrl.env.compose import ComposedEnv
from agentrl.env.verl import solution_text
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import ScriptedPolicy, call, play, say
from agentrl.types import Message, Sampling, Task

SEEN: list[dict[str, object]] = []
SCRIPT = [call("shout", text="six"), Message("assistant", "I say 6.", reasoning="It is easy.")]
ROW = {
    "data_source": "mine",
    "prompt": "Count.",
    "reward_model": {"ground_truth": "6"},
    "extra_info": {"index": 1},
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    SEEN.append({"solution_str": solution_str, "extra_info": extra_info})
    return 1.0


def shout(text: str) -> str:
    """Say it aloud."""
    return f"PRINTED {text.upper()}"


def composed() -> ComposedEnv:
    return ComposedEnv(tools=[shout], reward=compute_score)


async def test_the_solution_is_the_sampled_text_with_calls_and_thinking(renderer):
    SEEN.clear()
    engine = ScriptedEngine(renderer, SCRIPT, max_context=4096)
    player = Player(engine, renderer, composed, EpisodeLimits(), Sampling())
    episode = await run_episode(player, Task("t", ROW), episode_id="e", seed=0)
    assert episode.error is None, episode.error
    [seen] = SEEN
    text = str(seen["solution_str"])
    sampled = [s.ids for s in episode.segments if s.origin == "sampled"]
    assert text == "\n".join(renderer.vocabulary.decode_plain(ids) for ids in sampled)
    assert all(part in text for part in ("<tool_call>", '"text": "six"', "It is easy."))
    assert text.endswith("I say 6.")  # the end-of-turn token is special
    assert "PRINTED" not in text
    assert seen["extra_info"] == {"index": 1, "num_turns": 4, "tool_rewards": []}  # as verl counts: both sides


class Asking(ComposedEnv):
    """Ask the policy before the episode begins."""

    async def reset(self, task: Task) -> Any:
        await self.model.chat([Message("user", "Count for me.")], tools=(), train=True)
        return await super().reset(task)


@pytest.mark.parametrize("known", [True, False])
async def test_the_solution_is_that_of_the_turns_and_not_of_a_conversation_that_says_the_same(renderer, known):
    SEEN.clear()
    engine = ScriptedEngine(renderer, lambda turn: say("6"), max_context=4096)
    player = Player(
        engine, renderer, lambda: Asking(tools=[shout], reward=compute_score), EpisodeLimits(), Sampling()
    )
    episode = await run_episode(player, Task("t", ROW), episode_id="e", seed=0)
    assert episode.error is None, episode.error
    first = next(i for i, s in enumerate(episode.segments) if s.origin == "sampled")
    segments = list(episode.segments)  # the same words in other tokens
    segments[first] = replace(segments[first], ids=segments[first].ids * 2, logprobs=(), versions=())
    turns = episode.turns if known else tuple(replace(turn, place=None) for turn in episode.turns)
    changed = replace(episode, segments=tuple(segments), turns=turns)
    found = solution_text(changed, renderer.vocabulary.decode_plain)
    assert found == ("6" if known else "66"), "records of earlier versions do not tell which one it is"


async def test_without_tokens_the_messages_are_written_out():
    SEEN.clear()
    await play(composed(), Task("t", ROW), ScriptedPolicy(SCRIPT))
    assert SEEN[0]["solution_str"] == (
        '<tool_call>\n{"name": "shout", "arguments": {"text": "six"}}\n</tool_call>\n'
        "<think>\nIt is easy.\n</think>\nI say 6."
    )


async def test_the_answer_alone_is_the_text_of_a_single_turn():
    SEEN.clear()
    await play(composed(), Task("t", ROW), ScriptedPolicy([say("6")]))
    assert SEEN[0]["solution_str"] == "6"
    assert SEEN[0]["extra_info"] == {"index": 1, "num_turns": 2, "tool_rewards": []}
