"""A server on every node of a Ray cluster; workers lease from their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

# A process of its own: Ray installs handlers for crashes and signals that other tests should not live with.
DRIVER = """
import asyncio, json, os
import ray
from agentrl.sandbox import Sandbox, SandboxPool, ray_nodes

def work(nodes):
    async def lease():
        spec = nodes.local_spec()
        assert (spec.backend, spec.memory_mb) == ("remote", 128)
        async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
            return (await box.python("print(6 * 7)")).text()
    return asyncio.run(lease())

async def driver():
    nodes = await ray_nodes.start(Sandbox(memory_mb=128), max_total=4)
    answer = await ray.remote(num_cpus=0)(work).remote(nodes)
    mode = os.stat(nodes.token_file).st_mode & 0o077
    await nodes.stop()
    return {"answer": answer, "mode": mode, "token_file": nodes.token_file}

ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
try:
    found = asyncio.run(driver())
finally:
    ray.shutdown()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_leases_from_its_node() -> None:
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["answer"] == "42\n"
    assert found["mode"] == 0
    assert not Path(found["token_file"]).exists()
