"""Images in what a tool returns, where the chat template knows text only: said once, clearly."""

import asyncio
import json

import pytest

from agentrl.chat.template import Renderer
from agentrl.cli import main
from agentrl.env import ToolEnv, tool
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Limits, Player
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import ScriptedPolicy, call
from agentrl.testing.tiny_model import make_tokenizer
from agentrl.types import Image, Sampling, StopReason, Task

SAID = "a tool message holds an image, and the chat template of this model takes text only: return text"


class Camera(ToolEnv):
    """Look."""

    def setup(self) -> str:
        return "What is there?"

    @tool
    def look(self) -> tuple[object, ...]:
        """Look."""
        return ("a picture", Image(b"png"))

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        return [Task("t")]

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        return ScriptedPolicy([call("look"), "a cat"])


def test_an_episode_ends_there_and_earns_nothing(tmp_path):
    tools = list(Camera().tools)
    make_tokenizer(tmp_path, [json.dumps(tools)] * 4, vocab=400, max_context=4096)
    renderer = Renderer.from_directory(tmp_path)
    engine = ScriptedEngine(renderer, [call("look"), "a cat"], tools=tools)
    player = Player(engine, renderer, Camera, Limits(), Sampling())
    (group,) = asyncio.run(collect(player, [Task("t")], group_size=2, label="l", seed=0))
    for episode in group.episodes:
        assert (episode.stop_reason, episode.reward) == (StopReason.FAULT, 0.0)
        assert episode.faults["template"].count(SAID) == 1


def test_check_says_it_before_any_run(tmp_path, capsys):
    path = tmp_path / "tools.yaml"
    path.write_text(f"env: {__file__}:Camera\nmodel: {{tiny: {{vocab: 400}}}}\n")
    with pytest.raises(SystemExit) as left:
        main(["check", str(path)])
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert " ".join((out + err).split()).count(SAID) == 1
