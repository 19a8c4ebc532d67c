"""What a run sets on an env arrives there: settings, weights, the tokenizer's counts, rewards per group."""

import json

import pytest

from agentrl.chat.template import Renderer
from agentrl.config import load_config
from agentrl.env import ToolEnv, reward, tool
from agentrl.env.compose import ComposedEnv
from agentrl.env.read import final_answer
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.collect import collect
from agentrl.rollout.content import env_factory
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Episode, Sampling, Task

ENV = '''
from agentrl import ToolEnv, reward, tool
from agentrl.env import ToolSettings

class Mine(ToolEnv):
    """Do."""
    settings = ToolSettings(max_tool_calls=3)
    def setup(self) -> str:
        return "Go."
    @tool
    def act(self) -> str:
        """Act."""
        return "done"
    @reward
    def solved(self) -> bool:
        return True

def act(text: str) -> str:
    """Act."""
    return text

def solved(episode) -> bool:
    return True
'''


@pytest.fixture
def configure(tmp_path):
    (tmp_path / "mine.py").write_text(ENV)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Go."}\n')

    def configure(env: str):
        path = tmp_path / "tools.yaml"
        path.write_text(f"env: {env}\nmodel: {{tiny: {{}}}}\ndata: {{train: rows.jsonl}}\n")
        return load_config(path)

    return configure


def make(config):
    from agentrl.env.load import load_env

    return env_factory(load_env(config.env.use), config)()


def test_settings_change_what_they_name_and_keep_the_rest(configure):
    settings = "{mistakes: {unknown_tool: terminate}, observation_tokens: 99}"
    env = make(configure(f"{{use: mine.py:Mine, settings: {settings}, reward_weights: {{solved: 2}}}}"))
    assert (env.settings.max_tool_calls, env.settings.observation_tokens) == (3, 99)
    assert env.settings.mistakes == {"unknown_tool": "terminate"}
    assert env.settings.reward_weights == {"solved": 2}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("{use: mine.py:Mine, settings: {tool_timeouts: 3}}", "settings.tool_timeouts: unknown; did you mean"),
        ("{use: mine.py:Mine, settings: {tool_timeout_s: soon}}", "settings"),
        (
            "{use: mine.py:Mine, settings: {mistake_penalty: 0.5}}",
            "has no effect unless a mistake is set to penalise",
        ),
        (
            "{use: mine.py:Mine, settings: {mistake_penalty: -1}}",
            "env.settings.mistake_penalty must not be negative",
        ),
        ("{use: mine.py:Mine, reward_weights: {solvd: 2}}", "Mine has no such reward; did you mean 'solved'?"),
    ],
)
def test_a_setting_that_cannot_be_stops_before_the_run(configure, env, text):
    with pytest.raises(ConfigError) as caught:
        make(configure(env))
    assert text in str(caught.value)


def test_paths_of_a_composition_count_from_its_file(configure, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    options = "{tools: [mine.py:act], reward: mine.py:solved}"
    env = make(configure(f"{{use: 'agentrl.env.compose:ComposedEnv', options: {options}}}"))
    assert isinstance(env, ComposedEnv)
    assert [t["function"]["name"] for t in env.tools] == ["act"]


class Contest(ToolEnv):
    """Write."""

    def setup(self) -> str:
        return "Write."

    @tool
    def long(self) -> str:
        """Long."""
        return "word " * 5000

    @reward
    def written(self) -> float:
        return 0.25

    @reward(per="group", weight=0.5)
    def longest(self, episodes: list[Episode]) -> list[float]:
        most = max(len(final_answer(e)) for e in episodes)
        return [float(len(final_answer(e)) == most) for e in episodes]


class Broken(Contest):
    @reward(per="group")
    def longest(self, episodes: list[Episode]) -> list[float]:
        return [1.0]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, [json.dumps(list(Contest().tools))] * 4, vocab=400, max_context=4096)
    return Renderer.from_directory(directory)


class Answers:
    """Says another answer in each session."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, turn: int):
        self.number += 1
        return say("x" * self.number)


def player(renderer, make_env, script) -> Player:
    engine = ScriptedEngine(renderer, script, tools=make_env().tools)
    return Player(engine, renderer, make_env, EpisodeLimits(token_budget=30_000), Sampling())


async def test_rewards_per_group_join_those_of_the_episode(renderer):
    (group,) = await collect(player(renderer, Contest, Answers()), [Task("t")], group_size=3, label="s", seed=0)
    rewards = sorted((e.reward, e.rewards["longest"]) for e in group.episodes)
    assert rewards == [(0.25, 0.0), (0.25, 0.0), (0.75, 0.5)]


async def test_rewards_per_group_know_the_options_of_the_run(renderer):
    class Prized(Contest):
        def __init__(self, prize: float) -> None:
            self.prize = prize

        @reward(per="group")
        def longest(self, episodes: list[Episode]) -> list[float]:
            return [self.prize] * len(episodes)

    asked = player(renderer, lambda: Prized(prize=7.0), Answers())
    (group,) = await collect(asked, [Task("t")], group_size=2, label="s", seed=0)
    assert [e.rewards["longest"] for e in group.episodes] == [7.0, 7.0]


async def test_a_broken_group_reward_counts_0_for_all_and_is_noted(renderer):
    (group,) = await collect(player(renderer, Broken, Answers()), [Task("t")], group_size=3, label="s", seed=0)
    for episode in group.episodes:
        assert episode.rewards["longest"] == 0.0
        assert "reward 'longest' of Broken returned" in episode.faults["longest"]


async def test_results_are_cut_by_the_policys_own_tokens(renderer):
    episode = await run_episode(
        player(renderer, Contest, [call("long"), say("end")]), Task("t"), episode_id="e", seed=0
    )
    text = episode.turns[0].observation[0].content
    assert len(renderer.encode_text(text)) <= 1024
    assert len(renderer.encode_text(text)) > 900
    assert episode.metrics["output_truncated"] == 1


@pytest.mark.parametrize("error", [OSError("cannot close"), SystemExit("cannot close")])
async def test_a_close_that_fails_does_not_lose_the_episode(renderer, error: BaseException):
    class Ajar(Contest):
        def teardown(self) -> None:
            raise error

    said = rf"Ajar\.close: InfraError: Ajar\.teardown: {type(error).__name__}: cannot close"
    with pytest.warns(UserWarning, match=said):
        episode = await run_episode(player(renderer, Ajar, [say("end")]), Task("t"), episode_id="e", seed=0)
    assert episode.reward == 0.25
