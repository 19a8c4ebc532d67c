"""IPC that outlives its processes: System V objects, message queues, files in /dev/shm."""

from __future__ import annotations

import contextlib
import ctypes
import os

from . import kernel, leftovers

QUEUES, SHARED_FILES = "/dev/mqueue", "/dev/shm"
IPC_RMID = 0
SHM_INFO, SEM_INFO, MSG_INFO = 14, 19, 12
_told = (ctypes.c_int * 64)()
"""The kernel's summary of all objects of one kind; each kind stores the count at a different offset."""


def clear() -> None:
    """Remove all of it; call from PID 1 of an IPC namespace once nobody else is left in it."""
    with contextlib.suppress(OSError):
        _clear_system_v()
    for place in (QUEUES, SHARED_FILES):
        with contextlib.suppress(OSError):
            for name in os.listdir(place):
                path = f"{place}/{name}"
                if os.path.isdir(path) and not os.path.islink(path):
                    leftovers.remove_tree(path)
                else:
                    os.unlink(path)


def _clear_system_v() -> None:
    libc = kernel.libc
    if libc.shmctl(0, SHM_INFO, _told) >= 0 and _told[0]:  # used_ids
        for number in _identifiers("shm"):
            libc.shmctl(number, IPC_RMID, None)
    if libc.semctl(0, 0, SEM_INFO, _told) >= 0 and _told[7]:  # semusz: sets there are
        for number in _identifiers("sem"):
            libc.semctl(number, 0, IPC_RMID)
    if libc.msgctl(0, MSG_INFO, _told) >= 0 and _told[0]:  # msgpool: queues there are
        for number in _identifiers("msg"):
            libc.msgctl(number, IPC_RMID, None)


def _identifiers(kind: str) -> list[int]:
    with open(f"/proc/sysvipc/{kind}") as f:
        return [int(row.split()[1]) for row in f.read().splitlines()[1:]]
