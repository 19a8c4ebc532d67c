"""Requests of one server: what is lost when it is closed, and that nothing stays open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from agentrl.engine.servers.http import HttpServer, ServerLost
from agentrl.serve.listen import running
from agentrl.testing.sglang_server import LoopbackServer


@pytest.mark.parametrize("turns", [1, 3, 6, 9, 14], ids="after {} turns of the loop".format)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_closing_it_ends_requests_that_are_connecting_or_answered(turns: int, stream: bool) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 200}, "stream": stream}

    async def ask(server: HttpServer) -> None:
        if stream:
            async for _ in server.events("/generate", body):
                pass
        else:
            await server.post("/generate", body)

    async with LoopbackServer(token_s=0.01) as there:
        server = HttpServer(there.url, timeout_s=20)
        asking = [asyncio.create_task(ask(server)) for _ in range(20)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(error) for error in found} == {ServerLost}
        async with asyncio.timeout(20):
            while there._open:  # noqa: ASYNC110 - connections that were left open would stay for ever
                await asyncio.sleep(0.01)
        with pytest.raises(ServerLost, match="has been closed"):
            await ask(server)


@pytest.mark.parametrize("turns", [2, 5, 12, 18])
async def test_a_request_that_is_cancelled_while_it_drops_idle_connections_forgets_none(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoopbackServer() as there:
        server = HttpServer(there.url, timeout_s=20)
        pool = server._client._transport._inner._pool  # type: ignore[attr-defined]
        monkeypatch.setattr(pool, "_keepalive_expiry", 0.05)
        await asyncio.gather(*(server.get("/server_info") for _ in range(20)))
        await asyncio.sleep(0.1)
        asking = asyncio.create_task(server.get("/server_info"))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(20):
            while len(there._open) > 1:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        await server.close()


async def test_a_caller_that_is_cancelled_is_not_told_of_a_loss() -> None:
    async with LoopbackServer(token_s=3600) as there:
        server = HttpServer(there.url, timeout_s=20)
        asking = asyncio.create_task(
            server.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})
        )
        while not there.running:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await server.get("/server_info"))["max_req_input_len"] == there.max_context
        await server.close()


async def test_a_proxy_of_the_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with LoopbackServer() as there:
        server = HttpServer(there.url, timeout_s=20)
        assert (await server.get("/server_info"))["max_req_input_len"] == there.max_context
        await server.close()


async def test_a_stream_has_ended_when_it_says_so() -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "stream": True}
    async with LoopbackServer() as there:
        server = HttpServer(there.url, timeout_s=20)
        assert [event["output_ids"] async for event in server.events("/generate", body)][-1][:1] == [2]
        there.break_after = 2
        with pytest.raises(ServerLost):
            [event async for event in server.events("/generate", body)]
        await server.close()


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
async def test_an_event_ends_at_a_line_break_and_not_at_what_unicode_calls_one(end: str) -> None:
    """Servers write the sampled text as it is, and a policy may sample any character."""
    sent = [
        {"text": "one\u2028two\u2029three\u0085four", "output_ids": [1]},
        {"text": "\u2028", "output_ids": [2]},
    ]

    async def pieces() -> AsyncIterator[bytes]:
        lines = [json.dumps(event, ensure_ascii=False) for event in sent] + ["[DONE]"]
        data = "".join(f"data: {line}{end}{end}" for line in lines).encode()
        for at in range(0, len(data), 7):  # also in the middle of a character
            yield data[at : at + 7]

    async def answer(request: Request) -> StreamingResponse:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    async with running(Starlette(routes=[Route("/generate", answer, methods=["POST"])])) as address:
        server = HttpServer(address, timeout_s=20)
        assert [event async for event in server.events("/generate", {})] == sent
        await server.close()
