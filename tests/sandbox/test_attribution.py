"""Whose fault it was: once a program has run, what breaks is an outcome, unless something outside explains it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox import Box, Sandbox, SandboxBroken, SandboxDied, SandboxPool, bundle
from agentrl.sandbox.contract import SessionKind
from agentrl.sandbox.inside import cgroups, leftovers
from agentrl.sandbox.local import LocalBackend, LocalProcess
from tests.sandbox.sandbox_specs import spec_for

HUNTER = """
import os, sys
known = {name for name in os.listdir("/proc") if name.isdigit()}
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and name not in known and int(name) != os.getpid():
            try:
                os.kill(int(name), int(sys.argv[1]))
            except OSError:
                pass
"""
LOOK = """
import os, time
end, own, others = time.time() + 0.6, {os.getpid(), os.getppid()}, set()
os.listdir("/proc")
while time.time() < end:
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in own:
            continue
        others.add(name)
        for part in ("mem", "fd/0", "fd/1", "environ"):
            how = os.O_RDONLY if part in ("fd/0", "environ") else os.O_WRONLY
            try:
                os.close(os.open(f"/proc/{name}/{part}", how | os.O_NONBLOCK))
            except OSError:
                continue
            if open(f"/proc/{name}/stat").read().split()[3] not in map(str, own):
                print("opened", name, part)
print("looked at", len(others))
"""
UNREMOVABLE = """def remove_tree(path: str) -> None:
    import time
    if os.path.exists(path + "/workspace/stays"):
        raise RecursionError("no")
    while os.path.exists(path + "/workspace/millions"):
        time.sleep(1)
"""
UNACCEPT = """
import os, sys
frame, pages = sys._getframe(), []
while frame:
    pages += [value for value in frame.f_locals.values() if type(value).__name__ == "mmap"]
    frame = frame.f_back
assert pages
for page in pages:
    page[:] = bytes(len(page))
