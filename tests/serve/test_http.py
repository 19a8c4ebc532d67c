"""HTTP that is invalid, endless, pipelined, or meant for another protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest

from agentrl.chat.template import Renderer
from tests.serve.serve_kit import Served, serving
from tests.serve.test_hostile import GOOD, post, talker

BODY = json.dumps(GOOD).encode()
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


async def _sent(served: Served, *parts: bytes) -> bytes:
    """All that the server says to these bytes until it closes the connection."""
    host, port = served.url.removeprefix("http://").split(":")
    loop, said = asyncio.get_running_loop(), b""
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):  # it has closed without reading all
                for part in parts:
                    await loop.sock_sendall(client, part)
            with contextlib.suppress(ConnectionError):
                while new := await loop.sock_recv(client, 1 << 16):
                    said += new
    return said


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        (GET + b"X: ", *[b"x" * 1000] * 1000),
        (GET, *[b"X: x\r\n" * 100] * 1000),
        (CHUNKED + b"1\r\n{\r\n0\r\nX: ", *[b"x" * 1000] * 1000),
        (CHUNKED + b"1;x=", *[b"x" * 1000] * 1000),
        (b"\r\n" * 500,) * 1000,
        (GET.replace(b"Host: localhost\r\n", b"") + b"\r\n",),
        (GET + b"Host: elsewhere\r\n\r\n",),
        (GET + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",),
        (CHUNKED + b"1\r\n{\r\nno number\r\n",),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",),
        (b"GET /health HTTP/1.1\nHost: a\nX : b\n\n",),
    ],
)  # fmt: skip
async def test_invalid_http_gets_our_error(renderer: Renderer, sent: tuple[bytes, ...]):
    async with serving(talker(renderer), renderer, head_timeout_s=5) as served:
        answer = await _sent(served, *sent)
        assert answer.startswith(b"HTTP/1.1 400")
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"
        assert (await post(served, GOOD)).status_code == 200


@pytest.mark.parametrize("after", [b"nonsense\r\n\r\n", GET + b"X: " + b"x" * 200_000], ids=["nonsense", "large"])
async def test_invalid_http_behind_a_request_is_refused_after_its_answer(renderer: Renderer, after: bytes):
    async with serving(talker(renderer, delay_s=0.2), renderer) as served:
        answer = await _sent(served, CHAT + after)
        first, second = answer.split(b"HTTP/1.1 ")[1:]
        assert (first[:3], second[:3]) == (b"200", b"400")
        bodies = [json.loads(part.split(b"\r\n\r\n", 1)[1]) for part in (first, second)]
        assert bodies[0]["choices"][0]["message"]["content"] == "The answer is 5."
        assert bodies[1]["error"]["code"] == "invalid_http"


async def test_requests_sent_at_once_are_answered_in_order(renderer: Renderer):
    async with serving(talker(renderer), renderer) as served:
        answer = await _sent(served, GET + b"\r\n" + CHAT + GET + b"Connection: close\r\n\r\n")
        kinds = [b"chat.completion" in part for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
        assert kinds == [False, True, False]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
async def test_a_client_that_vanishes_behind_a_second_request_frees_its_slot(renderer: Renderer, later: bool):
    async with serving(talker(renderer, delay_s=3600), renderer) as served:
        host, port = served.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        second = GET + b"\r\n"
        writer.write(CHAT + (b"" if later else second))
        async with asyncio.timeout(20):
            while not served.service.gate.running:  # noqa: ASYNC110 - the gate counts, it tells nobody
                await asyncio.sleep(0.01)
            if later:
                writer.write(second)
                await asyncio.sleep(0.2)
            writer.transport.abort()
            while served.service.gate.running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_request_to_change_the_protocol_is_answered_in_this_one(renderer: Renderer):
    async with serving(talker(renderer), renderer) as served:
        upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
        answer = await _sent(served, GET + upgrade + GET + b"Connection: close\r\n\r\n")
        assert answer.count(b"HTTP/1.1 200 OK") == 2
