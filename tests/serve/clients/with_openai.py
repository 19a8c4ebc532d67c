"""The openai SDK, as a while-loop with tools. Usage: with_openai.py PLAIN_URL STREAM_URL"""

import json
import sys

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def main(base_url: str, stream: bool) -> str:
    """The answer at the end of the loop."""
    client = OpenAI(base_url=base_url, api_key="none")
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    while True:
        if stream:
            with client.chat.completions.stream(model="tiny", messages=messages, tools=[TOOL]) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL]).choices[0].message
            )
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
            )


print([main(sys.argv[1], False), main(sys.argv[2], True)])  # noqa: T201
