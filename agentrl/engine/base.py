"""The contract of an engine: token ids in, token ids out.

`Engine` has five members to implement, and default methods for optional features. An engine declares the optional
features that it supports in `capabilities`; callers check there and never look at its class.

Shapes: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agentrl.errors import EngineError
from agentrl.types import Completion, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do beyond sampling whole completions.

    Attributes:
        weights: `update_weights` works; without it the engine samples from a fixed policy and cannot train one.
        streaming: `generate_streaming` reports each token as it is sampled, with alternatives.
        masks: `generate_streaming` obeys `GenerateOptions.mask`.
        structures: `generate_streaming` obeys `GenerateOptions.structure`.
        prompt_logprobs: `prompt_logprobs` scores given tokens.
        separate_weights: the weights live outside this process, so the run compares `logprobs_by_server` with the
            learner after each update.
        sleep: `sleep` frees GPU memory.
        routes: completions have `routes`, for `learner.replay_routes`.
    """

    weights: bool = True
    streaming: bool = False
    masks: bool = False
    structures: bool = False
    prompt_logprobs: bool = False
    separate_weights: bool = False
    sleep: bool = False
    routes: bool = False


class TokenLogprob(NamedTuple):
    """One token, with its log-probability and policy version as in `Completion`.

    `top` holds (id, logprob) of the most likely tokens at its position, best first.
    """

    id: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()


class Mask(Protocol):
    """Which tokens may come next in one completion. Called on the engine's own thread."""

    def allowed(self) -> NDArray[np.bool_]:
        """(V,) True for tokens that may be sampled now; at least one is True."""
        ...

    def take(self, id: int) -> None:
        """Advance past a token that was sampled."""
        ...


@dataclass(frozen=True, slots=True)
class Structure:
    """A format that an inference server enforces with its own grammar.

    Attributes:
        tag: a structural tag of xgrammar, as JSON text.
        scored: report the log-probabilities of the policy (at temperature 1), which takes another pass over the
            sequence: tokens are reported when all are sampled. Otherwise they are those under the grammar.
    """

    tag: str
    scored: bool = False


class StructureRefused(ValueError):
    """A server refused a structure: its grammar engine cannot read it, or it has none."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of one call in addition to sampling a completion.

    Attributes:
        on_token: called with each token in order, on the caller's event loop.
        top: how many alternatives to report with each token.
        mask: restricts the completion to a grammar. Log-probabilities remain unrestricted.
        structure: the same for an inference server, in a form that it can read.
    """

    on_token: Callable[[TokenLogprob], None] | None = None
    top: int = 0
    mask: Mask | None = None
    structure: Structure | None = None


class Engine(ABC):
    """Holds the policy and samples from it. Safe to call from many tasks of one event loop."""

    capabilities: EngineCapabilities = EngineCapabilities()
    """What this engine can do; constant during its lifetime."""
    max_context: int
    """Maximum number of tokens (prompt and completion together) per sequence."""

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the weights that the next token is sampled with; 0 before the first update."""

    @abstractmethod
    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Continue `ids` until a stop id, `sampling.max_tokens`, or the end of the context.

        Calls with the same `session` extend each other: the engine may keep the state of the earlier call and
        compute only the new tokens. Cancelling the call frees its slot.

        Raises:
            EngineError: the engine has failed permanently.
            ValueError: `ids` is empty or leaves no room for a single token.
        """

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place (names as in the Hugging Face state dict) and set the version.

        Requests in flight continue with the new weights; cached states of the old weights are dropped.

        Raises:
            EngineError: the engine is lost, or `capabilities.weights` is False.
        """
        raise self._cannot("replace its weights")

    async def release(self, session: str) -> None:  # noqa: B027  (an engine that keeps nothing need not implement it)
        """Drop the state kept for `session`; unknown sessions are ignored."""

    async def close(self) -> None:  # noqa: B027
        """Stop and free everything; idempotent."""

    @property
    def ready(self) -> bool:
        """Whether a request would be answered immediately, instead of waiting for a server to come back."""
        return True

    @property
    def asleep(self) -> bool:
        """Whether requests wait only because of `sleep`, until the next `update_weights`."""
        return False

    @property
    def outage_s(self) -> float:
        """Total seconds during which no request could be answered, for reasons unrelated to the episodes."""
        return 0.0

    def server_timing(self) -> Mapping[str, float]:
        """What each server did since the last call, as metrics to log; {} without servers."""
        return {}

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        """Like `generate`; `options.on_token` has been called with every token when this returns.

        Raises:
            EngineError: the engine is lost, or `capabilities.streaming` is False.
            ValueError: as for `generate`, or `options.mask` is set and `capabilities.masks` is False, or a server
                refuses `options.structure` (`StructureRefused`).
        """
        raise self._cannot("stream tokens")

    async def prompt_logprobs(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        """Return each token of `ids` but the first, with its logprob (temperature 1) given those before it.

        Raises:
            EngineError: the engine is lost, or `capabilities.prompt_logprobs` is False.
            ValueError: `ids` is empty or contains an id outside the vocabulary.
        """
        raise self._cannot("score given tokens")

    async def logprobs_by_server(self, rows: Sequence[Sequence[int]]) -> Mapping[str, list[list[float]]]:
        """Return, by the name of each server, the logprob (temperature 1) of each token of each row but the first.

        Raises:
            EngineError: the engine is lost, or `capabilities.prompt_logprobs` is False.
        """
        return {"the engine": [[token.logprob for token in await self.prompt_logprobs(row)] for row in rows]}

    async def sleep(self) -> None:
        """Free GPU memory until the next `update_weights`; requests wait until then.

        Raises:
            EngineError: requests are in flight, or `capabilities.sleep` is False.
        """
        raise self._cannot("sleep")

    def _cannot(self, what: str) -> EngineError:
        return EngineError(f"{type(self).__name__} cannot {what}: its capabilities say so")
