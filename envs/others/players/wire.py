"""The player's side of the conversation with `agentrl.envs.others.outside`: JSON lines on stdin and stdout.

The adapter sends {"session", "start": index}, {"session", "reply": message} and {"session", "stop": true}. The
player sends {"ready": {...}} or {"failed": text} once, then {"session", "ask": {"messages", "tools"}} whenever
the policy is to speak, and {"session", "done": {"rewards", "error"}}. Messages are those of OpenAI's chat API,
with calls as {"id", "name", "arguments"}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TextIO

Json = dict[str, Any]


class Stopped(Exception):
    """The adapter ended the episode."""


async def contained(work: Coroutine[Any, Any, Any]) -> Any:
    """Await the code of a task: SystemExit and the like end its episode, not this program. Raises RuntimeError."""
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as e:
        raise RuntimeError(f"{type(e).__name__}: {e}") from e


def _task(loop: asyncio.AbstractEventLoop, work: Any, /, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(contained(work), loop=loop, **options)


class Session:
    """One episode.

    Attributes:
        index: the number of its task.
    """

    def __init__(self, wire: Wire, number: int, index: int) -> None:
        self.number, self.index, self.stopped = number, index, False
        self._wire, self._replies = wire, asyncio.Queue[Json | None]()

    async def ask(self, messages: Sequence[Json], tools: Sequence[Json]) -> Json:
        """The policy's next message. Raises Stopped."""
        if not self.stopped:
            self._wire.send({"session": self.number, "ask": {"messages": list(messages), "tools": list(tools)}})
            reply = await self._replies.get()
            if reply is not None:
                return reply
            self.stopped = True
        raise Stopped("the episode was ended")

    def done(self, rewards: Mapping[str, float], error: str | None = None) -> None:
        """Report the rewards, or why there are none."""
        self._wire.send({"session": self.number, "done": {"rewards": dict(rewards), "error": error}})
        self._wire.sessions.pop(self.number, None)

    def take(self, line: Json) -> None:
        """Pass on what the adapter sent."""
        self._replies.put_nowait(line.get("reply"))


class Wire:
    """Stdin and stdout as JSON lines. What the task prints goes to stderr, and its programs read nothing."""

    def __init__(self) -> None:
        self._in: TextIO = os.fdopen(os.dup(0), encoding="utf-8")
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.sessions: dict[int, Session] = {}

    def send(self, line: Json) -> None:
        """Write one line."""
        with self._lock:
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()

    def fail(self, text: str) -> None:
        """Say why no episode can be played, and exit."""
        self.send({"failed": text})
        sys.exit(1)

    def listen(self, start: Callable[[Session], None]) -> None:
        """Call `start` for each new episode, on the running loop; the process exits with stdin."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_task)

        def take(line: Json) -> None:
            number = line["session"]
            if "start" in line:
                session = self.sessions[number] = Session(self, number, line["start"])
                start(session)
            elif number in self.sessions:
                self.sessions[number].take(line)

        def read() -> None:
            for text in self._in:
                loop.call_soon_threadsafe(take, json.loads(text))
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
