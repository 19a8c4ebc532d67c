"""Servers as Ray actors: each on a node of a cluster with enough GPUs for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from importlib import import_module
from typing import Any

from agentrl.engine.servers.client import InferenceServer
from agentrl.engine.servers.launch.hosts import ASK_EVERY_S, Connect, Recipe
from agentrl.engine.servers.launch.launcher import ServerProcess
from agentrl.errors import EngineError
from agentrl.ports import reserved_port
from agentrl.ray_cluster import connect, disconnect, import_ray
from agentrl.scratch import ScratchFolder

KEY = "engine.server.launch: ray"


class RayCluster:
    """The cluster on which servers are started; connects at first use."""

    def __init__(self, address: str | None) -> None:
        self.local = address is None
        self._address, self._ours = address, False
        self.ray: Any = None
        self._lock = threading.Lock()  # servers are started in parallel

    def connect(self) -> Any:
        """Return the connected module `ray`. Raises ConfigError if there is no Ray or no cluster."""
        with self._lock:
            if self.ray is None:
                ray = import_ray(KEY)
                self._ours = connect(ray, self._address, cpus=2)
                self.ray = ray
        return self.ray

    def close(self) -> None:
        """Leave the cluster unless this process had joined it before; idempotent."""
        if self.ray is not None and self._ours:
            disconnect(self.ray)
        self.ray, self._ours = None, False


class ServerOnNode:
    """The actor: one server on the actor's node, under a guard that ends it with the actor."""

    def __init__(self) -> None:
        self._process: ServerProcess | None = None
        self._scratch: ScratchFolder | None = None
        self._port = contextlib.ExitStack()

    async def start(self, recipe: Recipe, *, loopback: bool) -> str:
        """Start the server at the node's address or at the loopback, and return its URL immediately."""
        ray: Any = import_module("ray")
        host = "127.0.0.1" if loopback else str(ray.util.get_node_ip_address())
        port = self._port.enter_context(reserved_port(host))
        command = [host if part == "127.0.0.1" else part for part in recipe.command(port)]
        self._scratch = ScratchFolder("server")
        self._process = await ServerProcess.start(
            command, environment=recipe.environment, log=self._scratch.path / "log"
        )
        return f"http://{host}:{port}"

    async def ended(self) -> str:
        """Wait for the server to end; return its exit code and last output."""
        assert self._process is not None
        code = await self._process.wait()
        return f"its process ended with exit code {code}; the end of its log:\n{self._process.last_words()}"

    async def stop(self) -> None:
        """Stop the server."""
        if self._process is not None:
            await self._process.stop()
        self._port.close()
        if self._scratch is not None:
            self._scratch.close()


class RayHost:
    """A server in an actor; after a restart it may be on another node."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        connect: Connect,
        *,
        cluster: RayCluster,
        gpus: int,
        start_timeout_s: float,
    ) -> None:
        self.name, self._recipe, self._connect = name, recipe, connect
        self._cluster, self._gpus, self._start_timeout_s = cluster, gpus, start_timeout_s
        self._actor: Any = None

    async def start(self) -> InferenceServer:
        """Find a node, launch and wait until the server responds; see `Host.start`."""
        ray = await asyncio.to_thread(self._cluster.connect)
        actor_class = ray.remote(ServerOnNode)
        # Several concurrent calls: one of them waits for the end of the server.
        self._actor = actor_class.options(num_cpus=1, num_gpus=self._gpus, max_concurrency=8).remote()
        server: InferenceServer | None = None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                url: str = await self._ask("start", self._recipe, loopback=self._cluster.local)
                server = self._connect(url)
                await self._wait_for(server)
        except TimeoutError:
            await self._give_up(server)
            raise EngineError(
                f"{self.name} did not answer within {self._start_timeout_s:g} s (engine.server.start_timeout_s); "
                f"it needs a node with {self._gpus} free GPUs"
            ) from None
        except BaseException:
            await self._give_up(server)
            raise
        return server

    async def ended(self) -> str:
        """Wait for the server, its actor or its node to end."""
        try:
            return str(await self._ask("ended"))
        except EngineError as e:
            return str(e)

    def keep_log(self) -> None:
        """The log is on the server's node; what ends the server is reported with the end of it."""

    async def stop(self) -> None:
        """Stop server and actor."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        ray = self._cluster.ray
        with contextlib.suppress(TimeoutError, ray.exceptions.RayError):  # gone: its guard has ended the server
            async with asyncio.timeout(20.0):
                await actor.stop.remote()
        ray.kill(actor)

    async def _wait_for(self, server: InferenceServer) -> None:
        ended = asyncio.ensure_future(self._ask("ended"))
        try:
            while True:
                try:
                    await server.check(timeout_s=60.0)
                    return
                except EngineError:
                    await asyncio.wait([ended], timeout=ASK_EVERY_S)
                if ended.done():
                    raise EngineError(f"{self.name} did not start: {ended.result()}")
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    async def _ask(self, method: str, *args: Any, **more: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*args, **more)
        except self._cluster.ray.exceptions.RayError as e:
            raise EngineError(f"the actor of {self.name} is lost: {' '.join(str(e).split())[:300]}") from e

    async def _give_up(self, server: InferenceServer | None) -> None:
        await self.stop()
        if server is not None:
            await server.close()
