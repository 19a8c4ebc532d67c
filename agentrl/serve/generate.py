"""Generate one completion: from ids through the engine to pieces for the client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.engine.base import Engine, GenerateOptions, Mask, Structure, TokenLogprob
from agentrl.errors import EngineError
from agentrl.serve.reader import Delta
from agentrl.types import Completion, Sampling


class Reading(Protocol):
    """The interface for reading a completion: a `Reader` or a `TextReader`."""

    @property
    def may_cut(self) -> bool:
        """Whether it can end the completion early."""
        ...

    @property
    def cut(self) -> bool:
        """Whether it has ended the completion."""
        ...

    def feed(self, id: int) -> list[Delta]:
        """Return the pieces that the next id completes."""
        ...

    def feed_all(self, ids: Sequence[int]) -> list[Delta]:
        """Return the pieces of a whole completion that cannot be cut."""
        ...

    def close(self) -> list[Delta]:
        """Return the pieces that the end of the completion settles."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Sampling options of one completion: `top` alternatives per token, restricted to a grammar by `mask`, or by
    `structure` on inference servers."""

    sampling: Sampling
    top: int = 0
    mask: Mask | None = None
    structure: Structure | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A completion, and its tokens with their alternatives if requested."""

    completion: Completion
    drawn: tuple[TokenLogprob, ...]


async def generate(
    engine: Engine,
    ids: Sequence[int],
    order: CompletionOptions,
    reader: Reading,
    *,
    session: str | None,
    on_deltas: Callable[[list[Delta], Sequence[TokenLogprob]], None] | None = None,
) -> Sampled:
    """Sample and read a completion; stop early if the reader cuts it. Cancelling frees the engine's slot.

    Args:
        on_deltas: called with new pieces and the tokens since the last call. An engine without streaming reports
        everything at the end.

    Raises:
        EngineError: the engine has failed permanently.
        StructureRefused: a server cannot use the structure of the options.
    """
    follow = _Following(reader, on_deltas)
    held = order.mask is not None or order.structure is not None
    streaming = order.top > 0 or held or on_deltas is not None or reader.may_cut
    if streaming and engine.capabilities.streaming:
        options = GenerateOptions(follow.take, order.top, order.mask, order.structure)
        sampling = engine.generate_streaming(ids, order.sampling, options, session=session)
        completion = await follow.until_cut(asyncio.ensure_future(sampling))
    else:
        completion = await engine.generate(ids, order.sampling, session=session)
        follow.take_all(completion)
    if completion.finish == "abort":
        raise EngineError("the engine aborted the completion")
    follow.end()
    return Sampled(follow.kept(completion), tuple(follow.drawn))


class _Following:
    """The tokens sampled so far, and the reader's pieces."""

    def __init__(
        self, reader: Reading, on_deltas: Callable[[list[Delta], Sequence[TokenLogprob]], None] | None
    ) -> None:
        self.reader, self._on_deltas = reader, on_deltas
        self.drawn: list[TokenLogprob] = []
        self._untold: list[TokenLogprob] = []
        self._cut = asyncio.Event()
        self._trouble: BaseException | None = None

    def take(self, drawn: TokenLogprob) -> None:
        """Read a token. Runs as a callback of the loop, so errors are kept for `until_cut`."""
        if self.reader.cut or self._trouble is not None:
            return
        try:
            self.drawn.append(drawn)
            self._untold.append(drawn)
            self._tell(self.reader.feed(drawn.id))
        except Exception as e:
            self._trouble = e
        if self.reader.cut or self._trouble is not None:
            self._cut.set()

    def take_all(self, completion: Completion) -> None:
        """Read a completion that was not streamed."""
        drawn = [
            TokenLogprob(id, logprob, version)
            for id, logprob, version in zip(completion.ids, completion.logprobs, completion.versions, strict=True)
        ]
        if self.reader.may_cut:
            for token in drawn:
                self.take(token)
        else:
            self.drawn += drawn
            self._untold += drawn
            self._tell(self.reader.feed_all(completion.ids))

    def end(self) -> None:
        """Handle the end of the completion."""
        if self._trouble is not None:
            raise self._trouble
        self._tell(self.reader.close(), last=True)

    def _tell(self, deltas: list[Delta], last: bool = False) -> None:
        if self._on_deltas is not None and (deltas or (last and self._untold)):
            self._on_deltas(deltas, self._untold)
            self._untold = []

    async def until_cut(self, sampling: asyncio.Future[Completion]) -> Completion:
        """Wait for the completion, or end it when the reader cuts it."""
        cutting = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((sampling, cutting), return_when=asyncio.FIRST_COMPLETED)
            if sampling.done():
                return sampling.result()
            return Completion((), (), (), "stop")
        finally:
            cutting.cancel()
            if not sampling.done():
                sampling.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineError):
                    await sampling

    def kept(self, completion: Completion) -> Completion:
        """Return the completion up to where it was cut."""
        if not self.reader.cut:
            return completion
        return replace(
            completion,
            ids=tuple(drawn.id for drawn in self.drawn),
            logprobs=tuple(drawn.logprob for drawn in self.drawn),
            versions=tuple(drawn.version for drawn in self.drawn),
            finish="stop",
        )
