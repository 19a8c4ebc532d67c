"""Sandboxes on other machines, leased from `agentrl sandbox serve`: the same frames, over TCP."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import Any, cast
from urllib.parse import urlsplit

from agentrl.errors import ConfigError
from agentrl.sandbox.contract import Sandbox
from agentrl.sandbox.errors import SandboxUnavailable
from agentrl.sandbox.link import StreamLink
from agentrl.sandbox.remote_server import read_token, to_wire

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0
CAUSE_TRIES, CAUSE_PAUSE_S = 20, 0.2
"""Interval for asking a server what ended a sandbox, because it may have to find out first."""


class Lease:
    """One leased sandbox on another machine; it ends with the connection."""

    def __init__(self, backend: Backend, server: tuple[str, int], number: str, link: StreamLink) -> None:
        self._backend, self._server, self._number, self._link = backend, server, number, link
        self._killed = False

    async def cause(self) -> str | None:
        """See contract.Process: what its server observed, or that the server is gone."""
        if self._killed:
            return "it was given back by the program that leased it"
        where = f"sandbox server {self._server[0]}:{self._server[1]}"
        for _ in range(CAUSE_TRIES):
            try:
                status, body = await self._backend.ask(self._server, "GET", f"/v1/ended/{self._number}")
            except (OSError, TimeoutError, ValueError) as error:
                return f"{where} does not answer: {str(error) or 'no answer'}"
            if status != 200:
                return f"{where} does not know it: it has been restarted"
            if body["ended"]:
                return cast("str | None", body["cause"])
            if self._link.failed_here:  # the sandbox is there and does not answer, or says what is no frame
                return None
            await asyncio.sleep(CAUSE_PAUSE_S)
        return f"the connection to {where} broke"

    async def kill(self) -> None:
        """Close the connection."""
        self._killed = True
        self._link.close()


class Backend:
    """See the module docstring."""

    name = "remote"

    def __init__(self, spec: Sandbox) -> None:
        assert spec.url is not None  # the spec validates both
        assert spec.token_file is not None
        self.spec = spec
        self._token = read_token(spec.token_file)
        self._servers = [_address(part.strip()) for part in spec.url.split(",")]
        self._turn = itertools.count()
        self._kept: frozenset[str] = frozenset()

    async def open(self) -> None:
        """Ask the servers for their promises; servers that do not answer are skipped until a lease retries
        them."""
        offers = []
        trouble = ""
        for server in self._servers:
            try:
                status, body = await self.ask(server, "GET", "/v1/health")
            except (OSError, TimeoutError) as error:
                trouble = f"{server[0]}:{server[1]}: {str(error) or 'no answer'}"
                continue
            if status != 200:
                raise ConfigError(f"sandbox server {server[0]}:{server[1]} refuses: {body.get('error')}")
            offers.append(frozenset(body["kept"]))
        if not offers:
            raise SandboxUnavailable(f"no sandbox server answers: {trouble}")
        self._kept = frozenset.intersection(*offers)

    async def start(self, name: str) -> tuple[Lease, StreamLink, str]:
        """Lease from the next server in turn, or from the first one after it that has capacity."""
        first = next(self._turn)
        trouble = []
        for i in range(len(self._servers)):
            server = self._servers[(first + i) % len(self._servers)]
            try:
                status, body, sock = await self._ask(server, "POST", "/v1/lease", to_wire(self.spec))
            except (OSError, TimeoutError) as error:
                trouble.append(f"{server[0]}:{server[1]}: {str(error) or 'no answer'}")
                continue
            if status == 101:
                link = await StreamLink.over(sock, name)
                try:
                    said = await link.hello()
                except BaseException:  # nobody else would end the lease
                    link.close()
                    raise
                return Lease(self, server, str(said["lease"]), link), link, str(said["home"])
            sock.close()
            if status == 400:
                raise ConfigError(f"sandbox server {server[0]}:{server[1]}: {body.get('error')}")
            trouble.append(f"{server[0]}:{server[1]}: {body.get('error')}")
        raise SandboxUnavailable(f"sandbox {name}: no server could lease one: {'; '.join(trouble)}")

    async def ask(self, server: tuple[str, int], method: str, path: str) -> tuple[int, dict[str, Any]]:
        """Send a request without a body; return the status and JSON of the answer."""
        status, body, sock = await self._ask(server, method, path, {})
        sock.close()
        return status, body

    async def _ask(
        self, server: tuple[str, int], method: str, path: str, body: dict[str, Any]
    ) -> tuple[int, dict[str, Any], socket.socket]:
        """Send a request; return (status, JSON of the answer, the connection after the response head)."""
        loop = asyncio.get_running_loop()
        text = json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {server[0]}:{server[1]}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Connection: Upgrade\r\nUpgrade: agentrl-frames\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        sock = socket.socket(socket.AF_INET6 if ":" in server[0] else socket.AF_INET)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, server)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await loop.sock_sendall(sock, head.encode() + text)
                # Byte by byte, because whatever follows the head belongs to the link.
                answer = b""
                while not answer.endswith(b"\r\n\r\n"):
                    part = await loop.sock_recv(sock, 1)
                    if not part or len(answer) > 8192:
                        raise ConnectionError("the answer is no HTTP")
                    answer += part
                lines = answer.decode("latin-1").split("\r\n")
                status = int(lines[0].split(" ")[1])
                length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
                data = b""
                while len(data) < length:
                    part = await loop.sock_recv(sock, length - len(data))
                    if not part:
                        raise ConnectionError("the answer is cut")
                    data += part
            return status, json.loads(data) if data else {}, sock
        except BaseException:
            sock.close()
            raise

    def promises(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the promises that every server has reported."""
        return self._kept - {"cpu_share"}, self._kept

    async def close(self) -> None:
        """Do nothing: leases end with their connections."""


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ConfigError(f"sandbox url={url!r}: must look like http://host:port")
    return parts.hostname, parts.port
