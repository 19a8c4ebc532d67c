"""A server on every node of a Ray cluster; workers lease from their own."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

import pytest

from agentrl.sandbox import Sandbox, SandboxPool

ray = pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.timeout(180)
def test_a_worker_leases_from_its_node() -> None:
    from agentrl.sandbox import ray_nodes

    async def driver() -> tuple[str, str]:
        nodes = await ray_nodes.start(Sandbox(memory_mb=128), max_total=4)

        def work(nodes: ray_nodes.Nodes) -> str:
            async def lease() -> str:
                spec = nodes.local_spec()
                assert (spec.backend, spec.memory_mb) == ("remote", 128)
                async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
                    return (await box.python("print(6 * 7)")).text()

            return asyncio.run(lease())

        answer = await ray.remote(num_cpus=0)(work).remote(nodes)
        assert Path(nodes.token_file).stat().st_mode & 0o077 == 0
        await nodes.stop()
        return answer, nodes.token_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
        try:
            answer, token_file = asyncio.run(driver())
        finally:
            ray.shutdown()
    assert answer == "42\n"
    assert not Path(token_file).exists()
