"""pydantic-ai. Usage: with_pydantic_ai.py PLAIN_URL STREAM_URL"""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main(base_url: str, stream: bool) -> str:
    """The answer at the end of the loop."""
    agent = Agent(OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=base_url, api_key="none")))

    @agent.tool_plain
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    if not stream:
        return (await agent.run("What is 2 plus 3?")).output
    async with agent.iter("What is 2 plus 3?") as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as events:
                    async for _ in events:
                        pass
        return run.result.output


async def both() -> list[str]:
    """Plain and streamed, in one event loop: clients may keep connections."""
    return [await main(sys.argv[1], False), await main(sys.argv[2], True)]


print(asyncio.run(both()))  # noqa: T201
