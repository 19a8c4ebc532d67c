"""Lifetimes: sessions, leases, cancellation, closing."""

from __future__ import annotations

import asyncio
import secrets

from agentrl.errors import ConfigError
from agentrl.sandbox import SandboxLimits
from agentrl.sandbox.errors import SandboxDied
from agentrl.testing.sandbox_suite.stage import Stage, expect


async def python_session(stage: Stage) -> None:
    async with stage.box() as box, await box.session("python") as session:
        expect((await session.run("x = 20\nx + 1")).stdout == b"21\n", "value of the last expression")
        expect((await session.run("def f(n):\n    return n * x")).stdout == b"", "a definition prints nothing")
        expect((await session.run("print(f(2))\nNone")).stdout == b"40\n", "state is lost")
        result = await session.run("f('a' - 1)")
        expect(result.exit_code == 1 and '<cell 4>", line 1' in result.error_text(), result)
        expect((await session.run("x")).stdout == b"20\n", "an exception ended the session")
        result = await session.run("import time\nprint('in', flush=True)\ntime.sleep(30)", wall_s=0.1)
        expect(result.outcome == "timeout" and result.stdout == b"in\n" and not result.session_lost, result)
        expect((await session.run("x")).stdout == b"20\n", "an interrupt lost the state")
        result = await session.run(
            "while True:\n  try:\n    time.sleep(9)\n  except BaseException: pass", wall_s=0.1
        )
        expect(result.outcome == "timeout" and result.session_lost, result)
        expect((await session.run("'x' in globals()")).stdout == b"False\n", "a lost session goes on")
        result = await session.run("import os; os._exit(9)")
        expect((result.outcome, result.exit_code, result.session_lost) == ("exit", 9, True), result)
        result = await session.run("import os; os.kill(os.getpid(), 11)")
        expect((result.outcome, result.signal, result.session_lost) == ("signal", 11, True), result)


async def bash_session(stage: Stage) -> None:
    async with stage.box() as box, await box.session("bash") as session:
        await session.run("mkdir d; cd d; X=5; export Y=6; f() { echo f$1; }")
        result = await session.run("pwd; echo $X $Y; f 1; false")
        expect(result.text() == f"{box.home}/d\n5 6\nf1\n" and result.exit_code == 1, result)
        result = await session.run("echo 'a\nb'; printf '0 0\\n1 0\\n' ; echo PS1; exec 9>&1; cat <<E\nhere\nE")
        expect(result.text() == "a\nb\n0 0\n1 0\nPS1\nhere\n" and result.exit_code == 0, result)
        result = await session.run("echo in; sleep 30", wall_s=0.1)
        expect(result.outcome == "timeout" and result.stdout == b"in\n", result)
        expect(
            result.session_lost or (await session.run("echo $X")).stdout == b"5\n", "state is lost without a word"
        )
        result = await session.run("if then")
        expect(result.exit_code not in (0, None) and b"syntax error" in result.stderr, result)
        result = await session.run("exit 4")
        expect((result.exit_code, result.session_lost) == (4, True), result)
        expect((await session.run("echo new $X")).stdout == b"new\n", "no new session")


async def background_jobs_of_a_session(stage: Stage) -> None:
    token = "agentrl-" + secrets.token_hex(8)
    async with stage.box() as box:
        async with await box.session("bash") as session:
            await session.run(f"(exec -a {token} sleep 60) >/dev/null 2>&1 &")
            await stage.runs(token)
            await box.python("print(1)")
            await box.run("sleep 99 &")
            expect(bool(stage.processes_with(token)), "a call ended the job of a session")
        await stage.nothing_left(token)


async def sessions_live_side_by_side(stage: Stage) -> None:
    async with stage.box() as box:
        shells = [await box.session("bash") for _ in range(3)]
        pythons = [await box.session("python") for _ in range(2)]
        for i, session in enumerate([*shells, *pythons]):
            await session.run(f"x={i}")
        for i, shell in enumerate(shells):
            expect((await shell.run("echo $x")).text() == f"{i}\n", "shells mix")
        expect((await pythons[0].run("x")).text() == "3\n", "interpreters mix")
        expect((await box.python("print(5)")).ok, "a fresh call next to sessions")


