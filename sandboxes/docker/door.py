"""A direct connection to a container: a socket that its supervisor calls, bypassing the engine's relays.

The stream attached by an engine passes through its daemon and the container's shim, each of which has to wake up
first. Instead, the socket is mounted into the container as one more read-only file. The supervisor connects before
anything else runs there; then the socket stops listening and its name is removed.
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
"""Its path inside the container."""


class Door:
    """One listening socket in a folder that nobody else can enter."""

    def __init__(self, path: str, listener: socket.socket) -> None:
        self.path, self._listener = path, listener

    @classmethod
    def make(cls) -> Door | None:
        """Create one; None if no socket can be created (name too long, disk full), since there is a fallback."""
        try:
            folder = _new_folder()
        except OSError:
            return None
        path = os.path.join(folder, "door")
        listener = socket.socket(socket.AF_UNIX)
        door = cls(path, listener)
        try:
            listener.bind(path)  # OSError if the name is too long
            os.chmod(path, 0o666)  # the container's user has no rights on this machine
            listener.listen(1)
        except OSError:
            door.close()
            return None
        listener.setblocking(False)
        return door

    async def opened(self) -> socket.socket:
        """Wait for the supervisor to connect."""
        caller, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        return caller

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))


def _new_folder() -> str:
    """Create a new folder that only this user can enter.

    Raises:
        OSError: there is no room for it, or another user interfered.
    """
    run = leftovers.run_folder(tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix=f"{os.path.basename(run)}.", dir=os.path.dirname(run))
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o700:
        raise PermissionError(f"{folder} has changed hands since it was made")
    return folder
