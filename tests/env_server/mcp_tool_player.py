"""Solve a calculator task with OpenEnv's tool client: `mcp_tool_player.py URL SEED EXPRESSION ANSWER`."""

from __future__ import annotations

import asyncio
import json
import sys

from openenv.core.mcp_client import MCPToolClient


async def main(url: str, seed: int, expression: str, answer: str) -> None:
    async with MCPToolClient(base_url=url) as env:
        opening = await env.reset(seed=seed)
        tools = [tool.name for tool in await env.list_tools()]
        shown = await env.call_tool("calculator", expression=expression)
        ended = await env.call_tool("send_message", text=answer)
        steps = (await env.state()).step_count
    json.dump([opening.observation.prompt, tools, shown, ended, steps], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