async def sqlite_session(stage: Stage) -> None:
    async with stage.box() as box, await box.session("sqlite") as session:
        await session.query(
            "create table t (a integer, b text); insert into t values (1, 'x'), (2, null), (3, 'z;')"
        )
        answer = await session.query("select * from t where a > ? order by a", [1])
        expect((list(answer.columns), answer.rows) == (["a", "b"], [[2, None], [3, "z;"]]), answer.rows)
        answer = await session.query("update t set b = 'y'")
        expect(answer.changed == 3, answer.changed)
        answer = await session.query("select * from t", max_rows=2)
        expect(len(answer.rows) == 2 and answer.more, answer.rows)
        answer = await session.query("select nonsense from t")
        expect(not answer.result.ok and "no such column" in answer.result.error_text(), answer.result)
        endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
        answer = await session.query(endless, wall_s=0.1)
        expect(answer.result.outcome == "timeout", answer.result)
        expect((await session.query("select count(*) from t")).rows == [[3]], "the file is lost")


async def a_used_box_is_never_handed_out(stage: Stage) -> None:
    for _ in range(3):
        async with stage.box() as box:
            expect(await box.list_dir() == [], "somebody else's files")
            result = await box.run(
                "ls -A /tmp /dev/shm 2>/dev/null | grep agentrl-left; echo x > agentrl-left; umask 0"
            )
            expect(result.stdout == b"", result)
            await box.run("echo x > ${TMPDIR}/agentrl-left")


async def usage(stage: Stage) -> None:
    async with stage.box() as box:
        await box.python("sum(range(3_000_000))")
        await box.write_file("f", b"x" * (3 << 20))
        used = await box.usage()
        expect(used.cpu_s > 0.01 and used.processes <= 2 and used.disk_bytes >= 3 << 20, used)
        expect(used.memory_bytes < 200 << 20, used)
        async with await box.session("python") as session:
            await session.run("held = bytearray(b'x' * (40 << 20))")
            used = await box.usage()
            expect(40 << 20 < used.memory_bytes < 240 << 20 and 1 <= used.processes <= 3, used)


async def calls_queue_up(stage: Stage) -> None:
    async with stage.box() as box:
        results = await asyncio.gather(*(box.python(f"print({i})") for i in range(20)))
        expect([r.text() for r in results] == [f"{i}\n" for i in range(20)], "answers are mixed up")


async def cancelling(stage: Stage) -> None:
    token = "agentrl-" + secrets.token_hex(8)
    async with stage.box() as box:
        task = asyncio.create_task(box.run(f"exec -a {token} sleep 60"))
        try:
            await stage.runs(token)
        finally:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            await stage.nothing_left(token)
        else:
            raise AssertionError("the cancellation was swallowed")
        expect((await box.run("echo ok")).stdout == b"ok\n", "not usable afterwards")


async def closing(stage: Stage) -> None:
    token = "agentrl-" + secrets.token_hex(8)
    box = await stage.pool.acquire()
    session = await box.session("bash")
    await session.run(f"(exec -a {token} sleep 60) >/dev/null 2>&1 &")
    expect(await box.alive(), "not alive")
    running = asyncio.create_task(box.run("sleep 60"))
    await asyncio.sleep(0.1)
    await box.close()
    await box.close()
    expect(not await box.alive(), "alive after close")
    try:
        await running
    except SandboxDied:
        pass
    else:
        raise AssertionError("a call outlived its box")
    await session.close()
    await stage.pool.release(box)
    await stage.nothing_left(token)


async def limits_of_the_box_stay(stage: Stage) -> None:
    async with stage.box() as box:
        try:
            await box.run(["true"], limits=SandboxLimits(memory_mb=9999, workspace_mb=1))
        except ConfigError:
            return
        raise AssertionError("a call changed the memory of the box")
