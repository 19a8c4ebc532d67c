"""The supervisor's event loop: the descriptors it waits on, and its link to the outside."""

from __future__ import annotations

import select
from collections.abc import Callable

from . import frames


class LinkLost(Exception):
    """The other side is gone, or the lifetime is over."""


class Loop:
    """Handlers by descriptor, and frames to the outside."""

    def __init__(self, link_in: int, link_out: int) -> None:
        self.link_in, self.link_out = link_in, link_out
        self.poll = select.poll()
        self.handlers: dict[int, Callable[[], None]] = {}

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.POLLIN) -> None:
        self.poll.register(fd, events)
        self.handlers[fd] = handler

    def _unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def send(self, header: frames.Header, payload: bytes = b"") -> None:
        """Send one frame to the outside; waits while the outside is not reading."""
        self._write(frames.pack(header, payload))

    def _write(self, frame: bytes) -> None:
        try:
            frames.write_all(self.link_out, frame)
        except OSError as error:
            raise LinkLost(str(error)) from None
