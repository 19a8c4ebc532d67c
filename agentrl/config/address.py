"""Addresses of HTTP servers in the configuration."""

from __future__ import annotations

import re


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


def without_credentials(url: str) -> str:
    """The address for messages and files."""
    return re.sub(r"^([^/?#]*://)?[^/?#]*@", r"\1(hidden)@", url)
