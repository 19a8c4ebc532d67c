"""The anthropic SDK, as a while-loop with tools. Usage: with_anthropic.py PLAIN_URL STREAM_URL"""

import sys

from anthropic import Anthropic

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def main(base_url: str, stream: bool) -> str:
    """The answer at the end of the loop."""
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    while True:
        asked = {"model": "tiny", "max_tokens": 500, "messages": messages, "tools": [TOOL]}
        counted = client.messages.count_tokens(**{k: v for k, v in asked.items() if k != "max_tokens"})
        if stream:
            with client.messages.stream(**asked) as events:
                kinds = [event.type for event in events]
                message = events.get_final_message()
            assert kinds[0] == "message_start", kinds
            assert kinds[-1] == "message_stop", kinds
        else:
            message = client.messages.create(**asked)
        assert counted.input_tokens > 0
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


print([main(sys.argv[1], False), main(sys.argv[2], True)])  # noqa: T201
