"""Search the episodes of many runs: an SQLite index in the user's cache, made from the files and never the truth.

A file of episodes is indexed again when its size or time changes; a damaged index is replaced. Run folders are
only read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import regex
from pydantic_core import from_json

from agentrl.errors import CheckpointError, ConfigError
from agentrl.run_folder.records import episode_lines, recorded_file, recorded_steps
from agentrl.run_folder.tags import read_tags

T = TypeVar("T")

VERSION = 6
REGEX_S = 5.0
"""How long a search by regular expression may take; some patterns would take years."""
MAX_TEXT = 4_000_000
"""Characters of an episode that are searched; `Found.cut` counts the episodes that have more."""
BATCH = 4_000_000
"""Characters of episodes that are held in memory while a file is indexed."""
MAX_PATTERN = 10_000
"""Characters of a text that SQL's `like` takes."""
SNIPPET = 80
"""Characters around a match."""
_UNIT, _RECORD = "\x1f", "\x1e"  # around a call, and between its tool and its outcome

_SCHEMA = """
create table if not exists files(
    id integer primary key, run blob, step integer, size integer, mtime integer, problem text, unique(run, step));
create table if not exists episodes(
    id integer primary key, file integer, step integer, episode text, task_group integer, task text, reward real,
    stop text, calls text, cut integer, body text);
create index if not exists episodes_file on episodes(file);
create index if not exists episodes_cut on episodes(cut) where cut > 0;
create index if not exists episodes_rows on episodes(step desc, id, file, reward, stop, task, calls);
"""


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for; what is None does not restrict.

    Attributes:
        text: a part of what was said, in any case; a regular expression where `regex` is set.
        outcome: of a call of `tool`, or of any tool; `parse_error` finds calls that could not be parsed.
        run: the path of one run.
        tag: of the runs to search.
    """

    text: str = ""
    regex: bool = False
    tool: str | None = None
    outcome: str | None = None
    stop: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    step_min: int | None = None
    step_max: int | None = None
    task: str | None = None
    run: Path | None = None
    limit: int = 50
    offset: int = 0
    worst_first: bool = False
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """One episode that was found; `snippet` is the text around the match."""

    run: Path
    step: int
    episode: str
    group: int
    task: str
    reward: float | None
    stop_reason: str
    snippet: str


@dataclass(frozen=True, slots=True)
class Found:
    """A page of hits, and how many there are in all.

    Attributes:
        cut: episodes within the other limits of the query whose text is longer than `MAX_TEXT`: only that much of
            it was searched.
    """

    total: int
    cut: int
    hits: tuple[Hit, ...]
    seconds: float


def cache_folder() -> Path:
    """Where the index lives: below XDG_CACHE_HOME or ~/.cache, else among temporary files."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for folder in (base / "agentrl", Path(tempfile.gettempdir()) / f"agentrl-{os.getuid()}"):
        if folder.parts[0] == "~":
            continue  # the user has no home
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise ConfigError("no folder for the search index: set XDG_CACHE_HOME to one that can be written")


def open_index(runs: Sequence[Path], file: Path | None = None) -> Index:
    """The index over some runs; call `refresh` before searching.

    Args:
        file: the database; by default one in the cache for all runs.
    """
    if file is None:
        folder = cache_folder()
        file = folder / f"episodes-{VERSION}.sqlite"
        for older in range(1, VERSION):  # nothing reads them any more, and they are large
            for part in ("", "-wal", "-shm"):
                (folder / f"episodes-{older}.sqlite{part}").unlink(missing_ok=True)
    return Index(runs, file)


