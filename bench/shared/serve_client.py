"""The client of `bench/serve.py`: a process that imports the standard library alone, so that it starts at once.

python serve_client.py HOST PORT FIRST NUM CONNECTIONS < BODY
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time


async def client(host: str, port: int, body: bytes, first: int, num: int, connections: int) -> dict[str, float]:
    """Send `num` requests over `connections`, counted from `first`, and say how long each took."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    seconds: list[float] = []
    numbers = itertools.count(first)

    async def one(count: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        for _ in range(count):
            request = head + body.replace(b"0000002", b"%07d" % next(numbers))
            began = time.perf_counter()
            writer.write(request)
            answered = await reader.readuntil(b"\r\n\r\n")
            assert answered.startswith(b"HTTP/1.1 200"), answered
            length = next(line for line in answered.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            seconds.append(time.perf_counter() - began)
        writer.close()
        await writer.wait_closed()

    began = time.perf_counter()
    await asyncio.gather(*[one(num // connections) for _ in range(connections)])
    wall = time.perf_counter() - began
    found = statistics.quantiles(seconds, n=100)
    return {
        "connections": connections,
        "requests": len(seconds),
        "p50_ms": 1e3 * found[49],
        "p99_ms": 1e3 * found[98],
        "requests_per_s": len(seconds) / wall,
    }


if __name__ == "__main__":
    host, port, *counts = sys.argv[1:]
    print(json.dumps(asyncio.run(client(host, int(port), sys.stdin.buffer.read(), *map(int, counts)))))
