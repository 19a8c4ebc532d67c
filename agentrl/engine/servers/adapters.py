"""Adapters (LoRA) on a server: which one is sampled with, and which requests still use an older one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

GRACE_S = 5.0
"""How long an update waits for the requests that it has ended; an adapter still used then is unloaded later."""


@dataclass(eq=False)
class Adapter:
    """One version of the policy's adapter on one server; no name is used twice. `users` are requests under way."""

    name: str
    version: int
    users: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, version: int) -> Adapter:
        """The adapter of a version, not loaded yet."""
        return cls(f"agentrl-{version}-{uuid.uuid4().hex[:8]}", version)


class AdapterStand:
    """The adapters that one server has; it begins with none: the model itself, version 0."""

    def __init__(self) -> None:
        self._base = Adapter("", 0)
        self.current = self._base
        self._older: list[Adapter] = []
        self._left = asyncio.Event()

    @contextmanager
    def use(self, request: str) -> Iterator[Adapter]:
        """The current adapter, which is kept while the block runs; its name is empty where there is none."""
        adapter = self.current
        adapter.users.add(request)
        try:
            yield adapter
        finally:
            adapter.users.discard(request)
            self._left.set()

    def change(self, adapter: Adapter) -> list[str]:
        """Sample with this one, which is loaded, from now on; returns the requests that use older ones."""
        self._older.append(self.current)
        self.current = adapter
        return [request for older in self._older for request in older.users]

    async def unused(self) -> list[str]:
        """Names of the older adapters that nothing uses any more, forgotten here; waits a little for them."""
        try:
            async with asyncio.timeout(GRACE_S):
                while any(older.users for older in self._older):
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            pass
        done = [older for older in self._older if not older.users]
        self._older = [older for older in self._older if older.users]
        return [older.name for older in done if older is not self._base]

    def names(self) -> list[str]:
        """All that are loaded."""
        return [adapter.name for adapter in (*self._older, self.current) if adapter is not self._base]
