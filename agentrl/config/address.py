"""Addresses of HTTP servers in the configuration."""

from __future__ import annotations


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
