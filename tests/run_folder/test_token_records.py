"""A file of token records from elsewhere: read within bounds, or one error."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import zstandard

from agentrl.errors import CheckpointError
from agentrl.run_folder.token_records import read_tokens, tokens_file


def header(ids: object, counts: object, columns: object) -> bytes:
    return json.dumps({"ids": ids, "counts": counts, "columns": columns}).encode() + b"\n"


WRONG = {
    "counts beyond the data": header(["a"], [10**30], ["entropy"]),
    "more ids than counts": header(["a", "b"], [0], ["entropy"]),
    "negative counts": header(["a", "b"], [-4, 8], ["flags"]) + b"1234",
    "a column twice": header(["a"], [1], ["entropy"] * 2) + bytes(8),
    "ids of other types": header([["a"]], [0], ["entropy"]),
    "no object": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "a number that is none": b'{"ids": ["a"], "counts": [NaN], "columns": ["flags"]}\n',
    "no line": b"",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_no_run_writes_is_one_error(tmp_path: Path, kind: str) -> None:
    tokens_file(tmp_path, 1).parent.mkdir()
    tokens_file(tmp_path, 1).write_bytes(zstandard.compress(WRONG[kind]))
    with pytest.raises(CheckpointError, match="damaged"):
        read_tokens(tmp_path, 1)


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    packer, piece = zstandard.ZstdCompressor(), bytes(1 << 20)
    stream = packer.compressobj(size=400 << 20)  # a size in the frame's head makes some readers allocate all of it
    data = b"".join(stream.compress(piece) for _ in range(400)) + stream.flush()
    assert len(data) < 100_000
    tokens_file(tmp_path, 1).parent.mkdir()
    tokens_file(tmp_path, 1).write_bytes(data)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="more than 64 MiB"):
        read_tokens(tmp_path, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 250_000
