"""Rewards in parts, tools per task, text envs, and the oracle as the writer of demonstrations."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import ConfigError, Stop, Task, TextEnv, ToolEnv, ToolResult, load_config, reward, tool
from agentrl.agents.player import read_outcome
from agentrl.env import Env, StepInfo
from agentrl.env.checker import EnvCheckError, check_env
from agentrl.env.play import RandomPolicy, ScriptedPolicy, call, play
from agentrl.env.toolenv.spec import tool_from
from agentrl.errors import RewardError
from agentrl.rollout.content import load_content
from agentrl.rollout.task_tools import task_tools, task_tools_now
from agentrl.types import Message

TASKS = [Task(f"t{i}", {"n": i}, i) for i in range(4)]


class Torn(dict[str, float]):
    """A mapping of the author's that looks its values up when it is read."""

    def items(self) -> Any:
        raise FileNotFoundError("scores.json")


class Parted(ToolEnv):
    """Say a number."""

    given: object = None

    def setup(self, n: int) -> str:
        return str(n)

    @reward(name="score", weight=0.5)
    def graded(self) -> dict[str, float]:
        return self.given if self.given is not None else {"solved": True, "cost": -3}  # type: ignore[return-value]

    @reward
    def other(self) -> float:
        return 0.0


async def played(env, task=TASKS[0], script=("done",)):
    return await play(env, task, ScriptedPolicy(script))


async def test_a_mapping_is_logged_in_parts_and_weighted_by_the_reward_or_the_part():
    episode = await played(Parted())
    assert episode.rewards == {"score/solved": 0.5, "score/cost": -1.5, "other": 0.0}
    assert (episode.reward, episode.solved) == (-1.0, True)
    env = Parted()
    env.configure({}, {"score/cost": 0.1})
    episode = await played(env)
    assert episode.rewards == pytest.approx({"score/solved": 0.5, "score/cost": -0.3, "other": 0.0})
    with pytest.raises(ConfigError, match="has no such reward"):
        Parted().configure({}, {"sore/cost": 0.1})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": float("nan")}, r"returned nan; rewards must be finite \(part 'a'\)"),
        ({"a": "1"}, r"returned '1', not a number.*\(part 'a'\)"),
        ({"a": None}, "not a number"),
        ({"a": {"b": 1}}, "not a number"),
        ({1: 1.0}, "the name of a part must be text"),
        ({"": 1.0}, "the name of a part must be text"),
        ({"other": 1.0}, "'other', which is the name of another reward"),
        ({str(i): 1.0 for i in range(101)}, "101 parts; at most 100"),
        (Torn(a=1.0), "returned what cannot be read: FileNotFoundError: scores.json"),
    ],
)
async def test_a_bad_part_is_a_fault_that_names_it(given, said):
    env = Parted()
    env.given = given
    with pytest.raises(RewardError, match=said):
        await played(env)


class Compared(ToolEnv):
    """Compare."""

    def setup(self, n: int) -> str:
        return str(n)

    @reward(per="turn")
    def each(self) -> dict[str, float]:
        return {"said": 1.0}

    @reward(per="group")
    def rank(self, episodes) -> list[dict[str, float]]:
        return [{"place": i} for i in range(len(episodes))]


async def test_rewards_per_turn_and_group_come_in_parts_too():
    episode = await played(Compared())
    assert (episode.metrics, episode.reward) == ({"reward/each/said": 1.0}, 1.0)
    assert await Compared().score_group([episode, episode]) == [{"rank/place": 0.0}, {"rank/place": 1.0}]


def test_the_json_of_a_program_is_parsed_and_text_stays_text():
    assert read_outcome(' {"passed": 3}\n') == {"passed": 3}
    assert read_outcome("[1, 2]") == [1, 2]
    for text in ("", "red", "42", '{"passed": 3', "[" * 100_000):
        assert read_outcome(text) == text


class PerTask(ToolEnv):
    """Use the tool of the task."""

    def setup(self, n: int) -> str:
        self.called = ""
        return f"Call tool_{n}."

    def more_tools(self):
        def use(word: str) -> str:
            """Use it."""
            self.called = word
            return word

        use.__name__ = f"tool_{self.task.row['n']}"
        return [tool_from(use)]

    @reward
    def solved(self) -> bool:
        return self.called == "yes"

    @classmethod
    def tasks(cls, split="train", seed=0):
        return TASKS

    @classmethod
    def demonstrations(cls, seed, num):
        return [[Message("user", "x"), Message("assistant", "y")]] * num

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call(f"tool_{task.row['n']}", word="yes")])


class Plain(Env):
    """A contract env whose reset sets the tools."""

    def __init__(self) -> None:
        self.schemas = ()

    @property
    def tools(self):
        return self.schemas

    async def reset(self, task):
        self.schemas = (
            {"type": "function", "function": {"name": f"f{task.row['n']}", "parameters": {"type": "object"}}},
        )
        return [Message("user", "go")], {}

    async def step(self, message):
        answers = [Message("tool", "no", tool_call_id=c.id) for c in message.tool_calls]
        return answers, 0.0, True, False, StepInfo()


