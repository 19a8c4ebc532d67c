"""Whose things are lying about: names that tell of an owner, and the removal of what a dead one has left."""

from __future__ import annotations

import contextlib
import errno
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


def remove_tree(path: str) -> None:
    """Delete a directory as far as that is possible; see `remove_whole`."""
    with contextlib.suppress(OSError):
        remove_whole(path)


def remove_whole(path: str) -> None:
    """Delete a directory whatever modes its owner gave to what is inside, and however deep it is.

    Links are not followed. A directory within one that is being emptied moves to the top first, so that a program
    that nests thousands of them costs no more than one that makes thousands side by side.

    Raises:
        OSError: something of it cannot be removed.
    """
    top = _open_folder(path, None)
    moved = 0
    try:
        while names := os.listdir(top):
            for name in names:
                if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=top)
                    continue
                folder = _open_folder(name, top)
                try:
                    for inner in os.listdir(folder):
                        if not stat.S_ISDIR(os.stat(inner, dir_fd=folder, follow_symlinks=False).st_mode):
                            os.unlink(inner, dir_fd=folder)
                            continue
                        os.close(_open_folder(inner, folder))  # one that is locked cannot be moved
                        while True:
                            moved += 1
                            try:
                                os.rename(inner, f"moved{moved}", src_dir_fd=folder, dst_dir_fd=top)
                                break
                            except OSError as error:  # a program has made something of that name
                                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                                    raise
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def _open_folder(name: str, fd: int | None) -> int:
    """A descriptor of a directory that its owner may have locked; it can be emptied from now on."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    if stat.S_IMODE(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=fd)  # of the owner's own making: nobody swaps it for a link any more
    return os.open(name, flags, dir_fd=fd)
