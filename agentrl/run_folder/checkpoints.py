"""Checkpoint folders: written aside, synced, sealed with a manifest, renamed into place."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import CheckpointError
from agentrl.run_folder.files import fsync_dir, read_bounded, share_weights, write_atomic

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)")
_held: dict[tuple[int, int], int] = {}
"""The checkpoints that this process holds: open folders by device and inode."""


@contextmanager
def writing(folder: Path, step: int) -> Iterator[Path]:
    """Yield a folder to fill; if the block succeeds, it becomes `folder/step-N`, else it is removed.

    An earlier `step-N` is replaced. A process that dies at any moment leaves the earlier one, the new one, or
    leftovers that `sweep` cleans up.
    """
    target = folder / f"step-{step}"
    temp, old = folder / f".writing-step-{step}", folder / f".replaced-step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    try:
        yield temp
        _seal(temp, step)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    temp.rename(target)
    fsync_dir(folder)
    shutil.rmtree(old, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clean up after a process that died inside `writing`."""
    for temp in folder.glob(".writing-step-*"):
        _discard(temp)
    for old in folder.glob(".replaced-step-*"):
        target = folder / old.name.removeprefix(".replaced-")
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def steps_saved(folder: Path) -> list[int]:
    """The steps that have a checkpoint folder, in order."""
    if not folder.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in names if match)


def verify(checkpoint: Path) -> int:
    """Compare every file with the manifest; return the step.

    Raises:
        CheckpointError: the manifest or a file is missing or was changed.
    """
    try:
        manifest = json.loads(read_bounded(checkpoint / MANIFEST))
        step, files = int(manifest["step"]), dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: has no {MANIFEST}, so it is not a finished checkpoint") from None
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as e:
        raise CheckpointError(f"{checkpoint / MANIFEST}: damaged: {e}") from None
    for name, entry in files.items():
        path = checkpoint / name
        try:
            size, digest = path.stat().st_size, _sha256(path)
        except (FileNotFoundError, IsADirectoryError):
            raise CheckpointError(f"{checkpoint}: {name} is missing") from None
        if size != entry["bytes"]:
            raise CheckpointError(f"{path}: has {size} bytes, not {entry['bytes']}; it was cut or changed")
        if digest != entry["sha256"]:
            raise CheckpointError(f"{path}: the content differs from what was saved (sha256 mismatch)")
    return step


def hold(checkpoint: Path) -> None:
    """Keep the run from deleting a checkpoint until this process ends; it may not be verified yet.

    Raises:
        CheckpointError: it was just deleted.
    """
    with suppress(OSError):  # a file system without locks
        try:
            handle = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            raise CheckpointError(f"{checkpoint}: the run has deleted it") from None
        folder = os.fstat(handle)
        if _held.setdefault((folder.st_dev, folder.st_ino), handle) != handle:
            os.close(handle)  # held already


def _seal(folder: Path, step: int) -> None:
    """Sync every file and write the manifest over them."""
    share_weights(folder)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path == folder / MANIFEST:
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
        entry = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        files[path.relative_to(folder).as_posix()] = entry
    for inner in [path for path in folder.rglob("*") if path.is_dir()]:
        fsync_dir(inner)
    text = json.dumps({"step": step, "files": files}, indent=1)
    write_atomic(folder / MANIFEST, text.encode())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(folder: Path, step: int) -> None:
    """Delete a checkpoint so that a process that dies meanwhile leaves no half of one under its name.

    One that another process holds (see `hold`) stays.
    """
    target, doomed = folder / f"step-{step}", folder / f".writing-step-{step}"
    handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        target.rename(doomed)
        _discard(doomed)
    finally:
        os.close(handle)


def _discard(folder: Path) -> None:
    """Delete a folder; what NFS and FUSE keep of files that are still open is left to `sweep`."""
    try:
        shutil.rmtree(folder)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise


def point(link: Path, name: str) -> None:
    """Make `link` point at its sibling `name`; a reader finds the old one or the new one.

    On a file system without symbolic links (exFAT, some network mounts), `link` is a file that contains the name.
    """
    temp = link.with_name(f".{link.name}.tmp")
    temp.unlink(missing_ok=True)
    try:
        temp.symlink_to(name)
    except OSError:
        temp.write_text(name)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)  # the run folder was copied by a program that follows links
    temp.replace(link)
    fsync_dir(link.parent)


def pointed(link: Path) -> int | None:
    """The step of the checkpoint that `link` points at; None if there is none.

    Programs that follow links leave a copy of the checkpoint in the place of a link.
    """
    try:
        if link.is_file():
            name = read_bounded(link).decode("ascii")
        elif link.is_symlink():
            name = link.readlink().name
        else:
            return int(json.loads(read_bounded(link / MANIFEST))["step"])
    except (OSError, CheckpointError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None
    match = _NAME.fullmatch(name.strip())
    return int(match[1]) if match else None
