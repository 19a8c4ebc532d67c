"""The far side's parts that can be looked at from here: system call tables, the filter, frames, output."""

from __future__ import annotations

import binascii
import errno
import fcntl
import marshal
import os
import random
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.sandbox import bundle
from agentrl.sandbox.inside import frames, keeper, kernel, tree
from agentrl.sandbox.inside.program import Tail

HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}


@pytest.mark.parametrize("machine", list(HEADERS))
def test_system_call_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not path.exists():
        pytest.skip(f"{path} is not installed")
    known = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    _, calls, denied = kernel.MACHINES[machine]
    for name, number in {**calls, **denied}.items():
        if name in known:
            assert number == known[name], name
    assert len({**calls, **denied}.keys() & known.keys()) > 70


def run_filter(program: bytes, number: int, args: tuple[int, ...] = (), arch: int | None = None) -> int:
    """What the kernel would answer: interpret the classic BPF program over a seccomp_data."""
    arch = kernel.machine()[0] if arch is None else arch
    data = struct.pack("=iIQ6Q", number, arch, 0, *(args + (0,) * 6)[:6])
    code = [struct.unpack_from("HBBI", program, i) for i in range(0, len(program), 8)]
    accumulator = position = 0
    while True:
        op, yes, no, k = code[position]
        position += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif op == 0x54:
            accumulator &= k
        elif op == 0x06:
            return k
        else:
            test = {0x15: accumulator == k, 0x25: accumulator > k, 0x35: accumulator >= k, 0x45: accumulator & k}
            position += yes if test[op] else no


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def test_the_filter_refuses_what_it_should_and_nothing_else() -> None:
    calls, denied = kernel.machine()[1:]
    program = kernel.seccomp_filter(network=True, shared_memory=True)
    for name, number in denied.items():
        assert run_filter(program, number) == EPERM, name
    assert run_filter(program, calls["clone3"]) == ENOSYS
    assert run_filter(program, calls["clone"], (17,)) == ALLOW
    assert run_filter(program, calls["clone"], (0x3D0F00,)) == ALLOW  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run_filter(program, calls["clone"], (flag | 17,)) == EPERM, hex(flag)
    socket = calls["socket"]
    assert [run_filter(program, socket, (family, 1, 0)) == ALLOW for family in (1, 2, 10, 16, 17, 38, 40)] == [
        True, True, True, True, False, False, False
    ]  # fmt: skip
    assert run_filter(program, socket, (16, 3, 9)) != ALLOW  # netlink, but not for routes
    assert run_filter(program, calls["mknodat"], (0, 0, 0x1000 | 0o644)) == ALLOW  # a FIFO
    assert run_filter(program, calls["mknodat"], (0, 0, 0x6000)) == EPERM
    assert run_filter(program, calls["prlimit64"], (0, 7)) == ALLOW
    assert run_filter(program, calls["prlimit64"], (1, 7)) == EPERM
    assert run_filter(program, calls["setpriority"], (0, 0, 5)) == ALLOW
    assert run_filter(program, calls["setpriority"], (0, 1, 5)) == EPERM
    assert run_filter(program, calls["setpriority"], (2, 0, 5)) == EPERM
    assert run_filter(program, calls["ioctl"], (0, 0x5412)) == EPERM
    assert run_filter(program, calls["ioctl"], (0, 0x5401)) == ALLOW
    special = set(calls.values()) | set(denied.values())
    for number in range(kernel.NEWEST_SYSCALL + 1):
        if number not in special:
            assert run_filter(program, number) == ALLOW, number
    assert run_filter(program, kernel.NEWEST_SYSCALL + 1) == ENOSYS
    assert run_filter(program, 0x40000000 + 39) == ENOSYS
    assert run_filter(program, 39, arch=0x40000003) == KILL  # the 32-bit table


def test_the_strict_filter_has_no_sockets_and_no_uncounted_memory() -> None:
    calls = kernel.machine()[1]
    program = kernel.seccomp_filter(network=False, shared_memory=False)
    for name in ("socket", "memfd_create", "shmget", "msgget", "semget", "mq_open"):
        assert run_filter(program, calls[name], (1, 1, 0)) == EPERM, name


