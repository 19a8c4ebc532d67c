"""Several processes with the local engine, presented as one engine: small models sample on every core.

A decode step of a small model is many short operations, which a second torch thread hardly speeds up; a second
process samples for half of the episodes. Figures are in docs/design/local-engine.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor

from agentrl.engine.base import Engine
from agentrl.engine.local.local_engine import Bounds
from agentrl.engine.local.process import ProcessEngine
from agentrl.types import Completion, Sampling

UNEVEN = 8
"""How many more sequences than the idlest process one may have and still get another with a prompt it knows."""


async def start_processes(
    path: str | Path, most: int, *, dtype: str = "float32", routes: bool = False, **bounds: Unpack[Bounds]
) -> Engine:
    """Start up to `most` processes: no more than torch has threads, and one if the model is not small.

    Args:
        bounds: of all of them together.

    Raises:
        ConfigError: the directory or the model cannot be used.
        EngineError: a process ended before it had loaded the model.
    """
    size = max(1, min(most, torch.get_num_threads()))
    share: Bounds = {**bounds, "sharers": size}

    async def start() -> ProcessEngine:
        return await ProcessEngine.start(path, dtype=dtype, routes=routes, **share)

    engines = [await start()]
    try:
        while len(engines) < size and engines[0].small:
            engines.append(await start())
    except BaseException:
        for engine in engines:
            engine.end()
        raise
    return engines[0] if len(engines) == 1 else ProcessPool(engines)


class ProcessPool(Engine):
    """`ProcessEngine`s that share the sequences: a session stays where it began, equal prompts stay together.

    The tokens are those of a single engine, up to the rounding of the matrix products.
    """

    def __init__(self, engines: Sequence[ProcessEngine]) -> None:
        """Take over running engines of the same model, at least one."""
        self._members = [_Member(engine) for engine in engines]
        self._sessions: dict[str, _Place] = {}
        self._prompts: dict[int, _Place] = {}
        self._version = engines[0].policy_version
        self.capabilities = engines[0].capabilities
        self.max_context = engines[0].max_context

    @property
    def policy_version(self) -> int:
        """Version of the weights of the newest update that all processes have confirmed."""
        return self._version

    @property
    def sizes(self) -> list[int]:
        """The number of sequences in each process."""
        return [member.sequences for member in self._members]

    @property
    def processes(self) -> list[int]:
        """The process ids."""
        return [member.engine.pid for member in self._members]

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Continue `ids`; see `Engine.generate`."""
        if session is None:
            with self._sequence(ids) as place:
                return await place.member.engine.generate(ids, sampling)
        if session not in self._sessions:
            self._sessions[session] = self._take(ids)
        return await self._sessions[session].member.engine.generate(ids, sampling, session=session)

    async def release(self, session: str) -> None:
        """Drop the state kept for `session`."""
        if (place := self._sessions.pop(session, None)) is not None:
            self._leave(place)
            await place.member.engine.release(session)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights of all processes; see `Engine.update_weights`."""
        await asyncio.gather(*(member.engine.update_weights(weights, version) for member in self._members))
        self._version = version

    async def close(self) -> None:
        """Stop; running requests end with finish "abort" and the tokens sampled so far."""
        await asyncio.gather(*(member.engine.close() for member in self._members))

    @contextmanager
    def _sequence(self, ids: Sequence[int]) -> Iterator[_Place]:
        place = self._take(ids)
        try:
            yield place
        finally:
            self._leave(place)

    def _take(self, ids: Sequence[int]) -> _Place:
        """Where a new sequence goes: to the others with its prompt, unless a process has much less to do."""
        prompt = hash(tuple(ids))
        idlest = min(self._members, key=lambda member: member.sequences)
        place = self._prompts.get(prompt)
        if place is None or place.member.sequences >= idlest.sequences + UNEVEN:
            place = self._prompts[prompt] = _Place(idlest, prompt)
        place.sequences += 1
        place.member.sequences += 1
        return place

    def _leave(self, place: _Place) -> None:
        place.sequences -= 1
        place.member.sequences -= 1
        if not place.sequences and self._prompts.get(place.prompt) is place:
            del self._prompts[place.prompt]


@dataclass(eq=False, slots=True)
class _Member:
    """A process, and how many sequences it has: open sessions, and calls without one."""

    engine: ProcessEngine
    sequences: int = 0


@dataclass(eq=False, slots=True)
class _Place:
    """The sequences of one prompt in one process."""

    member: _Member
    prompt: int
    sequences: int = 0
