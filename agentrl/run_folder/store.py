"""The run folder: everything a run leaves behind, whole after `kill -9` at any moment.

    config.yaml               the resolved configuration
    configs/to-step-N.yaml    an earlier one, with which the steps up to N were taken
    metrics.jsonl             one line for each step, synced; a line with "late" adds to that of its step
    episodes/step-N.jsonl.zst every episode of a step (agentrl.run_folder.records)
    tokens/step-N.tok.zst     what the learner saw of its tokens (agentrl.run_folder.token_records)
    checkpoints/step-N/       sealed by a manifest (agentrl.run_folder.checkpoints)
    events.log                human-readable log of events
    tasks.json                digests of the training and held-out tasks
    inputs.json               digests of the model and of other files that fixed keys name
    code.json, code/          digests and a copy of the code of envs, rewards and own functions
    history.jsonl             changes of settings and code that were made on resuming
    lineage.json              the run and step that a forked run began with
    summary.json, reward_curve.png   written at the end

Steps are counted by the optimizer steps done: the line and the episodes of step N belong to the N-th update,
checkpoint N holds the weights after it, and 0 is before the first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from agentrl.clean import clean_text
from agentrl.config import RunConfig, dump_config, load_config
from agentrl.config.changes import Change
from agentrl.config.load import load_sampling_config
from agentrl.errors import CheckpointError, ConfigError
from agentrl.reporting.report import Summary
from agentrl.run_folder import checkpoints, earlier_configs
from agentrl.run_folder.env_views import VIEWS
from agentrl.run_folder.files import append, fsync_dir, read_bounded, write_atomic
from agentrl.run_folder.history import add_history
from agentrl.run_folder.lock import LOCK, lock_folder
from agentrl.run_folder.moved import INPUTS_FILE, changes_of_run, input_digests
from agentrl.run_folder.own_start import with_own_start
from agentrl.run_folder.records import (
    LATE,
    EpisodeRecord,
    compress,
    episodes_file,
    parse_metrics,
    read_episodes,
    read_metrics,
    read_records,
    recorded_steps,
)
from agentrl.run_folder.redraws import Redraws, read_redraws, redraws_file, redraws_line
from agentrl.run_folder.task_digests import TASKS_FILE
from agentrl.run_folder.token_records import TokenColumns, encode_tokens, tokens_file

__all__ = ["Checkpoint", "RunStore", "find_checkpoint", "read_episodes", "read_metrics", "read_records"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint folder: the weights after `step` updates."""

    step: int
    path: Path