os._exit(0)
"""


@pytest.fixture(
    params=["namespace", "namespace_user", "landlock", pytest.param("docker", marks=pytest.mark.docker)]
)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    async with SandboxPool(spec_for(request.param), min_idle=0) as pool, pool.lease() as leased:
        yield leased


async def file_operations(box: Box) -> list[str]:
    """Each file operation in turn: how it ended. Any other exception than OSError escapes."""
    found = []
    for operation in (
        box.list_dir(), box.write_file("f", b"1"), box.read_file("f"), box.stat("f"), box.get_tree(),
        box.make_dir("d"), box.put_tree({"g": b"2"}), box.snapshot(), box.remove("f"),
    ):  # fmt: skip
        try:
            await operation
            found.append("ok")
        except OSError as error:
            found.append(type(error).__name__)
    return found


async def still_answers(box: Box) -> None:
    result = await box.python("print(6 * 7)")
    assert (result.outcome, result.stdout) == ("exit", b"42\n"), result


class TestWhatAProgramBreaks:
    async def test_a_home_that_nobody_may_enter(self, box: Box) -> None:
        locked = await box.run("chmod 000 ~")
        if os.getuid() != 0 and "Operation not permitted" in locked.error_text():
            pytest.skip("an ordinary user's landlock refuses it")
        assert locked.ok
        await still_answers(box)
        assert len(await file_operations(box)) == 9
        session = await box.session("bash")
        assert (await session.run("echo here")).stdout == b"here\n"
        await file_operations(box)
        assert (await (await box.session("python")).run("6 * 7")).stdout == b"42\n"
        assert (await session.run("chmod 700 ~")).ok
        assert set(await file_operations(box)) == {"ok"}

    async def test_a_home_that_is_gone(self, box: Box) -> None:
        await box.run("rm -rf ~/* ~; mv ~ ~.old; mkdir -p ~; chmod 000 ~ ~.old")
        await still_answers(box)
        await file_operations(box)

    async def test_a_program_cannot_take_back_that_it_began(self, box: Box) -> None:
        result = await box.python(UNACCEPT)
        assert (result.outcome, result.exit_code) == ("exit", 0), result
        await still_answers(box)

    async def test_a_session_that_ends_leaves_the_call_beside_it(self, box: Box) -> None:
        """A background job of the policy chooses the moment: while a reward's program or another session works.

        What the session leaves is ended after that call, which takes its time on a busy machine.
        """
        other = await box.session("bash")
        for _ in range(2):
            session = await box.session("bash")
            assert (await session.run("(sleep 0.2; touch left; kill -9 $$; sleep 4; touch later) &")).ok
            result = await box.python("import time; time.sleep(0.3); print('done')")
            assert (result.exit_code, result.stdout) == (0, b"done\n"), result
            await other.close()
        session, other = await box.session("bash"), await box.session("bash")
        assert (await session.run("(sleep 0.2; kill -9 $$; sleep 4; touch later) &")).ok
        result = await other.run("sleep 0.3; echo done")
        assert (result.exit_code, result.stdout) == (0, b"done\n"), result
        await asyncio.sleep(4.2)
        assert [entry.name for entry in await box.list_dir()] == ["left"]

    async def test_a_call_that_is_cancelled_twice(self, box: Box) -> None:
        """By its own limit and by that of the episode: the policy chooses how long its program takes to stop."""
        session = await box.session("python")
        stubborn = "import time\nwhile True:\n  try: time.sleep(9)\n  except KeyboardInterrupt: pass"
        call = asyncio.ensure_future(session.run(stubborn))
        await asyncio.sleep(0.2)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0.01)
        await asyncio.wait({call})
        assert call.cancelled()
        await still_answers(box)

    @pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01])
    async def test_a_reset_that_is_cancelled(self, box: Box, after_s: float) -> None:
        await box.run("echo 1 > left")
        reset = asyncio.ensure_future(box.reset())
        await asyncio.sleep(after_s)
        in_time = reset.cancel()  # it may have ended within that time
        await asyncio.wait({reset})
        assert reset.cancelled() == in_time
        assert await box.list_dir() == []
        await still_answers(box)

    async def test_a_sandbox_that_is_closed_while_it_is_reset(self, box: Box) -> None:
        reset = asyncio.ensure_future(box.reset())
        await asyncio.sleep(0)
        await asyncio.gather(box.close(), box.close())
        with pytest.raises(SandboxDied, match="has been closed"):
            await reset
        assert box._process is None

    @pytest.mark.parametrize("kind", ["bash", "python"])
    async def test_nonsense_from_a_session(self, box: Box, kind: SessionKind) -> None:
        for answer in ("99999999999999999999", "256", "-1", "0x1", "", "1 1", "\\xff", "1" * 5000):
            session = await box.session(kind)
            if kind == "bash":
                words = f"printf '%b' \"$__id {answer}\\n\" >&${{fd##*/}}"
                await session.run(f"for fd in /proc/self/fd/*; do {words}; done 2>/dev/null; sleep 0.1")
            else:
                words = f"(b'%d ' % n) + {answer.encode()!r}.replace(b'\\\\xff', b'\\xff') + b'\\n'"
                await session.run(
                    f"import os\nfor fd in range(3, 300):\n  for n in range(9):\n    try: os.write(fd, {words})\n"
                    "    except OSError: pass"
                )
            await session.run("1")
            await session.restart()  # what it has written may answer for calls to come: they are its own
            assert (await session.run("echo 5" if kind == "bash" else "5")).stdout == b"5\n"
            await still_answers(box)
            await session.close()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
    async def test_a_session_that_hunts_every_new_process(self, box: Box, number: signal.Signals) -> None:
        await box.write_file("hunter.py", HUNTER)
        session = await box.session("bash")
        pause = "for ((n = 0; n < 100000; n++)); do :; done"  # it would hunt a `sleep`
        assert (await session.run(f"python3 hunter.py {number.value} & {pause}")).ok
        assert set(await file_operations(box)) == {"ok"}
        await still_answers(box)
        other = await box.session("python")
        assert (await other.run("6 * 7")).stdout == b"42\n"

    async def test_a_session_cannot_open_what_waits_or_runs_beside_it(self, box: Box) -> None:
        await box.write_file("look.py", LOOK)
        session = await box.session("bash")
        await session.run("python3 look.py > seen 2>&1 &")
        while (await session.run("jobs -r")).stdout:
            await box.write_file("x", b"1")
            await box.python("import time; time.sleep(0.05)")
            await asyncio.sleep(0.02)
        seen = (await box.read_file("seen")).decode()
        assert seen.startswith("looked at") or "Permission denied: '/proc'" in seen, seen
        assert "opened" not in seen

    async def test_nobody_makes_itself_a_later_victim_than_the_supervisor(self, box: Box) -> None:
        result = await box.python("print(open('/proc/self/oom_score_adj', 'w').write('0'))")
        assert result.exit_code == 1, result
        assert b"Error" in result.stderr
        if box.spec.backend != "landlock":  # which shows no /proc
            seen = await box.run("cat /proc/self/oom_score_adj")
            assert seen.stdout == b"1000\n", seen

    async def test_moving_and_linking_between_directories_works_in_a_session(self, box: Box) -> None:
        session = await box.session("bash")
        result = await session.run(
            "mkdir a b; echo 1 > a/x; mv a/x b/x; ln b/x a/y; cat a/y; mv a/y $TMPDIR; cat $TMPDIR/y"
        )
        assert result.stdout == b"1\n1\n", result


class TestWhoseDoingItWas:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentrl.sandbox.box.PATIENCE_S", 0.2)
        monkeypatch.setattr("agentrl.sandbox.box.GRACE_S", 0.3)

    @pytest.fixture(params=["namespace", "namespace_user"])
    async def box(self, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
        async with SandboxPool(spec_for(request.param), min_idle=0) as pool, pool.lease() as leased:
            yield leased

    async def test_its_supervisor_is_killed_from_outside(self, box: Box) -> None:
        assert (await box.run("true")).ok
        os.kill(_pid(box), signal.SIGKILL)
        with pytest.raises(SandboxDied, match="killed from outside"):
            await box.run("true")

    async def test_the_oom_killer_elsewhere_does_not_explain_it(self, box: Box) -> None:
        with control_group() as elsewhere:
            assert (await box.run("true")).ok
            await killed_for_memory(elsewhere)
            os.kill(_pid(box), signal.SIGKILL)
            with pytest.raises(SandboxDied, match="killed from outside"):
                await box.run("true")

    async def test_the_oom_killer_in_its_own_group_may_explain_it(self) -> None:
        with control_group() as group:
            async with SandboxPool(spec_for("namespace_user"), min_idle=0) as pool, pool.lease():
                assert isinstance(pool._backend, LocalBackend)
                assert pool._backend._keeper is not None
                group.add(pool._backend._keeper.pid)
                async with pool.lease() as box:
                    assert (await box.run("true")).ok
                    await killed_for_memory(group)
                    os.kill(_pid(box), signal.SIGKILL)
                    with pytest.raises(SandboxBroken):
                        await box.run("true")

    async def test_its_supervisor_is_stopped_from_outside(self, box: Box) -> None:
        assert (await box.run("true")).ok
        os.kill(_pid(box), signal.SIGSTOP)
        with pytest.raises(SandboxDied, match="stopped from outside"):
            await box.run("true", wall_s=0.1)

    async def test_it_is_killed_by_whoever_leased_it(self, box: Box) -> None:
        assert (await box.run("true")).ok
        assert box._process is not None
        await box._process.kill()
        with pytest.raises(SandboxDied, match="by the program that leased it"):
            await box.run("true")

    async def test_its_keeper_is_killed(self, box: Box) -> None:
        assert (await box.run("true")).ok
        os.kill(_ppid(_pid(box)), signal.SIGKILL)

        async def runs() -> None:
            for _ in range(200):  # on a busy machine the box may live a moment longer
                await box.run("true")
                await asyncio.sleep(0.05)

        with pytest.raises(SandboxDied, match="keeper of the sandboxes is gone"):
            await runs()

    @pytest.mark.parametrize("used", [False, True])
    async def test_it_ends_and_nothing_outside_explains_why(self, box: Box, used: bool) -> None:
        if used:
            assert (await box.run("true")).ok
        os.kill(_pid(box), signal.SIGSEGV)  # no handler, so that a first process of a namespace ignores it ...
        assert box._link is not None
        box._link.send({"op": 1 / 3})  # ... and no order of ours: whatever the reason, it says nothing good
        box._link._transport.write(b"\xff" * 64)  # type: ignore[attr-defined]
        with pytest.raises(SandboxBroken if used else SandboxDied) as caught:
            await box.usage()
        if used:
            assert isinstance(caught.value, SandboxBroken)
            assert caught.value.reward == 0.0
            assert pickle.loads(pickle.dumps(caught.value)).reward == 0.0
            with pytest.raises(SandboxBroken):
                await box.read_file("x")
            await box.reset()
            await still_answers(box)

    async def test_after_a_reset_it_is_a_failure_again_unless_the_policys_files_are_back(self, box: Box) -> None:
        assert (await box.run("echo 1 > left")).ok
        files = await box.snapshot()
        await box.reset()
        _break(box)
        with pytest.raises(SandboxDied):
            await box.usage()
        await box.reset(files)
        _break(box)
        with pytest.raises(SandboxBroken):
            await box.usage()

    async def test_a_program_that_cannot_be_cancelled_is_the_policys(
        self, box: Box, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agentrl.sandbox.local.END_TIMEOUT_S", 0.3)
        call = asyncio.ensure_future(box.run("sleep 30"))
        await asyncio.sleep(0.2)
        _break(box)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(SandboxBroken, match="did not stop a cancelled program"):
            await box.run("true")

    @pytest.mark.parametrize("used", [False, True])
    async def test_an_order_that_its_supervisor_cannot_carry_out(self, box: Box, used: bool) -> None:
        if used:
            assert (await box.run("true")).ok
        with pytest.raises(SandboxBroken if used else SandboxError) as caught:
            async with box._lock:
                await box._exchange(
                    {"op": "open", "kind": "bash", "session": "s"}, b"", 20.0
                )  # it lacks the limits
        assert isinstance(caught.value, SandboxBroken) == used
        assert "KeyError" in str(caught.value)

    @pytest.mark.parametrize(("number", "outside"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
    async def test_of_all_signals_only_sigkill_can_come_from_outside_alone(
        self, box: Box, number: signal.Signals, outside: bool
    ) -> None:
        process = box._process
        assert isinstance(process, LocalProcess)
        await process.kill()
        process._killed, process.end = False, {"exit": number.value, "oom_kills": 0, "at_limit": False}
        assert await process.cause() == ("its supervisor was killed from outside the sandbox" if outside else None)

    async def test_a_session_may_have_caused_it(self, box: Box) -> None:
        session = await box.session("bash")
        assert (await session.run("true")).ok
        _break(box)
        with pytest.raises(SandboxBroken):
            await session.run("true", wall_s=0.1)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
    async def test_a_signal_proves_nothing_where_programs_may_send_it(
        self, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("agentrl.sandbox.local.END_TIMEOUT_S", 0.3)
        async with SandboxPool(spec_for("process"), min_idle=0) as pool, pool.lease() as box:
            assert (await box.run("true")).ok
            os.kill(_pid(box), number)
            with pytest.raises(SandboxBroken):
                await box.run("true", wall_s=0.1)

    async def test_on_death_infra_keeps_what_was(self) -> None:
        async with SandboxPool(Sandbox(on_death="infra"), min_idle=0) as pool, pool.lease() as box:
            await box.run("true")
            assert box._link is not None
            box._link._transport.write(b"\xff" * 64)  # type: ignore[attr-defined]
            with pytest.raises(SandboxDied) as caught:
                await box.usage()
            assert not isinstance(caught.value, SandboxBroken)

    async def test_the_ttl_is_the_episodes_own(self) -> None:
        async with SandboxPool(Sandbox(ttl_s=1.0, death_reward=-1.0), min_idle=0) as pool, pool.lease() as box:
            await box.run("true")
            await asyncio.sleep(1.2)
            with pytest.raises(SandboxBroken) as caught:
                await box.run("true")
            assert caught.value.reward == -1.0

    async def test_before_anything_ran_it_is_a_failure(self) -> None:
        async with SandboxPool(Sandbox(ttl_s=1.0), min_idle=0) as pool, pool.lease() as box:
            await box.write_file("x", b"1")  # ours alone
            await asyncio.sleep(1.2)
            with pytest.raises(SandboxDied):
                await box.read_file("x")

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"on_death": "redraw"}, "on_death='redraw': use 'score' or 'infra'"),
            ({"death_reward": float("nan")}, "death_reward=nan: must be a finite number"),
            ({"on_death": "infra", "death_reward": -1.0}, "death_reward=-1.0 has no effect with on_death='infra'"),
        ],
    )
    def test_settings_that_mean_nothing(self, options: dict[str, object], said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            Sandbox(**options)  # type: ignore[arg-type]


class TestSupervisor:
    async def test_an_exception_of_its_own_ends_the_call_and_not_the_box(
        self, broken_session_answer: None
    ) -> None:
        async with SandboxPool(Sandbox(), min_idle=0) as pool, pool.lease() as box:
            session = await box.session("python")
            result = await session.run("x = 1")
            assert (result.outcome, result.exit_code, result.session_lost) == ("exit", 126, True)
            assert b"ZeroDivisionError" in result.stderr
            await still_answers(box)
            assert set(await file_operations(box)) == {"ok"}

    async def test_without_landlock_the_hunter_finds_a_still_world(self, no_fence: None) -> None:
        async with SandboxPool(Sandbox(), min_idle=0) as pool, pool.lease() as box:
            await box.write_file("hunter.py", HUNTER)
            session = await box.session("bash")
            for number in (signal.SIGKILL, signal.SIGSTOP):
                assert (await session.run(f"python3 hunter.py {number.value} & sleep 0.1")).ok
                assert set(await file_operations(box)) == {"ok"}
                result = await box.python("print(1)", wall_s=1)  # which is left to them: the policy's doing
                assert result.outcome in ("exit", "signal", "timeout")
                await session.restart()
            await still_answers(box)


@contextlib.contextmanager
def _rewritten(monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str) -> Iterator[None]:
    """The far side with another text."""
    name, found = f"{bundle.PACKAGE}.{module}", bundle.sources()
    assert old in found[name]
    found[name] = found[name].replace(old, new)
    monkeypatch.setattr(bundle, "sources", lambda: found)
    bundle.program.cache_clear()
    yield
    monkeypatch.undo()
    bundle.program.cache_clear()


@pytest.fixture
def no_fence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel whose Landlock does not scope signals."""
    with _rewritten(monkeypatch, "kernel", "SIGNAL_SCOPE_ABI = 6", "SIGNAL_SCOPE_ABI = 99"):
        yield


