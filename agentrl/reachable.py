"""Whether anything accepts connections at an endpoint, before a run relies on it."""

from __future__ import annotations

import asyncio
import os
import socket
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

ATTEMPTS, AGAIN_AFTER_S = 2, 1.0


async def unreachable(url: str, *, through_proxy: bool = True, timeout_s: float = 5.0) -> str:
    """Why nothing accepts connections at the host and port of `url`; "" if something does, or a proxy is used.

    Args:
        url: an http or https URL.
        through_proxy: whether requests to it obey the proxy variables of the environment.
        timeout_s: timeout of one attempt.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if through_proxy and parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return ""
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(AGAIN_AFTER_S)
        try:
            async with asyncio.timeout(timeout_s):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return ""
        except TimeoutError:
            problem = f"no connection within {timeout_s:g} s"
        except OSError as e:
            named = None if isinstance(e, socket.gaierror) else e.errno
            problem = e.strerror or str(e) if named is None else os.strerror(named)
    return problem


async def unreachable_of(urls: Iterable[str]) -> dict[str, str]:
    """The URLs at which nothing accepts connections, each with the reason."""
    asked = list(dict.fromkeys(urls))
    found = await asyncio.gather(*[unreachable(url) for url in asked])
    return {url: why for url, why in zip(asked, found, strict=True) if why}