class RunStore:
    """A run folder locked by one process; a context manager that releases it.

    If the block raises and the folder was moved or deleted meanwhile, a CheckpointError says so instead.

    Attributes:
        path: the folder.
        resumed: True when the folder already held this run.
        changes: recorded settings that differ from the configuration before, if it was resumed with another one.
        set_aside: where an earlier folder of this name was moved, None if there was none.
    """

    def __init__(
        self, path: Path, config: RunConfig, lock: IO[str], *, resumed: bool, set_aside: Path | None = None
    ) -> None:
        self.path = path
        self.resumed = resumed
        self.changes: Sequence[Change] = ()
        self.set_aside = set_aside
        self._config = config
        self._lock = lock
        self._discarded = False
        self._adopted = True
        self._metrics: IO[bytes] | None = None
        self._awaited: set[int] = set()

    @classmethod
    def open(
        cls, config: RunConfig, path: Path | None = None, *, fresh: bool = False, exact: bool = False
    ) -> Self:
        """Make or reopen the folder of a run (`runs/<name>` unless `path` is given) and lock it.

        An incomplete last line of metrics.jsonl and leftovers of a killed process are cleaned up. A folder without
        any step can be replaced by another configuration; a cold start in it is moved to a sibling folder.

        Args:
            config: the resolved configuration; saved in a new folder, compared in an existing one.
            path: the run folder.
            fresh: start over; the existing folder is renamed with a timestamp.
            exact: for an evaluation: reject every other configuration; otherwise only one with another `fixed`
                key, and `adopt` records other changes.

        Raises:
            ConfigError: the folder holds another run, holds other things, cannot be written, is held by another
                process, or has a name that is not UTF-8.
        """
        if path is None and not config.name:
            raise ConfigError("name is empty: give the run a `name`, or a run folder")
        path = (path or Path("runs") / config.name).absolute()
        try:
            str(path).encode()
        except UnicodeEncodeError:  # other libraries could not write its weights
            raise ConfigError(f"{path}: the path of a run must be UTF-8; give another folder") from None
        elsewhere = "give another --out" if exact else "give this run another `name`"
        _make_folder(path)
        or_folder = "" if exact else ", or another folder with --run-dir, in Python run_dir="
        _require_run_folder(path, elsewhere + or_folder)
        lock, aside = lock_folder(path, elsewhere), None
        try:
            if fresh and any(child.name != LOCK for child in path.iterdir()):
                lock, aside = _set_aside(path, lock)
            elif (old := _unstarted(path)) is not None and not all(
                c.kind == "free" for c in changes_of_run(path, old, config)
            ):
                if _cold_started(path, old):
                    lock, aside = _set_aside(path, lock)
                else:
                    _empty(path)
            resumed, changes = _claim(path, config, elsewhere, exact=exact)
        except BaseException:
            lock.close()
            raise
        store = cls(path, config, lock, resumed=resumed, set_aside=aside)
        store.changes = [change for change in changes if change.kind == "recorded"]
        store._adopted = not changes
        try:
            store._tidy()
        except BaseException:
            store.close()
            raise
        return store

    def _tidy(self) -> None:
        """Make the folders that are missing, and clean up after a killed process."""
        path = self.path
        _make_folder(path / "episodes")
        _make_folder(path / "checkpoints")
        for leftover in [*path.glob(".*.tmp"), *path.glob("episodes/.*.tmp"), *path.glob("tokens/.*.tmp")]:
            leftover.unlink()
        checkpoints.sweep(path / "checkpoints")
        self._repair_metrics()
        if not (path / INPUTS_FILE).is_file():
            self.write_file(INPUTS_FILE, input_digests(self._config))
        self.event("resumed" if self.resumed else "created")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = isinstance(error, Exception) and not self._discarded and not self._in_place()
        self.close()
        if lost:
            raise CheckpointError(
                f"{self.path}: the run folder was moved or deleted while the run was using it; "
                "move it back to resume the run"
            ) from error

    def _in_place(self) -> bool:
        """Whether the locked folder still has its name."""
        try:
            return os.path.samestat((self.path / LOCK).stat(), os.fstat(self._lock.fileno()))
        except OSError:
            return False

    def close(self) -> None:
        """Release the folder; idempotent."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._lock.close()

    def adopt(self) -> None:
        """Write changed settings to config.yaml, and those that are recorded to history.jsonl.

        Call it when nothing can refuse them any more. The configuration of the earlier steps is kept.
        """
        if self._adopted:
            return
        step, file = max(checkpoints.steps_saved(self.path / "checkpoints"), default=0), self.path / "config.yaml"
        earlier_configs.keep_config(self.path, step, file.read_bytes())
        if self.changes:
            add_history(self.path, step, {change.key: [change.old, change.new] for change in self.changes})
        write_atomic(file, dump_config(self._config).encode())
        for change in self.changes:
            self.event(f"changed: {change}")
        self._adopted = True

    def discard(self) -> None:
        """Remove the folder of a run that was refused before it did anything, so that nothing blocks its name.

        A folder with a cold start, a step or files of others stays. An earlier run that `fresh` had moved gets its
        name back.
        """
        foreign = {child.name for child in self.path.iterdir()} - _OURS
        if foreign or _unstarted(self.path) is None or _cold_started(self.path, self._config):
            return
        self._discarded = True
        self.close()
        shutil.rmtree(self.path)
        if self.set_aside is not None:
            self.set_aside.rename(self.path)

    # --- steps ---

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step to metrics.jsonl and sync it; what is not finite becomes null."""
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("ab")
        line = {"step": step} | {key: _finite(value) for key, value in metrics.items() if key != "step"}
        try:
            self._metrics.write(json.dumps(line).encode() + b"\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        except OSError as e:
            with contextlib.suppress(OSError):  # it tries the same again
                self._metrics.close()
            self._metrics = None
            e.filename = e.filename or str(self.path / "metrics.jsonl")
            raise

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that were measured later to a step, in a separate line."""
        self.log_metrics(step, {LATE: True, **metrics})
        self._awaited.discard(step)

    def await_metrics(self, step: int) -> None:
        """Keep the checkpoint of a step until `add_metrics` is called for it: it may turn out to be the best."""
        self._awaited.add(step)

    def metrics(self) -> Sequence[Mapping[str, float]]:
        """The metrics of each step so far, in order, each with its `step`; null is left as None."""
        return read_metrics(self.path)

    def write_episodes(self, step: int, records: Iterable[EpisodeRecord]) -> None:
        """Write every episode of a step, failed ones included; replaces what was there."""
        write_atomic(episodes_file(self.path, step), compress(records))

    def write_tokens(self, step: int, columns: Mapping[str, TokenColumns]) -> None:
        """Write what the learner saw of a step's tokens; replaces what was there."""
        path = tokens_file(self.path, step)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, encode_tokens(columns))

    def log_redraws(self, step: int, found: Redraws) -> None:
        """Append what a step lost to the infrastructure."""
        append(redraws_file(self.path), redraws_line(step, found).encode())

    def redraws(self) -> Redraws:
        """What all steps so far lost."""
        return Redraws.together(read_redraws(self.path).values())

    def rewind(self, step: int) -> None:
        """Forget the lines and episodes after `step`, so that resuming from checkpoint `step` doubles none."""
        earlier_configs.rewind_configs(self.path, step)
        lost = [redraws_line(at, found) for at, found in read_redraws(self.path).items() if at <= step]
        if redraws_file(self.path).is_file():
            write_atomic(redraws_file(self.path), "".join(lost).encode())
        kept = [line for line in self.metrics() if line["step"] <= step]
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomic(self.path / "metrics.jsonl", text.encode())
        for recorded in recorded_steps(self.path):
            if recorded > step:
                episodes_file(self.path, recorded).unlink()
                tokens_file(self.path, recorded).unlink(missing_ok=True)

    def _repair_metrics(self) -> None:
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        data = path.read_bytes()
        lines = data.splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n") and parse_metrics(line) is not None]
        if len(whole) != len(lines):
            write_atomic(path, b"".join(whole))
            self.event(f"metrics.jsonl: dropped {len(lines) - len(whole)} torn line(s)")

    # --- checkpoints ---

    @contextmanager
    def checkpoint(self, step: int, keep: int, *, best: bool = False) -> Iterator[Path]:
        """Yield a folder to fill; if the block succeeds, it becomes `checkpoints/step-N`.

        Afterwards only the newest `keep` checkpoints remain, and with `best` the one whose line in metrics.jsonl
        has the highest `held_out` (the newest of equals; `held_out_reward` if nothing declares what is solved).
        One whose evaluation is still running stays until that has ended. Nothing is left when the block raises.
        The block may end on another thread, but one checkpoint is written at a time.
        """
        with checkpoints.writing(self.path / "checkpoints", step) as temp:
            for name in ("config.yaml", CODE_FILE, TASKS_FILE):
                if (self.path / name).is_file():
                    write_atomic(temp / name, (self.path / name).read_bytes())
            yield temp
        self.tidy_checkpoints(keep, best=best)
        self.event(f"checkpoint step-{step}")

    def tidy_checkpoints(self, keep: int, *, best: bool) -> None:
        """Point `best` at the best checkpoint, and remove all but it and the newest `keep`; see `checkpoint`."""
        awaited = frozenset(self._awaited)  # before the lines: the score comes first, then it is no longer awaited
        folder, lines = self.path / "checkpoints", self.metrics()
        key = "held_out" if any("held_out" in line for line in lines) else "held_out_reward"
        scores = {line["step"]: line[key] for line in lines if line.get(key) is not None}
        there = checkpoints.steps_saved(folder)
        scored = [s for s in there if s in scores] if best else []
        first = max(scored, key=lambda s: (scores[s], s), default=None)
        if first is not None:
            checkpoints.point(folder / "best", f"step-{first}")
        elif (folder / "best").is_symlink() or (folder / "best").is_file():  # of a time with `best`
            (folder / "best").unlink()
        for old in there[:-keep]:
            if old != first and not (best and old in awaited):
                checkpoints.remove(folder, old)

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that matches its manifest; None if there is none.

        A damaged one is renamed to `step-N.damaged`, with a warning, and the one before it is tried.
        """
        folder = self.path / "checkpoints"
        steps = checkpoints.steps_saved(folder)
        for step in reversed(steps):
            path = folder / f"step-{step}"
            try:
                checkpoints.verify(path)
            except CheckpointError as e:
                aside = _free_name(folder / f"step-{step}.damaged")
                path.rename(aside)
                then = "starting over" if step == steps[0] else "falling back to the checkpoint before it"
                text = f"{e}; kept as {aside.name}, {then}"
                self.event(text)
                warnings.warn(text, stacklevel=2)
                continue
            return Checkpoint(step, path)
        return None

    # --- the rest ---

    def event(self, text: str) -> None:
        """Add a line with the time (UTC) to events.log."""
        if self._discarded:
            return
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        append(self.path / "events.log", f"{now} {clean_text(' '.join(text.split()))}\n".encode())

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json."""
        write_atomic(self.path / "summary.json", summary.to_json().encode())

    def read_summary(self) -> Summary | None:
        """The summary of the run as it last ended, None before that."""
        path = self.path / "summary.json"
        return Summary.from_json(read_bounded(path)) if path.exists() else None

    def write_file(self, name: str, data: bytes) -> None:
        """Write another file of the run folder, atomically."""
        write_atomic(self.path / name, data)


