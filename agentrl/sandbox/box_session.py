"""A program in a sandbox that keeps its state between calls: a shell, an interpreter or a database."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.errors import SandboxError
from agentrl.sandbox.contract import GRACE_S, ExecResult, SandboxLimits, SessionKind, narrowed
from agentrl.sandbox.results import result_of

if TYPE_CHECKING:
    from agentrl.sandbox.box import Box


class BoxSession:
    """A program in a box that keeps its state between calls; see Box.session."""

    def __init__(self, box: Box, kind: SessionKind) -> None:
        self.box, self.kind = box, kind
        self._name = ""

    async def restart(self) -> None:
        """End the program if it is running, and start a new one."""
        box = self.box
        limits = {name: value for name, value in box.spec.rlimits().items() if name != "CPU"}
        async with box._lock:
            if self._name:
                await box._exchange({"op": "close", "session": self._name}, b"", GRACE_S)
                box._open_sessions.discard(self._name)
            box._sessions += 1
            self._name = f"{self.kind}{box._sessions}"
            box._open_sessions.add(self._name)
            await box._exchange(
                {"op": "open", "kind": "python_session" if self.kind == "python" else self.kind,
                 "session": self._name, "rlimits": limits}, b"", GRACE_S,
            )  # fmt: skip

    async def run(
        self, command: str, *, wall_s: float | None = None, limits: SandboxLimits | None = None
    ) -> ExecResult:
        """Run a command line or Python code. A timeout interrupts it; if that does not help, the session is lost.

        Background jobs live as long as their session.
        """
        return await self._call(command.encode("utf-8", "surrogatepass"), narrowed(self.box.spec, wall_s, limits))

    async def query(
        self,
        sql: str,
        parameters: Sequence[object] | None = None,
        *,
        database: str = "data.db",
        max_rows: int = 1000,
        wall_s: float | None = None,
    ) -> QueryResult:
        """Run SQL in a sqlite session; multiple statements are allowed if there are no parameters.

        The rows are those of the last statement, and `changed` counts the rows that all of them changed.
        """
        if self.kind != "sqlite":
            raise ValueError(f"query on a {self.kind} session: open one of kind 'sqlite'")
        order = {"database": database, "sql": sql, "parameters": parameters, "max_rows": max_rows}
        limits = narrowed(self.box.spec, wall_s, None)
        result = await self._call(json.dumps(order).encode(), limits)
        if result.ok and not result.truncated:
            return _query_result(result)
        return QueryResult(result=result)

    async def _call(self, code: bytes, limits: SandboxLimits) -> ExecResult:
        box, told = self.box, limits.call_limits()
        box._used = True
        for restarts in range(3):
            if restarts:
                await self.restart()
            async with box._lock:
                answer, output = await box._call({"op": "call", "session": self._name}, code, told)
            if not answer.get("gone"):
                break
        else:  # new sessions could not start: what runs in the sandbox leaves no room for another process
            text = b"sandbox: the session could not begin: no process can be started\n"
            return ExecResult("exit", 126, None, b"", text, 0, len(text), 0.0, 0.0, session_lost=True)
        result = result_of(answer, output)
        if result.session_lost:
            await self.restart()
        return result

    async def close(self) -> None:
        """End the session and everything it started; does nothing if the sandbox is already gone."""
        name, self._name = self._name, ""
        if name:
            with contextlib.suppress(SandboxError):
                async with self.box._lock:
                    await self.box._exchange({"op": "close", "session": name}, b"", GRACE_S)
                    self.box._open_sessions.discard(name)

    async def __aenter__(self) -> BoxSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass
class QueryResult:
    """Rows of a query; `result` is the program's outcome, with database errors in its stderr."""

    result: ExecResult
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    more: bool = False
    changed: int = 0


def _query_result(result: ExecResult) -> QueryResult:
    """Parse the database's answer. What another program has put into it becomes a result with exit code 126."""
    try:
        said = json.loads(result.stdout)
        columns, rows, more, changed = (said.pop(name) for name in ("columns", "rows", "more", "changed"))
        right = not said and type(columns) is type(rows) is list and type(more) is bool and type(changed) is int
        if right and all(type(row) is list and len(row) == len(columns) for row in rows):
            return QueryResult(result, columns, rows, more, changed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    text = b"sandbox: the answer of the database has been tampered with\n"
    return QueryResult(replace(result, exit_code=126, stdout=b"", stderr=text))
