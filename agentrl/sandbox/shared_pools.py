"""Sandbox pools shared within an event loop, one per spec; they close when the loop shuts down, or earlier."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator

from agentrl.sandbox.contract import Sandbox
from agentrl.sandbox.pool import SandboxPool

_pools: dict[asyncio.AbstractEventLoop, dict[Sandbox, SandboxPool]] = {}
_users: Counter[asyncio.AbstractEventLoop] = Counter()
_at_the_end: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}


def pool_for(spec: Sandbox, *, min_idle: int = 2) -> SandboxPool:
    """Return the running event loop's pool for a spec; the first caller creates it with this `min_idle`.

    `close_pools` closes all pools. A loop that ends without calling it (`asyncio.run` in a script or a test)
    closes them as it shuts down, so that no sandbox outlives its loop.
    """
    loop = asyncio.get_running_loop()
    pools = _pools.setdefault(loop, {})
    if loop not in _at_the_end:
        _at_the_end[loop] = _close_when_the_loop_ends()
        with contextlib.suppress(StopIteration):  # run up to the `yield`: the loop registers the generator
            _at_the_end[loop].__anext__().send(None)
    pool = pools.get(spec)
    if pool is None or pool.is_closed:
        pool = pools[spec] = SandboxPool(spec, min_idle=min_idle)
    return pool


async def close_pools() -> None:
    """Close every pool that `pool_for` created in this event loop."""
    pools = _pools.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(pool.close() for pool in pools.values()))


@contextlib.asynccontextmanager
async def using_pools() -> AsyncIterator[None]:
    """Close the pools of this event loop at the end of the block, unless another such block uses them."""
    loop = asyncio.get_running_loop()
    _users[loop] += 1
    try:
        yield
    finally:
        _users[loop] -= 1
        if not _users[loop]:
            del _users[loop]
            await close_pools()


async def _close_when_the_loop_ends() -> AsyncGenerator[None, None]:
    """Wait at the `yield` until `loop.shutdown_asyncgens`, which `asyncio.run` calls before closing the loop."""
    try:
        yield
    finally:
        await close_pools()
        del _at_the_end[asyncio.get_running_loop()]
