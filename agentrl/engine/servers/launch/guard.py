"""Run a server and end it, with everything it has started, when its owner process is gone.

    python guard.py COMMAND...

Run by path as a standalone program, so it imports nothing from agentrl. Its standard input is a pipe whose other
end the owner holds: the kernel closes that end however the owner dies, including kill -9, so that no server keeps
a GPU after a run. The guard also ends the server on SIGTERM, and exits with the server's exit code if that ends
first. If the guard itself is killed, as Ray does with the children of a dead actor, the kernel ends the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 5.0
"""Seconds that the server has to shut down."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> int:
    """Run the command until it ends or the guard is to end."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)  # Linux only
    # Orphans of the server become children of this process instead of init's, so that they can be found.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.set())
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # no thread is running yet
    )
    threading.Thread(target=_watch_owner, args=(stopping,), daemon=True).start()
    threading.Thread(target=_watch_server, args=(server, stopping), daemon=True).start()
    stopping.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    _end_leftovers()
    return code if code >= 0 else 128 - code


def _watch_owner(stopping: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stopping.set()


def _watch_server(server: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    server.wait()
    stopping.set()


def _end_leftovers() -> None:
    """Kill and reap all remaining descendants, including reparented ones."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end:
        children = _children()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _children() -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    found.append(int(folder.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
