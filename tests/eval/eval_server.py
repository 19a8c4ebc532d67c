"""A small OpenAI-compatible server on loopback whose model is a Python function."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Wire = Mapping[str, Any]
Answer = tuple[int, Mapping[str, Any], Mapping[str, str]]


@dataclass
class Server:
    """What the server was asked, and how it answers: `model` gets the messages, `trouble` the request's number."""

    model: Callable[[Sequence[Wire]], Wire]
    trouble: Callable[[int], Answer | None] = lambda number: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], key: str) -> Answer:
        with self.lock:
            self.requests.append(body)
            self.keys.append(key)
            number = len(self.requests)
        if (trouble := self.trouble(number)) is not None:
            return trouble
        said = self.model(body["messages"])
        finish = said.get("finish", "tool_calls" if said.get("tool_calls") else "stop")
        message = {"role": "assistant", "content": said.get("content")} | (
            {"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}
        )
        usage: Any = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        usage |= {"prompt_tokens_details": {"cached_tokens": 40}}
        usage = said.get("usage", usage)
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return (
            200,
            {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
            | {"usage": usage},
            {},
        )


def refusal(status: int, **error: Any) -> Answer:
    """An error in OpenAI's envelope."""
    return status, {"error": {"message": "no", "type": "x", "param": None, "code": None} | error}, {}


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            try:
                status, answer, headers = server.answer(body, self.headers.get("Authorization", ""))
            finally:
                with server.lock:
                    server.at_once -= 1
            data = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = False
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def solve(messages: Sequence[Wire]) -> Wire:
    """A model that solves the calculator's tasks: one call for the whole chain, then the number."""
    if messages[-1]["role"] == "tool":
        return {"content": messages[-1]["content"]}
    text = messages[-1]["content"]
    expression = re.findall(r"Start with (-?\d+)", text)[0]
    for word, number in re.findall(r"(Add|Subtract|Multiply by) (\d+)", text):
        expression = f"({expression}){ {'Add': '+', 'Subtract': '-', 'Multiply by': '*'}[word] }{number}"
    arguments = json.dumps({"expression": expression})
    call = {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return {"content": None, "tool_calls": [call]}


def guess(messages: Sequence[Wire]) -> Wire:
    """A model that never solves anything."""
    return {"content": "12345678"}
