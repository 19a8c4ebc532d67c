"""An agent that knows nothing of agentrl: the `openai` client, one tool, a while-loop.

agentrl calls `solve` once for each episode. Any endpoint would do as well:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "Start with 4. Add 7."
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from fractions import Fraction
from typing import Any

from openai import AsyncOpenAI

SYSTEM = "Use the calculator, then answer with the number."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate arithmetic.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def calculator(expression: str) -> str:
    """The value of an expression of whole numbers, + - * and parentheses."""
    if not re.fullmatch(r"[\d\s()+*-]{1,60}", expression) or "**" in expression:
        raise ValueError("only whole numbers, + - * and ( )")
    return str(Fraction(eval(expression, {"__builtins__": {}})))


async def solve_task(client: AsyncOpenAI, model: str, prompt: str) -> str:
    """Let the model call the calculator until it answers."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    while True:
        answer = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except Exception as e:
                result = f"Error: {e}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def solve(task: dict[str, Any], access: Any) -> str:
    """One episode: `task` is its data, `access` has the client (and `base_url` and `api_key` for any other)."""
    return await solve_task(access.client(), access.model, task["prompt"])


async def main() -> None:
    """One episode as a program: the client reads OPENAI_BASE_URL and OPENAI_API_KEY by itself."""
    async with AsyncOpenAI() as client:
        print(await solve_task(client, os.environ.get("OPENAI_MODEL", "policy"), sys.argv[1]))


if __name__ == "__main__":
    asyncio.run(main())