def find_checkpoint(path: Path, *, hold: bool = False) -> Checkpoint:
    """The checkpoint that a user means by a run folder (its newest good one) or by a checkpoint folder.

    Changes nothing on disk and needs no lock. With `hold`, the run does not delete it until this process ends.

    Raises:
        CheckpointError: there is none, or the folder named is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a run folder or one of its checkpoints")
    if (path / checkpoints.MANIFEST).is_file():
        return _verified(path, hold)
    broken, tried = "", set[int]()
    while steps := set(checkpoints.steps_saved(path / "checkpoints")) - tried:  # a run saves and deletes meanwhile
        tried.add(step := max(steps))
        try:
            return _verified(path / "checkpoints" / f"step-{step}", hold)
        except CheckpointError as e:
            broken = f"; {e}"
    raise CheckpointError(f"{path}: holds no finished checkpoint{broken}")


def _verified(folder: Path, hold: bool) -> Checkpoint:
    if hold:
        checkpoints.hold(folder)
    return Checkpoint(checkpoints.verify(folder), folder)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path}: is a file; a run needs a folder of this name") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot make the run folder: {e.strerror}") from None


def _set_aside(path: Path, lock: IO[str]) -> tuple[IO[str], Path]:
    """Rename the folder, make an empty one of its name, and lock that; returns where the old one is."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    aside = _free_name(path.with_name(f"{path.name}.before-{stamp}"))
    path.rename(aside)
    path.mkdir()
    fsync_dir(path.parent)
    new = lock_folder(path)
    lock.close()
    return new, aside


