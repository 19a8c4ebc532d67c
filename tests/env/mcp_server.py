"""A small MCP server for the tests: `python mcp_server.py` speaks stdio, `python mcp_server.py PORT` HTTP."""

import os
import sys

from mcp.server import MCPServer

server = MCPServer("counter")
count = 0


@server.tool()
def add(amount: int = 1) -> int:
    """Add to the counter."""
    global count
    count += amount
    return count


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("out of order")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(1)


@server.tool()
async def hang() -> str:
    """Never answers."""
    import asyncio

    await asyncio.sleep(1e6)
    return "never"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
