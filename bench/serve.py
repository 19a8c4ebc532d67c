"""What the endpoint adds to an engine: latency of a request, requests a second, memory over many requests.

    python bench/serve.py [--only timing|memory] [--quick] [--json FILE]

The engine answers at once with a prepared completion, so that all time is the endpoint's: HTTP, checking,
rendering, recognition, reading the completion. Requests are chats of four messages with one tool, each with a
question of its own; the client is a process of its own that writes prepared bytes. `cpu_ms` is the server's CPU
time for one request, which a busy machine changes little. The baseline is a route of Starlette on the same server
program that reads the same body as JSON and answers with a prepared one: what HTTP alone costs. `--quick` makes a
tenth of the requests. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine
from agentrl.models.tiny import make_tokenizer
from agentrl.serve.endpoint import Settings, create_app
from agentrl.serve.listen import running
from agentrl.serve.prometheus import Metrics
from agentrl.serve.service import ChatService, Gate
from agentrl.types import Completion, Message, Sampling, ToolCall

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "2+3"}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the calculator, then say the answer."},
    {"role": "user", "content": "What is 0000002+3?"},  # the number changes with every request
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]

ANSWER = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [{"index": 0, "message": CHAT[2]}]}

CLIENT = Path(__file__).parent / "shared" / "serve_client.py"
GOAL_ADDED_MS, GOAL_PER_S, GOAL_GROWTH_MB = 2.0, 800, 8.0
OWN_CORE = 0.8
"""Share of a core below which a server with 64 waiting connections says that the machine is busy."""
FILLING = 16_000
"""Requests after which what the server remembers of past ones has met its bounds."""


class NoOpEngine(Engine):
    """Says the same at once."""

    policy_version = 0
    max_context = 32_768

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """The prepared completion."""
        return self._completion

    async def release(self, session: str) -> None:
        """Nothing is kept."""

    async def update_weights(self, weights: Any, version: int) -> None:
        """There are none."""

    async def close(self) -> None:
        """Nothing to free."""


def make_renderer(folder: Path) -> Renderer:
    """ChatML over a small byte-level vocabulary."""
    text = json.dumps(TOOL) + " ".join(str(message["content"]) for message in CHAT)
    make_tokenizer(folder, [text] * 20, vocab=512, max_context=32_768)
    return Renderer.from_directory(folder)


# -- the client, in a process of its own -----------------------------------------------------------------------


asked = itertools.count(1, 100_000)


async def measured(url: str, num: int, connections: int) -> dict[str, float]:
    """Run the client against the server of this process."""
    host, port = url.removeprefix("http://").split(":")
    words = [sys.executable, str(CLIENT), host, port, *map(str, (next(asked), num, connections))]
    body = json.dumps({"model": "noop", "messages": CHAT, "tools": [TOOL], "temperature": 0}).encode()
    began = time.process_time()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    out, _ = await process.communicate(body)
    if process.returncode:
        raise SystemExit("the client failed")
    result: dict[str, float] = json.loads(out)
    return result | {"cpu_ms": 1e3 * (time.process_time() - began) / result["requests"]}


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def prepared(request: Request) -> JSONResponse:
    """A route that does nothing but HTTP and JSON."""
    await request.json()
    return JSONResponse(ANSWER)


def met(added_ms: float, busiest: dict[str, float]) -> bool | None:
    """Whether the goals of time are met; None if the server did not get a core for itself."""
    if added_ms < GOAL_ADDED_MS and busiest["requests_per_s"] >= GOAL_PER_S:
        return True
    return None if own_core(busiest) < OWN_CORE else False


def own_core(busiest: dict[str, float]) -> float:
    """The share of a core that the server got."""
    return busiest["requests_per_s"] * busiest["cpu_ms"] / 1e3


async def timing(url: str, scale: int) -> dict[str, Any]:
    """Latency and requests a second, by connections, and those of a bare route with one."""
    async with running(Starlette(routes=[Route("/v1/chat/completions", prepared, methods=["POST"])])) as plain:
        await measured(plain, 200, 4)
        bare = await measured(plain, 3200 // scale, 1)
    rows = []
    for connections in (1, 16, 64):
        # A row of `--quick` takes half a second, which anything else on the machine can spoil.
        tries = [await measured(url, 3200 // scale, connections) for _ in range(3 if scale > 1 else 1)]
        rows.append(max(tries, key=lambda row: row["requests_per_s"]))
        print("{connections:4.0f} connections {requests_per_s:7.0f} requests/s, p50 {p50_ms:6.2f} ms, "
              "p99 {p99_ms:6.2f} ms, CPU {cpu_ms:5.2f} ms".format(**rows[-1]), flush=True)  # fmt: skip
    ours, baseline = rows[0]["p50_ms"], bare["p50_ms"]
    return {
        "ours": ours,
        "baseline": baseline,
        "ratio": baseline / ours,
        "unit": "ms that a request takes beside the engine's own time, p50, one connection",
        "goal": f"added p50 < {GOAL_ADDED_MS} ms, >= {GOAL_PER_S} requests/s at 64 connections, memory flat",
        "met": met(ours - baseline, rows[-1]),
        "why": f"the server got {own_core(rows[-1]):.0%} of a core while 64 connections waited for it",
        "added_p50_ms": ours - baseline,
        "added_p99_ms": rows[0]["p99_ms"],
        "bare": bare,
        "rows": rows,
    }


async def memory(url: str, scale: int) -> dict[str, Any]:
    """Resident memory of the server over many requests, once its bounded memories are full."""
    filled = await measured(url, FILLING // scale, 16)
    sizes = [memory_mb()]
    for _ in range(4):
        await measured(url, 5000 // scale, 16)
        sizes.append(memory_mb())
    requests = 4 * (5000 // scale // 16 * 16)
    shown = ", ".join(f"{size:.1f}" for size in sizes)
    print(f"memory after {filled['requests']:.0f} requests and over {requests} more: {shown} MiB", flush=True)
    growth = sizes[-1] - sizes[0]
    return {"memory": {"requests": requests, "mb": sizes, "growth_mb": growth, "flat": growth < GOAL_GROWTH_MB}}


async def bench(only: str | None, quick: bool) -> dict[str, Any]:
    """All measurements."""
    scale = 10 if quick else 1
    with tempfile.TemporaryDirectory() as folder:
        renderer = make_renderer(Path(folder))
    said = Message("assistant", "The answer is 5.", (ToolCall("c", "calculator", {"expression": "5"}),))
    engine = NoOpEngine(completion_of(renderer, said, [TOOL]))
    talk = ChatService(engine, renderer, gate=Gate(1024), metrics=Metrics())
    app = create_app(talk, Settings(names=("noop",)), session=talk.open_session(100_000))
    found: dict[str, Any] = {
        "bench": "serve",
        "ours": None,
        "unit": "ms",
        "goal": None,
        "met": None,
        "load": os.getloadavg()[0],
        "quick": quick,
    }
    async with running(app) as url:
        await measured(url, 200, 4)  # warm
        if only != "memory":
            found |= await timing(url, scale)
        if only != "timing":
            found |= await memory(url, scale)
    if found.get("met") is True and only is None:
        found["met"] = bool(found["memory"]["flat"])
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("timing", "memory"))
    options = parser.parse_args()
    result = asyncio.run(bench(options.only, options.quick))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if result["met"] is not None:
        result.pop("why", None)
    finish(result, timed=True)


if __name__ == "__main__":
    main()
