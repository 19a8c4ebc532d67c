"""What the namespace back-end promises beyond the common suite: numbers, nothing left, one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.sandbox import Box, PromiseNotEnforceable, Sandbox, SandboxError, SandboxPool, SandboxUnavailable
from agentrl.sandbox.link import StreamLink
from agentrl.sandbox.local import LocalBackend, LocalProcess
from agentrl.sandbox.pool import make_backend
from agentrl.testing.sandbox_suite import hostile
from agentrl.testing.sandbox_suite.stage import Stage
from tests.sandbox.sandbox_specs import ORDINARY_USER, SYSTEM_PYTHON, spec_for

CGROUPS = Path("/sys/fs/cgroup")


def groups_of(pid: int) -> list[Path]:
    return [path for path in CGROUPS.glob("**/agentrl/*") if path.name.startswith(f"{pid}-")]


@pytest.mark.parametrize("name", ["namespace", "namespace_user"])
async def test_every_program_starts_without_any_privilege(name: str) -> None:
    async with SandboxPool(spec_for(name), min_idle=0) as pool, pool.lease() as box:
        text = (await box.run(["cat", "/proc/self/status"])).text()
        status = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[kind], 16) == 0, kind
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert "0" not in status["Uid"].split()
        mounts = (await box.run(["cat", "/proc/self/mounts"])).text().splitlines()
        writable = {line.split()[1] for line in mounts if "rw" in line.split()[3].split(",")}
        assert {place for place in writable if not place.startswith(("/dev/", "/proc/"))} == {
            "/workspace",
            "/tmp",
            "/proc",
        }
        result = await box.run("echo x > /proc/self/oom_score_adj")
        assert not result.ok
        hidden = [place for place in ("/sys", "/var", "/opt", "/srv") if place not in sys.base_prefix]
        assert (await box.run(f"ls {' '.join(hidden)} 2>&1 | grep -vc 'No such'")).text() == "0\n"


@pytest.mark.parametrize("share", [0.2, 0.5])
async def test_cpu_share_is_held(share: float) -> None:
    if os.getuid() != 0:
        pytest.skip("control groups need root here")
    async with (
        SandboxPool(Sandbox(cpus=share), min_idle=0) as pool,
        pool.lease() as box,
        SandboxPool(Sandbox(), min_idle=0) as free_pool,
        free_pool.lease() as free,
    ):
        burn = """
import os, time
child = os.fork()
end = time.monotonic() + 1.5
while time.monotonic() < end: pass
if child:
    os.wait()
    t = os.times()
    print(t.user + t.system + t.children_user + t.children_system)
else:
    os._exit(0)
"""

        async def used(by: Box) -> float:
            result = await by.python(burn)
            return float(result.text()) / result.wall_s

        found, to_have = 0.0, share
        for _ in range(5):
            found = max(found, await used(box))
            if found >= to_have * 0.4:
                break
            to_have = min(to_have, await used(free))  # what a busy machine gives
        assert found <= share * 1.15
        assert found >= to_have * 0.4


async def test_cpu_share_is_refused_where_it_cannot_be_held() -> None:
    spec = spec_for("namespace_user")
    pool = SandboxPool(Sandbox(run_as=spec.run_as, python=spec.python, cpus=0.5))
    with pytest.raises(PromiseNotEnforceable, match="cpu_share"):
        await pool.open()


async def test_a_keeper_whose_start_is_cancelled_ends_by_itself() -> None:
    pool = SandboxPool(Sandbox())
    backend = pool._backend
    assert isinstance(backend, LocalBackend)
    opening = asyncio.create_task(backend.open())
    while (keeper := backend._keeper) is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await backend.close()
    assert keeper.returncode != -signal.SIGKILL


async def test_a_resting_sandbox_is_one_small_process() -> None:
    async with SandboxPool(Sandbox(), min_idle=3) as pool:
        await settled(pool, idle=3)
        for box in pool._idle:
            process = box._process
            assert isinstance(process, LocalProcess)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            assert children == ""
            if os.getuid() != 0:
                continue  # nobody else may look into the memory of a supervisor
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            pss = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            assert pss <= 8 << 10, f"{pss} KiB"


async def settled(pool: SandboxPool, *, idle: int) -> None:
    for _ in range(1000):
        if pool.metrics()["idle"] == idle:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(pool.metrics())


HARNESS = """
import asyncio, sys
from agentrl.sandbox import Sandbox, SandboxPool
async def main():
    backend, token = sys.argv[1:]
    pool = SandboxPool(Sandbox(backend=backend, trusted=backend == "process"), min_idle=2)
    box = await pool.acquire()
    other = await pool.acquire()
    session = await other.session("bash")
    await session.run(f"(exec -a {token} sleep 300) & ")
    await other.write_file("f", "x")
    print(pool._backend._keeper.pid, flush=True)
    await box.run(f"(setsid bash -c 'exec -a {token} sleep 300' &) ; exec -a {token} sleep 300", wall_s=200)
