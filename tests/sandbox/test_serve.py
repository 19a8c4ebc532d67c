"""A pool served over HTTP: the same suite, tokens, deaths of either side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.sandbox import Sandbox, SandboxBroken, SandboxError, SandboxPool, SandboxUnavailable
from agentrl.sandbox.link import StreamLink
from agentrl.sandbox.remote_server import SandboxServer, from_wire, limits_from, read_token, to_wire
from agentrl.sandboxes.remote import Backend
from agentrl.testing.sandbox import SMALL_LIMITS, Check, not_promised, sandbox_checks
from tests.sandbox.theatre import Theatre, selected_checks

TOKEN = "a-token-of-some-length"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return str(path)


@pytest.fixture
async def server() -> AsyncIterator[tuple[SandboxServer, str]]:
    server = SandboxServer(Sandbox(), TOKEN, min_idle=1, max_total=8)
    url = await server.start()
    yield server, url
    await server.close()


async def test_a_remote_box_is_a_box(server: tuple[SandboxServer, str], token_file: str) -> None:
    spec = Sandbox(backend="remote", url=server[1], token_file=token_file, memory_mb=128, wall_s=3)
    async with SandboxPool(spec, min_idle=0) as pool:
        async with pool.lease() as box:
            assert (await box.python("print(6 * 7)")).text() == "42\n"
            await box.write_file("f", b"x" * 5_000_000)
            assert len(await box.read_file("f", max_bytes=10**8)) == 5_000_000
            async with await box.session("bash") as session:
                await session.run("cd /tmp")
                assert (await session.run("pwd")).text() == "/tmp\n"
            assert server[0].health()["leased"] == 1
            asked = [own for own in server[0]._pools if own.memory_mb == 128]
            assert [own.wall_s for own in asked] == [3]
        for _ in range(100):
            if server[0].health()["leased"] == 0:
                break
            await asyncio.sleep(0.02)
        assert server[0].health()["leased"] == 0


async def test_a_wrong_token_is_refused(server: tuple[SandboxServer, str], tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("another-token-of-length")
    pool = SandboxPool(Sandbox(backend="remote", url=server[1], token_file=str(tmp_path / "wrong")))
    with pytest.raises(ConfigError, match="the token is missing or wrong"):
        await pool.open()
    (tmp_path / "short").write_text("x")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        read_token(str(tmp_path / "short"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(str(tmp_path / "none"))


async def test_the_death_of_the_server_is_typed(token_file: str) -> None:
    server = SandboxServer(Sandbox(), TOKEN, min_idle=0)
    url = await server.start()
    async with SandboxPool(Sandbox(backend="remote", url=url, token_file=token_file), min_idle=0) as pool:
        box = await pool.acquire()
        call = asyncio.create_task(box.run("sleep 30"))
        await asyncio.sleep(0.1)
        await server.close()
        with pytest.raises(SandboxError):
            await call
        with pytest.raises(SandboxUnavailable, match="no server could lease one"):
            await pool.acquire()
        await pool.release(box)


async def test_a_client_that_gives_up_while_a_box_starts_returns_it(
    server: tuple[SandboxServer, str], token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = StreamLink.hello

    async def silent(link: StreamLink) -> Mapping[str, Any]:
        if link.name == "x":
            await asyncio.Event().wait()
        return await hello(link)

    monkeypatch.setattr(StreamLink, "hello", silent)
    starting = asyncio.create_task(
        Backend(Sandbox(backend="remote", url=server[1], token_file=token_file)).start("x")
    )
    async with asyncio.timeout(20):
        while server[0].health()["leased"] == 0:  # noqa: ASYNC110 - the server counts, it tells nobody
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        while server[0].health()["leased"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)


async def test_another_server_takes_over(server: tuple[SandboxServer, str], token_file: str) -> None:
    other = SandboxServer(Sandbox(), TOKEN, min_idle=0)
    urls = f"{await other.start()}, {server[1]}"
    async with SandboxPool(Sandbox(backend="remote", url=urls, token_file=token_file), min_idle=0) as pool:
        await other.close()
        for _ in range(3):
            async with pool.lease() as box:
                assert (await box.run(["true"])).ok


def test_a_client_cannot_choose_what_is_the_servers() -> None:
    own = Sandbox(readonly=("/usr/share",))
    assert from_wire(to_wire(Sandbox(memory_mb=100, env=(("A", "b"),))), own) == Sandbox(
        memory_mb=100, env=(("A", "b"),), readonly=("/usr/share",)
    )
    for name, value in (("backend", "process"), ("readonly", ["/etc"]), ("nonsense", 1)):
        with pytest.raises(ConfigError, match=f"{name!r} cannot be requested"):
            from_wire({name: value}, own)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_mb", 257), ("pids", 65), ("cpus", 3.0), ("cpu_s", 11.0), ("workspace_mb", 65), ("inodes", 20_001),
        ("file_mb", 65), ("open_files", 257), ("wall_s", 10.1), ("stdout_bytes", 1 << 30),
        ("stderr_bytes", 9**9),
        ("output_total_mb", 10_000), ("ttl_s", 1e9), ("ttl_s", float("inf")), ("wall_s", float("nan")),
        ("memory_mb", "1"), ("pids", True), ("pids", None), ("cpus", -1.0), ("network", True), ("network", 1),
        ("python_path", ["/tmp"]), ("env", [["A", "other"]]), ("env", [["B", 1]]), ("env", [1]), ("env", 7),
    ],
)  # fmt: skip
def test_a_client_is_never_given_more_than_the_server_has(name: str, value: object) -> None:
    own = Sandbox(cpus=2.0, cpu_s=10.0, env=(("A", "b"),), require=("files",))
    less = from_wire(to_wire(Sandbox(memory_mb=100, workspace_mb=32, env=(("C", "d"),), require=())), own)
    assert (less.memory_mb, less.cpus, less.cpu_s, less.require) == (100, 2.0, 10.0, ("files",))
    assert less.env == (("A", "b"), ("C", "d"))
    with pytest.raises(ConfigError, match="lease: "):
        from_wire({name: value}, own)


async def test_a_lease_ends_when_its_time_is_over_whatever_the_client_says(token_file: str) -> None:
    server = SandboxServer(Sandbox(ttl_s=2.0), TOKEN, min_idle=0)
    url = await server.start()
    try:
        spec = Sandbox(backend="remote", url=url, token_file=token_file, ttl_s=2.0)
        async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
            link = box._link
            assert link is not None

            async def keep_awake() -> None:
                while True:
                    await link.send({"op": "wake", "ttl_s": 1e6})
                    await asyncio.sleep(0.2)

            assert (await box.run("true")).ok
            async with asyncio.timeout(20):
                with pytest.raises(SandboxError):
                    await keep_awake()
                with pytest.raises(SandboxBroken):  # the episode's own doing, as on this machine
                    await box.run("true")
    finally:
        await server.close()


async def test_what_a_remote_sandbox_sends_is_no_evidence(
    server: tuple[SandboxServer, str], token_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Sandbox(backend="remote", url=server[1], token_file=token_file)
    async with SandboxPool(spec, min_idle=0) as pool:
        async with pool.lease() as box:
            assert (await box.run("true")).ok
            assert isinstance(box._link, StreamLink)
            box._link.data_received(b"\xff" * 64)
            with pytest.raises(SandboxBroken, match="sent an invalid frame"):
                await box.run("true")
        async with pool.lease() as box:
            assert (await box.run("true")).ok
            monkeypatch.setattr("agentrl.sandbox.box.PATIENCE_S", 0.1)
            monkeypatch.setattr("agentrl.sandbox.box.GRACE_S", 0.1)
            assert isinstance(box._link, StreamLink)
            monkeypatch.setattr(box._link, "_take", lambda header, payload: None)  # it never answers
            with pytest.raises(SandboxBroken, match="did not answer"):
                await box.run("true", wall_s=0.1)


@pytest.mark.parametrize("body", [b"[1]", b"7", b'{"python_path": 7}', b'{"env": {"a": 1}}', b"[" * 60_000, b"{"])
async def test_a_lease_that_is_none_is_refused(server: tuple[SandboxServer, str], body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server[1].rpartition(":")[2]))
    head = f"POST /v1/lease HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert (answer == b"") == (body in (b"[" * 60_000, b"{"))
    writer.close()


def test_what_a_server_may_grant_is_said_when_it_is_started() -> None:
    assert limits_from(["memory_mb=1024", "cpus=1.5", "network=true"]) == {
        "memory_mb": 1024, "cpus": 1.5, "network": True
    }  # fmt: skip
    for text in ("memory_mb", "memory_mb=x", "network=1", "backend=process", "memory_mb=true", "=", "env={}"):
        with pytest.raises(ConfigError, match="--limit"):
            limits_from([text])


def test_remote_needs_its_address() -> None:
    with pytest.raises(ConfigError, match="'remote' needs both"):
        Sandbox(backend="remote")
    with pytest.raises(ConfigError, match="no other back-end takes one"):
        Sandbox(url="http://127.0.0.1:1", token_file="x")


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    path = tmp_path_factory.mktemp("remote") / "token"
    path.write_text(TOKEN)
    with asyncio.Runner() as runner:
        server = SandboxServer(Sandbox(**SMALL_LIMITS), TOKEN, min_idle=2)
        url = runner.run(server.start())
        spec = Sandbox(backend="remote", url=url, token_file=str(path), **SMALL_LIMITS)
        theatre = Theatre(spec, selected_checks(request), runner)
        yield theatre
        theatre.close()
        runner.run(server.close())


@pytest.mark.timeout(600)  # the first one that must be alone waits for all others
@pytest.mark.parametrize(
    "check", [c for c in sandbox_checks() if c.kind != "hostile"], ids=lambda check: check.name
)
def test_check(theatre: Theatre, check: Check) -> None:
    """The hostile programs meet the same supervisor as on the serving machine; all else crosses the wire."""
    missing = not_promised(check, theatre.stage)
    if missing == "memory" and os.getuid() != 0:
        pytest.skip("no control group")
    assert missing is None
    theatre.result(check)
