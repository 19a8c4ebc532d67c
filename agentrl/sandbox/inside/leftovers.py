"""Leftover files: names that identify their owner, and removal of what dead owners left behind."""

from __future__ import annotations

import contextlib
import os
import stat


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; 0 if there is no such process.

    Without /proc (macOS), it is 1 if there is one.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return int(not os.path.isdir("/proc") and _exists(pid))
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except OSError:
        return False
    return True


def run_name() -> str:
    """Return a name that identifies the owner, so that a later run can check whether the owner is still alive."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def is_stale(name: str) -> bool:
    """Return whether the owner named by `run_name` is gone; a suffix after a dot separates items of one owner."""
    pid, _, began = name.partition(".")[0].partition("-")
    return pid.isdigit() and began.isdigit() and start_time(int(pid)) != int(began)


def run_folder(place: str) -> str:
    """Return the path in `place` of this process's folder, without creating it."""
    return os.path.join(place, f"agentrl-{os.getuid()}-{run_name()}")


def sweep_folders(place: str) -> None:
    """Remove the folders of this user's dead runs; other processes may be doing the same."""
    prefix = f"agentrl-{os.getuid()}-"
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if name.startswith(prefix) and is_stale(name[len(prefix) :]):
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                if os.lstat(path).st_uid == os.getuid():
                    remove_tree(path)


FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> None:
    """Delete a directory as far as possible; see `remove_whole`."""
    with contextlib.suppress(OSError):
        remove_whole(path)


def remove_whole(path: str) -> None:
    """Delete a directory whatever modes its owner gave to its contents; links are not followed.

    It may be deeper than the call stack or a path name allows: one folder is open at a time, and `..` leads back
    up.

    Raises:
        OSError: some of it cannot be removed; everything else is gone.
    """
    errors: list[OSError] = []
    names: list[str] = []
    folder = _open_folder(path, None)
    try:
        left = [_delete_files(folder, errors)]
        while left[0] or names:
            if left[-1]:
                name = left[-1].pop()
                try:
                    inner = _open_folder(name, folder)
                except OSError as error:
                    errors.append(error)
                    continue
                os.close(folder)
                folder = inner
                names.append(name)
                left.append(_delete_files(folder, errors))
            else:
                inner = os.open("..", FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
                left.pop()
                try:
                    os.rmdir(names.pop(), dir_fd=folder)
                except OSError as error:
                    errors.append(error)
    finally:
        os.close(folder)
    if errors:
        raise errors[0]
    os.rmdir(path)


def _open_folder(name: str, fd: int | None) -> int:
    """Open a directory that its owner may have locked, and make it possible to empty it."""
    if stat.S_IMODE(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
        os.chmod(name, stat.S_IRWXU, dir_fd=fd)  # created by its owner: nobody can replace it with a link any more
    return os.open(name, FOLDER, dir_fd=fd)


def _delete_files(folder: int, errors: list[OSError]) -> list[str]:
    """Delete everything that is not a directory; return the names of the directories."""
    found: list[str] = []
    try:
        names = os.listdir(folder)
    except OSError as error:
        errors.append(error)
        return found
    for name in names:
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                found.append(name)
            else:
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            errors.append(error)
    return found