class Index:
    """Episodes of some runs in an SQLite file that several processes may use. Safe to use from several threads."""

    def __init__(self, runs: Sequence[Path], file: Path) -> None:
        self.runs, self.file = [run.resolve() for run in runs], file
        self._lock = threading.Lock()

    def refresh(self) -> int:
        """Index what has changed since the last time; returns the number of episodes indexed.

        Raises:
            ConfigError: the disk is full.
        """
        with self._lock:
            try:
                return self._refresh()
            except sqlite3.DatabaseError as e:
                if isinstance(e, sqlite3.OperationalError) and "locked" in str(e):
                    return 0  # another viewer is indexing the same files
                if "is full" in str(e):
                    raise ConfigError(
                        f"{self.file}: the search index cannot be written: {e}; free some space there, or set "
                        "XDG_CACHE_HOME to another folder"
                    ) from None
                return self._rebuild()

    def search(self, query: Query) -> Found:
        """The episodes that match, newest step first, or lowest reward first; a damaged index is rebuilt before.

        Raises:
            ConfigError: the regular expression is not valid.
        """
        started = time.perf_counter()
        try:
            found = self._whole(lambda: self._found(query))
        except sqlite3.OperationalError as e:
            if not query.regex or "user-defined function" not in str(e):
                raise
            raise ConfigError(
                f"{query.text[:80]!r} took more than {REGEX_S:g} s to find: write a simpler regular expression "
                "or search fewer steps"
            ) from None
        return replace(found, seconds=time.perf_counter() - started)

    def _found(self, query: Query) -> Found:
        with self._open() as db:
            where, values = self._where(replace(query, text=""), db)
            (cut,) = db.execute(f"select count(*) from episodes {where} and cut > 0", values).fetchone()
            where, values = self._where(query, db)
            order = "episodes.reward is not null, episodes.reward, " if query.worst_first else ""
            sought = f"select id from episodes {where} order by {order}step desc, id"
            # Texts are looked through once, to count and to find.
            ids = [id for (id,) in db.execute(sought, values)]
            first = max(0, query.offset)
            hits = tuple(_hit(db, id, query) for id in ids[first : first + max(0, query.limit)])
        return Found(len(ids), cut, hits, 0.0)

    def calls(self) -> set[tuple[str, str]]:
        """The tools that were called, each with the outcomes its calls had; without a name, one of calls that
        could not be parsed."""

        def read() -> list[tuple[str]]:
            with self._open() as db:
                where, values = self._where(Query(), db)
                return db.execute(f"select distinct calls from episodes {where}", values).fetchall()

        found = re.compile(f"{_UNIT}(.*?){_RECORD}(.*?){_UNIT}", re.DOTALL)
        return {(tool, outcome) for (calls,) in self._whole(read) for tool, outcome in found.findall(calls)}

    def problems(self) -> list[str]:
        """The files that could not be read, with the reason."""

        def read() -> list[tuple[bytes, str]]:
            with self._open() as db:
                return db.execute("select run, problem from files where problem is not null").fetchall()

        return [problem for run, problem in self._whole(read) if Path(os.fsdecode(run)) in self.runs]

    def _whole(self, read: Callable[[], T]) -> T:
        """What `read` returns, from a new index if this one is damaged."""
        try:
            return read()
        except sqlite3.DatabaseError as e:
            if not _is_damage(e):
                raise
            with self._lock:
                self._rebuild()
            return read()

    def _rebuild(self) -> int:
        for leftover in (self.file, *(Path(f"{self.file}-{end}") for end in ("wal", "shm"))):
            leftover.unlink(missing_ok=True)
        return self._refresh()

    def _refresh(self) -> int:
        done = 0
        with self._open() as db:
            for run in self.runs:
                known = {
                    step: (id, size, mtime)
                    for id, step, size, mtime in db.execute(
                        "select id, step, size, mtime from files where run = ?", [os.fsencode(run)]
                    )
                }
                there = recorded_steps(run)
                for step in known.keys() - set(there):
                    _forget(db, known[step][0])
                for step in there:
                    try:
                        stat = recorded_file(run, step).stat()
                    except OSError:
                        continue
                    if step in known:
                        if known[step][1:] == (stat.st_size, stat.st_mtime_ns):
                            continue
                        _forget(db, known[step][0])
                    done += _add(db, run, step, stat)
                    db.commit()
            db.commit()
        return done

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=5)) as db:
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = off")
            db.executescript(_SCHEMA)
            yield db

    def _where(self, query: Query, db: sqlite3.Connection) -> tuple[str, list[object]]:
        runs = self.runs if query.run is None else [query.run.resolve()]
        if query.tag is not None:
            runs = [run for run in runs if query.tag in read_tags(run)]
        # The plus keeps this from choosing the order in which episodes are read.
        parts = [f"+file in (select id from files where run in ({', '.join('?' * len(runs))}))"]
        values: list[object] = [os.fsencode(run) for run in runs]
        conditions: tuple[tuple[str, str, object], ...] = (
            ("stop", "=", query.stop),
            ("task", "=", query.task),
            ("reward", ">=", query.reward_min),
            ("reward", "<=", query.reward_max),
            ("step", ">=", query.step_min),
            ("step", "<=", query.step_max),
        )
        for column, sign, value in conditions:
            if value is not None:
                parts.append(f"{column} {sign} ?")
                values.append(value)
        if query.tool is not None or query.outcome is not None:
            before = "" if query.tool is None else f"{_UNIT}{query.tool}"
            after = "" if query.outcome is None else f"{query.outcome}{_UNIT}"
            parts.append("instr(calls, ?) > 0")
            values.append(f"{before}{_RECORD}{after}")
        if query.text:
            condition, sought = _matching(query, db)
            parts.append(condition)
            values.append(sought)
        return f"where {' and '.join(parts)}", values


def _matching(query: Query, db: sqlite3.Connection) -> tuple[str, object]:
    """The condition on the text."""
    if query.regex:
        try:
            pattern = regex.compile(query.text, regex.IGNORECASE)
        except (regex.error, RecursionError, OverflowError) as e:
            raise ConfigError(f"{query.text[:80]!r} is not a regular expression: {e}") from None
        until = time.monotonic() + REGEX_S

        def matches(body: str) -> bool:
            return pattern.search(body, timeout=max(until - time.monotonic(), 1e-3)) is not None

        db.create_function("matches", 1, matches, deterministic=True)
        # What an expression begins with is found faster without it.
        contained, beginning = _contains(_beginning(query.text), db)
        return f"({contained} and matches(body))", beginning
    return _contains(query.text, db)