CODE_FILE = "code.json"
"""Digests of the code of a run, in its folder and in each checkpoint."""

_OURS = {
    *(LOCK, "config.yaml", "events.log", "metrics.jsonl", "summary.json", "reward_curve.png", "eval.json"),
    *(TASKS_FILE, INPUTS_FILE, CODE_FILE, "code", "history.jsonl", "lineage.json"),
    *("episodes", "tokens", "checkpoints"),
    *("loggers", VIEWS, earlier_configs.FOLDER, "start", ".start.base", ".start.making"),
}
"""What a folder may hold in which nothing was done yet."""


def _unstarted(path: Path) -> RunConfig | None:
    """The configuration of a run folder in which no step was taken and nothing played; None of any other."""
    file = path / "config.yaml"
    if not file.is_file() or {child.name for child in path.iterdir()} - _OURS:
        return None
    played = any(file.stat().st_size for file in (path / "episodes").glob("[!.]*"))
    played = played or any(line["step"] > 0 for line in read_metrics(path))
    if played or checkpoints.steps_saved(path / "checkpoints"):
        return None
    try:
        return _config_in(path)
    except ConfigError:  # of a version that knew other keys; `_claim` says what is wrong
        return None


def _config_in(path: Path) -> RunConfig:
    """The configuration of a folder; that of an evaluation may lack settings of training that the rest needs."""
    load = load_sampling_config if (path / "eval.json").is_file() else load_config
    return load(path / "config.yaml", check_paths=False)


def _cold_started(path: Path, config: RunConfig) -> bool:
    """Whether a start policy is there that took a cold start to make."""
    return config.warmup is not None and (path / "start").is_dir()


def _empty(path: Path) -> None:
    """Remove the files of a rejected attempt, except for the held lock."""
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        elif child.name != LOCK:
            child.unlink()


def _require_run_folder(path: Path, elsewhere: str) -> None:
    """Raises ConfigError for a folder that holds other things than a run: it must not be moved."""
    others = sorted(child.name for child in path.iterdir() if not child.name.startswith("."))
    if others and not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: is not a run folder (it holds {', '.join(others[:3])}); {elsewhere}")


def _claim(path: Path, config: RunConfig, elsewhere: str, *, exact: bool) -> tuple[bool, Sequence[Change]]:
    """Save the configuration in a new folder, or compare it with that of an old one.

    Returns:
        Whether the folder held a run, and what differs from its configuration.
    """
    file, text = path / "config.yaml", dump_config(config).encode()
    if not file.is_file():
        write_atomic(file, text)
        return False, ()
    if exact and file.read_bytes() == text:  # what one env of several is evaluated with may not load as a run
        return True, ()
    changes = changes_of_run(path, with_own_start(_config_in(path), path), config)
    refused = [change for change in changes if exact or change.kind == "fixed"]
    if refused:
        listed = "\n    ".join(map(str, refused))
        remedy = "undo the change" if exact else "a started run cannot make this change: undo it"
        raise ConfigError(
            f"{path}: holds a run with another configuration:\n    {listed}\n"
            f"{remedy} to resume it, {elsewhere}, or start over with --fresh, in Python "
            "fresh=True (the old folder is renamed and kept)"
        )
    return True, changes


def _free_name(path: Path) -> Path:
    """`path`, or `path-2`, `path-3` ... where that is taken."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _finite(value: float) -> float | None:
    number = value if isinstance(value, bool | int) else float(value)
    return number if math.isfinite(number) else None
