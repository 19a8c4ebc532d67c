"""The sessions of a server: how many there may be, and which have been idle for too long."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from agentrl.async_tasks import spawn
from agentrl.env_server.served import EnvSource
from agentrl.env_server.session import EnvSession


class SessionsFull(Exception):
    """All sessions are taken."""


@dataclass(slots=True)
class _Slot:
    session: EnvSession
    used: float
    attached: bool = False
    """Whether a WebSocket holds the session, which then never idles out."""


@dataclass(slots=True)
class Sessions:
    """The open sessions by id."""

    source: EnvSource
    max_sessions: int = 64
    idle_s: float = 900.0
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that are closing sessions."""
    _open: dict[str, _Slot] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def create(self, *, attached: bool = False) -> EnvSession:
        """A new session. Raises SessionsFull."""
        if len(self._open) >= self.max_sessions:
            raise SessionsFull(f"all {self.max_sessions} sessions are taken; close one, or raise --max-sessions")
        session = EnvSession(self.source, uuid.uuid4().hex)
        self._open[session.id] = _Slot(session, time.monotonic(), attached)
        return session

    def get(self, session_id: object) -> EnvSession | None:
        """The session with this id, whose idle time starts again."""
        slot = self._open.get(session_id) if isinstance(session_id, str) else None
        if slot is None:
            return None
        slot.used = time.monotonic()
        return slot.session

    def attach(self, session_id: str) -> EnvSession | None:
        """Tie a session to a WebSocket; None if there is none or it is already tied to one."""
        session, slot = self.get(session_id), self._open.get(session_id)
        if session is None or slot is None or slot.attached:
            return None
        slot.attached = True
        return session

    def detach(self, session_id: str) -> None:
        """Release a session that a WebSocket held without closing it."""
        if slot := self._open.get(session_id):
            slot.attached, slot.used = False, time.monotonic()

    async def close(self, session_id: str) -> bool:
        """Close a session, even if cancelled, and return whether it was open. Its place is free at once."""
        slot = self._open.pop(session_id, None)
        if slot is not None:
            await asyncio.shield(self._close(slot.session))
        return slot is not None

    def _close(self, session: EnvSession) -> asyncio.Task[None]:
        return spawn(self.closing, session.close())

    async def close_all(self) -> None:
        """Close every session, and wait for those that are closing."""
        while self._open:
            self._close(self._open.popitem()[1].session)
        if self.closing:
            await asyncio.wait(self.closing)

    async def watch(self) -> None:
        """Close sessions without a connection that have been idle for `idle_s`; runs until cancelled."""
        while True:
            await asyncio.sleep(min(self.idle_s / 4, 15.0))
            now = time.monotonic()
            for slot in self._open.values():
                if slot.attached or slot.session.busy:
                    slot.used = now
            for key in [key for key, slot in self._open.items() if slot.used < now - self.idle_s]:
                self._close(self._open.pop(key).session)
