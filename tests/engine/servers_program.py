"""Servers as Ray actors, in a process of its own; prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import torch

from agentrl.engine.servers.launch.hosts import Recipe
from agentrl.engine.servers.launch.ray_host import RayCluster, RayHost
from agentrl.engine.servers.replica_pool import ServedLimits
from agentrl.engine.servers.server_engine import ServedEngine
from agentrl.engine.servers.sglang import SGLangServer
from agentrl.engine.servers.weight_sync import TensorSync
from agentrl.types import Sampling

SERVER = """
import asyncio, sys
from agentrl.testing.sglang_server import LoopbackServer

async def main():
    server = LoopbackServer(token_s=0.02)
    server.host, server.port, server.version = sys.argv[1], int(sys.argv[2]), "0"
    await server.start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def main(model: Path) -> None:
    """Two servers, one of which loses its actor while it works."""
    said: list[str] = []
    cluster = RayCluster(None)
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    recipe = Recipe(lambda port: [sys.executable, "-c", SERVER, "127.0.0.1", str(port)], environment)
    hosts = [
        RayHost(
            f"server {number}",
            recipe,
            lambda url: SGLangServer(url, timeout_s=30.0),
            cluster=cluster,
            gpus=0,
            start_timeout_s=200.0,
        )
        for number in range(2)
    ]
    engine = ServedEngine(
        hosts,
        TensorSync(bucket_bytes=1 << 20),
        model=model,
        limits=ServedLimits(health_every_s=1.0),
        tell=said.append,
        on_close=cluster.close,
    )
    await engine.start()
    try:
        await engine.update_weights({"a": torch.ones(2)}, version=3)
        tasks = [asyncio.create_task(engine.generate([n], Sampling(max_tokens=40))) for n in range(6)]
        await asyncio.sleep(0.3)
        cluster.ray.kill(hosts[0]._actor)
        done = await asyncio.gather(*tasks)
        async with asyncio.timeout(200):
            while len(engine._pool.ready) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        again = await asyncio.gather(*(engine.generate([n], Sampling(max_tokens=2)) for n in range(4)))
    finally:
        await engine.close()
    result = {
        "tokens": [len(c.ids) for c in done],
        "versions": sorted({v for c in [*done, *again] for v in c.versions}),
        "said": said,
    }
    print(json.dumps(result), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
