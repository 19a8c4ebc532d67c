"""Work for a client ends when the client leaves, and in no other case."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from agentrl.serve.event_stream import GoneError, while_there


class Connection:
    """The connection of a client that leaves when told."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.problems: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.problems.append(str(context)))

    async def serve(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """What `work` returns."""

        async def receive() -> dict[str, str]:
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def working() -> Any:
            return await work()

        return await while_there(Request({"type": "http"}, receive), working())


@pytest.mark.parametrize("steps", [-2, -1, 0, 1, 2, 3])
async def test_a_client_may_leave_while_its_answer_becomes_ready(steps: int):
    client, ready = Connection(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(client.serve(lambda: ready))
    await asyncio.sleep(0.01)
    first, then = (client.leave.set, lambda: ready.done() or ready.set_result(5))[:: 1 if steps >= 0 else -1]
    first()
    for _ in range(abs(steps)):
        await asyncio.sleep(0)
    then()
    [found] = await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert found == 5 or isinstance(found, GoneError)
    assert client.problems == []


async def test_work_that_fails_while_it_is_canceled_was_for_nobody():
    client = Connection()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("in cleaning up")

    task = asyncio.create_task(client.serve(work))
    await asyncio.sleep(0.01)
    client.leave.set()
    with pytest.raises(GoneError):
        await task


async def test_other_ends_of_the_work_are_its_own():
    client = Connection()

    async def late() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await client.serve(late)
    task = asyncio.create_task(client.serve(lambda: asyncio.sleep(60)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.problems == []
