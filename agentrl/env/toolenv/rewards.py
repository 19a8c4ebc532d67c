"""Call, validate and weight the rewards of an episode, a turn and a group."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from agentrl.env.toolenv.asked import Asked, asking, waits_for
from agentrl.env.toolenv.dispatch import call_function, within
from agentrl.env.toolenv.json_schema import shorten
from agentrl.env.toolenv.observe import error_text
from agentrl.env.toolenv.spec import RewardSpec
from agentrl.env.toolenv.threads import CallTimeout, ToolRaised
from agentrl.errors import ConfigError, InfraError, JudgeError, RewardError, infra_error, traceback_of
from agentrl.sandbox import met_inside
from agentrl.suggest import did_you_mean
from agentrl.types import SANDBOX_FAULT, CallRecord, Message


@dataclass(frozen=True, slots=True)
class TurnView:
    """The argument of a reward per turn: the policy's message, its calls and their results, the env's answer."""

    index: int
    message: Message
    calls: tuple[CallRecord, ...]
    observation: tuple[Message, ...]
    terminated: bool


_lost: ContextVar[dict[str, str] | None] = ContextVar("lost", default=None)


@contextmanager
def leaving_out_lost() -> Iterator[Mapping[str, str]]:
    """While the block runs, a reward that meets an InfraError is left out, and the others are computed.

    Yields:
        The errors of those that were left out, by name of the reward.
    """
    found: dict[str, str] = {}
    token = _lost.set(found)
    try:
        yield found
    finally:
        _lost.reset(token)


class BadReward(Exception):
    """A reward is not a finite number, or not one number per episode."""


LARGEST = 1e100
"""Largest reward: squares and sums of squares must be finite."""
MAX_PARTS = 100
"""Maximum number of parts of one reward (`score/solved`, ...)."""


@dataclass
class Rewards:
    """Collects the rewards of one episode, turn or group; a failed reward counts as 0 and is recorded.

    Attributes:
        where: name of the env.
        timeout_s: timeout of rewards that do not set one.
        values: rewards by name, weighted.
        faults: error messages of failed rewards, by name.
    """

    where: str
    timeout_s: float
    values: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    async def ask(
        self,
        spec: RewardSpec,
        function: Callable[..., object],
        argument: object,
        read: Callable[[object], Mapping[str, float]],
    ) -> None:
        """Call one reward, and its judge if it has one; `read` converts the return value to weighted values.

        Raises:
            InfraError: the reward raised one, or timed out while waiting for a judge; see `leaving_out_lost`.
        """
        with asking() as asked:
            try:
                fault = await self._fault(spec, function, argument, read, asked)
            except InfraError as e:
                if (lost := _lost.get()) is None:
                    raise
                lost[spec.name] = str(e)
                return
        if fault or asked.unusable:
            self.values.setdefault(spec.name, 0.0)
            name = SANDBOX_FAULT if asked.sandbox else spec.name
            self.faults[name] = fault or f"reward {spec.name!r} of {self.where}: {asked.unusable[0]}"

    async def _fault(
        self,
        spec: RewardSpec,
        function: Callable[..., object],
        argument: object,
        read: Callable[[object], Mapping[str, float]],
        asked: Asked,
    ) -> str:
        """The faults as text; empty if there are none."""
        what = f"reward {spec.name!r} of {self.where}"
        limit = spec.mark.timeout_s if spec.mark.timeout_s is not None else self.timeout_s
        try:
            value = await _called(spec, function, argument, limit)
        except CallTimeout:
            if asked.waiting:
                raise JudgeError(f"{what}: no answer of {asked.waiting[0]} within {limit:g} s") from None
            return f"{what}: no result after {limit:g} s"
        except (ConfigError, asyncio.CancelledError):
            raise
        except ToolRaised as e:
            return f"{what} raised {error_text(e.cause)}\n{traceback_of(e.cause)}"
        except Exception as e:
            if (infra := infra_error(e)) is not None:
                raise infra from (None if infra is e else e)
            asked.sandbox = met_inside(e)
            return f"{what} raised {error_text(e)}\n{traceback_of(e)}"
        try:
            if asked.unusable and spec.mark.judge is not None:  # of a penalty, the worst is the highest score
                highest = max(getattr(spec.mark.judge, "high", 0.0), 0.0)
                value = min((value, highest), key=lambda score: sum(read(score).values()))
            self.values.update(read(value))
        except BadReward as e:
            return f"{what} {e}"
        except Exception as e:  # of the author's own mapping
            return f"{what} returned what cannot be read: {error_text(e)}"
        return ""

    def result(self) -> dict[str, float]:
        """The values. Raises RewardError if one failed."""
        if self.faults:
            raise RewardError(self.faults, self.values)
        return self.values


async def _called(spec: RewardSpec, function: Callable[..., object], argument: object, limit: float) -> object:
    arguments = {} if spec.takes is None else {spec.takes: argument}
    value = await call_function(function, arguments, limit)
    if spec.mark.judge is None:
        return value
    if not isinstance(value, str):
        raise TypeError(f"a reward with a judge returns the question as text, got {value!r:.80}")
    with waits_for("the judge"):
        return await within(spec.mark.judge.score(value), limit)


def check_number(value: object) -> float:
    """A finite float from bool, int, float or a numpy scalar.

    Raises:
        BadReward: the value is not a finite number.
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise BadReward(f"returned {_short(value)}, not a number; return bool, int or float")
    try:
        number = float(value)
    except Exception as e:  # user code, like __repr__
        raise BadReward(f"returned {_short(value)}: {error_text(e)}") from None
    if not math.isfinite(number):
        raise BadReward(f"returned {number}; rewards must be finite")
    if abs(number) > LARGEST:
        raise BadReward(f"returned {number:g}, of which no mean or deviation can be computed")
    return number


