"""What the docker back-end promises beyond the common suite: hardened for real, nothing left, honest errors."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox import Sandbox, SandboxPool, SandboxUnavailable
from agentrl.sandbox.inside import leftovers
from agentrl.sandbox.link import StreamLink
from agentrl.sandboxes.docker import LABEL, AttachedLink, Backend
from agentrl.sandboxes.docker.door import Door
from tests.sandbox.sandbox_specs import docker_answers

pytestmark = pytest.mark.docker


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    if not docker_answers():
        pytest.skip("no Docker engine answers (scripts/ci-docker starts one)")
    yield
    assert containers() == []


def connect() -> Any:
    import docker

    return docker.APIClient(version="auto", **docker.utils.kwargs_from_env())


def containers(owner: int | None = None) -> list[str]:
    """Containers of one process, this one by default; another run may use the same engine."""
    client = connect()
    try:
        found = client.containers(all=True, filters={"label": LABEL})
    finally:
        client.close()
    prefix = f"{os.getpid() if owner is None else owner}-"
    return [container["Id"] for container in found if container["Labels"][LABEL].startswith(prefix)]


async def test_a_container_is_hardened() -> None:
    async with SandboxPool(Sandbox(backend="docker", cpus=0.5), min_idle=0) as pool, pool.lease() as box:
        client = connect()
        found = client.inspect_container(containers()[0])
        client.close()
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["NetworkMode"] == "none"
        backend = pool._backend
        assert isinstance(backend, Backend)
        assert host["CapDrop"] == ["ALL"] or backend._podman  # which names each
        assert host["LogConfig"]["Type"] == "none"
        assert host["Memory"] == host["MemorySwap"] > 0
        assert host["PidsLimit"] == pool.spec.pids + 2
        text = (await box.run(["cat", "/proc/self/status"])).text()
        status = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
        assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
        assert status["Seccomp_filters"] == "2"  # the engine's and ours
        burn = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass\n"
        burn += "print(time.process_time())"
        assert float((await box.python(burn)).text()) < 1.5 * 0.5 * 1.25


async def test_a_killed_container_is_a_typed_failure() -> None:
    async with SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool:
        box = await pool.acquire()
        call = asyncio.create_task(box.run("sleep 60"))
        await asyncio.sleep(0.2)
        client = connect()
        client.kill(containers()[0])
        client.close()
        with pytest.raises(SandboxError):
            await call
        await pool.release(box)


KNOCK = """
import glob, os, socket
for path in ["/run/agentrl.sock", *glob.glob("/run/*.sock")]:
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
        print("open", path)
    except ConnectionRefusedError:
        print("refused")
