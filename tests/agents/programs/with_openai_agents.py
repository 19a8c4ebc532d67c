"""Buttons, played with openai-agents: the tool presses, the SDK runs the loop."""

import asyncio
import json
import sys

from agents import Agent, FunctionTool, Runner, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
task = json.load(sys.stdin)
pressed = ["nothing"]


async def press(context: object, arguments: str) -> str:
    pressed.append(str(json.loads(arguments).get("colour")))
    return f"It is {pressed[-1]}."


def tool(schema: dict) -> FunctionTool:
    function = schema["function"]
    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=press,
        strict_json_schema=False,
    )


async def main() -> None:
    system, *rest = task["messages"]
    agent = Agent(
        name="buttons", instructions=system["content"], model="policy", tools=[tool(t) for t in task["tools"]]
    )
    await Runner.run(agent, rest, max_turns=4)
    sys.stdout.write(pressed[-1])


asyncio.run(main())
