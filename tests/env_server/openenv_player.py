"""Replay episodes with OpenEnv's clients: `openenv_player.py URL WIDTH`, run by the Python that has `openenv`.

Reads [[reset, [action, ...]], ...] and writes [[reward, metadata], ...]. All episodes of a batch of WIDTH are open
at the same time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openenv.core.generic_client import GenericEnvClient

Episode = tuple[dict[str, Any], list[dict[str, Any]]]


async def batch(url: str, episodes: list[Episode]) -> list[tuple[float, Any]]:
    everyone = asyncio.Barrier(len(episodes))

    async def one(reset: dict[str, Any], actions: list[dict[str, Any]]) -> tuple[float, Any]:
        total, result = 0.0, None
        async with GenericEnvClient(base_url=url, connect_timeout_s=60) as env:
            await env.reset(**reset)
            await everyone.wait()
            for action in actions:
                result = await env.step(action)
                total += float(result.reward or 0.0)
                if result.done:
                    break
        return total, result.observation["metadata"] if result else None

    return await asyncio.gather(*[one(*episode) for episode in episodes])


async def main() -> None:
    url, width = sys.argv[1], int(sys.argv[2])
    episodes = json.load(sys.stdin)
    found = []
    for start in range(0, len(episodes), width):
        found += await batch(url, episodes[start : start + width])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
