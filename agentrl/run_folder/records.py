"""Episodes on disk: the record of each episode, and reading run folders.

Reading needs no torch and no lock, so that a page or a command can look into a run while it trains.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentrl.clean import clean_text, first_reason
from agentrl.errors import CheckpointError
from agentrl.plural import plural
from agentrl.run_folder.files import MAX_BYTES, MAX_FILE, at_home, decompressed, open_regular
from agentrl.types import Episode, Group


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode of one step, and what the learner made of it.

    `group` numbers the tasks of the step from 0. `advantages` has one number for each sampled segment of the
    episode, in their order; it is empty when all are 0 (a KL penalty or a teacher may still train the episode) or
    the episode did not train. `set_aside` marks the groups without signal, or refused by `rollout.group_filter`,
    that gave their places to others (`rollout.refill_zero_signal`); `baseline` the greedy episode that the rest of
    its group is compared with (`advantage: remax`). `hint` is what a teacher read and the policy did not.
    """

    step: int
    group: int
    episode: Episode
    advantages: tuple[float, ...] = ()
    set_aside: bool = False
    baseline: bool = False
    hint: str | None = None

    @classmethod
    def of(cls, step: int, group: int, episode: Episode, advantage: float | None) -> EpisodeRecord:
        """A record whose every sampled segment has the same advantage (None: the episode did not train)."""
        num_sampled = sum(segment.origin == "sampled" for segment in episode.segments)
        advantages = () if advantage is None else (advantage,) * num_sampled
        return cls(step=step, group=group, episode=episode, advantages=advantages)


@cache
def _codec() -> TypeAdapter[tuple[EpisodeRecord]]:
    # A dataclass takes its configuration from what holds it, hence the tuple.
    config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="strings")
    return TypeAdapter(tuple[EpisodeRecord], config=config)


def encode(record: EpisodeRecord) -> bytes:
    """One line of JSON without its newline; what JSON cannot say (an object in a task's row) becomes text.

    Never raises, whatever is in the record, and `decode` reads every line.
    """
    if all(_shallow(value) for value in _loose(record.episode)):
        try:
            return _codec().dump_json((record,), exclude=_NOT_RECORDED, fallback=_plain, warnings=False)[1:-1]
        except (ValueError, TypeError, RecursionError, AttributeError):  # half a surrogate pair, an odd key
            pass
    return json.dumps(_tame(record, 0), allow_nan=False, separators=(",", ":")).encode()


_NOT_RECORDED: Any = {0: {"episode": {"segments": {"__all__": {"routes"}}}}}
"""Routes are only of use to the step's update, and larger than all the rest."""
MAX_DEPTH = 80
"""Nesting of what tasks and calls bring along; deeper parts are kept as text."""


def _loose(episode: Episode) -> Iterator[Any]:
    """The values of an episode whose shape is not ours."""
    yield episode.task.row
    yield episode.tools
    for message in episode.messages:
        yield from (call.arguments for call in message.tool_calls)
    for turn in episode.turns:
        yield from (call.arguments for call in turn.message.tool_calls)
        yield from (record.call.arguments for record in turn.calls)


