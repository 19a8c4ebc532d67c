"""Failures of the sandbox: each must raise a SandboxError, never return a result, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import secrets

from agentrl.errors import SandboxError
from agentrl.sandbox import Box
from agentrl.testing.sandbox_suite.stage import Check, Stage, expect


async def _kill(box: Box) -> None:
    process = box._process
    expect(process is not None, "no process")
    if process is not None:
        await process.kill()


async def death_in_mid_call(stage: Stage) -> None:
    token = "agentrl-" + secrets.token_hex(8)
    async with stage.box() as box:
        call = asyncio.create_task(box.run(f"exec -a {token} sleep 60"))
        await asyncio.sleep(0.2)
        await _kill(box)
        try:
            result = await call
        except SandboxError:
            pass
        else:
            raise AssertionError(f"a dead sandbox gave a result: {result}")
        try:
            await box.python("print(1)")
        except SandboxError:
            pass
        else:
            raise AssertionError("a dead sandbox ran a program")
        expect(not await box.alive(), "dead and alive")
        await stage.nothing_left(token)


async def death_between_calls(stage: Stage) -> None:
    async with stage.box() as box:
        session = await box.session("python")
        await session.run("x = 1")
        await _kill(box)
        for operation in (session.run("x"), box.read_file("f"), box.usage(), box.snapshot()):
            try:
                await operation
            except SandboxError:
                continue
            raise AssertionError("a dead sandbox answered")
        await box.reset()
        expect((await box.python("print(1)")).ok, "reset did not bring it back")


async def death_while_idle(stage: Stage) -> None:
    for _ in range(100):
        if stage.pool._idle:
            break
        await asyncio.sleep(0.05)
    for box in list(stage.pool._idle):
        await _kill(box)
    async with stage.box() as box:
        expect((await box.python("print(1)")).ok, "a dead box was handed out")


async def many_leases_with_deaths(stage: Stage) -> None:
    chance = random.Random(7)
    died = answered = 0

    async def episode() -> None:
        nonlocal died, answered
        async with stage.box() as box:
            for _ in range(3):
                kill = asyncio.create_task(_kill(box)) if chance.random() < 0.1 else None
                try:
                    result = await box.python("print(1)")
                    expect(result.stdout == b"1\n", result)
                    answered += 1
                except SandboxError:
                    died += 1
                    return
                finally:
                    if kill is not None:
                        await asyncio.gather(kill, return_exceptions=True)

    for _ in range(4):
        await asyncio.gather(*(episode() for _ in range(8)))
    expect(answered > 30 and died + answered > 40, (died, answered))


async def random_cancellations(stage: Stage) -> None:
    chance = random.Random(3)
    async with stage.box() as box:
        for _ in range(60):
            call = asyncio.create_task(box.run("sleep 0.02; echo done"))
            await asyncio.sleep(chance.random() * 0.04)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        expect((await box.run("echo fine")).stdout == b"fine\n", "not usable after cancellations")
        expect((await box.usage()).processes <= 2, "processes are left")


def checks() -> list[Check]:
    """All of them."""
    functions = (
        death_in_mid_call, death_between_calls, death_while_idle, many_leases_with_deaths, random_cancellations
    )  # fmt: skip
    return [Check(f.__name__, "chaos", f, alone=True) for f in functions]