@pytest.fixture
def broken_session_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A supervisor with a bug where it reads a session's answer."""
    with _rewritten(monkeypatch, "supervisor", "call.answer += data", "1 / 0"):
        yield


@contextlib.contextmanager
def control_group() -> Iterator[cgroups.ControlGroup]:
    groups = cgroups.Groups()
    if not groups.controllers:
        pytest.skip(f"no control group can be made: {groups.why_not}")
    group = groups.create("hog", memory_mb=200, pids=100, cpus=None)
    try:
        yield group
    finally:
        group.close()
        for _ in range(100):
            if group.remove():
                break
            time.sleep(0.05)
        groups.close()


async def killed_for_memory(group: cgroups.ControlGroup) -> None:
    """A process of this group needs more memory than the group has."""
    program = "open('/proc/self/oom_score_adj', 'w').write('1000'); input(); bytearray(1 << 30)"
    hog = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", program, stdin=asyncio.subprocess.PIPE)
    group.add(hog.pid)
    await hog.communicate(b"\n")
    assert hog.returncode == -signal.SIGKILL
    assert group.oom_kills()[0] == 1


def _break(box: Box) -> None:
    """Have its supervisor answer no more, for no reason that shows outside."""
    assert box._link is not None
    box._link._transport.write(b"\xff" * 64)  # type: ignore[attr-defined]