@pytest.mark.parametrize("network", [False, True])
def test_without_unix_sockets_there_are_pairs_but_not_of_datagrams(network: bool) -> None:
    program = kernel.seccomp_filter(network=network, shared_memory=False, unix=False)
    pair = kernel.machine()[1]["socketpair"]
    flags = socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        assert run_filter(program, pair, (1, kind | flags, 0)) == ALLOW
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        assert run_filter(program, pair, (1, kind, 0)) == run_filter(program, pair, (1, kind | flags, 0)) == EPERM


@pytest.mark.parametrize("unix", [False, True])
def test_pairs_of_sockets_are_those_of_unix(unix: bool) -> None:
    program = kernel.seccomp_filter(network=True, shared_memory=False, unix=unix)
    pair = kernel.machine()[1]["socketpair"]
    assert run_filter(program, pair, (socket.AF_UNIX, socket.SOCK_STREAM, 0)) == ALLOW
    for family in (0, socket.AF_INET, socket.AF_TIPC, socket.AF_ALG):
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            assert run_filter(program, pair, (family, kind, 0)) == 0x00050000 | errno.EAFNOSUPPORT


def test_where_a_user_is_shared_its_limits_and_attributes_are_out_of_reach() -> None:
    calls, unsupported = kernel.machine()[1], 0x00050000 | errno.EOPNOTSUPP
    shared, own = (kernel.shared_user_filter(own_user=own_user) for own_user in (False, True))
    nproc, nofile = resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE
    assert run_filter(shared, calls["setrlimit"], (nproc, 1)) == EPERM
    assert run_filter(shared, calls["setrlimit"], (nofile, 1)) == ALLOW
    assert run_filter(shared, calls["prlimit64"], (0, nproc, 0, 1)) == ALLOW
    for address in (1, 1 << 32, (1 << 47) - 8):
        assert run_filter(shared, calls["prlimit64"], (0, nproc, address, 0)) == EPERM
        assert run_filter(shared, calls["prlimit64"], (0, nofile, address, 0)) == ALLOW
        assert run_filter(own, calls["prlimit64"], (0, nproc, address, 0)) == ALLOW
    numbers = kernel.READ_ATTRIBUTES[os.uname().machine]
    headers, pattern = HEADERS[os.uname().machine]
    if headers.exists():
        names = {int(number): name for name, number in re.findall(pattern, headers.read_text())}
        assert {names[number] for number in numbers} == {
            f"{prefix}{verb}xattr" for prefix in ("", "l", "f") for verb in ("get", "list")
        }
    # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_ENABLE_VERITY, BTRFS_IOC_SNAP_CREATE
    for request in (0x80086601, 0x40086602, 0x401C581F, 0x40806685, 0x50009401):
        assert run_filter(shared, calls["ioctl"], (0, request)) == 0x00050000 | errno.ENOTTY
        assert run_filter(own, calls["ioctl"], (0, request)) == ALLOW
    for request in (0x5401, 0x5413, 0x541B, 0x5451, 0x8912):  # of terminals, pipes and sockets; FIOCLEX
        assert run_filter(shared, calls["ioctl"], (0, request)) == ALLOW
    for command in (fcntl.F_SETLEASE, fcntl.F_NOTIFY):
        assert run_filter(shared, calls["fcntl"], (0, command, 1)) == EPERM
    for command in (fcntl.F_SETFD, fcntl.F_SETFL, fcntl.F_SETLK, fcntl.F_SETPIPE_SZ):
        assert run_filter(shared, calls["fcntl"], (0, command, 1)) == ALLOW
    for number in numbers:
        assert run_filter(shared, number) == unsupported
        assert run_filter(own, number) == ALLOW


