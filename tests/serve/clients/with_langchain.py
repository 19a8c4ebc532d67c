"""langchain-openai. Usage: with_langchain.py PLAIN_URL STREAM_URL"""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def main(base_url: str, stream: bool) -> str:
    """The answer at the end of the loop."""
    model = ChatOpenAI(model="tiny", base_url=base_url, api_key="none").bind_tools([add])
    messages = [HumanMessage("What is 2 plus 3?")]
    while True:
        if stream:
            pieces = list(model.stream(messages))
            answer = pieces[0]
            for piece in pieces[1:]:
                answer = answer + piece
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content
        for call in answer.tool_calls:
            messages.append(ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"]))


print([main(sys.argv[1], False), main(sys.argv[2], True)])  # noqa: T201
