"""Addresses of HTTP servers in the configuration."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
"""Hosts under which a server on this machine is reached; servers print the last two as their own address."""


def address_problem(url: str) -> str:
    """Why the address cannot be used; "" if it can."""
    import httpx

    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as e:
        return f"not a URL: {e}"
    if parts.scheme not in ("http", "https") or not parts.host:
        return "not an http or https URL with a host"
    return "" if parts.port is None or 0 < parts.port < 1 << 16 else f"invalid port {parts.port}"


def server_of(url: str) -> tuple[str | None, int | None, str]:
    """What two addresses of the same server have in common. A gateway tells servers apart by their paths."""
    parts = urlsplit(url)
    host = "localhost" if parts.hostname in THIS_MACHINE else parts.hostname
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return host, port, parts.path.rstrip("/").removesuffix("/v1")


def without_credentials(url: str) -> str:
    """The address for messages and files."""
    return re.sub(r"^([^/?#]*://)?[^/?#]*@", r"\1(hidden)@", url)


def hide_credentials(text: str, fill: str = "") -> str:
    """`text` without the credentials of the addresses in it.

    Args:
        fill: replaces each of their characters, so that the columns of the text stay.
    """

    def hidden(found: re.Match[str]) -> str:
        return f"{found[1]}{fill * len(found[2]) or '(hidden)'}@"

    return re.sub(r"\b([a-z][a-z0-9+.-]*://)([^/?#\s]+)@", hidden, text, flags=re.IGNORECASE)
