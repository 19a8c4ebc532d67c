"""Sandboxes on a Ray cluster: one server per node, so that workers lease from their own node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError
from agentrl.sandbox.contract import Sandbox
from agentrl.sandbox.remote_server import SandboxServer, to_wire


class NodeServer:
    """The actor: one server on its node, with the token file next to it."""

    def __init__(self, spec: Sandbox, token: str, token_file: str, max_total: int) -> None:
        self._server = SandboxServer(spec, token, max_total=max_total)
        self._token, self._token_file = token, token_file

    async def start(self, host: str) -> str:
        """Listen on `host` and return the URL."""
        await asyncio.to_thread(self._write_token)
        return await self._server.start(host)

    def _write_token(self) -> None:
        with open(os.open(self._token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
            f.write(self._token)

    async def stop(self) -> None:
        """End all leases of this server."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._token_file)
        await self._server.close()


@dataclass(frozen=True)
class Nodes:
    """The running servers. Can be sent to workers; whoever started them calls `stop`."""

    actors: tuple[Any, ...]
    urls: tuple[tuple[str, str], ...]
    """(node id, URL) of each."""
    token_file: str
    """Path of the token file, the same on every node."""
    spec: Sandbox

    def local_spec(self) -> Sandbox:
        """The cluster's spec, leased from the current node, or from other nodes if it has no capacity."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        urls = [url for node, url in self.urls if node == here] or [url for _, url in self.urls]
        return Sandbox(
            backend="remote",
            url=",".join(urls),
            token_file=self.token_file,
            on_death=self.spec.on_death,
            death_reward=self.spec.death_reward,
            **to_wire(self.spec),
        )

    async def stop(self) -> None:
        """Stop all servers."""
        import ray

        await asyncio.gather(*(actor.stop.remote() for actor in self.actors), return_exceptions=True)
        for actor in self.actors:
            ray.kill(actor)


async def start(spec: Sandbox, *, max_total: int = 256) -> Nodes:
    """Start a server with this spec on every node of the running Ray cluster.

    Args:
        spec: what the servers lease; its back-end must run on the node itself.
        max_total: maximum number of simultaneous sandboxes per node.

    Raises:
        ConfigError: the spec is itself a remote one.
        SandboxUnavailable: a node cannot run it.
    """
    from importlib import import_module

    ray: Any = import_module("ray")  # Ray's own types change with every version
    affinity: Any = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy

    if spec.backend == "remote":
        raise ConfigError("ray_nodes.start: the spec must name a back-end of the nodes themselves, not 'remote'")
    token = secrets.token_hex(16)
    token_file = os.path.join(tempfile.gettempdir(), f"agentrl-{secrets.token_hex(6)}.token")
    actors: list[Any] = []
    starting, names = [], []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        place = affinity(node["NodeID"], soft=False)
        actor: Any = (
            ray.remote(NodeServer)
            .options(num_cpus=0, scheduling_strategy=place)
            .remote(spec, token, token_file, max_total)
        )
        actors.append(actor)
        names.append(node["NodeID"])
        starting.append(actor.start.remote(node["NodeManagerAddress"]))
    urls = await asyncio.gather(*starting)
    return Nodes(tuple(actors), tuple(zip(names, urls, strict=True)), token_file, spec)
