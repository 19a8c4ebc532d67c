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
    """Whether the owner that `run_name` spoke of is gone; what follows a dot tells things of one owner apart."""
    pid, _, began = name.partition(".")[0].partition("-")
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


FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> None:
    """Delete a directory as far as that is possible; see `remove_whole`."""
    with contextlib.suppress(OSError):
        remove_whole(path)


def remove_whole(path: str) -> None:
    """Delete a directory whatever modes its owner gave to what is inside; links are not followed.

    It may be deeper than a call stack or a path name can be: one folder is open at a time, and `..` leads back up.

    Raises:
        OSError: something of it cannot be removed; everything else is gone.
    """
    errors: list[OSError] = []
    folder = _open_folder(path, None)
    names: list[str] = []
    left = [_delete_files(folder, errors)]
    while left:
        if left[-1]:
            name = left[-1].pop()
            try:
                inner = _open_folder(name, folder)
            except OSError as error:
                errors.append(error)
                continue
            names.append(name)
            left.append(_delete_files(inner, errors))
        else:
            left.pop()
            inner = os.open("..", FOLDER, dir_fd=folder)
        os.close(folder)
        folder = inner
        if len(names) == len(left) > 0:
            try:
                os.rmdir(names.pop(), dir_fd=folder)
            except OSError as error:
                errors.append(error)
    os.close(folder)
    if errors:
        raise errors[0]
    os.rmdir(path)


def _open_folder(name: str, fd: int | None) -> int:
    """A descriptor of a directory that its owner may have locked; it can be emptied from now on."""
    if stat.S_IMODE(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(name, stat.S_IRWXU, dir_fd=fd)  # of the owner's own making: nobody swaps it for a link any more
    return os.open(name, FOLDER, dir_fd=fd)


def _delete_files(folder: int, errors: list[OSError]) -> list[str]:
    """Delete what is no directory; the names of those that are one."""
    found = []
    for name in os.listdir(folder):
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                found.append(name)
            else:
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            errors.append(error)
    return found
