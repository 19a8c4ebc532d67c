"""Episodes on disk: what a run folder holds of each episode, and the reading of run folders.

Reading needs no torch and no lock, so that a page or a command can look into a run while it trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentrl.errors import CheckpointError
from agentrl.types import Episode


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One episode of one step, and what the learner made of it.

    `group` numbers the tasks of the step from 0. `advantages` has one number for each sampled segment of the
    episode, in their order; it is empty when the episode did not train. `set_aside` marks the groups without
    signal that gave their places to others (`rollout.refill_zero_signal`); `baseline` the greedy episode that the
    others of its group are compared with (`advantage: remax`).
    """

    step: int
    group: int
    episode: Episode
    advantages: tuple[float, ...] = ()
    set_aside: bool = False
    baseline: bool = False

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
    """One line of JSON without its newline; what JSON cannot say (an object in a task's row) becomes text."""
    return _codec().dump_json((record,), fallback=_plain)[1:-1]


def decode(line: bytes) -> EpisodeRecord:
    """The record of one line.

    Raises:
        pydantic.ValidationError: the line is not a record.
    """
    return _codec().validate_json(b"[" + line + b"]")[0]


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as numbers and lists, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def episodes_file(run: Path, step: int) -> Path:
    """Where the episodes of a step are; step 0 is before the first update."""
    return run / "episodes" / f"step-{step:06d}.jsonl.zst"


def recorded_steps(run: Path) -> list[int]:
    """The steps of which a run folder holds episodes, in order."""
    steps = []
    for path in (run / "episodes").glob("step-*.jsonl.zst"):
        digits = path.name.removeprefix("step-").removesuffix(".jsonl.zst")
        if digits.isdigit():
            steps.append(int(digits))
    return sorted(steps)


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
    path = episodes_file(run, step)
    if not path.is_file():
        steps = recorded_steps(run)
        have = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise CheckpointError(f"{run}: no episodes of step {step}; {have}")
    num_read = 0
    try:
        for line in _lines(path):
            yield decode(line)
            num_read += 1
    except (zstandard.ZstdError, ValidationError, EOFError) as e:
        reason = str(e).splitlines()[0]
        raise CheckpointError(f"{path}: damaged after {num_read} episodes: {reason}") from e


def _lines(path: Path) -> Iterator[bytes]:
    stream = zstandard.ZstdDecompressor().decompressobj()
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 16):
            *lines, rest = (rest + stream.decompress(chunk)).split(b"\n")
            yield from lines
    if not stream.eof:
        raise EOFError("the file was cut")


def read_records(run: Path, step: int) -> list[EpisodeRecord]:
    """All records of one step; see `iter_records`."""
    return list(iter_records(run, step))


def read_episodes(run: Path, step: int) -> list[Episode]:
    """All episodes of one step; see `iter_records`."""
    return [record.episode for record in iter_records(run, step)]


def read_metrics(run: Path) -> list[Mapping[str, float]]:
    """The lines of metrics.jsonl in order, each with its `step`; a torn last line is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = [parse_metrics(line) for line in path.read_bytes().splitlines()]
    return [line for line in lines if line is not None]


def parse_metrics(line: bytes) -> Mapping[str, float] | None:
    """One line of metrics.jsonl, None when it is torn."""
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and isinstance(data.get("step"), int) else None
