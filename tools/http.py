"""A tool that reads web pages of hosts that were named beforehand. Off until there is such a list.

What a policy asks for is fetched from this machine, outside of any sandbox. So every address is checked before it
is connected to, and the connection goes to the address that was checked: a name that resolves to something else a
moment later gains nothing. Redirects are followed by the same rules. Proxies from the environment are not used.

A host that does not resolve, refuses the connection or breaks off is an observation: whether to ask it is the
policy's choice, and an episode that is played again for it would be the policy's choice as well.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx

from agentrl.env.toolenv.declare import tool
from agentrl.errors import ConfigError
from agentrl.tools.html import html_to_text

MAX_CHARS = 8000
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/javascript")
# Global by the letter of the registries, but a way to an address of another kind inside: NAT64, 6to4, Teredo.
_WRAPPED = [ipaddress.ip_network(n) for n in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")]


@dataclass(frozen=True, slots=True)
class _Hop:
    """One place to fetch from: the address is checked, the host is what TLS and the Host header say."""

    url: str
    host: str
    port: int
    address: str


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    kind: str
    charset: str
    location: str
    data: bytes
    cut: bool


class Http:
    """GET requests to listed hosts.

    Args:
        hosts: who may be asked: "example.org", "*.example.org" (everything below it), "127.0.0.1:8080". Without a
            port, 80 for http and 443 for https are meant. There is no default.
        allow_private: let the listed hosts be on this machine or in a private network.
        timeout_s: limit of one call, redirects included.
        max_bytes: longest body that is read; the rest of a longer one is left out.
        max_redirects: redirects of one call.

    Raises:
        ConfigError: no host is listed, or an entry is none.
    """

    outside = True
    """Its calls reach others than the episode."""

    def __init__(
        self,
        hosts: Sequence[str] = (),
        *,
        allow_private: bool = False,
        timeout_s: float = 20.0,
        max_bytes: int = 1 << 20,
        max_redirects: int = 5,
    ) -> None:
        if isinstance(hosts, str) or not hosts:
            raise ConfigError(
                "agentrl.tools.http:Http is off until hosts are listed: write "
                "{use: agentrl.tools.http:Http, options: {hosts: [example.org]}}"
            )
        self._allowed = [_read_entry(entry) for entry in hosts]
        self._named = ", ".join(hosts)
        for name, value in (("timeout_s", timeout_s), ("max_bytes", max_bytes)):
            if value <= 0:
                raise ConfigError(f"agentrl.tools.http:Http: {name} must be positive, got {value}")
        self._allow_private, self._timeout_s = allow_private, timeout_s
        self._max_bytes, self._max_redirects = max_bytes, max_redirects

    @tool(parallel=True)
    async def fetch(self, url: str, start: int = 0) -> str:
        """Read a web page as text, from character `start` on."""
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await self._read(url)
        except TimeoutError:
            raise TimeoutError(f"{url[:200]}: no complete answer after {self._timeout_s:g} s") from None
        shown = text[max(0, start) :][:MAX_CHARS]
        end = max(0, start) + len(shown)
        if end < len(text):
            shown += f"\n[... {len(text) - end} more characters: fetch again with start={end}]"
        return shown or "[empty]"

    async def _read(self, url: str) -> str:
        for _ in range(self._max_redirects + 1):
            answer = await self._get(await self._check(url))
            if answer.status not in _REDIRECTS or not answer.location:
                return await asyncio.to_thread(_to_text, answer)
            url = urljoin(url, answer.location)
        raise ValueError(f"more than {self._max_redirects} redirects, the last one to {url[:200]}")

    async def _check(self, url: str) -> _Hop:
        """The hop that `url` asks for. Raises ValueError or PermissionError with what the policy may know."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as e:
            raise ValueError(f"{url[:200]!r} is no URL: {e}") from None
        host = (parts.hostname or "").rstrip(".").lower()
        if parts.scheme not in _PORTS or not host:
            raise ValueError(f"{url[:200]!r}: write http://host/path or https://host/path")
        if parts.username is not None or parts.password is not None:
            raise ValueError("a URL with a user name or password is not fetched")
        port = port or _PORTS[parts.scheme]
        self._admit(host, port, parts.scheme)
        addresses = await _resolve(host, port)
        if not self._allow_private and any(not _is_public(a) for a in addresses):
            raise PermissionError(f"{host} is not on the public internet")
        return _Hop(url, host, port, addresses[0])

    def _admit(self, host: str, port: int, scheme: str) -> None:
        """Raises PermissionError where the host is not listed."""
        if not any(
            port == (allowed_port or _PORTS[scheme])
            and (host.endswith(name[1:]) if name.startswith("*.") else host == name)
            for name, allowed_port in self._allowed
        ):
            raise PermissionError(f"{host}:{port} is not allowed; the hosts are: {self._named}")

    async def _get(self, hop: _Hop) -> _Answer:
        url = httpx.URL(hop.url)
        headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity", "User-Agent": "agentrl"}
        # Connect to the checked address, whatever the name resolves to by now; TLS still asks for the host's name.
        pinned = url.copy_with(host=hop.address, username=None, password=None, fragment=None)
        async with httpx.AsyncClient(trust_env=False, timeout=self._timeout_s) as client:
            request = client.build_request("GET", pinned, headers=headers, extensions={"sni_hostname": hop.host})
            try:
                response = await client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout) as e:
                raise ConnectionError(f"{hop.host}:{hop.port}: no connection: {e}") from None
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                raise ConnectionError(f"{hop.host}:{hop.port}: {type(e).__name__}: {e}") from None
            try:
                data, cut = await self._body(response, hop)
            finally:
                await response.aclose()
        kind = response.headers.get("content-type", "text/plain").partition(";")[0].strip().lower()
        return _Answer(
            response.status_code,
            kind,
            response.charset_encoding or "utf-8",
            response.headers.get("location", ""),
            data,
            cut,
        )

    async def _body(self, response: httpx.Response, hop: _Hop) -> tuple[bytes, bool]:
        if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise ValueError(f"{hop.host} answers with compressed data, which is not read")
        data = bytearray()
        try:
            async for chunk in response.aiter_raw(65_536):
                data += chunk
                if len(data) > self._max_bytes:
                    return bytes(data[: self._max_bytes]), True
        except httpx.HTTPError as e:
            raise ConnectionError(f"{hop.host}: the answer broke off: {type(e).__name__}") from None
        return bytes(data), False


