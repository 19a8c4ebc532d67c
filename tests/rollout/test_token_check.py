"""`tokenization_check`: what an episode says of its tokens, what then trains, and when the run stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.chat.token_check import TokenCheckBudget
from agentrl.env import ToolEnv, reward
from agentrl.errors import TemplateError
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player, TokenCheck, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import say
from agentrl.trainer.samples import to_samples
from agentrl.types import Group, Message, Sampling, Task


class Echo(ToolEnv):
    """Say anything."""

    def setup(self) -> str:
        self.said = 0
        return "Hello."

    def respond(self, message: Message) -> str | None:
        self.said += 1
        return "Go on." if self.said < 4 else None

    @reward
    def solved(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def forgetful(renderer: Renderer) -> Renderer:
    """A template that replaces what the assistant said more than two messages ago."""
    shown = "{{- message.content }}\n{%- for call"
    assert shown in CHATML_TEMPLATE
    rewriting = "{{- message.content if loop.index0 >= messages | length - 2 else 'forgotten' }}\n{%- for call"
    return Renderer(renderer.vocabulary, CHATML_TEMPLATE.replace(shown, rewriting))


def player(renderer: Renderer, stop_above: float | None = None) -> Player:
    check = TokenCheck("strict", TokenCheckBudget(stop_above, at_least=2))
    engine = ScriptedEngine(renderer, lambda turn: say("fine words"))
    return Player(engine, renderer, Echo, EpisodeLimits(), Sampling(), token_check=check)


async def test_an_episode_whose_ledger_is_the_rendering_says_so(renderer: Renderer):
    episode = await run_episode(player(renderer), Task("t"), episode_id="e", seed=0)
    assert episode.error is None
    assert episode.metrics["tokens/identical"] == 1
    assert "tokens/failed" not in episode.metrics


async def test_an_episode_that_fails_votes_but_does_not_train(renderer: Renderer, forgetful: Renderer):
    bad = await run_episode(player(forgetful), Task("t"), episode_id="bad", seed=0)
    good = await run_episode(player(renderer), Task("t"), episode_id="good", seed=0)
    assert bad.metrics["tokens/failed"] == 1
    group = Group(Task("t"), (bad, replace(good, reward=0.0)))
    samples, _ = to_samples([group], overlong="train")
    assert {sample.episode_id for sample in samples} == {"good"}


async def test_too_many_failures_stop_the_run_with_the_reason(forgetful: Renderer):
    tasks = [Task(f"t{n}") for n in range(4)]
    with pytest.raises(TemplateError, match=r"tokenization_check: strict: .* transcripts differ"):
        await collect(player(forgetful, stop_above=0.1), tasks, group_size=1, label="s1", seed=0)
