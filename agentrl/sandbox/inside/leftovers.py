"""Whose things are lying about: names that tell of an owner, and the removal of what a dead one has left."""

from __future__ import annotations

import contextlib
import os
import stat


def start_time(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def run_name() -> str:
    """A name that tells whose things these are, so that a later run can see whether the owner still lives."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def is_stale(name: str) -> bool:
    """Whether the owner that `run_name` spoke of is gone."""
    pid, _, began = name.partition("-")
    return pid.isdigit() and began.isdigit() and start_time(int(pid)) != int(began)


def run_folder(place: str) -> str:
    """The path in `place` of the folder with this process's things; nobody has made it yet."""
    return os.path.join(place, f"agentrl-{os.getuid()}-{run_name()}")


def sweep_folders(place: str) -> None:
    """Remove the folders of this user's runs that are gone."""
    prefix = f"agentrl-{os.getuid()}-"
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if name.startswith(prefix) and is_stale(name[len(prefix) :]) and os.lstat(path).st_uid == os.getuid():
            remove_tree(path)


def remove_tree(path: str) -> None:
    """Delete a directory whatever modes its owner gave to what is inside; links are not followed."""
    with contextlib.suppress(OSError):
        os.chmod(path, stat.S_IRWXU)
        with os.scandir(path) as found:
            inside = list(found)
        for entry in inside:
            if entry.is_dir(follow_symlinks=False):
                remove_tree(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(path)
