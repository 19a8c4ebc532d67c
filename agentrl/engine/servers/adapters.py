"""LoRA adapters on a server: the one in use for sampling, and older ones that requests still use."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.run import LoRAConfig
from agentrl.models.folder import reading_tensors

GRACE_S = 5.0
"""Seconds an update waits for the requests it has ended; an adapter still in use then is unloaded later."""


@dataclass(eq=False)
class Adapter:
    """One version of the policy's adapter on one server; names are never reused. `users` counts active
    requests."""

    name: str
    version: int
    users: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, version: int) -> Adapter:
        """Create the adapter of a version, not loaded yet."""
        return cls(f"agentrl-{version}-{uuid.uuid4().hex[:8]}", version)


class AdapterStand:
    """The adapters on one server; initially none, which is the model itself, version 0."""

    def __init__(self) -> None:
        self._base = Adapter("", 0)
        self.current = self._base
        self._older: list[Adapter] = []
        self._left = asyncio.Event()

    @contextmanager
    def use(self, request: str) -> Iterator[Adapter]:
        """Keep the current adapter loaded during the block; its name is empty if there is none."""
        adapter = self.current
        adapter.users.add(request)
        try:
            yield adapter
        finally:
            adapter.users.discard(request)
            self._left.set()

    def change(self, adapter: Adapter) -> list[str]:
        """Sample with this loaded adapter from now on; return the requests that use older ones."""
        self._older.append(self.current)
        self.current = adapter
        return [request for older in self._older for request in older.users]

    async def unused(self) -> list[str]:
        """Remove and return the names of unused older adapters, after a short wait for their requests."""
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
        """Return all that are loaded."""
        return [adapter.name for adapter in (*self._older, self.current) if adapter is not self._base]


_IN_BLOCK = re.compile(r"(^|\.)(layers|h)\.\d")
_ROUTED = re.compile(r"\.(experts|gate|router)\.")


def adapted_layers(lora: LoRAConfig, model: Path) -> list[str]:
    """Return the layers that get adapters, by the last parts of their names, for a server's command line.

    Empty if they are all linear layers, and the model has no safetensors with such in numbered blocks.
    """
    ends = _linear_names(model) if lora.targets == "all-linear" else lora.targets
    return sorted({end.rpartition(".")[2] for end in ends})


def _linear_names(model: Path) -> set[str]:
    """The linear layers in the blocks of a model directory, by the last parts of their names.

    Routed experts and routers have no adapters, and servers do not start for those of routers.

    Raises:
        ConfigError: a file cannot be read.
    """
    from safetensors import safe_open

    names = set()
    for file in sorted(model.glob("*.safetensors")):
        with reading_tensors(file), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                if (
                    name.endswith(".weight")
                    and _IN_BLOCK.search(name)
                    and not _ROUTED.search(name)
                    and len(tensors.get_slice(name).get_shape()) == 2
                ):
                    names.add(name.split(".")[-2])
    return names
