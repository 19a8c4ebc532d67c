"""Episodes on disk: whatever is in a record is written and read again, and no file can fill the memory."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard

import agentrl
from agentrl.errors import CheckpointError
from agentrl.run_folder.records import (
    EpisodeRecord,
    compress,
    decode,
    encode,
    episodes_file,
    iter_records,
    read_groups,
    read_metrics,
)
from agentrl.run_folder.redraws import Redraws, read_redraws, redraws_file, redraws_line
from agentrl.types import CallRecord, Episode, Group, Image, Message, Segment, StopReason, Task, ToolCall, Turn


def episode(row: Any = None, arguments: Any = None, content: Any = "x", **more: Any) -> Episode:
    call = ToolCall("i", "tool", arguments or {})
    message = Message("assistant", content, tool_calls=(call,))
    turn = Turn(message, (), 0.0, "stop", 1, 0.0, 0.0, (CallRecord(call, "r", "ok", 0.0),))
    segment = Segment((1, 2), "sampled", -1, 0, (-0.1, -math.inf), (0, 0))
    fields = {"reward": 1.0} | more
    return Episode("e", Task("t", row or {}), (message,), (turn,), (segment,), StopReason.ANSWERED, **fields)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


CYCLE: dict[str, Any] = {}
CYCLE["again"] = CYCLE
HOSTILE = {
    "half of a surrogate pair": {"content": "\ud800"},
    "the same in a key": {"row": {"\udc00": 1}},
    "the same in parts": {"content": ("a\udfff", Image(b"\xff"))},
    "the same in an error": {"error": "\ud800", "reward": None},
    "the same in a metric": {"metrics": {"\ud800": math.inf}},
    "no finite number": {"row": {"x": math.nan, "y": -math.inf}, "reward": math.nan},
    "a huge number": {"row": {"x": 10**400}},
    "bytes": {"row": {"x": b"\xff"}},
    "odd keys": {"row": {(1, 2): 3, 4: 5, None: 6}},
    "a set": {"row": {"x": {1, 2}}},
    "deep": {"row": {"x": nested(5000)}},
    "deep arguments": {"arguments": nested(900)},
    "deep enough to be kept": {"row": {"x": nested(70)}},
    "a cycle": {"row": CYCLE},
    "what has no text": {"row": {"x": Unprintable(), Unprintable(): 1}},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_whatever_is_in_a_record_is_written_and_read(what: str):
    line = encode(EpisodeRecord(1, 0, episode(**HOSTILE[what])))
    assert b"\n" not in line
    assert decode(line).episode.id == "e"


def test_what_json_can_say_comes_back_as_it_was():
    given = episode({"x": [1, "é", None, {"y": 0.5}]}, {"a": nested(20)}, "naïve \u202e text")
    assert decode(encode(EpisodeRecord(1, 0, given))).episode == given


def write(run: Path, data: bytes) -> None:
    episodes_file(run, 1).parent.mkdir(exist_ok=True)
    episodes_file(run, 1).write_bytes(data)


@pytest.mark.parametrize(
    "line", [b"", b"[]", b'{"step":1', b"[" * 300_000, b'{"a":' * 100_000, b"\xff\xfe", b"null"]
)
def test_a_damaged_line_is_one_error_with_its_place(tmp_path: Path, line: bytes):
    good = encode(EpisodeRecord(1, 0, episode()))
    write(tmp_path, zstandard.compress(good + b"\n" + line + b"\n"))
    with pytest.raises(CheckpointError, match=r"step-000001\.jsonl\.zst:2: damaged after 1 episode: \S") as caught:
        list(iter_records(tmp_path, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [b"x" * 1000, encode(EpisodeRecord(1, 0, episode(content="x" * 65000))) + b"\n"])
def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, line: bytes):
    data = zstandard.ZstdCompressor(level=3).compressobj()
    repeated = line * ((1 << 20) // len(line))
    packed = b"".join(data.compress(repeated) for _ in range(200)) + data.flush()
    assert len(packed) < 1 << 17
    write(tmp_path, packed)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"step-000001.*damaged"):
        sum(1 for _ in iter_records(tmp_path, 1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300 << 20


def test_large_files_of_a_run_are_read(tmp_path: Path):
    records = [EpisodeRecord(1, n, episode(content="prompt " * 50_000)) for n in range(20)]
    write(tmp_path, compress(records))
    assert [record.group for record in iter_records(tmp_path, 1)] == list(range(20))


def test_lines_of_metrics_that_are_none_are_left_out(tmp_path: Path):
    lines = [b'{"step": 1, "a": 2}', b"[" * 100_000, b"x" * (9 << 20), b"7", b'{"step": 2}', b'{"step": 3, "a']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert read_metrics(tmp_path) == [json.loads(lines[0]), {"step": 2}]


def test_long_lines_that_a_run_wrote_are_read(tmp_path: Path):
    long = "x" * (5 << 20)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, long: 2.0}) + "\n" + json.dumps({"step": 2}))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    lost = Group(Task(long, {}), (episode(),), (episode(reward=None, error="SandboxDied: gone"),))
    redraws_file(tmp_path).write_text(redraws_line(1, Redraws.of([lost])))
    assert read_redraws(tmp_path)[1].redrawn == 1


def test_the_groups_of_a_step_are_those_that_it_trained(tmp_path: Path):
    lost = episode(reward=None, error="SandboxDied: gone")
    records = [
        EpisodeRecord(1, 1, episode(reward=3.0)),
        EpisodeRecord(1, 0, episode(reward=1.0)),
        EpisodeRecord(1, 0, lost),
        EpisodeRecord(1, 0, episode(reward=2.0)),
        EpisodeRecord(1, 0, episode(reward=4.0), baseline=True),
        EpisodeRecord(1, 2, episode(), set_aside=True),
    ]
    write(tmp_path, compress(records))
    first, second = read_groups(str(tmp_path), 1)
    assert [e.reward for e in first.episodes] == [1.0, 2.0]
    assert [e.error for e in first.failed] == [lost.error]
    assert first.greedy is not None
    assert first.greedy.reward == 4.0
    assert [e.reward for e in second.episodes] == [3.0]
    assert second.failed == ()
    assert second.greedy is None


def test_metrics_of_a_late_evaluation_are_with_its_step_and_another_folder_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no config\.yaml"):
        agentrl.read_metrics(tmp_path / "runz")
    (tmp_path / "config.yaml").touch()
    assert agentrl.read_metrics(tmp_path) == []
    lines = [{"step": 1, "a": 2}, {"step": 2, "a": 3}, {"step": 1, "held_out": 0.5, "late": 1}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert agentrl.read_metrics(str(tmp_path)) == [{"step": 1, "a": 2, "held_out": 0.5}, {"step": 2, "a": 3}]