def _shallow(value: Any) -> bool:
    """Whether a value is nested less than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, Mapping | list | tuple)
            for inner in (item.values() if isinstance(item, Mapping) else item)
        ]
        if not level:
            return True
    return False


def _tame(value: Any, depth: int) -> Any:
    """`value` as what JSON can say: text without halves of pairs, finite numbers, keys that are text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(str(value))
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if depth >= MAX_DEPTH:
        return _text_of(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _tame(getattr(value, f.name), depth + 1) for f in fields(value) if f.name != "routes"}
    if isinstance(value, Mapping):
        return {clean_text(_text_of(key)): _tame(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_tame(inner, depth + 1) for inner in value]
    plain = _plain(value)
    return plain if isinstance(plain, str) else _tame(plain, depth + 1)


def _text_of(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception:  # a user-defined __str__, or a structure that is too deep for it
        text = f"<{type(value).__name__}>"
    return clean_text(text[:100_000])


def decode(line: bytes) -> EpisodeRecord:
    """The record of one line.

    Raises:
        pydantic.ValidationError: the line is not a record.
    """
    return _codec().validate_json(b"[" + line + b"]")[0]


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as numbers and lists, anything else as its text."""
    try:
        return value.tolist() if hasattr(value, "tolist") else _text_of(value)
    except Exception:  # a user-defined tolist
        return _text_of(value)


def episodes_file(run: Path, step: int) -> Path:
    """The episodes file of a step; step 0 is before the first update."""
    return run / "episodes" / f"step-{step:06d}.jsonl.zst"


PARTIAL_FILE = "episodes/partial.jsonl"
"""Episodes that are written one by one, by a recording of external agents or an evaluation in progress."""


def recorded_file(run: Path, step: int) -> Path:
    """The file to read the episodes of a step from: `episodes_file`, but of a recording whose server still runs or
    was killed, the lines that it has written."""
    partial = None if step else unfinished_recording(run)
    return partial or episodes_file(run, step)


def unfinished_recording(run: Path) -> Path | None:
    """The lines of a recording of external agents, if its episodes file lacks some of them."""
    partial, whole = run / PARTIAL_FILE, episodes_file(run, 0)
    if (run / "config.yaml").exists() or not partial.is_file():  # an evaluation has a configuration
        return None
    with contextlib.suppress(FileNotFoundError):
        return partial if partial.stat().st_mtime_ns > whole.stat().st_mtime_ns else None
    return partial


_EPISODES = re.compile(r"step-([0-9]{6,18})\.jsonl\.zst")


def recorded_steps(run: Path) -> list[int]:
    """The steps of which a run folder holds episodes, in order."""
    steps = []
    for path in (run / "episodes").glob("step-*.jsonl.zst"):
        if named := _EPISODES.fullmatch(path.name):
            steps.append(int(named[1]))
    if 0 not in steps and unfinished_recording(run) is not None:
        steps.append(0)
    return sorted(steps)


def likely_steps(episode: str, steps: Iterable[int]) -> list[int]:
    """The steps in which to look for an episode: the one that its id names (s12/...) first, then the newest."""
    named = re.match(r"s([0-9]{1,18})/", episode)
    likely = int(named[1]) if named else -1
    return sorted(steps, key=lambda step: (step != likely, -step))


def compress(records: Iterable[EpisodeRecord]) -> bytes:
    """The content of an episodes file."""
    stream = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    chunks = [stream.compress(encode(record) + b"\n") for record in records]
    return b"".join([*chunks, stream.flush()])


def iter_records(run: Path, step: int) -> Iterator[EpisodeRecord]:
    """The records of one step, one at a time.

    Raises:
        CheckpointError: the run has no episodes of this step, or the file is damaged.
    """
    for num_read, line in enumerate(episode_lines(run, step)):
        try:
            yield decode(line)
        except ValidationError as e:
            where = f"{recorded_file(run, step)}:{num_read + 1}"
            raise CheckpointError(
                f"{where}: damaged after {plural(num_read, 'episode')}: {first_reason(e)}"
            ) from None


def episode_lines(run: Path, step: int) -> Iterator[bytes]:
    """The lines of one step's episodes file, each the JSON of a record.

    Raises:
        CheckpointError: the run has no episodes of this step, or the file is damaged or cannot be read.
    """
    path = recorded_file(run, step)
    num_read = 0
    try:
        for line in _lines(path) if path.suffix == ".zst" else whole_lines(path):
            yield line
            num_read += 1
    except FileNotFoundError:
        steps = recorded_steps(run)
        have = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise CheckpointError(f"{run}: no episodes of step {step}; {have}") from None
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from None
    except (zstandard.ZstdError, MemoryError, EOFError, RecursionError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise CheckpointError(
            f"{path}:{num_read + 1}: damaged after {plural(num_read, 'episode')}: {reason}"
        ) from e


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file of records that are records; others were cut when their writer was killed."""
    for line in bounded_lines(path, MAX_BYTES):
        with contextlib.suppress(ValidationError, RecursionError):
            decode(line)
            yield line.removesuffix(b"\n")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of an episodes file. Raises EOFError if it was cut or holds more than a run writes."""
    rest: list[bytes] = []
    for data in decompressed(path):
        first, newline, others = data.partition(b"\n")
        rest.append(first)
        if newline:
            yield b"".join(rest)
            *lines, last = others.split(b"\n")
            yield from lines
            rest = [last]
    if any(rest):
        raise EOFError("its last line has no end")


def read_records(run: Path, step: int) -> list[EpisodeRecord]:
    """All records of one step; see `iter_records`."""
    return list(iter_records(run, step))


def read_episodes(run: Path | str, step: int) -> list[Episode]:
    """All episodes of one step; see `iter_records`."""
    return [record.episode for record in iter_records(at_home(run), step)]


def read_groups(run: Path | str, step: int) -> list[Group]:
    """The groups of one step as they were trained, without those that were set aside; see `iter_records`."""
    by_number: dict[int, list[EpisodeRecord]] = {}
    for record in iter_records(at_home(run), step):
        if not record.set_aside:
            by_number.setdefault(record.group, []).append(record)
    found = []
    for _, each in sorted(by_number.items()):
        played = [record for record in each if not record.baseline]
        episodes = tuple(record.episode for record in played if record.episode.error is None)
        failed = tuple(record.episode for record in played if record.episode.error is not None)
        greedy = next((record.episode for record in each if record.baseline), None)
        found.append(Group(each[0].episode.task, episodes, failed, greedy))
    return found


def read_metrics(run: Path) -> Sequence[Mapping[str, float]]:
    """The metrics of every step in order, each with its `step`; an incomplete last line is skipped."""
    found: list[dict[str, float]] = []
    for line in bounded_lines(run / "metrics.jsonl", MAX_LINE):
        values = parse_metrics(line)
        if values is not None and LATE in values:
            of_step = next((each for each in reversed(found) if each["step"] == values["step"]), None)
            if of_step is not None:
                of_step.update({key: value for key, value in values.items() if key != LATE})
        elif values is not None:
            found.append(dict(values))
    return found


def bounded_lines(path: Path, limit: int) -> Iterator[bytes]:
    """The lines of a file that need not be there, one at a time; one longer than `limit` bytes comes in pieces."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        yield from iter(lambda: file.readline(limit), b"")


LATE = "late"
"""The key of a line of metrics.jsonl that adds to the line of its step, which was written before."""
MAX_LINE = MAX_FILE
"""Bytes of a line of metrics.jsonl or redrawn.jsonl; a longer one is not valid."""


def parse_metrics(line: bytes) -> Mapping[str, float] | None:
    """One line of metrics.jsonl, None when it is torn or has a value that is no number."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(data, dict) and isinstance(data.get("step"), int)
    return data if whole and all(isinstance(value, float | int | None) for value in data.values()) else None
