"""What is examined: an env of a run, its oracle, and the tasks chosen from its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.config import RunConfig
from agentrl.env.env import Env
from agentrl.env.load import load_env
from agentrl.env.play import Policy
from agentrl.errors import ConfigError
from agentrl.exam.arena import MakePolicy
from agentrl.exam.strategies import echo, random_policy, saying, tour
from agentrl.rollout.content import env_factory, load_content
from agentrl.rollout.oracle import author_method
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class Examinee:
    """An env to examine.

    Attributes:
        config: the run as this env sees it.
        oracle: returns a policy that solves a task; None if the env has none.
    """

    name: str
    config: RunConfig
    make_env: Callable[[], Env]
    train: Sequence[Task]
    held_out: Sequence[Task]
    oracle: Callable[[Task], Policy] | None
    hold_back: bool

    @property
    def oracle_policy(self) -> MakePolicy | None:
        """The oracle in the form of the other policies."""
        oracle = self.oracle
        return None if oracle is None else lambda env, task: oracle(task)


def examinees(config: RunConfig, *, hold_back: bool) -> list[Examinee]:
    """The env of a run, or each of several, with their tasks.

    Raises:
        ConfigError: an env or its tasks cannot be loaded.
    """
    content = load_content(config.model_copy(update={"warmup": None}))
    views = config.by_env
    return [
        _examinee(name, views[name], part.make_env, part.train_tasks, part.held_out_tasks, hold_back)
        for name, part in content.by_env.items()
    ]


def open_examinee(config: RunConfig, *, hold_back: bool) -> Examinee:
    """The env of a run without its tasks."""
    env_class = load_env(config.sole_env.use, config.sole_env.options)
    return _examinee("", config, env_factory(env_class, config), (), (), hold_back)


def _examinee(
    name: str,
    config: RunConfig,
    make_env: Callable[[], Env],
    train: Sequence[Task],
    held_out: Sequence[Task],
    hold_back: bool,
) -> Examinee:
    def make() -> Env:
        env = make_env()
        env.hold_back = hold_back
        return env

    oracle = author_method(load_env(config.sole_env.use, config.sole_env.options), "oracle")
    return Examinee(name, config, make, train, held_out, oracle, hold_back)


def choose(tasks: Sequence[Task], num: int) -> list[Task]:
    """`num` tasks spread evenly; all of them if there are no more."""
    size = len(tasks)
    if size <= num:
        return [tasks[i] for i in range(size)]
    return [tasks[i * size // num] for i in range(num)]


def named_policy(examinee: Examinee, name: str) -> MakePolicy:
    """The policy of a script: `oracle`, `random-SEED`, `tour`, `echo` or `null`.

    Raises:
        ConfigError: there is no policy with this name.
    """
    if name == "oracle" and (oracle := examinee.oracle_policy) is not None:
        return oracle
    if name == "echo":
        return echo
    if name == "tour":
        return tour
    if name == "null":
        return saying("")
    kind, _, seed = name.partition("-")
    if kind != "random" or not seed.isdigit():
        raise ConfigError(f"policy {name!r}: the exam has no such policy")
    return random_policy(int(seed))
