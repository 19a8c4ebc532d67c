"""litellm. Usage: with_litellm.py PLAIN_URL STREAM_URL"""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-up in the network

import litellm

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
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    while True:
        answer = litellm.completion(
            model="openai/tiny", base_url=base_url, api_key="none", messages=messages, tools=[TOOL], stream=stream
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
            )


print([main(sys.argv[1], False), main(sys.argv[2], True)])  # noqa: T201
