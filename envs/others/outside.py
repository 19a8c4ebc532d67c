"""Base of adapters whose tasks are played by a program in another Python, one process for all episodes.

The program (envs/others/players) runs the ecosystem's own loop, tools and scorer, and asks for the policy's
messages. So an ecosystem's package may need other versions than ours. A lost program is an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import collections
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias, cast

from agentrl.env.adapter import Adapter
from agentrl.env.env import StepInfo
from agentrl.env.tasks import Split
from agentrl.env.toolenv.observe import plain_text
from agentrl.errors import ConfigError, InfraError
from agentrl.scratch import ScratchFolder
from agentrl.types import CallRecord, Episode, Image, Message, Part, Role, StopReason, Task, ToolCall

JsonObject: TypeAlias = "dict[str, object]"
PLAYERS = Path(__file__).parent / "players"


class Player:
    """A program that plays the tasks of one name with one set of options.

    Raises:
        ConfigError: it cannot be started, or says why it cannot play.
    """

    def __init__(self, python: str, script: str, given: str, name: str) -> None:
        self.name, self._sessions, self._numbers = name, dict[int, Session](), itertools.count()
        self._lock, self._said = threading.Lock(), collections.deque[str](maxlen=20)
        self._scratch = ScratchFolder("player")
        command, pipe = [python, str(PLAYERS / script), given], subprocess.PIPE
        try:
            env = {**os.environ, "TMPDIR": str(self._scratch.path)}
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
        except OSError as e:
            self._scratch.close()
            raise ConfigError(f"env.options.python: cannot run {python!r}: {e.strerror}") from e
        atexit.register(self.stop)
        self._stdin, self._stdout, self._stderr = (
            cast("IO[bytes]", f) for f in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        first = _object(json.loads(self._stdout.readline() or b"{}"))
        if "ready" not in first:
            problem = first.get("failed") or f"cannot be played: {self.last_words()}"
            self.stop()
            self._stdout.close()
            raise ConfigError(f"env {name} {problem}")
        self.ids = [str(i) for i in cast("list[object]", _object(first["ready"])["ids"])]
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self._process.poll() is None

    def open(self, index: int) -> Session:
        """Start an episode of task `index`."""
        session = Session(self, next(self._numbers))
        self._sessions[session.number] = session
        self.send({"session": session.number, "start": index})
        return session

    def send(self, line: JsonObject) -> None:
        """Write one line. Raises InfraError."""
        try:
            with self._lock:
                self._stdin.write(json.dumps(line).encode() + b"\n")
                self._stdin.flush()
        except (OSError, ValueError):
            raise InfraError(f"{self.name}: its program ended: {self.last_words()}") from None

    def last_words(self) -> str:
        """The last line that the ended program wrote to stderr."""
        self._listener.join(timeout=5.0)
        return self._said[-1] if self._said else "it said nothing"

    def stop(self) -> None:
        """End the program and remove its folder: at exit, the reading thread is not waited for."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._scratch.close()

    def forget(self, session: Session) -> None:
        """Ignore what else an episode says."""
        self._sessions.pop(session.number, None)

    def _listen(self) -> None:
        with self._stderr:
            for text in self._stderr:
                if line := text.decode(errors="replace").strip():
                    self._said.append(line)

    def _read(self) -> None:
        with self._stdout:
            for text in self._stdout:
                line = _object(json.loads(text))
                if session := self._sessions.get(cast(int, line["session"])):
                    session.take(line)
        for session in list(self._sessions.values()):
            session.take({"lost": self.last_words()})
        self._scratch.close()


