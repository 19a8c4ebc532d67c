"""The largest body that a client may send delays no other request, whatever it consists of."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import time
from typing import Any

import pytest

from agentrl.chat.template import Renderer
from agentrl.serve.bounds import has_more_values
from tests.serve.serve_kit import Fixed, serving

SIZE = 31 << 20
PATHS = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/messages": "messages"}


def many(item: str) -> str:
    return "[" + ",".join([item] * (SIZE // (len(item) + 1))) + "]"


def messages(kind: str) -> str:
    start, end = '[{"role":"user","content":', "}]"
    if kind == "a text":
        return start + '"' + "word " * (SIZE // 5) + '"' + end
    if kind == "parts":
        return start + many('{"type":"text","text":"hi"}') + end
    if kind == "escaped quotes":
        return start + '"' + '\\"' * (SIZE // 8) + '"' + end
    assert kind == "wrong messages"
    return many('{"role":"nobody","content":5}')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *((path, kind) for path in PATHS for kind in ("parts", "wrong messages")),
        *(("/v1/messages", "a text"), ("/v1/responses", "escaped quotes")),
    ],
)
async def test_no_body_holds_up_the_event_loop(renderer: Renderer, path: str, kind: str):
    body = f'{{"model":"tiny","max_tokens":5,"{PATHS[path]}":{messages(kind)}}}'
    if path == "/v1/responses":
        body = body.replace('"max_tokens":5,', "")
    held = []

    async def watch() -> None:
        spent = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            spent, before = time.thread_time(), spent
            held.append(spent - before)

    def post() -> tuple[int, Any]:
        there = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=100)
        with contextlib.closing(there):
            there.request("POST", path, body.encode())
            answer = there.getresponse()
            return answer.status, json.loads(answer.read())

    async with serving(Fixed(renderer), renderer) as served:
        watching = asyncio.ensure_future(watch())
        status, answer = await asyncio.to_thread(post)
        watching.cancel()
    assert status in (400, 413), answer
    assert max(held) < 0.2, "CPU time of the event loop for one step"


def values_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + values_of(one) for one in value.values())
    return 1 + sum(map(values_of, value)) if isinstance(value, list) else 1


def test_values_are_counted_outside_of_texts_only():
    rng = random.Random(0)

    def drawn(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 3)
        if kind == 0:
            return "".join(rng.choice('"\\,[{ x\n') for _ in range(rng.randrange(12)))
        if kind < 3:
            return rng.choice((None, 12.5, True))
        if kind < 5:
            return [drawn(depth - 1) for _ in range(rng.randrange(5))]
        return {f"k{n}": drawn(depth - 1) for n in range(rng.randrange(5))}

    for _ in range(300):
        value = drawn(5)
        data = json.dumps(value, indent=rng.choice((None, 1))).encode()
        assert not has_more_values(data, 2 * values_of(value) + 2), "few"
        assert has_more_values(data, (values_of(value) - 1) // 3 - 1), "many"
    text = json.dumps({"text": ',[{"' * 100_000, "code": "\\" * 100_001}).encode()
    assert not has_more_values(text, 20)
    assert not has_more_values(b'"' + b"\\" * 1_000_001, 20)
