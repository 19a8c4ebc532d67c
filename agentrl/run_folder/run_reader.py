"""Follow run folders without a lock: headers, metrics, notes and raw episode records, cached by size and time.

Nothing here imports torch or the trainer. Records are plain JSON objects: a page that shows a thousand episodes
cannot wait for each of them to be validated.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json

from agentrl.errors import CheckpointError
from agentrl.run_folder import tags
from agentrl.run_folder.files import open_regular, read_bounded
from agentrl.run_folder.history import Lineage, read_history, read_lineage
from agentrl.run_folder.lock import lock_holder
from agentrl.run_folder.records import (
    LATE,
    MAX_LINE,
    PARTIAL_FILE,
    bounded_lines,
    episode_lines,
    parse_metrics,
    recorded_file,
    recorded_steps,
)

Json = dict[str, Any]
"""A JSON object."""

EVENTS_KEPT = 5_000
"""Lines of events.log that are read."""
MAX_VALUES = 100_000
"""Values of a configuration; a run's own has a few hundred, and its options what its author wrote."""
QUIET_S = 600.0
"""A run on another machine counts as running for this long after its last change."""


def is_run(path: Path) -> bool:
    """Whether a folder that may be read holds a run, or a recording of external agents."""
    run = os.path.isfile(path / "config.yaml") and os.path.isdir(path / "episodes")
    return run or os.path.isfile(path / PARTIAL_FILE)


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths` and in them, at most two levels deep, by name."""
    found: dict[Path, None] = {}
    for path in paths:
        for candidate in (path, *_children(path)):
            if is_run(candidate):
                found[candidate.resolve()] = None
            elif candidate != path:
                found.update((inner.resolve(), None) for inner in _children(candidate) if is_run(inner))
    return sorted(found)


def _children(path: Path) -> list[Path]:
    try:
        children = sorted(path.iterdir())
    except OSError:
        return []
    # unlike Path.is_dir, this does not raise where a link leads into a folder that may not be read
    return [child for child in children if not child.name.startswith(".") and os.path.isdir(child)]


@dataclass
class Metrics:
    """The lines of metrics.jsonl as columns: `values[name][i]` belongs to `steps[i]`, None where it is missing."""

    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    num_bytes: int = 0
    last_line: bytes = b""

    def continued_in(self, file: IO[bytes]) -> bool:
        """Whether a file has the last line where it was read; leaves it there, after that line."""
        file.seek(self.num_bytes - len(self.last_line))
        return file.read(len(self.last_line)) == self.last_line

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line; one of a step that is there replaces it and all after it, as a resumed run does. A late
        line adds to its step."""
        step = int(line["step"])
        if LATE in line:
            self._add_late(step, line)
            return
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            for column in self.values.values():
                column.pop()
        self.steps.append(step)
        for name, value in line.items():
            number = _number(value)
            if name != "step":
                column = self.values.setdefault(name, [None] * (len(self.steps) - 1))
                column.append(number)
        for column in self.values.values():
            if len(column) < len(self.steps):
                column.append(None)

    def _add_late(self, step: int, line: Mapping[str, Any]) -> None:
        place = bisect_left(self.steps, step)
        if place == len(self.steps) or self.steps[place] != step:
            return
        for name, value in line.items():
            if name not in ("step", LATE) and (number := _number(value)) is not None:
                self.values.setdefault(name, [None] * len(self.steps))[place] = number

    def before(self, name: str) -> float | None:
        """A value before training; None if it was not measured then."""
        start = bisect_left(self.steps, 1)
        return next((value for value in self.values.get(name, ())[:start] if value is not None), None)

    def after(self, name: str) -> float | None:
        """The newest value after a step of training."""
        start = bisect_left(self.steps, 1)
        return next((value for value in reversed(self.values.get(name, ())[start:]) if value is not None), None)


class RunReader:
    """One run folder, read again where its files have changed. Safe to use from several threads.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._metrics = Metrics()
        self._seen: tuple[int, int] = (0, 0)
        self._config: tuple[tuple[int, int], Json] | None = None

    @property
    def config(self) -> Json:
        """The resolved configuration as the file says it; empty where it cannot be read."""
        with self._lock:
            now = stamp(self.path / "config.yaml")
            if self._config is None or self._config[0] != now:
                self._config = (now, _yaml(self.path / "config.yaml"))
            return self._config[1]

    @property
    def metrics(self) -> Metrics:
        """All metrics so far."""
        path = self.path / "metrics.jsonl"
        with self._lock:
            now = stamp(path)
            if now == self._seen:
                return self._metrics
            self._read_metrics(path)
            self._seen = now
            return self._metrics

    def _read_metrics(self, path: Path) -> None:
        try:
            with open_regular(path) as file:
                if not self._metrics.continued_in(file):  # a resumed run rewrote it
                    self._metrics = Metrics()
                    file.seek(0)
                while line := file.readline(MAX_LINE):
                    if not line.endswith(b"\n"):
                        break  # still being written
                    self._metrics.num_bytes += len(line)
                    self._metrics.last_line = line
                    if (found := parse_metrics(line)) is not None:
                        self._metrics.add(found)
        except (OSError, CheckpointError):  # missing, not readable, or no file at all
            self._metrics = Metrics()

    @property
    def summary(self) -> Json:
        """What summary.json says; empty before the run ended."""
        try:
            found = json.loads(read_bounded(self.path / "summary.json"))
        except (OSError, ValueError, RecursionError, CheckpointError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def events(self) -> list[tuple[str, str]]:
        """The first line of events.log and the newest ones: time and text."""
        try:
            whole = list(bounded_lines(self.path / "events.log", MAX_LINE))
        except (OSError, CheckpointError):
            return []
        whole = whole if len(whole) <= EVENTS_KEPT else [whole[0], *whole[-EVENTS_KEPT + 1 :]]
        lines = [line.decode("utf-8", "replace").rstrip("\n") for line in whole]
        return [(time, text) for time, _, text in (line.partition(" ") for line in lines) if text]

    @property
    def status(self) -> str:
        """`running`, `finished` or `stopped`."""
        if self._finished() or (self.path / "results.json").is_file():  # of an evaluation
            return "finished"
        return "running" if self._held() else "stopped"

    def _finished(self) -> bool:
        """Whether the run ended, and was not resumed with more steps since."""
        summary = self.summary
        if not summary.get("finished"):
            return False
        done, wanted = _number(summary.get("steps")), _number(self.config.get("steps"))
        return done is None or wanted is None or done >= wanted

    def _held(self) -> bool:
        holder = lock_holder(self.path)
        if holder is None:
            return False
        process, machine = holder
        if machine != socket.gethostname():
            return time.time() - self.updated < QUIET_S
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    @property
    def started(self) -> float:
        """When the run began, in seconds since 1970."""
        return seconds_of(self.events[0][0]) or 0.0 if self.events else self.updated

    @property
    def updated(self) -> float:
        """When a file of the run changed last."""
        files = ("metrics.jsonl", "events.log", "summary.json", "config.yaml", PARTIAL_FILE)
        return max(stamp(self.path / name)[1] / 1e9 for name in files)

    @property
    def state(self) -> tuple[tuple[int, int], ...]:
        """Changes whenever the run has something new to show."""
        files = ("metrics.jsonl", "events.log", "summary.json", "episodes", "tokens", PARTIAL_FILE, tags.FILE)
        return tuple(stamp(self.path / name) for name in files)

    @property
    def tags(self) -> tuple[str, ...]:
        """What `agentrl tag` gave the run."""
        return tags.read_tags(self.path)

    @property
    def lineage(self) -> Lineage | None:
        """Where the run was forked from; None if it was not, or the file is damaged."""
        try:
            return read_lineage(self.path)
        except (OSError, CheckpointError):
            return None

    @property
    def history(self) -> Sequence[Mapping[str, object]]:
        """What was changed on resuming or forking, oldest first."""
        try:
            return read_history(self.path)
        except (OSError, CheckpointError):
            return ()

    @property
    def steps(self) -> list[int]:
        """The steps with recorded episodes."""
        return recorded_steps(self.path)


class RecordCache:
    """Whole steps of raw records, the most recently used ones, up to a number of uncompressed bytes."""

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max, self._lock = max_bytes, threading.Lock()
        self._kept: OrderedDict[tuple[Path, int], tuple[tuple[int, int], list[bytes]]] = OrderedDict()

    def lines(self, run: RunReader, step: int) -> list[bytes]:
        """The lines of a step.

        Raises:
            CheckpointError: there are none, or the file is damaged.
        """
        now, key = stamp(recorded_file(run.path, step)), (run.path, step)
        with self._lock:
            if (kept := self._kept.get(key)) is not None and kept[0] == now:
                self._kept.move_to_end(key)
                return kept[1]
        lines = list(episode_lines(run.path, step))
        with self._lock:
            self._kept[key] = (now, lines)
            while (
                len(self._kept) > 1 and sum(sum(map(len, lines)) for _, lines in self._kept.values()) > self._max
            ):
                self._kept.popitem(last=False)
        return lines

    def records(self, run: RunReader, step: int) -> list[Json]:
        """The records of a step as JSON objects. Raises CheckpointError, as `lines` does."""
        try:
            return [record for line in self.lines(run, step) if isinstance(record := from_json(line), dict)]
        except ValueError as e:
            raise CheckpointError(f"{recorded_file(run.path, step)}: a damaged record: {e}") from None

    def record(self, run: RunReader, step: int, episode: str) -> Json | None:
        """One record by the id of its episode; the last where several have it."""
        # as pydantic writes it, and as json does where pydantic cannot
        marks = {
            json.dumps(episode, ensure_ascii=ascii).encode("utf-8", "surrogatepass") for ascii in (False, True)
        }
        found = None
        for line in self.lines(run, step):
            if any(mark in line for mark in marks):
                record = from_json(line)
                if isinstance(record, dict) and record.get("episode", {}).get("id") == episode:
                    found = record
        return found


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file, which change with its content; zeros if it is missing."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def seconds_of(time: str) -> float | None:
    """The seconds since 1970 of a time in events.log or history.jsonl; None if it is not one."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return None


def _number(value: Any) -> float | None:
    """A metric; None for what no run writes."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or abs(value) < 1 << 63 else None


def _yaml(path: Path) -> Json:
    try:
        return _parsed(read_bounded(path).decode("utf-8", "replace"))
    except (OSError, CheckpointError):
        return {}


@lru_cache(maxsize=8)
def _parsed(text: str) -> Json:
    """The configuration in a text, which a run and its examination parse in turn: a tenth of a second."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        found = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) and _is_bounded(found) else {}


def _is_bounded(config: Json) -> bool:
    """Whether a configuration has as few values as a run writes; nested aliases can stand for billions."""
    left: list[Any] = [config]
    for _ in range(MAX_VALUES):
        if not left:
            return True
        value = left.pop()
        left.extend(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    return False
