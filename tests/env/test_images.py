"""Images in what a tool returns, where the model reads text only: refused by type, else an observation."""

import json

import pytest

from agentrl.chat.template import Renderer
from agentrl.cli import main
from agentrl.config import RunConfig
from agentrl.env import ToolEnv, reward, tool
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.build import make_player
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.types import Image, Sampling, Task

SAID = "tool 'look' returns an Image by its type, and the chat template of this model takes text only"


class Camera(ToolEnv):
    """Look."""

    def setup(self) -> str:
        return "What is there?"

    @tool
    def look(self) -> tuple[object, ...]:
        """Look."""
        return ("a picture", Image(b"png"))

    @reward
    def cat(self, episode) -> bool:
        return "cat" in str(episode.messages[-1].content)

    @classmethod
    def tasks(cls, split: str, seed: int) -> list[Task]:
        return [Task("t")]

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        return ScriptedPolicy([call("look"), "a cat"])


class Sees(Camera):
    """Look."""

    @tool
    def look(self) -> list[str | Image]:
        """Look."""
        return ["a picture", Image(b"png")]


async def test_an_image_becomes_a_note_in_an_episode_that_trains(tmp_path):
    tools = list(Camera().tools)
    make_tokenizer(tmp_path, [json.dumps(tools)] * 4, vocab=400, max_context=4096)
    renderer = Renderer.from_directory(tmp_path)
    engine = ScriptedEngine(renderer, [call("look"), "a cat"], tools=tools)
    player = Player(engine, renderer, Camera, EpisodeLimits(), Sampling())
    (group,) = await collect(player, [Task("t")], group_size=2, label="l", seed=0)
    assert group.failed == ()
    for episode in group.episodes:
        text = "a picture\n[an image, which this model cannot read, was left out]"
        assert (episode.error, episode.turns[0].observation[0].content) == (None, text)
        assert episode.metrics["images_left_out"] == 1


async def test_a_model_that_sees_gets_the_image():
    episode = await play(Camera(), Task("t"), ScriptedPolicy([call("look"), "a cat"]))
    assert episode.turns[0].observation[0].content == ("a picture", Image(b"png"))


@pytest.mark.parametrize(("env", "code"), [("Sees", 2), ("Camera", 0)])
def test_check_refuses_a_tool_whose_type_says_image(tmp_path, capsys, env, code):
    path = tmp_path / "tools.yaml"
    path.write_text(f"env: {__file__}:{env}\nmodel: {{tiny: {{vocab: 400}}}}\n")
    with pytest.raises(SystemExit) as left:
        main(["check", str(path)])
    out, err = capsys.readouterr()
    said = " ".join((out + err).split())
    assert (left.value.code, said.count(SAID)) == (code, 1 if code else 0), said


def test_a_run_refuses_it_before_it_starts(tmp_path):
    config = RunConfig.model_validate({"name": "r", "env": f"{__file__}:Sees", "model": {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match=SAID):
        make_player(config, None, None, Sees, temperature=1.0)
