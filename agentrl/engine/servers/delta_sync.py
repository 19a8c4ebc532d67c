"""Send only the weights that changed: `engine.sync: delta`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.engine.servers.inside.agentrl_weight_delta import encode
from agentrl.engine.servers.weight_sync import Failures, TensorSync, buckets, push_to_each
from agentrl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.engine.servers.client import InferenceServer


class DeltaSync:
    """Sends what changed since the last push to the servers that hold it, and everything to the others.

    Keeps a copy of the weights in host memory.

    Attributes:
        bytes_sent: size of the last push to one server, before it is encoded in a request.
    """

    def __init__(self, *, bucket_bytes: int, full_every: int) -> None:
        """Send at most `bucket_bytes` in one request, and all weights at every `full_every`-th push."""
        self._bucket_bytes, self._full_every = bucket_bytes, full_every
        self._full = TensorSync(bucket_bytes=bucket_bytes)
        self._sent: dict[str, Tensor] = {}
        self._version: int | None = None
        self._holders: set[InferenceServer] = set()
        self._since_full = 0
        self.bytes_sent = 0

    async def push(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        """Bring weights to servers and return those that failed."""
        if version != self._version:
            return await self._advance(servers, weights, version)
        failures = await self._full.push(servers, weights, version)  # a server that was started again
        self._holders.update(server for server in servers if server not in failures)
        return failures

    async def close(self) -> None:
        """Forget the weights."""
        self._sent, self._version = {}, None
        self._holders.clear()

    async def _advance(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        due = self._since_full + 1 >= self._full_every
        holders = [] if due else [server for server in servers if server in self._holders]
        others = [server for server in servers if server not in holders]
        failures: Failures = {}
        if holders:
            changes = await asyncio.to_thread(self._changes, weights)
            failures |= await push_to_each(holders, lambda server: self._send(server, changes, version))
        if others:
            failures |= await self._full.push(others, weights, version)
        if not holders:
            self.bytes_sent = sum(tensor.nbytes for tensor in weights.values())
        self._since_full = self._since_full + 1 if holders else 0
        self._sent = await asyncio.to_thread(lambda: {name: t.detach().cpu() for name, t in weights.items()})
        self._version = version
        self._holders = {server for server in servers if server not in failures}
        return failures

    def _changes(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, new in weights.items():
            try:
                changed = encode(name, self._sent[name].to(new.device), new)
            except ValueError as e:
                raise EngineError(f"the weights cannot be sent: {e}") from e
            if changed is not None:
                found[changed[0]] = changed[1]
        self.bytes_sent = sum(len(header) + packed.nbytes for header, packed in found.items())
        return found

    async def _send(self, server: InferenceServer, changes: Mapping[str, Tensor], version: int) -> None:
        async with server.updating(by_tensor=True):
            for bucket in buckets(changes, self._bucket_bytes) if changes else [{}]:
                await server.load_changes(bucket, version)
