"""A way of our own into a container: a socket that its supervisor calls, past the relays of the engine.

What goes over the stream that an engine attaches is handed on twice, by its daemon and by the container's shim,
and each of them has to wake up first. So the socket is shown to the container as one more read-only file. The
supervisor connects before anything else runs there; then the socket listens no more and its name is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile

from agentrl.sandbox.inside import leftovers

PLACE = "/run/agentrl.sock"
"""Where the container sees it."""


class Door:
    """One listening socket in a folder that nobody else can enter."""

    def __init__(self, path: str, listener: socket.socket) -> None:
        self.path, self._listener = path, listener

    @classmethod
    def make(cls) -> Door | None:
        """A new one; None where no socket can be made (a name too long, a full disk): there is another way."""
        try:
            folder = _new_folder()
        except OSError:
            return None
        path = os.path.join(folder, "door")
        listener = socket.socket(socket.AF_UNIX)
        door = cls(path, listener)
        try:
            listener.bind(path)  # OSError where the name is too long
            os.chmod(path, 0o666)  # the container's user is nobody here
            listener.listen(1)
        except OSError:
            door.close()
            return None
        listener.setblocking(False)
        return door

    async def opened(self) -> socket.socket:
        """Wait for the supervisor to call."""
        caller, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        return caller

    def close(self) -> None:
        """Listen no more; idempotent."""
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


def _new_folder() -> str:
    """A folder that is new, ours, and nobody else's to enter.

    Raises:
        OSError: there is no room for it, or somebody got at it.
    """
    run = leftovers.run_folder(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=f"{os.path.basename(run)}.", dir=os.path.dirname(run))
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o700:
        raise PermissionError(f"{folder} has changed hands since it was made")
    return folder
