"""Read rows of files: JSON lines, JSON arrays, parquet, saved datasets. Errors name the file and row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.datafiles import SAVED, data_files
from agentrl.env.env import Env
from agentrl.env.toolenv.scoring import ScoredEnv
from agentrl.errors import ConfigError
from agentrl.types import Task

Row = tuple[int, Mapping[str, Any]]


def read_jsonl(path: Path) -> Iterator[Row]:
    """(line number from 1, object) of each non-empty line.

    Raises:
        ConfigError: the file is missing, or a line is not a JSON object; names file and line.
    """
    if not path.is_file():
        raise ConfigError(f"data: no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                row = json.loads(text.decode().rstrip())  # an end of line would begin another line of columns
            except UnicodeDecodeError as e:
                raise ConfigError(f"{path}:{number}: not UTF-8 text (byte {e.start}: {e.reason})") from None
            except json.JSONDecodeError as e:
                raise ConfigError(f"{path}:{number}: not JSON: {e.msg} (column {e.colno})") from None
            except RecursionError:
                raise ConfigError(f"{path}:{number}: nested too deeply") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: a row must be a JSON object, got {type(row).__name__}")
            yield number, row


def read_rows(path: Path) -> Iterator[Row]:
    """(line or row number from 1, row) of a .jsonl, .json or .parquet file, or of a saved dataset's folder.

    Raises:
        ConfigError: the file is missing, of an unsupported type, or needs a package that is not installed.
    """
    if (path / SAVED).is_file():
        return _read_dataset(path)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _read_array(path) if _is_array(path) else read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise ConfigError(
        f"data: {path}: not a .jsonl, .json (lines or an array) or .parquet file, nor a folder of a saved dataset"
    )


def count_rows(path: Path) -> int:
    """The number of rows from `read_rows`, without reading them if possible. Raises ConfigError."""
    if path.suffix == ".parquet" and path.is_file():
        with _parquet(path) as file:
            return int(file.metadata.num_rows)
    if path.suffix in (".jsonl", ".ndjson", ".json") and not _is_array(path):
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    return sum(1 for _ in read_rows(path))


def _is_array(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        for line in file:
            if text := line.removeprefix(b"\xef\xbb\xbf").strip():
                return text.startswith(b"[")
    return False


def _read_array(path: Path) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start}: {e.reason})") from None
    except json.JSONDecodeError as e:
        raise ConfigError(f"{path}:{e.lineno}: not JSON: {e.msg} (column {e.colno})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: row {number}: a row must be a JSON object, got {type(row).__name__}")
        yield number, row


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ConfigError(f"data: {path}: parquet needs pyarrow: pip install 'agentrl-train[parquet]'") from e
    if not path.is_file():
        raise ConfigError(f"data: no file {path}")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as e:
        raise ConfigError(f"data: {path}: not a parquet file: {e}") from e


def _read_parquet(path: Path) -> Iterator[Row]:
    number = 0
    with _parquet(path) as file:
        import pyarrow

        try:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except pyarrow.ArrowException as e:
            raise ConfigError(f"data: {path}: unreadable after row {number}: {e}") from e


def _read_dataset(path: Path) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as e:
        raise ConfigError(f"data: {path}: a saved dataset needs datasets: pip install 'agentrl-train[hf]'") from e
    try:
        found = datasets.load_from_disk(str(path))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as e:  # the errors of pyarrow are some of these
        raise ConfigError(f"data: {path}: not a saved dataset: {' '.join(str(e).split())[:300]}") from e
    yield from enumerate(found, 1)


def load_rows(
    source: Path | str | Sequence[str],
    env: type[Env],
    *,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    split: str = "train",
) -> list[Task]:
    """One task per row, all checked against the arguments of `setup` before anything runs.

    Args:
        source: a file, or what `data_files` takes.
        env: the env whose `setup` takes the rows.
        seed: the n-th row, over all files, has the seed `seed + n`.
        columns: maps arguments of `setup` to column names if they differ.
        split: selects files of a folder or dataset.

    Raises:
        ConfigError: a row does not fit; names file, line (or row) and argument.
    """
    files = data_files(
        str(source) if isinstance(source, Path) else source, "train" if split == "train" else "held_out"
    )
    names = _names(files)
    tasks: list[Task] = []
    for path in files:
        before = len(tasks)
        fills = path.suffix == ".parquet" or path.is_dir()
        for number, given in read_rows(path):
            row = _renamed(given, columns or {}, f"{path}:{number}")
            if fills and issubclass(env, ScoredEnv):  # its `setup` says which arguments may be missing
                row = env.spec().setup.without_nulls(row)
            if problem := env.row_problem(row):
                raise ConfigError(f"{path}:{number}: {problem}")
            tasks.append(Task(f"{names[path]}-{number}", row, seed + len(tasks) + 1))
        if len(tasks) == before:
            raise ConfigError(f"{path}: no rows")
    return tasks


def _names(files: Sequence[Path]) -> Mapping[Path, str]:
    """A unique name for each file: its name, with as many parent folders as needed."""
    for depth in itertools.count(1):
        names = {path: "-".join([*path.parts[-depth:-1], path.stem]) for path in files}
        if len(set(names.values())) == len(files) or depth > max(len(path.parts) for path in files):
            break
    if len(set(names.values())) < len(files):  # with different suffixes
        return {path: "-".join([*path.parts[1:-1], path.name]) for path in files}
    return names


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> Mapping[str, Any]:
    if not columns:
        return row
    if missing := [column for column in columns.values() if column not in row]:
        raise ConfigError(
            f"{where}: no column {missing[0]!r} (data.columns); the row has {', '.join(map(str, row))}"
        )
    rest = {name: value for name, value in row.items() if name not in columns.values()}
    return rest | {argument: row[column] for argument, column in columns.items()}
