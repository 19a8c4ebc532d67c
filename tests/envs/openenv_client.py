"""Replay actions with OpenEnv's own client: reads [[reset, [action, ...]], ...], writes [[reward, done], ...]."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient


async def episode(url: str, reset: dict[str, Any], actions: list[dict[str, Any]]) -> tuple[float, bool]:
    total, done = 0.0, False
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(**reset)
        for action in actions:
            try:
                result = await env.step(action)
            except RuntimeError:  # the server rejected the action
                continue
            total, done = total + float(result.reward or 0.0), bool(result.done)
    return total, done


async def main() -> None:
    turns = asyncio.Semaphore(16)

    async def one(reset: dict[str, Any], actions: list[dict[str, Any]]) -> tuple[float, bool]:
        async with turns:
            return await episode(sys.argv[1], reset, actions)

    json.dump(await asyncio.gather(*[one(*item) for item in json.load(sys.stdin)]), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
