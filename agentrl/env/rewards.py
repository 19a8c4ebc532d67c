"""Rewards of an episode, a turn and a group: asked by name, checked, weighted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from agentrl.env.dispatch import call_function, within
from agentrl.env.observe import error_text
from agentrl.env.spec import RewardSpec
from agentrl.env.threads import CallTimeout, ToolRaised
from agentrl.errors import InfraError, JudgeError
from agentrl.types import CallRecord, Message


@dataclass(frozen=True, slots=True)
class TurnView:
    """What a reward per turn sees: the policy's message, its calls and their results, the env's answer."""

    index: int
    message: Message
    calls: tuple[CallRecord, ...]
    observation: tuple[Message, ...]
    terminated: bool


async def ask_reward(
    spec: RewardSpec, function: Callable[..., Any], argument: Any, timeout_s: float, where: str
) -> Any:
    """Call one reward method, and its judge where it has one.

    Raises:
        JudgeError: it raised or ran out of time. Another InfraError passes as it is.
    """
    arguments = {} if spec.takes is None else {spec.takes: argument}
    limit = spec.mark.timeout_s if spec.mark.timeout_s is not None else timeout_s
    try:
        value = await call_function(function, arguments, limit)
        if spec.mark.judge is None:
            return value
        if not isinstance(value, str):
            raise TypeError(f"a reward with a judge returns the question as text, got {value!r:.80}")
        return await within(spec.mark.judge.score(value), limit)
    except CallTimeout:
        raise JudgeError(f"reward {spec.name!r} of {where}: no result after {limit:g} s") from None
    except (InfraError, asyncio.CancelledError):
        raise
    except ToolRaised as e:
        raise JudgeError(f"reward {spec.name!r} of {where} raised {error_text(e.cause)}") from e.cause
    except Exception as e:
        raise JudgeError(f"reward {spec.name!r} of {where} raised {error_text(e)}") from e


def check_number(value: Any, name: str, where: str) -> float:
    """A finite float from bool, int, float or a numpy scalar.

    Raises:
        JudgeError: it is something else.
    """
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise JudgeError(
            f"reward {name!r} of {where} returned {value!r:.80}, not a number; return bool, int or float"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise JudgeError(f"reward {name!r} of {where} returned {value!r:.80}: {e}") from None
    if not math.isfinite(number):
        raise JudgeError(f"reward {name!r} of {where} returned {number}; rewards must be finite")
    return number


def weight_of(spec: RewardSpec, weights: Mapping[str, float]) -> float:
    """The weight of the run where it names one, else the one in the code."""
    return float(weights.get(spec.name, spec.mark.weight))


def weight_of_nothing(weights: Mapping[str, float], given: Iterable[str]) -> str:
    """What to say of a weight for a part (`score/solved`) that no episode had; empty where there is none.

    Args:
        weights: of the run, by name.
        given: the names of all parts that episodes had.
    """
    found = sorted(given)
    for name in weights:
        if "/" in name and name not in found:
            near = get_close_matches(name, found, 1)
            hint = f"did you mean {near[0]!r}?" if near else "name one of them"
            return (
                f"env.reward_weights: no episode had the part {name!r}, so its weight has no effect; the parts "
                f"were: {', '.join(found) or 'none'}; {hint}"
            )
    return ""


def check_group(values: Any, num_episodes: int, name: str, where: str) -> list[float]:
    """One finite number an episode.

    Raises:
        JudgeError: another count, or something that is no number.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        values = list(values) if hasattr(values, "__iter__") and not isinstance(values, str | Mapping) else values
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != num_episodes:
        raise JudgeError(
            f"reward {name!r} of {where} returned {values!r:.80}; one number for each of the "
            f"{num_episodes} episodes is wanted"
        )
    return [check_number(value, name, where) for value in values]
