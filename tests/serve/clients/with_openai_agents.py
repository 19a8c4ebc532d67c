"""openai-agents over chat completions and over responses. Usage: with_openai_agents.py PLAIN_URL STREAM_URL"""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def main(base_url: str, stream: bool) -> str:
    """The answers over both interfaces, joined."""
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    answers = []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="tiny", openai_client=client)
        agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
        if stream:
            result = Runner.run_streamed(agent, "What is 2 plus 3?")
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "What is 2 plus 3?")
        answers.append(result.final_output)
    await client.close()
    assert len(set(answers)) == 1, answers
    return answers[0]


async def both() -> list[str]:
    """Plain and streamed, in one event loop: clients may keep connections."""
    return [await main(sys.argv[1], False), await main(sys.argv[2], True)]


print(asyncio.run(both()))  # noqa: T201