def finite(rewards: Mapping[str, float], where: str, faults: dict[str, str]) -> dict[str, float]:
    """The rewards with 0 for what is not a finite number, which becomes a fault; anything but a mapping is one."""
    if not isinstance(rewards, Mapping) or not all(isinstance(name, str) for name in rewards):
        faults["score"] = f"the rewards of {where} are {shorten(rewards)}: return a mapping of names to numbers"
        return {}
    found = {name: _finite(value) for name, value in rewards.items()}
    for name, number in found.items():
        if number is None:
            faults[name] = (
                f"reward {name!r} of {where} is {shorten(rewards[name])}: a reward must be a finite number, "
                f"at most {LARGEST:g}"
            )
    return {name: number or 0.0 for name, number in found.items()}


def finite_entries(given: Mapping[str, float]) -> dict[str, float]:
    """The entries that are finite numbers."""
    return {name: number for name, value in given.items() if (number := _finite(value)) is not None}


def finite_step(
    reward: object, metrics: Mapping[str, float], env: str, faults: dict[str, str]
) -> tuple[float, dict[str, float]]:
    """The reward and metrics that `step` of an env returned; what is not a finite number becomes a fault, and a
    reward then counts as 0."""
    number, found = _finite(reward), finite_entries(metrics)
    bad = [] if number is not None else [f"reward {shorten(reward)}"]
    bad += [f"metric {shorten(name)} = {shorten(v)}" for name, v in metrics.items() if name not in found]
    if bad:
        said = f"{env}.step returned the {' and the '.join(bad[:2])}"
        faults["step"] = f"{said}: not a finite number, at most {LARGEST:g}"
    return number or 0.0, found


def _finite(value: object) -> float | None:
    try:
        return check_number(value)
    except BadReward:
        return None


def read_parts(
    spec: RewardSpec, value: object, weights: Mapping[str, float], others: Iterable[str] = ()
) -> tuple[dict[str, float], dict[str, float]]:
    """The return value of a reward as numbers by name, before and after their weights.

    A mapping is a reward in parts: `{"solved": True}` of the reward `score` is the part `score/solved`. Its weight
    is that of the part, else that of the reward.

    Args:
        others: names of the other rewards, which no part may take.

    Raises:
        BadReward: a value is not a finite number, or a name is not usable.
    """
    if not isinstance(value, Mapping):
        number = check_number(value)
        return {spec.name: number}, {spec.name: _weighted(number, weight_of(spec, weights))}
    if len(value) > MAX_PARTS:
        raise BadReward(f"returned {len(value)} parts; at most {MAX_PARTS} are allowed")
    taken, numbers = set(others), dict[str, float]()
    for part, given in value.items():
        if not isinstance(part, str) or not part:
            raise BadReward(f"returned a part named {_short(part)}; the name of a part must be text")
        name = f"{spec.name}/{part}"
        if part in taken or name in taken:
            raise BadReward(
                f"returned a part named {part!r}, which is the name of another reward; rename the part"
            )
        try:
            numbers[name] = check_number(given)
        except BadReward as e:
            raise BadReward(f"{e} (part {part!r})") from None
    weight = weight_of(spec, weights)
    return numbers, {name: _weighted(number, float(weights.get(name, weight))) for name, number in numbers.items()}


def _weighted(number: float, weight: float) -> float:
    if not abs(weight * number) <= LARGEST:
        raise BadReward(f"returned {number:g}, which times its weight {weight:g} is too large")
    return weight * number


def _short(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"an object of {type(value).__name__}"


def weight_of(spec: RewardSpec, weights: Mapping[str, float]) -> float:
    """The weight from the run's configuration, else the one in the code."""
    return float(weights.get(spec.name, spec.mark.weight))


def weight_of_nothing(weights: Mapping[str, float], given: Iterable[str]) -> str:
    """The warning about weights for parts (`score/solved`) that no episode had; empty if there are none.

    Args:
        weights: the run's weights by name.
        given: names of all parts in episodes.
    """
    found = sorted(given)
    for name in weights:
        if "/" in name and name not in found:
            hint = did_you_mean(name, found, otherwise="name one of them")
            return (
                f"env.reward_weights: no episode had the part {name!r}, so its weight has no effect; the parts "
                f"were: {', '.join(found) or 'none'}; {hint}"
            )
    return ""


def check_group(values: object, num_episodes: int) -> list[object]:
    """Validate that there is one value per episode.

    Raises:
        BadReward: the count differs.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        values = list(values) if hasattr(values, "__iter__") and not isinstance(values, str | Mapping) else values
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != num_episodes:
        raise BadReward(f"returned {_short(values)}; one number for each of the {num_episodes} episodes is wanted")
    return list(values)
