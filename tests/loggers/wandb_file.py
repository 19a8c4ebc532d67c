"""Read W&B's offline files: `python wandb_file.py FILE...` prints a JSON line for each run and row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

BLOCK = 32 * 1024
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after the file's header; a torn last one is left out."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part = data[at + HEADER : at + HEADER + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(part) < length:
            return
        at += HEADER + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield parts


def main() -> None:
    """Print what the files hold."""
    from wandb.proto import wandb_internal_pb2

    for path in sys.argv[1:]:
        for data in records(Path(path).read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                config = {update.key: json.loads(update.value_json) for update in record.run.config.update}
                found = {"run": record.run.run_id, "project": record.run.project, "config": config}
            elif record.HasField("history"):
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                found = {"row": row}
            else:
                continue
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