def _pid(box: Box) -> int:
    assert isinstance(box._process, LocalProcess)
    return box._process.pid


def _ppid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class TestLeftovers:
    def test_a_tree_deeper_than_the_call_stack_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / "kept").write_text("x")
        root = tmp_path / "root"
        (root / "shut").mkdir(parents=True)
        (root / "shut" / "f").write_text("x")
        (root / "link").symlink_to(tmp_path)
        folder = os.open(root, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=folder)
            inner = os.open("d", os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = inner
        os.close(folder)
        (root / "shut").chmod(0)
        leftovers.remove_tree(str(root))
        assert sorted(os.listdir(tmp_path)) == ["kept"]
        leftovers.remove_tree(str(root))  # fine when it is gone

    async def test_one_sandbox_that_cannot_be_cleaned_up_leaves_the_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with _rewritten(monkeypatch, "leftovers", "def remove_tree(path: str) -> None:\n", UNREMOVABLE):
            async with SandboxPool(Sandbox(backend="landlock"), min_idle=0) as pool, pool.lease() as other:
                async with pool.lease() as box:
                    await box.run("touch stays")
                await still_answers(other)
                monkeypatch.setattr("agentrl.sandbox.local.KILL_TIMEOUT_S", 0.1)
                async with pool.lease() as box:
                    await box.run("touch millions")
                async with pool.lease() as another:
                    await still_answers(another)