asyncio.run(main())
"""


def mounted() -> list[str]:
    """What is mounted, except by a Docker engine, which other tests use at the same time."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if "docker" not in line]


@pytest.mark.parametrize("backend", ["namespace", "landlock", "process"])
def test_a_killed_harness_leaves_nothing(backend: str, tmp_path: Path) -> None:
    spec_for(backend)
    token = f"agentrl-crash-{os.getpid()}-{backend}"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    mounts = mounted()
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, backend, token], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert harness.stdout is not None
    keeper = int(harness.stdout.readline())

    def alive() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (os.getpid(), harness.pid):
                try:
                    command, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
                except OSError:
                    continue
                if (token.encode() in command or int(entry.name) == keeper) and ") Z " not in state:
                    found.append(entry.name)
        return found

    deadline = time.monotonic() + 10
    while len(alive()) < 4:
        assert time.monotonic() < deadline, "the harness did not get going"
        time.sleep(0.02)
    harness.send_signal(signal.SIGKILL)
    harness.wait()
    harness.stdout.close()
    deadline = time.monotonic() + 8
    while (left := alive()) or groups_of(keeper) or list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, (left, groups_of(keeper), list(tmp_path.iterdir()))
        time.sleep(0.05)
    assert mounted() == mounts


def test_the_next_keeper_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    spec_for("landlock")
    script = textwrap.dedent("""
        import asyncio, os, signal, sys
        from agentrl.sandbox import Sandbox, SandboxPool
        async def main():
            pool = SandboxPool(Sandbox(backend=sys.argv[1]), min_idle=0)
            box = await pool.acquire()
            os.kill(pool._backend._keeper.pid, signal.SIGKILL)
            print(pool._backend._keeper.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script, "landlock"], stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    keeper = int(done.stdout)
    time.sleep(0.5)
    left = list(tmp_path.iterdir())
    assert left, "the crash left nothing to sweep: the test tests nothing"

    async def next_run() -> None:
        async with SandboxPool(Sandbox(backend="landlock"), min_idle=0) as pool, pool.lease():
            assert not groups_of(keeper)
            assert not left[0].exists()

    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(tmp_path)
    import tempfile

    tempfile.tempdir = None
    try:
        asyncio.run(next_run())
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
    assert list(tmp_path.iterdir()) == []


OUTSIDE = [program for program in hostile.PROGRAMS if program.escapes_outside]


@pytest.mark.parametrize("program", OUTSIDE, ids=lambda program: program.name)
def test_the_hostile_programs_do_get_through_where_nothing_stops_them(program: hostile.Hostile) -> None:
    """The control of the controls: outside a sandbox these programs succeed."""

    async def run() -> None:
        spec = Sandbox(backend="process", trusted=True)
        async with SandboxPool(spec, min_idle=0) as pool:
            stage = Stage(pool)
            try:
                with pytest.raises(AssertionError, match=r"ESCAPED|written outside|outcome|oom"):
                    await hostile.play(stage, program)
            finally:
                stage.close()

    asyncio.run(run())
    assert len(OUTSIDE) >= 15


MANY = """
import os, select, time
held_by_all, ready = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        held = bytearray(b"x" * (40 << 20))
        os.write(ready, b"x")
        time.sleep(60)
        os._exit(0)
holding = 0
while holding < 20 and os.waitpid(-1, os.WNOHANG)[0] == 0:
    if select.select([held_by_all], [], [], 0.01)[0]:
        holding += len(os.read(held_by_all, 20))
"""
"""Ends as soon as all hold their memory, or one of them has ended."""


async def test_memory_bombs_do_not_take_the_supervisor() -> None:
    bombs = {
        "one": "held = bytearray(b'x' * (1 << 30))",
        "many": MANY,
        "disk": "import os\ntry:\n    open('/tmp/f', 'wb').write(b'x' * (100 << 20))\nexcept OSError: pass\n"
        "held = bytearray(b'x' * (1 << 30))",
    }
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        for name, code in bombs.items():
            async with pool.lease() as box:
                for _ in range(4):
                    result = await box.python(code)
                    # Without a control group, a process that is too large hits its own rlimit.
                    assert result.outcome in (("oom",) if os.getuid() == 0 else ("oom", "exit")), (name, result)
                    assert (await box.python("print(1)")).text() == "1\n", name


async def test_output_does_not_grow_the_harness() -> None:
    import resource

    async with SandboxPool(Sandbox(), min_idle=0) as pool, pool.lease() as box:
        await box.run("head -c 50M /dev/zero")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await box.run("head -c 200M /dev/zero")
        assert result.stdout_total == 200 << 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10


async def test_declared_paths_are_visible_and_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data.txt").write_text("given")
    (tmp_path / "data.txt").chmod(0o666)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "mine.py").write_text("VALUE = 3")
    spec = Sandbox(readonly=(str(tmp_path),), python_path=(str(tmp_path / "packages"),), env=(("A", "b"),))
    async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
        assert await box.read_file(str(tmp_path / "data.txt")) == b"given"
        assert (await box.python("import mine, os; print(mine.VALUE, os.environ['A'])")).text() == "3 b\n"
        with pytest.raises(OSError, match="Read-only"):
            await box.write_file(str(tmp_path / "data.txt"), "taken")


async def test_network_can_be_opened_by_name() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection({server.getsockname()!r}, 2); print('connected')"
        async with SandboxPool(Sandbox(network=True), min_idle=0) as pool, pool.lease() as box:
            assert (await box.python(code)).text() == "connected\n"
            assert pool.capabilities is not None
            assert "network" not in pool.capabilities.kept


WITHOUT_NAMESPACES = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from agentrl.sandbox.inside import kernel
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.install_seccomp(kernel.seccomp_filter(network=True, shared_memory=True))
os.execv({system!r}, [{system!r}, *sys.argv[1:]])
"""


async def test_where_namespaces_are_forbidden_it_says_so_and_landlock_serves(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become an ordinary user")
    python = tmp_path / "python"
    import agentrl

    root = str(Path(agentrl.__file__).parent.parent)
    text = WITHOUT_NAMESPACES.format(python=sys.executable, root=root, user=23456, system="/usr/bin/python3")
    python.write_text(text)
    python.chmod(0o755)
    pool = SandboxPool(Sandbox(python=str(python)))
    with pytest.raises(SandboxUnavailable, match=r"clone .* Operation not permitted.*backend='landlock'"):
        await pool.open()
    await pool.close()
    spec_for("landlock")
    async with SandboxPool(Sandbox(backend="landlock", python=str(python)), min_idle=0) as pool:
        assert pool.capabilities is not None
        assert "disk" not in pool.capabilities.kept
        assert "cpu_share" not in pool.capabilities.kept
        assert re.match(r"no control group \(/.*\): watched", pool.capabilities.notes["memory"])
        async with pool.lease() as box:
            assert (await box.python("print(1)")).text() == "1\n"


async def test_a_stopped_supervisor_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.sandbox.box.GRACE_S", 0.3)
    monkeypatch.setattr("agentrl.sandbox.box.PATIENCE_S", 0.1)
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        box = await pool.acquire()
        process = box._process
        assert isinstance(process, LocalProcess)
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(SandboxError, match="did not answer"):
            await box.run(["true"], wall_s=0.2)
        await pool.release(box)
        assert not Path(f"/proc/{process.pid}").exists()


async def test_a_session_whose_program_stops_the_clock_sleeps_between_its_calls() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool, pool.lease() as box, await box.session("python") as one:
        assert (await one.run("import time; time.monotonic = lambda: 0.0; import os; os.sched_yield = None")).ok
        await asyncio.sleep(0.5)
        assert float((await one.run("time.process_time()")).text()) < 0.25  # a busy wait would take all of it


@pytest.mark.parametrize("name", ["namespace", "landlock"])
async def test_the_network_of_the_host_is_not_its_unix_sockets(name: str, tmp_path: Path) -> None:
    code = """
import socket, sys
for address in (sys.argv[1], "\\0" + sys.argv[1]):
    try:
        socket.socket(socket.AF_UNIX).connect(address)
        print("connected to", address)
    except OSError:
        pass
socket.socket(socket.AF_INET).connect(("127.0.0.1", int(sys.argv[2])))
a, b = socket.socketpair()
"""
    datagrams = """
import socket, sys
try:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"from inside", sys.argv[1])
    print("sent to", sys.argv[1])
except OSError:
    pass
"""
    folder = tempfile.mkdtemp(prefix="agentrl-")  # which every user may enter, unlike tmp_path
    os.chmod(folder, 0o755)
    path = f"{folder}/s"
    try:
        with socket.socket(socket.AF_UNIX) as plain, socket.socket(socket.AF_UNIX) as abstract:
            plain.bind(path)
            abstract.bind("\0" + path)
            os.chmod(path, 0o777)
            plain.listen()
            abstract.listen()
            with socket.create_server(("127.0.0.1", 0)) as server:
                spec = replace(spec_for(name), network=True)
                async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
                    found = await box.python(code, argv=[path, str(server.getsockname()[1])])
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
                datagram.bind(f"{folder}/d")
                os.chmod(f"{folder}/d", 0o777)
                for network in (False, True):
                    spec = replace(spec, network=network)
                    async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
                        sent = await box.python(datagrams, argv=[f"{folder}/d"])
                    assert (sent.stdout, sent.exit_code) == (b"", 0), sent
        assert (found.stdout, found.exit_code) == (b"", 0), found
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["namespace", "namespace_user", "landlock", "landlock_user"])
async def test_other_sandboxes_do_not_take_the_processes_of_one(name: str) -> None:
    spec = replace(spec_for(name), pids=6)
    if spec.run_as is not None:  # a user whose processes no other test counts
        spec = replace(spec, run_as=ORDINARY_USER + 1)
    bomb = "import os, time\nfor _ in range(199):\n    if not os.fork(): time.sleep(60)"
    async with SandboxPool(spec, min_idle=0) as pool, contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(pool.lease())
        session = await stack.enter_async_context(await one.session("bash"))
        assert (await session.run("true")).ok
        for _ in range(6):
            other = await stack.enter_async_context(pool.lease())
            await stack.enter_async_context(await other.session("bash"))
        for where in (session, one):
            assert (await where.run("sleep 0 & sleep 0 & wait $(jobs -p)")).ok
        raised = await one.run("before=$(ulimit -u); ulimit -S -u unlimited; [ $(ulimit -u) = $before ]")
        assert raised.exit_code == 0, raised
        refused = await one.python(bomb)
        assert "BlockingIOError" in refused.error_text(), refused


@contextlib.contextmanager
def limited(limit: str, python: str) -> Iterator[str]:
    """An interpreter that starts under this `ulimit`."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)  # the keeper's user starts the program in it
        path = folder / "python"
        path.write_text(f'#!/bin/bash\nulimit -S {limit}\nexec {python} "$@"\n')
        path.chmod(0o755)
        yield str(path)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def sleepers(user: int, count: int) -> Iterator[None]:
    """Other processes of this user."""
    running = [subprocess.Popen(["sleep", "60"], user=user, group=user, extra_groups=[]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def open_files(backend: LocalBackend) -> int:
    assert backend._keeper is not None
    return len(os.listdir(f"/proc/{backend._keeper.pid}/fd"))


@pytest.mark.parametrize("name", ["landlock_user", "namespace_user"])
async def test_a_sandbox_that_cannot_be_forked_leaves_nothing_in_the_keeper(name: str) -> None:
    with limited("-u 1", SYSTEM_PYTHON) as python:
        backend = make_backend(replace(spec_for(name), run_as=ORDINARY_USER + 2, python=python))
        assert isinstance(backend, LocalBackend)
        await backend.open()
        try:
            before = open_files(backend)
            for number in range(3):
                with pytest.raises(SandboxUnavailable, match="temporarily unavailable"):
                    await backend.start(f"refused.{number}")
                assert open_files(backend) == before
            assert not list(Path(tempfile.gettempdir()).glob(f"agentrl-{ORDINARY_USER + 2}-*/refused.*"))
        finally:
            await backend.close()


async def test_a_sandbox_whose_folder_no_process_can_delete_leaves_none() -> None:
    user = ORDINARY_USER + 3
    with limited("-u 20", SYSTEM_PYTHON) as python:
        backend = make_backend(replace(spec_for("landlock_user"), run_as=user, python=python))
        await backend.open()
        try:
            process, link, home = await backend.start("one")
            with sleepers(user, 20):
                os.kill(process.pid, signal.SIGKILL)
                await process.ended
            link.close()
            assert (process.end or {})["exit"] == signal.SIGKILL
            assert not Path(home).parent.exists()
        finally:
            await backend.close()


async def test_a_sandbox_for_which_the_keeper_has_no_open_file_left_leaves_nothing_there() -> None:
    with limited("-n 24", sys.executable) as python:
        backend = make_backend(replace(spec_for("process"), python=python))
        assert isinstance(backend, LocalBackend)
        await backend.open()
        try:
            before, links = open_files(backend), list[StreamLink]()

            async def fill() -> None:
                while True:
                    links.append((await backend.start(f"box.{len(links)}"))[1])

            with pytest.raises(SandboxUnavailable, match="Too many open files"):
                await fill()
            assert open_files(backend) == before + len(links)
            for link in links:
                link.close()
        finally:
            await backend.close()


@contextlib.contextmanager
def no_new_files() -> Iterator[None]:
    """This process can open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_program_with_too_many_open_files_has_no_sandbox_for_now() -> None:
    async with SandboxPool(Sandbox(), min_idle=0) as pool:
        with pytest.raises(SandboxUnavailable, match="Too many open files"), no_new_files():
            await pool.acquire()
        async with pool.lease() as box:
            assert (await box.run("true")).ok


async def test_a_sandbox_whose_limit_the_kernel_refuses_leaves_no_control_group() -> None:
    backend = make_backend(Sandbox(pids=1 << 40))
    assert isinstance(backend, LocalBackend)
    await backend.open()
    try:
        if "pids" not in backend.controllers:
            pytest.skip("no control group limits processes here")
        with pytest.raises(SandboxUnavailable, match=r"Invalid argument: '.*/pids\.max'"):
            await backend.start("refused")
        assert backend._keeper is not None
        runs = groups_of(backend._keeper.pid)
        assert runs
        assert not [run for run in runs if (run / "refused").exists()]
    finally:
        await backend.close()


async def test_sandboxes_start_once_their_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "later"))
    backend = make_backend(spec_for("process"))
    await backend.open()
    try:
        with pytest.raises(SandboxUnavailable, match="No such file or directory"):
            await backend.start("early")
        (tmp_path / "later").mkdir()
        _, link, home = await backend.start("late")
        link.close()
        assert Path(home).is_relative_to(tmp_path / "later")
    finally:
        await backend.close()


