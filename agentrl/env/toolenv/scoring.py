"""Scoring of a ToolEnv: its `@reward` methods are called on the episode's thread, validated and weighted."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from agentrl.env.env import DeclaredReward, Env, hint_arguments
from agentrl.env.solved import SolvedAt, SolvedRule
from agentrl.env.toolenv.calls import add_counts
from agentrl.env.toolenv.dispatch import call_function, listed
from agentrl.env.toolenv.rewards import (
    BadReward,
    Rewards,
    TurnView,
    check_group,
    check_number,
    read_parts,
    weight_of,
)
from agentrl.env.toolenv.settings import ToolSettings
from agentrl.env.toolenv.spec import ClassSpec, RewardSpec, class_spec, unknown_weights
from agentrl.env.toolenv.threads import EpisodeThread, current
from agentrl.errors import ConfigError, RewardError
from agentrl.suggest import did_you_mean
from agentrl.types import Episode


class ScoredEnv(Env):
    """The part of `ToolEnv` that declares and computes rewards."""

    settings: ToolSettings = ToolSettings()
    _open: bool = False
    _thread: EpisodeThread
    _unweighted: dict[str, float]

    @contextmanager
    def _on_thread(self) -> Iterator[None]:
        """Run plain functions on this episode's thread inside the block."""
        token = current.set(self._thread)
        try:
            yield
        finally:
            current.reset(token)

    @classmethod
    def spec(cls) -> ClassSpec:
        """The declared tools, rewards and row arguments. Raises ConfigError if they are invalid."""
        return class_spec(cls)

    def configure(
        self, settings: Mapping[str, object], reward_weights: Mapping[str, float], solved_at: SolvedAt = None
    ) -> None:
        """Apply the settings, reward weights and `solved_at` of a run; see `Env.configure`."""
        weights = {"reward_weights": reward_weights} if reward_weights else {}
        if settings or weights:
            self.settings = self.settings.changed({**settings, **weights})
            self.check_weights()
        super().configure({}, {}, solved_at)
        if isinstance(solved_at, Mapping):
            self.check_solved_at(solved_at)

    def declared_rewards(self) -> Mapping[str, DeclaredReward] | None:
        """The methods marked `@reward`, in the order of definition."""
        weights = self.settings.reward_weights
        return {r.name: DeclaredReward(r.mark.per, weight_of(r, weights)) for r in self.spec().rewards}

    def endpoints(self) -> Sequence[str]:
        """The URLs of judges given to `@reward(judge=...)`."""
        urls = [getattr(reward.mark.judge, "url", None) for reward in self.spec().rewards]
        return [url for url in urls if isinstance(url, str)]

    def rewards_of_record(self) -> Sequence[str]:
        """The methods marked `@reward` that never use `self`."""
        found = [r for r in self.spec().rewards if r.mark.per == "episode"]
        return [r.name for r in found if not _uses_self(getattr(type(self), r.attribute))]

    @property
    def scores_groups(self) -> bool:
        """Whether a group reward is declared or `score_group` is overridden."""
        return type(self).score_group is not ScoredEnv.score_group or any(
            reward.mark.per == "group" for reward in self.spec().rewards
        )

    def check_weights(self) -> None:
        """Raises ConfigError when a weight of the run names no reward."""
        unknown_weights(self.spec(), self.settings.reward_weights, type(self).__name__)

    def check_solved_at(self, thresholds: Mapping[str, float]) -> None:
        """Raises ConfigError when a threshold of the run names no reward per episode."""
        known = [name for name, reward in (self.declared_rewards() or {}).items() if reward.per == "episode"]
        if unknown := [name for name in thresholds if name not in known and name.split("/")[0] not in known]:
            raise ConfigError(
                f"env.solved_at.{unknown[0]}: {type(self).__name__} has no such reward per episode; "
                + did_you_mean(unknown[0], known, otherwise=f"they are: {', '.join(known) or 'none'}")
            )

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """Rewards of the episode by name, weighted.

        Raises:
            RewardError: one raised, timed out, or returned an invalid value; the error carries the others.
            InfraError: a judge is unreachable.
        """
        return (await self._ask_all("episode", episode)).result()

    def solved_rule(self) -> SolvedRule | None:
        """`solved_at` if set, else the declarations of the rewards (see `agentrl.env.solved`)."""
        return super().solved_rule() or self.spec().solved

    def solved_verdict(self, rewards: Mapping[str, float], total: float) -> bool | None:
        """See `Env.solved_verdict`; parts are compared before weighting."""
        return super().solved_verdict({**rewards, **self._unweighted}, total)

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """Rewards per group: for each scored episode of a task, weighted values by name.

        The instance has the state of `__init__`; `setup` was never called.

        Raises:
            RewardError: see `score`; also if there is not one number per episode.
            InfraError: a judge is unreachable.
        """
        found: list[dict[str, float]] = [{} for _ in episodes]
        rewards = Rewards(type(self).__name__, self.settings.reward_timeout_s)
        for spec in self.spec().rewards:
            if spec.mark.per == "group":
                values: list[dict[str, float]] = [{spec.name: 0.0} for _ in episodes]

                def read(
                    value: object, values: list[dict[str, float]] = values, spec: RewardSpec = spec
                ) -> Mapping[str, float]:
                    values[:] = [self._read_parts(spec, v)[1] for v in check_group(value, len(episodes))]
                    return {}

                await self._ask_reward(rewards, spec, listed(getattr(self, spec.attribute)), episodes, read)
                for parts, value in zip(found, values, strict=True):
                    parts.update(value)
        if not self._open:
            await self._thread.close()
        if rewards.faults:
            raise RewardError(rewards.faults, found)
        return found

    async def call_teacher_hint(self, episode: Episode, timeout_s: float) -> object:
        """The return value of `teacher_hint`, which runs on the episode's thread; see `Env.call_teacher_hint`."""
        if type(self).teacher_hint is Env.teacher_hint:
            return None
        await self._thread.held()
        with self._on_thread():
            return await call_function(self.teacher_hint, hint_arguments(self, episode), timeout_s)

    def _reward_of(self, name: str, value: object, faults: dict[str, str]) -> float:
        """The reward of a tool's call, or of `respond`; 0 if it is not a number."""
        try:
            return 0.0 if value is None else check_number(value)
        except BadReward as e:
            what = "" if name == "respond" else "tool "
            faults[name] = f"reward of {what}{name!r} of {type(self).__name__}: it {e}"
            return 0.0

    async def _turn_rewards(self, turn: TurnView, metrics: dict[str, float], faults: dict[str, str]) -> float:
        rewards = await self._ask_all("turn", turn)
        faults.update(rewards.faults)
        add_counts(metrics, {f"reward/{name}": value for name, value in rewards.values.items()})
        return sum(rewards.values.values())

    async def _ask_all(self, per: str, argument: object) -> Rewards:
        rewards = Rewards(type(self).__name__, self.settings.reward_timeout_s)
        for spec in self.spec().rewards:
            if spec.mark.per == per:

                def read(value: object, spec: RewardSpec = spec) -> Mapping[str, float]:
                    numbers, weighted = self._read_parts(spec, value)
                    if per == "episode":
                        self._unweighted |= {spec.name: sum(numbers.values()), **numbers}
                    return weighted

                await self._ask_reward(rewards, spec, getattr(self, spec.attribute), argument, read)
        return rewards

    def _read_parts(self, spec: RewardSpec, value: object) -> tuple[dict[str, float], dict[str, float]]:
        others = [reward.name for reward in self.spec().rewards if reward.name != spec.name]
        return read_parts(spec, value, self.settings.reward_weights, others)

    async def _ask_reward(
        self,
        rewards: Rewards,
        spec: RewardSpec,
        function: Callable[..., object],
        argument: object,
        read: Callable[[object], Mapping[str, float]],
    ) -> None:
        """Compute one reward on the episode's thread; see `Rewards.ask`."""
        await self._thread.held()
        with self._on_thread():
            await rewards.ask(spec, function, argument, read)


def _uses_self(method: Callable[..., object]) -> bool:
    """Whether the code of a method reads its first argument; True if that cannot be seen."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or code.co_argcount == 0 or "__class__" in code.co_freevars:  # `super()` reads it unseen
        return True
    first = code.co_varnames[0]
    return first in code.co_cellvars or any(step.argval == first for step in dis.get_instructions(code))
