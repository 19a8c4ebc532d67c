"""Demonstrations that the env's own oracle plays."""

from __future__ import annotations

import pytest

from agentrl.config import load_config
from agentrl.env import Stop, ToolEnv, reward, tool
from agentrl.errors import ConfigError
from agentrl.rollout.content import load_content
from agentrl.testing.policy import ScriptedPolicy, call
from agentrl.types import Task


class Adder(ToolEnv):
    """Add, then submit."""

    def setup(self, a: int, b: int) -> str:
        self.wanted, self.given = a + b, 0
        return f"{a} + {b}"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @tool
    def submit(self, result: int) -> Stop:
        """Hand in."""
        self.given = result
        return Stop("Submitted.")

    @reward
    def solved(self) -> bool:
        return self.given == self.wanted

    @classmethod
    def tasks(cls, split, seed, *, size=5):
        return [Task(f"{split}-{i}", {"a": i, "b": seed}, i) for i in range(size)]

    @classmethod
    def oracle(cls, task):
        a, b = task.row["a"], task.row["b"]
        return ScriptedPolicy([call("add", a=a, b=b), call("submit", result=a + b)])


class Broken(Adder):
    @classmethod
    def oracle(cls, task):
        raise KeyError("no way")


class Plain(ToolEnv):
    def setup(self) -> str:
        return "x"

    @classmethod
    def tasks(cls, split, seed):
        return [Task("t")]


def config_of(tmp_path, name, warmup):
    path = tmp_path / "tools.yaml"
    path.write_text(f"env: {__file__}:{name}\nmodel: {{tiny: {{}}}}\nseed: 2\nwarmup: {warmup}\n")
    return load_config(path)


def test_the_oracle_plays_training_tasks_for_real(tmp_path):
    found = load_content(config_of(tmp_path, "Adder", "{num: 3}")).demonstrations
    assert len(found) == 3
    assert [m.role for m in found[1]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[1][1].content == "1 + 2"
    assert found[1][3].content == "3"  # the tool's own answer
    assert found[1][-1].tool_calls[0].arguments == {"result": 3}
    assert len(load_content(config_of(tmp_path, "Adder", "{num: 50}")).demonstrations) == 5


async def test_it_plays_where_a_loop_is_running_as_well(tmp_path):
    assert load_content(config_of(tmp_path, "Adder", "{num: 1}")).demonstrations


@pytest.mark.parametrize(
    ("name", "warmup", "said"),
    [
        ("Broken", "{num: 1}", "Broken.oracle on task 'train-0': KeyError: 'no way'"),
        ("Plain", "{num: 1}", "add a `demonstrations` or an `oracle` classmethod"),
        ("Adder", "{num: 1, options: {quality: 1}}", "warmup.options has no effect"),
    ],
)
def test_what_keeps_it_from_playing_is_said(tmp_path, name, warmup, said):
    with pytest.raises(ConfigError) as caught:
        load_content(config_of(tmp_path, name, warmup))
    assert said in str(caught.value)
