"""Limits go to the supervisor with the first call that has them, and hold for that call whatever came before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agentrl.sandbox import Box, SandboxLimits, SandboxPool
from agentrl.sandbox.contract import narrowed
from tests.sandbox.sandbox_specs import spec_for

PRINT = "print('x' * 1000)"
SHORT = SandboxLimits(stdout_bytes=100)


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    async with SandboxPool(spec_for("namespace"), min_idle=0) as pool, pool.lease() as leased:
        yield leased


async def test_limits_that_a_call_does_not_set_are_those_of_the_sandbox() -> None:
    spec = replace(spec_for("namespace"), wall_s=60.0, cpu_s=7.0, file_mb=3, open_files=77)
    limited = "(r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE)"
    program = f"import resource as r; print(*(r.getrlimit(which)[0] for which in {limited}))"
    async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as leased:
        for limits in (None, SHORT, SandboxLimits(wall_s=20.0)):
            assert (await leased.python(program, limits=limits)).text() == f"7 {3 << 20} 77\n"
        lowered = await leased.python(program, wall_s=10.0, limits=SandboxLimits(file_mb=1))
        assert lowered.text() == f"7 {1 << 20} 77\n"
    assert narrowed(spec, None, SHORT) == replace(spec, stdout_bytes=100)
    assert narrowed(spec, 10.0, SHORT) == replace(spec, stdout_bytes=100, wall_s=10.0)


async def test_limits_of_one_call_are_not_those_of_the_next(box: Box) -> None:
    session = await box.session("python")
    for _ in range(2):
        whole, cut = await box.python(PRINT), await box.python(PRINT, limits=SHORT)
        assert (whole.truncated, whole.stdout_total, len(whole.stdout)) == (False, 1001, 1001)
        assert (cut.truncated, cut.stdout_total) == (True, 1001)
        assert cut.stdout.startswith(b"x" * 50)
        assert cut.stdout.endswith(b"x" * 49 + b"\n")
        assert (await session.run(PRINT, limits=SHORT)).truncated
        assert not (await session.run(PRINT)).truncated
        await box.write_file("f", "x")  # which has limits of its own
        assert not (await box.run("seq 300")).truncated
    assert (await box.run("sleep 30", wall_s=0.2)).outcome == "timeout"
    assert (await box.run("sleep 0.5; echo done")).text() == "done\n"


async def test_limits_of_a_cancelled_call_are_forgotten(box: Box) -> None:
    assert not (await box.python(PRINT)).truncated
    for _ in range(3):
        for turns in (1, 2, 5):
            call = asyncio.create_task(box.run("sleep 30", limits=SHORT))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not (await box.python(PRINT)).truncated
            assert (await box.python(PRINT, limits=SHORT)).truncated


async def test_limits_of_a_call_that_was_never_sent_are_forgotten(box: Box) -> None:
    assert not (await box.python(PRINT)).truncated
    with pytest.raises(ValueError, match="write a file and read that"):
        await box.python(PRINT, stdin=bytes(9 << 20), limits=SHORT)
    assert (await box.python(PRINT, limits=SHORT)).truncated


async def test_limits_are_told_to_a_sandbox_that_begins_anew(box: Box) -> None:
    assert (await box.python(PRINT, limits=SHORT)).truncated
    await box.reset()
    assert (await box.python(PRINT, limits=SHORT)).truncated
    await box.reset()
    assert not (await box.python(PRINT)).truncated
    assert (await box.run("sleep 30", wall_s=0.2)).outcome == "timeout"
