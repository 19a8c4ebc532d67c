"""Send only the weights that changed: `engine.sync: delta`."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from agentrl.engine.servers.http import ServerLost, ServerRefused
from agentrl.engine.servers.inside.agentrl_weight_delta import encode, statement
from agentrl.engine.servers.weight_sync import Failures, buckets, push_to_each
from agentrl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.engine.servers.client import InferenceServer

_CHECK_S = 30.0
"""How long a server that refused changes may take to say that it is still there."""


class DeltaSync:
    """Sends what changed since the last push to the servers that hold it, and everything to the others.

    Every server checks a hash of every tensor. Keeps a copy of the weights in host memory.

    Attributes:
        bytes_sent: size of the last push to one server that held the previous weights, or otherwise of all
            weights, before it is encoded in a request.
    """

    def __init__(self, *, bucket_bytes: int, full_every: int, tell: Callable[[str], None] = warnings.warn) -> None:
        """Send at most `bucket_bytes` in one request, and all weights at every `full_every`-th push.

        `tell` hears about servers that did not hold the previous weights.
        """
        self._bucket_bytes, self._full_every, self._tell = bucket_bytes, full_every, tell
        self._sent: dict[str, Tensor] = {}
        self._hashes: dict[str, int] = {}
        self._version: int | None = None
        self._holders: set[InferenceServer] = set()
        self._since_full = 0
        self.bytes_sent = 0

    async def push(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        """Bring weights to servers and return those that failed.

        Raises:
            EngineError: a weight is NaN or an integer.
        """
        changes, moved = await asyncio.to_thread(self._changes, weights)
        due = version != self._version and self._since_full + 1 >= self._full_every
        behind = [] if due or moved is None else [server for server in servers if server in self._holders]
        others = [server for server in servers if server not in behind]
        # Until they have answered, nobody knows what they hold; who is left out holds what was sent before.
        self._holders = set() if moved is not False else self._holders.difference(servers)
        failures = await push_to_each(behind, lambda server: self._send(server, changes, version))
        others += await self._disagreeing(failures)
        failures |= await push_to_each(others, lambda server: self._send_all(server, weights, changes, version))
        self._sent = await asyncio.to_thread(lambda: {name: t.detach().cpu() for name, t in weights.items()})
        self._hashes = {head["name"]: head["hash"] for head in map(json.loads, changes)}
        self._holders.update(server for server in servers if server not in failures)
        if version != self._version:
            self._since_full = self._since_full + 1 if behind else 0
            self._version = version
        size = sum(len(header) + packed.nbytes for header, packed in changes.items())
        self.bytes_sent = size if behind else sum(tensor.nbytes for tensor in weights.values())
        return failures

    async def close(self) -> None:
        """Forget the weights."""
        self._sent, self._hashes, self._version = {}, {}, None
        self._holders.clear()

    def _changes(self, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool | None]:
        """Return the changes of every weight since the last push, and whether there are any.

        None instead if they are not all comparable: nothing was sent, or names, types or shapes are others.
        """
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                raise EngineError(
                    "the weights cannot be sent: engine.sync delta compares floating-point numbers, and "
                    f"{name} is {tensor.dtype}; use engine.sync disk or tensor"
                )
            if bool(torch.isnan(tensor).any()):
                raise EngineError(f"the weights cannot be sent: {name} contains NaN")
        alike = {n: (t.dtype, t.shape) for n, t in weights.items()} == {
            n: (t.dtype, t.shape) for n, t in self._sent.items()
        }
        found, moved = {}, False
        for name, new in weights.items():
            old = self._sent[name].to(new.device) if alike else new
            header, packed = encode(name, old, new, self._hashes.get(name) if alike else 0)
            found[header] = packed
            moved = moved or bool(packed.numel())
        return found, moved if alike else None

    async def _disagreeing(self, failures: Failures) -> list[InferenceServer]:
        """Take the servers that refused the changes, and are still there, out of `failures`."""
        found = []
        for server, error in list(failures.items()):
            answered = isinstance(error, ServerLost | ServerRefused) and error.status is not None
            if answered and await _is_there(server):
                self._tell(f"{server.url} refused changes of its weights and gets all of them: {error}")
                found.append(server)
                del failures[server]
        return found

    async def _send(self, server: InferenceServer, changes: Mapping[str, Tensor], version: int) -> None:
        async with server.updating(by_tensor=True):
            for bucket in buckets(changes, self._bucket_bytes):
                await server.load_changes(bucket, version)

    async def _send_all(
        self, server: InferenceServer, weights: Mapping[str, Tensor], changes: Mapping[str, Tensor], version: int
    ) -> None:
        async with server.updating(by_tensor=True):
            for bucket in buckets(weights, self._bucket_bytes):
                await server.load_tensors(bucket, version)
            await server.load_changes(dict(map(statement, changes)), version)


async def _is_there(server: InferenceServer) -> bool:
    for _ in range(2):  # a server may close the connection on which it answered with an error
        try:
            await server.check(timeout_s=_CHECK_S)
            return True
        except EngineError:
            continue
    return False