async def test_attributes_of_the_users_files_are_hidden() -> None:
    spec = spec_for("landlock_user")
    assert spec.run_as is not None
    code = "import os, sys\nprint(os.listxattr(sys.argv[1]), os.getxattr(sys.argv[1], 'user.origin'))"
    with tempfile.NamedTemporaryFile() as file:
        os.setxattr(file.name, "user.origin", b"https://user:token@host")
        os.chown(file.name, spec.run_as, -1)
        async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
            seen = await box.python(code, argv=[file.name])
            listed = await box.run("echo > a && ls -l a")
    assert (seen.stdout, "Operation not supported" in seen.error_text()) == (b"", True), seen
    assert (listed.exit_code, listed.stderr) == (0, b""), listed


@pytest.mark.parametrize("name", ["namespace", "namespace_user", "landlock", "landlock_user"])
async def test_the_mask_of_the_program_that_uses_sandboxes_is_not_theirs(name: str) -> None:
    spec = spec_for(name)
    mask = os.umask(0o077)
    try:
        async with SandboxPool(spec, min_idle=0) as pool, pool.lease() as box:
            seen = await box.run(
                "umask && echo x > /dev/null && grep -c . /etc/passwd > found && stat -c %a found"
            )
    finally:
        os.umask(mask)
    assert (seen.text(), seen.exit_code) == ("0022\n644\n", 0), seen
