"""What a run is made of, checked before any model is loaded: one clear error for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import load_config
from agentrl.config.run import RunConfig
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.rollout.content import load_content, message_of
from agentrl.types import Message, ToolCall

ENVS = '''
from agentrl import ToolEnv, reward, tool
from agentrl.env import Env
from agentrl.env.tasks import generated
from agentrl.types import Message, Task


class Plain(ToolEnv):
    """Count."""

    def setup(self, start: int) -> str:
        return f"Begin with {start}."

    @classmethod
    def tasks(cls, split, seed, *, first=0):
        return generated("plain", split, seed, 10, lambda rng: {"start": first + rng.randrange(5)})


class Sized(Plain):
    def __init__(self, size: int = 1) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size


class Reads(Plain):
    def __init__(self, path: str) -> None:
        self.text = open(path).read()


class Misfit(Plain):
    @classmethod
    def tasks(cls, split, seed):
        return generated("misfit", split, seed, 10, lambda rng: {"begin": 1})


class Empty(Plain):
    @classmethod
    def tasks(cls, split, seed):
        return []


class Untyped(ToolEnv):
    @tool
    def add(self, a, b: int) -> int:
        """Add."""


class NoTasks(ToolEnv):
    """None."""


class NoLicence(Plain):
    """None."""

    def __init__(self):
        raise RuntimeError("no licence")


class Offline(Plain):
    """None."""

    @classmethod
    def tasks(cls, split, seed):
        raise ConnectionResetError("no network")


class Rows(Plain):
    """None."""

    @classmethod
    def tasks(cls, split, seed):
        return [{"start": 1}]


class Yields(Plain):
    """None."""

    @classmethod
    def tasks(cls, split, seed):
        yield Task("t")


class Mute(Plain):
    """Demonstrates nothing."""

    @classmethod
    def demonstrations(cls, seed, num, *, wrong):
        return [None] * wrong


class Unbound(Plain):
    """None."""

    def tasks(self, split, seed=0):
        return [Task("t", {"start": 1})]
'''


@pytest.fixture
def load(tmp_path: Path):
    (tmp_path / "mine.py").write_text(ENVS)

    def load(name: str, **sections: Any):
        env = {"use": f"{tmp_path}/mine.py:{name}" if ":" not in name else name, **sections.pop("env", {})}
        return load_content(RunConfig(**{"env": env, "model": {"tiny": {}}} | sections))

    return load


@pytest.mark.parametrize(
    ("name", "sections", "said"),
    [
        ("Plain", {"env": {"options": {"size": 3}}}, "env.options {'size': 3} do not fit "),
        ("Plain", {"env": {"options": {"size": 3}}}, "Plain takes no arguments (it has no __init__), got size"),
        ("Sized", {"env": {"options": {"sise": 3}}}, "unexpected keyword argument 'sise'"),
        ("Sized", {"env": {"options": {"size": 0}}}, "size must be at least 1, got 0"),
        ("Reads", {}, "missing 1 required positional argument: 'path'"),
        ("Reads", {"env": {"options": {"path": "nowhere.txt"}}}, "No such file or directory: 'nowhere.txt'"),
        ("Plain", {"data": {"options": {"last": 3}}}, "with data.options {'last': 3}: "),
        ("Misfit", {}, "argument 'start' of Misfit.setup is missing; it has: begin"),
        ("Empty", {}, "Empty.tasks('train', ...) with data.options {}: it gives no task"),
        ("NoTasks", {}, "has no `tasks` classmethod: name a JSON-lines file under data.train"),
        ("Untyped", {}, "Untyped.add: argument 'a' has no type hint"),
        ("NoLicence", {}, "NoLicence cannot be made: RuntimeError: no licence ("),
        ("NoLicence", {}, "/mine.py:"),
        ("Offline", {}, "Offline.tasks('train', ...) with data.options {}: ConnectionResetError: no network ("),
        ("Rows", {}, "Rows.tasks('train', ...): a sequence of Task is wanted (a list, or agentrl.env.tasks.gener"),
        ("Rows", {}, "got a list of dict"),
        ("Yields", {}, "got a generator"),
        ("Unbound", {}, "Unbound.tasks must be a class method: write @classmethod above it"),
        ("Plain", {"warmup": {}}, "does not generate demonstrations"),
        ("Missing", {}, "has no 'Missing'"),
        ("no_such_package.envs:Env", {}, "no module 'no_such_package'"),
        ("Plain", {"data": {"train": "nowhere.jsonl"}}, "no file nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_clear_error(load, name: str, sections: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as caught:
        load(name, **sections)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_row_that_does_not_fit_is_named_by_its_line(load, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"start": 1}\n\n{"begin": 2}\n')
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:3: argument 'start' of Plain\.setup is missing; it has: begin"
    ):
        load("Plain", data={"train": str(rows)})


def test_options_reach_what_they_are_for(load):
    content = load("Sized", env={"options": {"size": 7}}, data={"options": {"first": 100}})
    assert content.make_env().size == 7
    assert content.make_env() is not content.make_env()
    assert all(100 <= content.train_tasks[i].row["start"] < 105 for i in range(10))
    assert content.train_tasks[0].id == "plain-train-0-0"
    assert content.held_out_tasks[0].id == "plain-held_out-0-0"


def test_a_tool_env_without_init_takes_nothing_and_one_with_init_what_it_says():
    class Bare(ToolEnv):
        """Bare."""

    class Derived(Bare):
        def __init__(self, size: int) -> None:
            self.size = size

    Bare()
    assert Derived(3).size == Derived(size=3).size == 3
    for wrong in (lambda: Bare(3), lambda: Bare(size=3)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="Bare takes no arguments"):
            wrong()


class TestDemonstrations:
    def test_openai_messages_become_ours(self):
        found = message_of(
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                    {"name": "stop"},
                ],
            },
            "x:1",
        )
        calls = (ToolCall("c7", "add", {"a": 1}), ToolCall("call00001", "stop", {}))
        assert found == Message("assistant", "", calls, reasoning="hm")
        answer = {"role": "tool", "content": "3", "tool_call_id": "c7", "name": "add"}
        assert message_of(answer, "x:1") == Message("tool", "3", tool_call_id="c7", name="add")

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            ({}, 'a demonstration is an object with a list under "messages"'),
            ({"messages": "hello"}, 'a list under "messages"'),
            ({"messages": [{"role": "user", "content": "hi"}]}, "needs a message of the assistant"),
            (
                {
                    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
                    "tools": [{"type": "function", "function": {"description": "Add."}}],
                },
                '"tools" must be a list of {"type": "function", "function": {"name": ...}}',
            ),
            ({"messages": ["hello"]}, "a message must be an object, got 'hello'"),
            (
                {"messages": [{"role": "robot"}]},
                "role: must be one of system, developer, user, assistant, tool, got 'robot'",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                "content[0].type: 'image' is not supported",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": ["add"]}]}, "tool_calls[0]: must be {"),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
                "tool_calls[0].function.name: must be text",
            ),
            ({"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "{"}]}]}, "not JSON"),
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "3"}]}]},
                "must be a JSON object",
            ),
            *(
                (
                    {
                        "messages": [
                            {"role": "user", "content": "hi"},
                            {"role": "assistant", "content": "ho", **lost},
                        ]
                    },
                    f"messages[1].{next(iter(lost))} has no effect: a message has role, content, tool_calls, ",
                )
                for lost in ({"thinking": "hm"}, {"function_call": {"name": "add"}}, {"weight": 0})
            ),
        ],
    )
    def test_a_bad_one_is_named_by_its_line(self, load, tmp_path: Path, row: Any, said: str):
        file = tmp_path / "demos.jsonl"
        good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
        file.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ConfigError) as caught:
            load("Plain", warmup={"demonstrations": str(file)})
        assert str(caught.value).startswith(f"{file}:2: ")
        assert said in str(caught.value)

    def test_keys_without_a_value_are_taken(self, load, tmp_path: Path):
        file = tmp_path / "demos.jsonl"
        answer = {"role": "assistant", "content": "ho", "function_call": None, "annotations": [], "weight": 1}
        file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}, answer]}) + "\n")
        assert len(load("Plain", warmup={"demonstrations": str(file)}).demonstrations) == 1

    def test_none_at_all_is_no_cold_start(self, load, tmp_path: Path):
        file = tmp_path / "demos.jsonl"
        file.write_text("\n")
        with pytest.raises(ConfigError, match=r"demos\.jsonl: there is no demonstration in it"):
            load("Plain", warmup={"demonstrations": str(file)})
        for num, said in ((0, "it gives no demonstration"), (1, "TypeError: 'NoneType' object is not iterable")):
            with pytest.raises(ConfigError, match=said):
                load("Mute", warmup={"num": 1, "options": {"wrong": num}})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "settings",
            "{tool_timeout: 3}",
            "4:14: env.settings.tool_timeout: unknown; did you mean",
        ),
        ("settings", "{mistakes: {unknwn_tool: observe}}", "4:25: env.settings.mistakes.unknwn_tool: there is no"),
        ("reward_weights", "{x: 1}", "4:20: env.reward_weights.x: Plain has no such reward"),
        ("options", "{size: 1}", "4:3: env.options {'size': 1} do not fit"),
    ],
)
def test_what_only_the_env_can_check_is_located_in_the_file(tmp_path: Path, key: str, value: str, said: str):
    (tmp_path / "envs.py").write_text(ENVS)
    path = tmp_path / "tools.yaml"
    path.write_text(f"model: {{tiny: {{}}}}\nenv:\n  use: envs.py:Plain\n  {key}: {value}\n")
    with pytest.raises(ConfigError) as caught:
        load_content(load_config(path))
    assert str(caught.value).startswith(f"{path}:{said}")
    mixture = f"envs:\n  one:\n    use: envs.py:Plain\n    {key}: {value}\n  two: {{use: envs.py:Plain}}\n"
    path.write_text(f"model: {{tiny: {{}}}}\n{mixture}")
    with pytest.raises(ConfigError, match=f"^{path}:5:.*envs.one: env.{key}"):
        load_content(load_config(path))
    path.write_text("model: {tiny: {}}\nenv: envs.py:Plain\n")
    with pytest.raises(ConfigError, match=f"^--set env.{key}="):
        load_content(load_config(path, [f"env.{key}={value}"]))


def test_options_of_tasks_are_located_too(tmp_path: Path):
    (tmp_path / "env.py").write_text(ENVS)
    path = tmp_path / "tools.yaml"
    path.write_text("env: env.py:Plain\nmodel: {tiny: {}}\ndata: {options: {last: 1}}\n")
    with pytest.raises(ConfigError, match=rf"^{path}:3:8: .*with data.options"):
        load_content(load_config(path))
    path.write_text("env: env.py:Plain\nmodel: {tiny: {}}\neval: {sets: {far: {options: {last: 1}}}}\n")
    with pytest.raises(ConfigError, match=rf"^{path}:3:15: eval.sets.far: "):
        load_content(load_config(path))
