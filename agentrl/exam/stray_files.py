"""Files that episodes leave behind: every file that this process opens for writing is noted."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentrl.exam.marks import ExamResult, Level

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
_INSTALLED = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_PATH_EVENTS = {"os.mkdir": 0, "os.rename": 1, "sqlite3.connect": 0, "os.symlink": 1, "os.link": 1}


class FileWatch:
    """The files and folders that were created or written while it is on."""

    def __init__(self) -> None:
        self.on = False
        self._paths: dict[str, bool] = {}

    def note(self, event: str, given: tuple[object, ...]) -> None:
        """An audit event of the interpreter."""
        if event == "open" and len(given) >= 3:
            mode, flags = given[1], given[2]
            writes = isinstance(mode, str) and any(c in mode for c in "wax+")
            if not (writes or (isinstance(flags, int) and flags & _WRITING)):
                return
            path = given[0]
        elif event in _PATH_EVENTS and len(given) > _PATH_EVENTS[event]:
            path = given[_PATH_EVENTS[event]]
        else:
            return
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, str | os.PathLike):
            name = os.path.abspath(os.fspath(path))
            if name not in self._paths:
                self._paths[str(name)] = os.path.lexists(name)

    def left(self) -> list[str]:
        """The paths that were created and still exist, without those inside others."""
        noted = list(self._paths.items())  # looking at them may open files, and other threads still do
        found = [p for p, before in noted if not before and os.path.lexists(p) and not _ours(p)]
        folders = set(found)
        return sorted(p for p in found if not any(str(parent) in folders for parent in Path(p).parents))


_watch: list[FileWatch] = []


def _hook(event: str, given: tuple[object, ...]) -> None:
    for watch in _watch:
        if watch.on:
            watch.note(event, given)


_hooked = False


@contextmanager
def watching_files() -> Iterator[FileWatch]:
    """Watch the files that this process creates."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # cannot be removed: it does nothing while nothing watches
        _hooked = True
    watch = FileWatch()
    _watch.append(watch)
    watch.on = True
    try:
        yield watch
    finally:
        watch.on = False
        _watch.remove(watch)


def _ours(path: str) -> bool:
    """Files of the interpreter, of packages and of caches."""
    if "__pycache__" in path or path.endswith((".pyc", ".lock")) or path.startswith(("/dev/", "/proc/", "/sys/")):
        return True
    home = os.path.expanduser("~")
    places = (os.path.join(home, ".cache"), os.path.join(home, ".config"), *_INSTALLED)
    name = os.path.relpath(path, tempfile.gettempdir()).split(os.sep)[0]
    return path.startswith(places) or name.startswith(("agentrl-", "pymp-"))


def judge_process(result: ExamResult, environ: Mapping[str, str], folder: str) -> None:
    """Report changes of the environment variables and the working folder."""
    changed = sorted(key for key in {*environ, *os.environ} if environ.get(key) != os.environ.get(key))
    changed = [key for key in changed if key not in ("COLUMNS", "LINES") and not key.startswith("PYTEST_")]
    before = ", ".join(changed[:5])
    if changed and any(key in environ for key in changed):
        result.add("leftovers", Level.ERROR, f"episodes change environment variables of the process: {before}")
    elif changed:
        result.add("leftovers", Level.WARNING, f"episodes set environment variables of the process: {before}")
    if os.getcwd() != folder:
        result.add("leftovers", Level.ERROR, "episodes change the working folder of the process")
        os.chdir(folder)


def judge_leftovers(result: ExamResult, left: list[str]) -> None:
    """Report files that remain."""
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        text = f"episodes left files behind: {', '.join(left[:3])}{more}; remove them in teardown"
        result.add("leftovers", Level.ERROR, text)