def _contains(text: str, db: sqlite3.Connection) -> tuple[str, object]:
    """The condition that a text is in a body, in any case."""
    if len(text) > MAX_PATTERN or not text.isascii():  # `like` ignores the case of ASCII letters only
        db.create_function("holds", 2, lambda body, sought: sought in body.casefold(), deterministic=True)
        return "holds(body, ?)", text.casefold()
    for sign in "!%_":
        text = text.replace(sign, "!" + sign)
    return "body like ? escape '!'", f"%{text}%"


def _hit(db: sqlite3.Connection, id: int, query: Query) -> Hit:
    columns = "files.run, episodes.step, episode, task_group, task, reward, stop, body"
    sought = f"select {columns} from episodes join files on files.id = episodes.file where episodes.id = ?"
    run, *rest, body = db.execute(sought, [id]).fetchone()
    return Hit(Path(os.fsdecode(run)), *(*rest, _snippet(body, query)))


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is damaged, as opposed to a lock, a full disk or a wrong query."""
    if isinstance(error, sqlite3.OperationalError):
        return any(text in str(error) for text in ("no such table", "no such column", "disk I/O error"))
    return type(error) is sqlite3.DatabaseError


def _beginning(pattern: str) -> str:
    """Text with which every match of a regular expression begins; empty where that is not sure."""
    literal = re.match(r"[A-Za-z0-9 _:;,/@#%&=\"'<>-]*", pattern)
    if literal is None or "|" in pattern:
        return ""
    rest = pattern[literal.end() :]
    return literal[0][:-1] if rest[:1] in ("*", "?", "{", "+") else literal[0]


def _forget(db: sqlite3.Connection, file: int) -> None:
    db.execute("delete from episodes where file = ?", [file])
    db.execute("delete from files where id = ?", [file])


def _add(db: sqlite3.Connection, run: Path, step: int, stat: os.stat_result) -> int:
    """Index one file; what is whole before a damaged place is kept."""
    values = [os.fsencode(run), step, stat.st_size, stat.st_mtime_ns]
    file = db.execute("insert or replace into files(run, step, size, mtime) values (?, ?, ?, ?)", values).lastrowid
    rows: list[tuple[object, ...]] = []
    done = size = 0
    try:
        for line in episode_lines(run, step):
            rows.append((file, step, *_row(line)))
            size += len(line)
            if size > BATCH:
                done, size = done + _insert(db, rows), 0
                rows.clear()
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        db.execute("update files set problem = ? where id = ?", [str(e)[:500] or type(e).__name__, file])
    return done + _insert(db, rows)


def _insert(db: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> int:
    columns = "file, step, episode, task_group, task, reward, stop, calls, cut, body"
    db.executemany(f"insert into episodes({columns}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    return len(rows)


def _row(line: bytes) -> tuple[object, ...]:
    record = from_json(line)
    episode = record["episode"]
    texts: list[str] = []
    for message in episode["messages"]:
        content = message["content"]
        texts += [content] if isinstance(content, str) else [part for part in content if isinstance(part, str)]
        if message.get("reasoning"):
            texts.append(message["reasoning"])
        texts += [f"{call['name']}({_arguments(call['arguments'])})" for call in message.get("tool_calls", ())]
    if episode.get("error"):
        texts.append(episode["error"])
    calls = [
        f"{_UNIT}{call['call']['name']}{_RECORD}{call['outcome']}{_UNIT}"
        for turn in episode["turns"]
        for call in turn.get("calls", ())
    ]
    if any(turn["message"].get("parse_errors") for turn in episode["turns"]):
        calls.append(f"{_UNIT}{_RECORD}parse_error{_UNIT}")
    reward = episode.get("reward")
    text = "\n".join(texts)
    body = text[:MAX_TEXT].replace("\0", " ").encode("utf-8", "replace").decode()  # SQL's `like` ends at a NUL
    return (
        *(episode["id"], int(record["group"]), str(episode["task"]["id"])),
        *(float(reward) if reward is not None else None, episode["stop_reason"], "".join(calls)),
        *(max(0, len(text) - MAX_TEXT), body),
    )


def _arguments(arguments: dict[str, object]) -> str:
    """Arguments as `show` prints them, but without escapes in texts, which nobody would search for."""
    return ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in arguments.items()
    )


def _snippet(body: str, query: Query) -> str:
    at, end = 0, 0
    if query.text:
        begins = query.text[:SNIPPET]  # compiling thousands of characters takes minutes
        pattern = query.text if query.regex else re.escape(begins)
        with contextlib.suppress(TimeoutError):
            if (match := regex.search(pattern, body, regex.IGNORECASE, timeout=0.5)) is not None:
                at, end = match.span()
    low, high = max(0, at - SNIPPET), min(len(body), max(end, at) + SNIPPET)
    return f"{'…' if low else ''}{body[low:high]}{'…' if high < len(body) else ''}"
