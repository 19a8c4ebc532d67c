"""What a caller may ask of an engine beyond a completion: each token as it is drawn, alternatives, a grammar.

Shapes: V vocabulary, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentrl.types import Completion, Sampling


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token, with its logprob and the policy version as in `Completion`.

    `top` holds (id, logprob) of the most likely tokens at its place, best first.
    """

    id: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


class Mask(Protocol):
    """Which tokens may come next in one completion. Called on the engine's own thread."""

    def allowed(self) -> NDArray[np.bool_]:
        """(V,) True where a token may be drawn now; at least one is."""
        ...

    def take(self, id: int) -> None:
        """This token was drawn."""
        ...


@dataclass(frozen=True, slots=True)
class Watch:
    """What one call wants besides its completion.

    Attributes:
        on_token: told each token in order, on the event loop of the caller.
        top: how many alternatives each token comes with.
        mask: holds the completion to a grammar. Logprobs stay those of the unrestricted distribution.
    """

    on_token: Callable[[Drawn], None] | None = None
    top: int = 0
    mask: Mask | None = None


@runtime_checkable
class WatchedEngine(Protocol):
    """An engine that can be watched while it samples; engines without it give whole completions only."""

    @property
    def masks(self) -> bool:
        """Whether it obeys `Watch.mask`; others raise ValueError where one is given."""
        ...

    async def generate_watched(
        self, ids: Sequence[int], sampling: Sampling, watch: Watch, *, session: str | None = None
    ) -> Completion:
        """As `Engine.generate`; `watch.on_token` has been told every token when this returns."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that knows the log-probabilities of tokens that it did not draw."""

    async def prompt_logprobs(self, ids: Sequence[int], *, top: int = 0) -> list[Drawn]:
        """Each token of `ids` but the first, with its logprob (temperature 1) given those before it.

        Raises:
            ValueError: `ids` is empty or holds an id outside the vocabulary.
        """
        ...