"""


def doors() -> list[Path]:
    run = Path(leftovers.run_folder(tempfile.gettempdir()))
    return list(run.parent.glob(f"{run.name}*"))


async def test_the_supervisor_is_spoken_to_directly_and_its_door_leads_nowhere_afterwards() -> None:
    async with SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool, pool.lease() as box:
        assert type(box._link) is StreamLink
        assert doors() == []
        assert set((await box.python(KNOCK)).text().split("\n")) - {""} == {"refused"}
        changed = await box.run("chmod 777 /run/agentrl.sock")
        assert changed.exit_code == 1
        assert "Read-only file system" in changed.error_text() or "not permitted" in changed.error_text()


async def test_a_folder_that_somebody_has_prepared_holds_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Path(leftovers.run_folder(tempfile.gettempdir()))
    prepared.mkdir(mode=0o777)
    door = Door.make()
    try:
        assert door is not None
        folder = Path(door.path).parent
        assert folder != prepared
        assert list(prepared.iterdir()) == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not leftovers.is_stale(folder.name.partition(f"agentrl-{os.getuid()}-")[2])
        door.close()
        assert not folder.exists()
        monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: os.fspath(prepared))  # one that others may enter
        assert Door.make() is None
    finally:
        prepared.rmdir()


async def test_where_no_door_opens_the_engines_stream_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.sandboxes.docker.PLACE", "/run/another.sock")  # told, and not connected to
    command = Backend._command
    monkeypatch.setattr(
        Backend,
        "_command",
        lambda self, door: [w.replace("/run/another", "/run/none") for w in command(self, door)],
    )
    make = Door.make

    def counted() -> Door | None:
        made.append(make())
        return made[-1]

    made: list[Door | None] = []
    monkeypatch.setattr(Door, "make", counted)
    async with SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool, pool.lease() as box:
        assert type(box._link) is AttachedLink
        assert (await box.python("print(6 * 7)")).text() == "42\n"
    assert doors() == []
    assert len(made) == 1  # the first sandbox tells for all: the pool's own is one before the lease


async def test_a_container_that_is_just_ending_is_asked_to_go_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import docker
    import requests

    class Podman(docker.APIClient):
        """Says once what podman says of a container that has ended and is not tidied up."""

        def remove_container(self, container: str, **how: Any) -> None:
            asked.append(container)
            if len(asked) == 1:
                said = requests.Response()
                said.status_code = 500
                raise docker.errors.APIError("container state improper: stopped", response=said)
            super().remove_container(container, **how)

    asked: list[str] = []
    async with SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool:
        async with pool.lease():
            monkeypatch.setattr(pool._backend.client, "__class__", Podman)
        assert len(asked) >= 2
        assert len(set(asked)) == 1
        assert containers() == []


async def test_an_engine_that_cannot_see_our_files_is_asked_without(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Door.make

    def hidden() -> Door | None:
        door = make()
        assert door is not None
        os.unlink(door.path)
        asked.append(door.path)
        return door

    asked: list[str] = []
    monkeypatch.setattr(Door, "make", hidden)
    async with SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool:
        for _ in range(2):
            async with pool.lease() as box:
                assert type(box._link) is AttachedLink
                assert (await box.python("print(6 * 7)")).text() == "42\n"
    assert len(asked) == 1


async def test_gvisor_without_a_door_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Backend._connect

    def as_if_gvisor(self: Backend, sdk: Any) -> None:
        connect(self, sdk)
        self._gvisor = True

    monkeypatch.setattr(Backend, "_connect", as_if_gvisor)
    monkeypatch.setattr(Door, "make", lambda: None)
    pool = SandboxPool(Sandbox(backend="docker"), min_idle=0)
    with pytest.raises(SandboxUnavailable, match=r"forge reports.*--host-uds=open"):
        await pool.open()
    await pool.close()


def test_a_door_that_cannot_be_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert Door.make() is None
    assert list(deep.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert Door.make() is None


HARNESS = """
import asyncio
from agentrl.sandbox import Sandbox, SandboxPool
async def main():
    pool = SandboxPool(Sandbox(backend="docker"), min_idle=0)
    box = await pool.acquire()
    print("ready", flush=True)
    await box.run("sleep 100", wall_s=90)
asyncio.run(main())
"""


def test_a_killed_harness_leaves_no_container() -> None:
    harness = subprocess.Popen([sys.executable, "-c", HARNESS], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    assert harness.stdout.readline() == "ready\n"
    assert len(containers(harness.pid)) == 1
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    harness.stdout.close()
    deadline = time.monotonic() + 10
    while containers(harness.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def test_no_engine_and_no_image_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SandboxPool(Sandbox(backend="docker", image="agentrl/no-such-image:1"), min_idle=0)
    with pytest.raises(ConfigError, match=r"'agentrl/no-such-image:1' is not on this Docker engine"):
        await pool.open()
    await pool.close()
    monkeypatch.setenv("DOCKER_HOST", f"unix:///nowhere-{os.getpid()}.sock")
    pool = SandboxPool(Sandbox(backend="docker"), min_idle=0)
    with pytest.raises(SandboxUnavailable, match="no Docker engine answers"):
        await pool.open()
    await pool.close()
    monkeypatch.undo()


async def test_no_two_living_containers_have_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few users there are to choose from; an ended one gives its own back."""
    monkeypatch.setattr("agentrl.sandboxes.docker.USERS", 3)
    async with (
        SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool,
        SandboxPool(Sandbox(backend="docker"), min_idle=0) as more,
    ):
        for _ in range(2):
            async with pool.lease() as one, more.lease() as two, pool.lease() as three:
                users = {(await box.run("id -u")).text() for box in (one, two, three)}
            assert len(users) == 3