def _read_entry(entry: str) -> tuple[str, int | None]:
    """(host, port) of one entry of the list."""
    parts = urlsplit(f"//{entry}") if isinstance(entry, str) else None
    try:
        host, port = (parts.hostname, parts.port) if parts else (None, None)
    except ValueError:
        host = None
    bare = (host or "").removeprefix("*.")
    if not host or not bare or "*" in bare or entry != (parts.netloc if parts else "") or "@" in entry:
        raise ConfigError(
            f"agentrl.tools.http:Http: host {entry!r}: write example.org, *.example.org or example.org:8080"
        )
    return host.rstrip("."), port


async def _resolve(host: str, port: int) -> list[str]:
    """All addresses of `host`. Raises ConnectionError where it has none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ConnectionError(f"there is no host {host}") from None
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return _is_public(str(ip.ipv4_mapped))
        if any(ip in network for network in _WRAPPED):
            return False
    return ip.is_global and not ip.is_multicast


def _to_text(answer: _Answer) -> str:
    """What the policy reads of an answer. Raises ValueError where the content is no text."""
    if not (answer.kind.startswith(_TEXT_TYPES) or answer.kind.endswith(("+json", "+xml"))):
        raise ValueError(f"the content is {answer.kind}, not text ({len(answer.data)} bytes)")
    try:
        text = answer.data.decode(answer.charset, "replace")
    except LookupError:
        text = answer.data.decode("utf-8", "replace")
    if answer.kind in ("text/html", "application/xhtml+xml"):
        text = html_to_text(text)
    if answer.status >= 400:
        text = f"[status {answer.status}]\n{text}"
    return (
        f"{text}\n[the rest was left out: the page has more than {len(answer.data)} bytes]" if answer.cut else text
    )