async def test_tools_of_a_task():
    assert PerTask().tools == []
    names = [s["function"]["name"] for s in await task_tools(PerTask, TASKS)]
    assert names == ["tool_0", "tool_1", "tool_2", "tool_3"]
    assert [s["function"]["name"] for s in task_tools_now(Plain, TASKS)] == ["f0", "f1", "f2", "f3"]
    episode = await play(PerTask(), TASKS[2], PerTask.oracle(TASKS[2]))
    assert episode.solved
    assert [s["function"]["name"] for s in episode.tools] == ["tool_2"]
    await check_env(PerTask, TASKS, oracle=PerTask.oracle)
    await check_env(Plain, TASKS)


async def test_two_instances_with_different_tools_for_one_task_are_found():
    class Fickle(Plain):
        made = 0

        async def reset(self, task):
            Fickle.made += 1
            return await super().reset(Task("t", {"n": Fickle.made}))

    with pytest.raises(EnvCheckError, match="different tools for the same task"):
        await check_env(Fickle, TASKS)


YAML = "env: {path}:PerTask\nmodel: {{tiny: {{}}}}\nwarmup: {warmup}\n"


def config_of(tmp_path, warmup):
    (tmp_path / "tools.yaml").write_text(YAML.format(path=__file__, warmup=warmup))
    return load_config(tmp_path / "tools.yaml")


def test_the_oracle_writes_the_demonstrations_with_the_tools_of_each_task(tmp_path):
    found = load_content(config_of(tmp_path, "oracle")).demonstrations
    assert [[s["function"]["name"] for s in d.tools] for d in found] == [[f"tool_{i}"] for i in range(4)]
    assert found[1][2].tool_calls[0].name == "tool_1"
    assert load_content(config_of(tmp_path, "{num: 2}")).demonstrations[0][0].content == "x"
    assert load_content(config_of(tmp_path, "{use: oracle, num: 2}")).demonstrations[0].tools
    with pytest.raises(ConfigError, match=r"warmup\.use"):
        config_of(tmp_path, "oracel")
    with pytest.raises(ConfigError, match=r"warmup\.options has no effect"):
        load_content(config_of(tmp_path, "{use: oracle, options: {a: 1}}"))


class Guess(TextEnv):
    """Guess my number from 0 to 9."""

    def setup(self, n: int) -> str:
        self.number = n
        return "Your guess?"

    def reply(self, text: str):
        if text == "give up":
            return None
        if text == "half":
            return ToolResult("Half a point.", reward=0.5)
        return Stop("Right!", reward=1.0) if text == str(self.number) else "Wrong. Your guess?"


async def test_a_game_in_five_lines():
    episode = await played(Guess(), TASKS[3], ["1", "half", "3"])
    assert [m.content for m in episode.messages] == [
        "Guess my number from 0 to 9.",
        *("Your guess?", "1", "Wrong. Your guess?", "half", "Half a point.", "3", "Right!"),
    ]
    assert (episode.reward, str(episode.stop_reason)) == (1.5, "terminated")
    assert Guess().tools == []
    episode = await played(Guess(), TASKS[3], ["give up"])
    assert (episode.reward, str(episode.stop_reason)) == (0.0, "answered")
    await check_env(Guess, TASKS, reward_range=(0, 8))
    assert RandomPolicy((), 0)([Message("user", "a b")]).tool_calls == ()


async def test_an_async_reply_and_one_that_raises():
    class Slow(Guess):
        async def reply(self, text: str):
            return Stop("", 1.0)

    assert (await played(Slow(), TASKS[0])).reward == 1.0

    class Broken(Guess):
        def reply(self, text: str):
            return ToolResult("x", reward=float("nan"))

    with pytest.raises(RewardError, match="must be finite"):
        await played(Broken(), TASKS[0])


def test_a_text_env_with_a_tool_or_without_reply_is_refused():
    class WithTool(Guess):
        @tool
        def look(self) -> str:
            """Look."""
            return ""

    with pytest.raises(ConfigError, match="a TextEnv has no tools, and 'look' is one"):
        WithTool.check_class()

    class Silent(TextEnv):
        """Says nothing."""

    with pytest.raises(ConfigError, match="write `def reply"):
        Silent.check_class()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda self: None, "more_tools: return a list of tools made with tool_from"),
        (lambda self: ["lookup"], r"got \['lookup'\]"),
        (lambda self: [len], "made with tool_from"),
        (lambda self: self.nothing, "more_tools: AttributeError: .*'nothing'"),
        (lambda self: [self.task.row["missing"]], "more_tools: KeyError: 'missing'"),
    ],
)
async def test_tools_of_a_task_that_are_none_say_so(found, said):
    env = type("Wrong", (PerTask,), {"more_tools": found})()
    with pytest.raises(ConfigError, match=said):
        await env.reset(TASKS[0])
