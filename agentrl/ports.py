"""Ports for servers that take a while to start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Reserve a free TCP port of `host` ("" for all addresses) for a server that sets SO_REUSEADDR.

    A server takes many seconds from its command line to its socket. Meanwhile, the kernel could give the port to
    another program. It does not while a socket is bound to the port, and since that socket does not listen and
    both set SO_REUSEADDR (socket(7)), the server can still listen there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