def test_a_program_that_lives_on_in_its_children_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    look, looks = tree.parents, []

    def missing_one() -> dict[int, int]:
        found = look()
        if not looks and os.fork() == 0:
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        looks.append(found)
        if len(looks) == 1:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return found

    monkeypatch.setattr(tree, "parents", missing_one)
    pid = os.fork()
    if pid == 0:
        left = 99
        try:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            killed = tree.kill_except([], [])
            left = len(tree.descendants(os.getpid())) if killed == 1 else 98
        finally:
            os._exit(left)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can switch to another user id")
def test_processes_that_start_meanwhile_are_not_outside_the_sandbox(tmp_path: Path) -> None:
    listed = tree.everybody

    def starting() -> set[int]:
        if os.fork() == 0:
            time.sleep(60)
        return listed()

    (tmp_path / "box").mkdir()
    tmp_path.chmod(0o755)
    folder = os.open(tmp_path, os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setresuid(23459, 23459, 23459)
            tree.everybody = starting
            limit = tree.UserLimit(8, f"/proc/self/fd/{folder}")
            status = limit.outside
            tree.kill_except([], [])
        finally:
            os._exit(status)
    os.close(folder)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(kernel.landlock_abi() < kernel.SIGNAL_SCOPE_ABI, reason="Landlock scopes no signals here")
def test_sessions_are_fenced_for_an_ordinary_user_too() -> None:
    pid = os.fork()
    if pid == 0:  # it has no privileges, and has not given any up: the back-end `process`
        try:
            if os.getuid() == 0:
                os.setresuid(23456, 23456, 23456)
            kernel.fence()
            os.kill(os.getppid(), 0)
        except ProcessLookupError:
            os._exit(1)
        except PermissionError as error:
            os._exit(0 if "landlock" not in str(error) else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_interpreter_in_a_home_directory_brings_no_user_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    for prefix in (home, home / ".local", home / "python"):
        for name in ("bin", "lib", "share"):
            (prefix / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    monkeypatch.setattr(keeper.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=f"{tmp_path}/link"))

    def seen(prefix: Path) -> list[str]:
        monkeypatch.setattr(sys, "base_prefix", str(prefix))
        return keeper.interpreter_paths()

    for prefix in (home, home / ".local", tmp_path / "link"):
        assert seen(prefix) == [f"{prefix}/bin", f"{prefix}/lib"]
    assert seen(tmp_path) == []
    assert seen(home / "python") == [f"{home}/python"]
    assert seen(Path("/usr")) == ["/usr"]
    at_the_top = [f"/{name}" for name in ("bin", "include", "lib", "lib64")]
    assert seen(Path("/")) == [path for path in at_the_top if os.path.lexists(path)]

    def only_who_runs_it(uid: int) -> SimpleNamespace:
        if uid != 23456:
            raise KeyError(uid)
        return SimpleNamespace(pw_dir=str(home))

    monkeypatch.setattr(keeper.pwd, "getpwuid", only_who_runs_it)
    assert seen(home) == [str(home)]
    monkeypatch.setattr(keeper.os, "getuid", lambda: 23456)
    assert seen(home) == [f"{home}/bin", f"{home}/lib"]


def test_frames_survive_any_cutting() -> None:
    chance = random.Random(1)
    sent = [({"n": i, "text": "ü" * i}, chance.randbytes(chance.randrange(3000))) for i in range(50)]
    stream = b"".join(frames.pack(header, payload) for header, payload in sent)
    reader, got = frames.FrameReader(), []
    while stream:
        size = chance.choice((1, 7, 100, 5000))
        got += reader.feed(stream[:size])
        stream = stream[size:]
    assert got == sent


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(ValueError):
        frames.FrameReader().feed(b"\xff" * 8)
    with pytest.raises(ValueError):
        frames.FrameReader().feed(struct.pack(">II", 3, 0) + b"no!")
    for head in (b"[1]", b'{"a":1}}', b'{"a":1} ', b"\xff" * 10, b"\xff" * 60):
        with pytest.raises(ValueError):
            frames.FrameReader().feed(frames.pack_raw(head, b""))
    with pytest.raises(ValueError, match="frame of"):
        frames.FrameReader().feed(struct.pack(">II", frames.MAX_HEADER + 1, 0))


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 1000])
def test_the_ends_of_output_are_kept(limit: int) -> None:
    chance = random.Random(limit)
    for _ in range(30):
        data = chance.randbytes(chance.choice((0, 1, limit - 1 if limit else 0, limit, limit + 1, 5000, 300_000)))
        tail, rest = Tail(limit), data
        while rest:
            size = chance.randrange(1, 70_000)
            tail.add(rest[:size])
            rest = rest[size:]
        head, end = tail.parts()
        assert tail.total == len(data)
        if len(data) <= limit:
            assert head + end == data
        else:
            assert len(head) + len(end) == limit
            assert data.startswith(head)
            assert data.endswith(end)