class Session:
    """One episode in a player."""

    def __init__(self, player: Player, number: int) -> None:
        self.player, self.number = player, number
        self._loop, self._lines = asyncio.get_running_loop(), asyncio.Queue[JsonObject]()

    def take(self, line: JsonObject) -> None:
        """Pass on a line; called by the player's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._lines.put_nowait, line)

    async def next(self) -> JsonObject:
        """The next line: `ask` or `done`. Raises InfraError."""
        line = await self._lines.get()
        if "lost" in line:
            raise InfraError(f"{self.player.name}: its program ended: {line['lost']}")
        return line

    def send(self, **said: object) -> None:
        """Send a line of this episode."""
        self.player.send({"session": self.number, **said})


_players: dict[tuple[str, str, str, str], Player] = {}
_starting = threading.Lock()


def player_of(python: str, script: str, given: str, name: str) -> Player:
    """The running player; one per process, started again, once, if it ended."""
    key = (python or sys.executable, script, given, name)
    with _starting:
        if (player := _players.get(key)) is None or not player.alive:
            player = _players[key] = Player(*key)
    return player


class OutsideEnv(Adapter):
    """A task that a player plays. A subclass defines `player`.

    A request that continues the conversation is the policy's next turn; any other is a separate conversation with
    the policy.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._tools: Sequence[Mapping[str, object]] = ()
        self._rewards: dict[str, float] | None = None

    @classmethod
    def player(cls) -> Player:
        """The player of this env. Raises ConfigError."""
        raise NotImplementedError

    @classmethod
    def check_name(cls) -> None:
        """Start the player. Raises ConfigError."""
        if cls.options.held_out not in ("fifth", "all"):
            raise ConfigError(f"env.options.held_out: {cls.options.held_out!r}: use fifth or all")
        cls.player()

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0) -> Sequence[Task]:
        """The tasks in order; every fifth is held out."""
        indices = list(range(len(ids := cls.player().ids)))
        if cls.options.held_out == "fifth" and len(ids) >= 5:
            indices = [i for i in indices if (i % 5 == 4) == (split == "held_out")]
        return [Task(ids[i], {"index": i}, seed + i) for i in indices]

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """The tools that the last request offered."""
        return self._tools

    async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, object]]:
        """Start the episode and wait for its first request."""
        await self.close()
        self._rewards, self._known = None, list[JsonObject]()
        player = await asyncio.to_thread(self.player)
        self._session = player.open(int(task.row["index"]))
        if not await self._advance():
            raise InfraError(f"{player.name}: task {task.id!r} ended before the policy was asked")
        return [read_message(m) for m in self._known], {}

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        """Send the message and wait for the next request, or the end.

        Raises:
            RuntimeError: the task failed.
        """
        assert self._session is not None
        errors = [Message("tool", f"Error: {error}") for error in message.parse_errors]
        if errors and not message.tool_calls:
            return errors, 0.0, False, False, StepInfo(metrics={"parse_error": float(len(errors))})
        metrics = {"parse_error": float(len(errors))} if errors else {}
        said = write_message(message)
        self._known.append(said)
        known = len(self._known)
        self._session.send(reply=said)
        if not await self._advance():
            reason = StopReason.TERMINATED if message.tool_calls else StopReason.ANSWERED
            return errors, 0.0, True, False, StepInfo(stop_reason=reason, metrics=metrics)
        new = [read_message(m) for m in self._known[known:]]
        info = StepInfo(calls=_records(message, new), metrics=metrics)
        return [*new, *errors], 0.0, False, False, info

    async def score(self, episode: Episode) -> Mapping[str, float]:
        """The scorer's values; an episode that was cut off is scored as it stands. Raises RuntimeError."""
        if self._rewards is None and self._session is not None:
            self._session.send(stop=True)
            while await self._advance():
                self._session.send(stop=True)
        return self._rewards or {}

    async def close(self) -> None:
        """End the episode."""
        if (session := self._session) is not None:
            self._session = None
            session.player.forget(session)
            if self._rewards is None and session.player.alive:
                session.send(stop=True)

    async def _advance(self) -> bool:
        """Wait for a request that continues the conversation; False if the episode is over."""
        assert self._session is not None
        while True:
            line = await self._session.next()
            if "done" in line:
                done = _object(line["done"])
                self._rewards = {}
                if done["error"] is not None:
                    raise RuntimeError(f"{self._session.player.name}: {done['error']}")
                self._rewards = {name: float(cast(float, r)) for name, r in _object(done["rewards"]).items()}
                return False
            ask = _object(line["ask"])
            messages = cast("list[JsonObject]", ask["messages"])
            if _continues(messages, self._known):
                self._tools, self._known = cast("list[JsonObject]", ask["tools"]), messages
                return True
            self._session.send(reply=await self._aside(messages, cast("list[JsonObject]", ask["tools"])))

    async def _aside(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> JsonObject:
        """Answer a request that does not continue the conversation."""
        if self.model is None:
            raise InfraError(
                f"{self.rest}: the task holds a second conversation with the policy, which this kind of "
                "run cannot hold; is the policy its own grader?"
            )
        return write_message(await self.model.chat([read_message(m) for m in messages], tools=tools))


def _records(message: Message, answers: Sequence[Message]) -> tuple[CallRecord, ...]:
    texts = {m.tool_call_id: plain_text(m.content) for m in answers if m.role == "tool"}
    return tuple(CallRecord(c, texts.get(c.id, ""), "ok", 0.0) for c in message.tool_calls)


def _continues(messages: Sequence[JsonObject], known: Sequence[JsonObject]) -> bool:
    return len(messages) > len(known) - (not known) and all(
        _identity(a) == _identity(b) for a, b in zip(messages, known, strict=False)
    )


def _identity(message: JsonObject) -> str:
    fields = {name: message.get(name) or None for name in ("role", "content", "tool_call_id")}
    calls = [[c["id"], c["name"]] for c in cast("list[JsonObject]", message.get("tool_calls") or [])]
    return json.dumps({**fields, "calls": calls}, sort_keys=True)


def write_message(message: Message) -> JsonObject:
    """The policy's message for the player."""
    said: JsonObject = {"role": "assistant", "content": plain_text(message.content)}
    if message.reasoning:
        said["reasoning"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {"id": c.id, "name": c.name, "arguments": plain_arguments(c)} for c in message.tool_calls
        ]
    return said


def plain_arguments(call: ToolCall) -> object:
    """The arguments as JSON has them; a policy may write any value."""
    given: object = call.arguments
    return dict(given) if isinstance(given, Mapping) else given


def read_message(said: JsonObject) -> Message:
    """A message of the player."""
    calls = tuple(
        ToolCall(str(c["id"]), str(c["name"]), cast("Mapping[str, object]", c["arguments"]))
        for c in cast("list[JsonObject]", said.get("tool_calls") or [])
    )
    role = cast(Role, said["role"])
    call, name = (said.get(key) for key in ("tool_call_id", "name"))
    return Message(role, _content(said.get("content")), calls, cast("str | None", call), cast("str | None", name))


def _content(content: object) -> str | tuple[Part, ...]:
    if not isinstance(content, list):
        return str(content or "")
    return tuple(_part(_object(part)) for part in content)


def _part(part: JsonObject) -> Part:
    if part.get("type") == "text":
        return str(part["text"])
    head, comma, data = str(_object(part["image_url"])["url"]).partition(",")
    if not comma:
        raise InfraError("an image of the task is not a data URL")
    return Image(base64.b64decode(data), head.removeprefix("data:").partition(";")[0])


def _object(value: object) -> JsonObject:
    return cast(JsonObject, value) if isinstance(value, dict) else {}
