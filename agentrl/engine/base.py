"""The contract of an engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentrl.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class Completer(Protocol):
    """Samples completions from the current policy. Safe to call from many tasks of one event loop."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token is drawn with; 0 before the first update."""
        ...

    max_context: int
    """Largest number of tokens (prompt and completion together) of one sequence."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Continue `ids` until a stop id, `sampling.max_tokens`, or the end of the context.

        Calls with the same `session` extend one another: the engine may keep the state of the earlier call and
        compute only what is new. Cancelling the call frees its slot.

        Raises:
            EngineError: the engine is lost.
            ValueError: `ids` is empty or leaves no room for a single token.
        """
        ...

    async def release(self, session: str) -> None:
        """Forget what is kept for `session`; unknown sessions are fine."""
        ...


class Engine(Completer, Protocol):
    """Holds the policy that it samples from; the run hands it the weights, and closes it."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place (names as in the Hugging Face state dict) and set the version.

        Requests in flight go on with the new weights; kept states computed with the old ones are dropped.
        """
        ...

    async def close(self) -> None:
        """Stop and free everything; idempotent."""
        ...


@runtime_checkable
class Interrupted(Protocol):
    """An engine that may have to wait for its servers; other engines answer at all times."""

    @property
    def ready(self) -> bool:
        """Whether a request would be answered now."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can free its GPU memory while a learner on the same GPU works."""

    async def sleep(self) -> None:
        """Free it until the next `update_weights`; what is asked meanwhile waits.

        Raises:
            EngineError: requests are in flight.
        """
        ...
