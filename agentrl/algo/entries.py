"""Each file with a loss or an estimator declares it in `ENTRIES`; the package collects them."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Named
from agentrl.algo.ratio import LossOutput
from agentrl.algo.step_data import Advantages, StepData

Entry = TypeVar("Entry", "PolicyLoss", "Estimator")


class Signal(NamedTuple):
    """What of the rewards has to differ within a group for an advantage."""

    of: Literal["sum", "parts", "turns"] = "sum"
    """Their sums, their named parts, or those of turns."""
    unweighted: frozenset[str] = frozenset()
    """Parts that the advantage gives no weight."""


SUM = Signal()


class PolicyLoss(NamedTuple):
    """A policy loss as the configuration names it."""

    fn: Callable[..., LossOutput]
    """With the signature described in `agentrl.algo.losses`."""
    config: type[Named]
    """Its parameters; all have defaults."""
    silent: bool = True
    """Whether an episode whose advantages are all 0 adds nothing to the gradient."""
    select: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
    """(advantages_N, old_logprobs_N, keys_N, config) -> bool_N over all trained tokens of a step, for losses that
    take `selected_T`."""


class Estimator(NamedTuple):
    """An advantage estimator as the configuration names it."""

    fn: Callable[[StepData, Any], Advantages]
    config: type[Named]
    """Its parameters; all have defaults."""
    needs: tuple[str, ...] = ()
    """Fields of StepData that may not be None."""
    compares: bool = True
    """Whether an episode is compared with its siblings, so that equal rewards carry no signal."""
    signal: Callable[[Any], Signal] = lambda config: SUM
    """What has to differ within a group, with these parameters."""


def entries_in(package: str, path: Iterable[str], kind: type[Entry]) -> dict[str, Entry]:
    """The `ENTRIES` of every file of a package, in the order of their names.

    Raises:
        TypeError: a file has no `ENTRIES` of this kind, or uses a name that another file has.
    """
    found: dict[str, Entry] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(path)):
        entries = getattr(import_module(f"{package}.{name}"), "ENTRIES", {})
        if not entries or not all(isinstance(entry, kind) for entry in entries.values()) or entries.keys() & found:
            raise TypeError(
                f"{package}.{name} must define ENTRIES = {{name: {kind.__name__}(...)}} with new names"
            )
        found |= entries
    return dict(sorted(found.items()))
