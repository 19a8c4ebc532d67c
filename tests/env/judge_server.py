"""A chat endpoint on loopback that answers as planned."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        status, answer = self.server.plan.pop(0) if len(self.server.plan) > 1 else self.server.plan[0]
        if self.path.endswith("/chat/completions") and status == 200:
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


class JudgeServer(ThreadingHTTPServer):
    """Keeps the requests in `seen`; each takes the next (status, answer) of `plan`, the last one for good."""

    def __init__(self, *answers: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[Any] = []
        self.plan: list[tuple[int, Any]] = [(200, answer) for answer in answers]
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def judge_server(*answers: str) -> Iterator[JudgeServer]:
    """A server that gives these answers."""
    with JudgeServer(*answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