def test_the_far_side_travels_as_text() -> None:
    text = bundle.program("supervisor")
    assert "agentrl.sandbox" not in text.partition("SOURCES")[0]
    scope: dict[str, object] = {}
    exec(compile(text[: text.rindex("supervisor.main(")], "bundle", "exec"), scope)
    assert scope["supervisor"].__name__ == f"{bundle.PACKAGE}.supervisor"  # type: ignore[attr-defined]


def test_frames_that_arrive_together_are_read_one_by_one() -> None:
    reader, writer = os.pipe()
    sent = [({"a": 1}, b"xyz"), ({"b": [2]}, b""), ({}, b"\0" * 5000)]
    os.write(writer, b"".join(frames.pack(header, payload) for header, payload in sent))
    for header, payload in sent:
        head, found = frames.read_frame(reader)
        assert (frames.decode(head), found) == (header, payload)
    os.write(writer, frames.pack({"a": 1}, b"xyz")[:-1])
    os.close(writer)
    with pytest.raises(EOFError):
        frames.read_frame(reader)
    os.close(reader)


def test_waiting_awake_ends_with_an_event_or_soon() -> None:
    near, far = os.pipe()
    poll = select.poll()
    poll.register(near, select.POLLIN)
    clock = iter(i * tree.LINGER_S / 8 for i in range(1000))
    ways: list[None] = []
    tree.linger(poll, now=lambda: next(clock), give_way=lambda: ways.append(None))
    assert len(ways) == 7  # looked, gave way, until the time was over
    os.write(far, b".")
    tree.linger(poll, now=lambda: next(clock), give_way=lambda: ways.append(None))
    assert len(ways) == 7
    for fd in (near, far):
        os.close(fd)


def test_the_kernels_lists_of_children_name_every_descendant() -> None:
    shell = "sleep 60 & (sleep 60 & sleep 60) & echo started; wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, start_new_session=True) as root:
        try:
            assert root.stdout is not None
            root.stdout.readline()
            until = time.monotonic() + 10
            while len(tree.below(root.pid)) < 4 and time.monotonic() < until:
                time.sleep(0.01)
            assert set(tree.descendants(root.pid)) == set(tree.below(root.pid))
        finally:
            os.killpg(root.pid, signal.SIGKILL)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_bundle_runs_and_what_it_loaded_is_all_there(compiled: bool) -> None:
    text = bundle.program("supervisor", compiled=compiled)
    start = text[: text.rindex("supervisor.main(")]
    code = f"{start}\nprint(supervisor.__file__)"
    python = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run([python, "-S", "-s", "-c", READ], input=code.encode(), capture_output=True)
    assert done.stdout.split()[0] == b"<agentrl_inside.supervisor>", done.stderr


def test_text_of_a_bundle_can_be_read_by_every_python() -> None:
    """Bytecode is for the same Python; what version 2 of marshal refuses, as slices, is only in bytecode."""
    packed = re.search(r"a2b_base64\('([^']+)'\)", bundle.program("supervisor"))
    assert packed is not None
    data = zlib.decompress(binascii.a2b_base64(packed[1]))
    assert data == marshal.dumps(bundle.sources(), 2)


READ = "import sys; exec(sys.stdin.read())"
