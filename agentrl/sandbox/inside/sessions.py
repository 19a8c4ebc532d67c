"""Long-lived programs: bash, a Python interpreter, SQLite. Orders arrive in frames, not as text to scan."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ast
import contextlib
import fcntl
import json
import os
import select
import sys
import types
from collections.abc import Iterator
from typing import Any

from . import child, frames, kernel, tree

with contextlib.suppress(ImportError):
    # `compile` imports it for non-ASCII names: not from the programs' folder.
    import unicodedata  # noqa: F401

BASH_LOOP = """
while IFS= builtin read -r -d '' -u {link} __id && IFS= builtin read -r -d '' -u {link} __command; do
  builtin eval "$__command" {link}>&-
  __status=$?
  if [[ -o posix ]]; then
    unset -f builtin
  else
    POSIXLY_CORRECT=1
    unset -f builtin
    unset POSIXLY_CORRECT
  fi
  builtin printf '%s %s\\n' "$__id" "$__status" >&{link}
done
"""
"""Commands may define functions of any name. Only in POSIX mode, which an assignment enables, is `unset` looked up
before a function of that name; with no function `builtin` left, that bypasses all others."""


def serve(kind: str, control: int, scope: dict[str, Any]) -> int:
    """Become the session; answers are lines of `id status` on the control descriptor."""
    # Whatever the session starts remains its descendant, so that ending the session ends everything.
    with contextlib.suppress(OSError):  # gVisor lacks this: orphans end with the call
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if kind == "bash":
        link = (
            10 + int.from_bytes(os.urandom(2), "big") % 20
        )  # no command relies on a number; bash keeps its own at 255
        os.dup2(control, link)
        os.close(control)
        for name in ("BASH_ENV", "POSIXLY_CORRECT", "SHELLOPTS", "BASHOPTS"):
            os.environ.pop(name, None)
        return child.execute(["bash", "--norc", "--noprofile", "-c", BASH_LOOP.format(link=link), "bash"])
    # Moved away from low numbers, and not inherited by what the session starts.
    link = fcntl.fcntl(control, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(control)
    os.register_at_fork(after_in_child=lambda: os.close(link))
    answer = _sqlite() if kind == "sqlite" else _python(scope)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)  # a late interrupt must not cut a frame
    for number, payload in _orders(link):
        try:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            status = answer(payload)
        except KeyboardInterrupt:
            status = 130
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        frames.write_all(link, b"%s %d\n" % (number, status))
    return 0


def _orders(link: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the number and text of each order until the supervisor is gone; usually read in one go."""
    left = b""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while data := os.read(link, 1 << 16):
        left = left + data if left else data
        while len(left) >= frames.LENGTHS.size:
            head, payload = frames.LENGTHS.unpack_from(left)
            begin, end = frames.LENGTHS.size + head, frames.LENGTHS.size + head + payload
            if end > len(left):
                try:
                    left += frames.read_exactly(link, end - len(left))
                except EOFError:
                    return
            number, text, left = left[frames.LENGTHS.size : begin], left[begin:end], left[end:]
            yield number, text
        tree.linger(poll)  # calls arrive in bursts


def _python(scope: dict[str, Any]) -> Any:
    """Run an interpreter with one persistent `__main__`; prints the value of a final expression, like a
    notebook."""
    sys.argv = [""]
    sys.path.insert(0, "")
    cells: dict[str, bytes] = {}

    def run(payload: bytes) -> int:
        name, status = f"<cell {len(cells) + 1}>", 0
        cells[name] = payload
        try:
            code, last = _compiled(payload, name)
            if code is not None:
                exec(code, scope)
            if last is not None:
                sys.displayhook(eval(last, scope))
        except SystemExit as error:
            status = child.exit_status(error)
        except BaseException as error:
            child.show_exception(error, cells)
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                status = status or 120
        return status

    return run


def _compiled(payload: bytes, name: str) -> tuple[types.CodeType | None, types.CodeType | None]:
    """Split a cell into (statements, final expression). Raises SyntaxError and the like."""
    if not payload[:1].isspace():  # which `eval` would forgive
        try:
            return None, compile(payload, name, "eval", dont_inherit=True)  # fast path for short cells
        except Exception:
            pass
    # Not `ast.parse`, whose frame would be in the traceback of a SyntaxError.
    tree: Any = compile(payload, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    code = compile(tree, name, "exec", dont_inherit=True)
    if not isinstance(last, ast.Expr):
        return code, None
    return code, compile(ast.Expression(last.value), name, "eval", dont_inherit=True)


def _sqlite() -> Any:
    """Run a connection to one database file; an order is {"database", "sql", "parameters", "max_rows"}."""
    import sqlite3  # not from the programs' folder: see child.SITE

    connections: dict[str, sqlite3.Connection] = {}
    failures = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError, KeyboardInterrupt)

    def run(payload: bytes) -> int:
        order = json.loads(payload)
        path = order["database"]
        try:
            if path not in connections:
                connections[path] = sqlite3.connect(path, isolation_level=None)
            cursor = connections[path].cursor()
            sql, parameters = order["sql"], order["parameters"]
            changed = 0
            for number, statement in enumerate([sql] if parameters is not None else _statements(sql)):
                if number:
                    for _ in cursor:  # only the rows of the last statement are shown
                        pass
                    changed += max(cursor.rowcount, 0)
                cursor.execute(statement, parameters or ())
            columns = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchmany(order["max_rows"] + 1) if columns else []
            more = len(rows) > order["max_rows"]
            shown = [[_plain(value) for value in row] for row in rows[: order["max_rows"]]]
            answer = {
                "columns": columns,
                "rows": shown,
                "more": more,
                "changed": changed + max(cursor.rowcount, 0),
            }
            frames.write_all(1, json.dumps(answer).encode())
            return 0
        except failures as error:
            frames.write_all(2, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
            return 1

    def _statements(sql: str) -> list[str]:
        """Split a text into its statements. `executescript` would commit a transaction that is open."""
        found, begin = [], 0
        for end in (i + 1 for i, c in enumerate(sql) if c == ";"):
            if sqlite3.complete_statement(sql[begin:end]):
                found.append(sql[begin:end])
                begin = end
        found = [text for text in [*found, sql[begin:]] if not _is_blank(text)]
        return found or [sql]

    return run


def _is_blank(sql: str) -> bool:
    """Return whether the text has only spaces, semicolons and comments."""
    left = sql.lstrip(" \t\n\f\r;")
    while left.startswith(("--", "/*")):
        left = left.partition("\n" if left.startswith("--") else "*/")[2].lstrip(" \t\n\f\r;")
    return not left


def _plain(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


child.SESSIONS = sys.modules[__name__]
