"""Many leases with sudden deaths and cancellations. `python -m bench.sandbox chaos` runs ten thousand of them."""

from __future__ import annotations

import pytest

from agentrl.sandbox import Sandbox
from agentrl.testing.sandbox_suite.endurance import chaos


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_many_leases_deaths_and_cancellations() -> None:
    seen = await chaos(Sandbox(), leases=300, cancellations=60, at_once=8)
    assert seen.untyped == 0, seen.complaints
    assert seen.leases == 308
    assert 7 <= seen.killed <= 28
    assert seen.died <= seen.killed
    assert seen.cancelled >= 45
    assert seen.answered > 600
    assert seen.left == 0
    assert seen.descriptors_after <= seen.descriptors_before + 8
    assert seen.rss_kb_after - seen.rss_kb_before < 8 << 10


async def test_many_wait_at_once_and_all_are_served() -> None:
    seen = await chaos(Sandbox(memory_mb=128), leases=60, cancellations=0, at_once=40, seed=3)
    assert seen.untyped == 0, seen.complaints
    assert seen.leases == 100
    assert seen.left == 0
