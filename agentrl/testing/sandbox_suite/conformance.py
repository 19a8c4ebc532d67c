"""What every back-end does alike: files, streams, ends, sessions."""

from __future__ import annotations

import asyncio
import secrets
import time

from agentrl.errors import ConfigError
from agentrl.sandbox import Limits
from agentrl.sandbox.errors import SandboxDied
from agentrl.testing.sandbox_suite.stage import Check, Stage, expect

ALL_BYTES = bytes(range(256)) * 5 + b"\r\n\xff\x00\xfe"


async def text_files(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("a.txt", "Grüße, 世界\n")
        expect(await box.read_file("a.txt") == "Grüße, 世界\n".encode(), "text changed")
        await box.write_file("näme mit ❄ blank.txt", "x")
        expect([f.name for f in await box.list_dir()] == ["a.txt", "näme mit ❄ blank.txt"], "names changed")


async def binary_files(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("b", ALL_BYTES)
        expect(await box.read_file("b") == ALL_BYTES, "bytes changed")
        await box.write_file("empty", b"")
        expect(await box.read_file("empty") == b"", "empty file changed")


async def large_files(stage: Stage) -> None:
    async with stage.box() as box:
        data = secrets.token_bytes(1 << 20) * 9 + b"end"
        await box.write_file("large", data)
        expect(await box.read_file("large", max_bytes=1 << 30) == data, "large file changed")
        expect(await box.read_file("large", offset=len(data) - 3) == b"end", "offset is off")
        expect(len(await box.read_file("large")) == 1 << 20, "max_bytes is not held")
        inside = await box.run("wc -c < large")
        expect(int(inside.stdout) == len(data), inside)


async def overwriting(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("f", "a long first version")
        await box.write_file("f", "short", mode=0o640)
        expect(await box.read_file("f") == b"short", "the old end is still there")
        expect((await box.stat("f")).mode == 0o640, "the mode is not set")


async def folders(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("a/b/c.txt", "x")
        await box.make_dir("a/d/e")
        expect(
            [(f.name, f.kind) for f in await box.list_dir("a")] == [("b", "directory"), ("d", "directory")], "list"
        )
        info = await box.stat("a/b/c.txt")
        expect((info.kind, info.size) == ("file", 1), info)
        await box.remove("a/b/c.txt")
        await box.remove("a/b")
        expect([f.name for f in await box.list_dir("a")] == ["d"], "not removed")


async def removing_what_is_locked(stage: Stage) -> None:
    async with stage.box() as box:
        await box.run("mkdir -p locked/inner && touch locked/inner/f && chmod 0 locked/inner locked")
        await box.remove("locked", recursive=True)
        expect(await box.list_dir() == [], "still there")


async def file_errors(stage: Stage) -> None:
    async with stage.box() as box:
        await box.make_dir("folder")
        wrong: list[tuple[type[OSError], object]] = [
            (FileNotFoundError, box.read_file("nothing")),
            (IsADirectoryError, box.read_file("folder")),
            (IsADirectoryError, box.write_file("folder", "x")),
            (FileNotFoundError, box.write_file("no/parent", "x", parents=False)),
            (FileNotFoundError, box.list_dir("nothing")),
            (NotADirectoryError, box.get_tree("/etc/hosts")),
            (FileNotFoundError, box.stat("nothing")),
            (OSError, box.remove("/nothing-of-mine")),
        ]
        for kind, operation in wrong:
            try:
                await operation  # type: ignore[misc]
            except OSError as error:
                expect(isinstance(error, kind), f"expected {kind.__name__}, got {error!r}")
            else:
                raise AssertionError(f"no {kind.__name__}")


async def permissions(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("secret", "x", mode=0o000)
        forbidden = (box.read_file("secret"), box.write_file("/etc/hosts", "x"), box.write_file("/usr/x", "x"))
        for operation in forbidden:
            try:
                await operation
            except OSError:
                continue
            raise AssertionError("was allowed")


async def trees(stage: Stage) -> None:
    files = {"a.py": b"print(1)\n", "deep/er/b.bin": ALL_BYTES, "empty": b""}
    async with stage.box() as box:
        await box.put_tree(files, "project")
        expect(await box.get_tree("project") == files, "the tree changed")
        for name in ("../x", "/x", "a/../../x"):
            try:
                await box.put_tree({name: b""})
            except ValueError:
                continue
            raise AssertionError(f"{name} was accepted")


async def large_trees(stage: Stage) -> None:
    files = {f"d{i}/f": secrets.token_bytes(1 << 20) for i in range(12)} | {"one": secrets.token_bytes(9 << 20)}
    async with stage.box() as box:
        await box.put_tree(files)
        state = await box.snapshot()
        await box.reset(state)
        expect(await box.get_tree(max_bytes=64 << 20) == files, "the tree changed")


async def a_full_process_table(stage: Stage) -> None:
    async with stage.box() as box:
        async with await box.session("bash") as session:
            jobs = f"for i in $(seq {stage.spec.pids + 20}); do sleep 60 & done 2>/dev/null; echo some"
            await session.run(jobs, wall_s=2)
            result = await box.python("print(1)")
            expect(result.exit_code == 126 or result.stdout == b"1\n", result)
            async with await box.session("python") as other:
                result = await other.run("1")
                expect(result.exit_code == 126 or result.stdout == b"1\n", result)
        expect((await box.python("print(1)")).stdout == b"1\n", "not usable once the jobs are gone")


async def too_much_input(stage: Stage) -> None:
    async with stage.box() as box:
        try:
            await box.run(["cat"], stdin=bytes(9 << 20))
        except ValueError:
            expect((await box.run(["true"])).ok, "not usable afterwards")
            return
        raise AssertionError("9 MiB of stdin were taken")


async def tree_limits(stage: Stage) -> None:
    async with stage.box() as box:
        await box.run("for i in $(seq 50); do echo x > f$i; done; head -c 100000 /dev/zero > big")
        for operation in (box.get_tree(max_files=20), box.get_tree(max_bytes=50_000)):
            try:
                await operation
            except OSError:
                continue
            raise AssertionError("a limit was not held")
        expect(len(await box.get_tree()) == 51, "not all files came")


async def streams(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.run("echo out; echo err >&2; exit 3")
        expect((result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3), result)
        result = await box.run(["printf", "%s|", "a b", "$HOME", "*", "'q'", '"', "ü", "new\nline"])
        expect(result.text() == "a b|$HOME|*|'q'|\"|ü|new\nline|", result)
        result = await box.python(
            "import sys; sys.stdout.buffer.write(bytes(range(256)) * 5 + b'\\r\\n\\xff\\0\\xfe')"
        )
        expect(result.stdout == ALL_BYTES, "bytes of stdout changed")
        expect("�" in result.text(), "text() of what is no text")


async def large_output_is_exact(stage: Stage) -> None:
    async with stage.box() as box:
        for size in (65536, 100_000, 200_000, 1 << 20):
            result = await box.python(
                f"import sys; sys.stdout.write('x' * {size}); sys.stderr.write('y' * {size})"
            )
            expect(
                result.outcome == "exit" and len(result.stdout) == len(result.stderr) == size,
                (size, result.outcome),
            )
            expect(not result.truncated, "called truncated")


async def output_is_cut_in_the_middle(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.run("echo BEGIN; seq 100000; echo END", limits=Limits(stdout_bytes=1000))
        expect(result.truncated and result.stdout_total == 588_905, result.stdout_total)
        expect(result.stdout.startswith(b"BEGIN\n1\n") and result.stdout.endswith(b"100000\nEND\n"), result.stdout)
        expect(len(result.stdout) < 1100, len(result.stdout))


async def endless_output_ends(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.run("yes", limits=Limits(output_total_mb=2))
        expect(result.outcome == "output_limit" and result.exit_code is None, result.outcome)
        expect(result.stdout.startswith(b"y\ny\n"), "the output is lost")


async def large_commands(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.run(["printf", "%s", "x" * 100_000])
        expect(len(result.stdout) == 100_000, result.stdout_total)
        result = await box.python(f"data = {'x' * 2_000_000!r}\nprint(len(data))")
        expect(result.stdout == b"2000000\n", result)


async def stdin(stage: Stage) -> None:
    async with stage.box() as box:
        for data in (b"", b"line\n", ALL_BYTES, b"$(touch x) `id` ; & | < >\n", secrets.token_bytes(3 << 20)):
            result = await box.run(["cat"], stdin=data, limits=Limits(stdout_bytes=8 << 20))
            expect(result.stdout == data, f"{len(data)} bytes of stdin changed")
        result = await box.run(["true"], stdin=b"x" * (4 << 20))
        expect(result.ok and result.wall_s < 2, "unread stdin holds the call")
        result = await box.python("print(input())", stdin=b"hello\n")
        expect(result.stdout == b"hello\n", result)


async def cannot_start(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("plain", "x")
        for command, code in ((["no-such-program"], 127), (["./plain"], 126), (["/"], 126), (["a\0b"], 126)):
            result = await box.run(command)
            expect((result.outcome, result.exit_code) == ("exit", code), (command, result))
            expect(result.stderr != b"", "without a word")
        result = await box.run(["true"], cwd="nowhere")
        expect((result.exit_code, b"nowhere" in result.stderr) == (126, True), result)
        result = await box.run("no-such-program")
        expect(result.exit_code == 127, result)


async def environment(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.run(["env"], env={"MINE": "a b=c\nd"})
        expect("MINE=a b=c\nd" in result.text(), result)
        names = {line.partition("=")[0] for line in (await box.run(["env"])).text().splitlines()}
        expect("MINE" not in names, "a variable survived its call")
        expect({"PATH", "HOME", "LANG"} <= names and len(names) < 25, names)
        result = await box.python("import os; print(os.environ['X'], os.getenv('PATH') != '')", env={"X": "1"})
        expect(result.stdout == b"1 True\n", result)


async def working_directory(stage: Stage) -> None:
    async with stage.box() as box:
        await box.make_dir("sub/dir")
        for cwd, expected in (
            (None, box.home),
            ("sub/dir", box.home + "/sub/dir"),
            (box.home + "/sub", box.home + "/sub"),
        ):
            expect((await box.run(["pwd"], cwd=cwd)).text().strip() == expected, cwd)
        result = await box.python("import os; print(os.getcwd())", cwd="sub")
        expect(result.text().strip() == box.home + "/sub", result)
        await box.run("cd sub")
        expect((await box.run("pwd")).text().strip() == box.home, "cd outlived its call")


async def timeouts(stage: Stage) -> None:
    async with stage.box() as box:
        began = time.monotonic()
        result = await box.run("echo before; sleep 30; echo after", wall_s=0.5)
        expect(result.outcome == "timeout" and result.exit_code is None and result.signal is None, result)
        expect(result.stdout == b"before\n", "what was printed before is lost")
        expect(time.monotonic() - began < 1.5, "late")
        expect((await box.run("echo next")).stdout == b"next\n", "not usable afterwards")


async def timeouts_kill_the_tree(stage: Stage) -> None:
    token = "agentrl-" + secrets.token_hex(8)
    async with stage.box() as box:
        result = await box.run(f"(exec -a {token} sleep 50) & exec -a {token} sleep 60", wall_s=0.5)
        expect(result.outcome == "timeout", result)
        await stage.nothing_left(token)
        expect((await box.usage()).processes <= 2, "processes are left")


async def cpu_limit(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.python("while True: pass", limits=Limits(cpu_s=1, wall_s=6))
        expect(result.outcome == "timeout" and result.wall_s < 5.5 and result.cpu_s < 2.5, result)


async def python_is_fresh(stage: Stage) -> None:
    async with stage.box() as box:
        first = await box.python(
            "import sys, os; x = 1; sys.path.append('/x'); os.chdir('/'); os.environ['A'] = 'b'; print(__name__)"
        )
        expect(first.stdout == b"__main__\n", first)
        look = "'x' in globals(), '/x' in sys.path, os.getcwd(), 'A' in os.environ, len(sys.argv)"
        code = f"import sys, os; print({look})"
        second = await box.python(code)
        expect(second.text() == f"False False {box.home} False 1\n", second)
        expect(
            (await box.python("import sys; print(sys.argv[1:])", argv=["a", "b c"])).stdout == b"['a', 'b c']\n",
            "argv",
        )


async def python_ends_like_python(stage: Stage) -> None:
    cases = [
        ("raise SystemExit", 0, b"", b""), ("import sys; sys.exit(7)", 7, b"", b""),
        ("exit('bye')", 1, b"", b"bye\n"),
        ("import atexit; atexit.register(print, 'late')", 0, b"late\n", b""),
        ("import threading as t, time\nt.Thread(target=lambda: (time.sleep(.1), print('t'))).start()", 0, b"t\n",
         b""),
        ("import os; print('x', end=''); os._exit(5)", 5, b"", b""), ("quit()", 0, b"", b""),
        ("import sys; sys.exit(-1)", 255, b"", b""),
    ]  # fmt: skip
    async with stage.box() as box:
        for code, status, out, err in cases:
            result = await box.python(code)
            expect((result.exit_code, result.stdout, result.stderr) == (status, out, err), (code, result))
        result = await box.python("def f():\n    return 1 / 0\n\nf()\n")
        expect(result.exit_code == 1, result)
        expect('File "program.py", line 2, in f\n    return 1 / 0' in result.error_text(), result.error_text())
        expect("inside" not in result.error_text(), "our own frames show")
        result = await box.python("def broken(:\n")
        expect(result.exit_code == 1 and "SyntaxError" in result.error_text(), result)


async def python_can_import(stage: Stage) -> None:
    async with stage.box() as box:
        await box.write_file("helper.py", "VALUE = 5\n")
        result = await box.python("import helper, sqlite3, json, subprocess, multiprocessing; print(helper.VALUE)")
        expect(result.stdout == b"5\n", result)
        result = await box.python(
            "import multiprocessing as m\nif __name__ == '__main__':\n"
            "    with m.get_context('fork').Pool(2) as p:\n        print(p.map(abs, [-1, -2]))"
        )
        expect(result.stdout == b"[1, 2]\n" or b"PermissionError" in result.stderr, result)


async def python_is_reproducible(stage: Stage) -> None:
    code = "import time; print(hash('a'), {'x', 'y', 'z', 'w'}, time.tzname)"
    outputs = set()
    for _ in range(2):
        async with stage.box() as box:
            outputs.add((await box.python(code)).stdout)
            outputs.add((await box.run(["python3", "-c", code])).stdout)
    expect(len(outputs) == 1, outputs)


async def python_session(stage: Stage) -> None:
    async with stage.box() as box, await box.session("python") as session:
        expect((await session.run("x = 20\nx + 1")).stdout == b"21\n", "value of the last expression")
        expect((await session.run("def f(n):\n    return n * x")).stdout == b"", "a definition prints nothing")
        expect((await session.run("print(f(2))\nNone")).stdout == b"40\n", "state is lost")
        result = await session.run("f('a' - 1)")
        expect(result.exit_code == 1 and '<cell 4>", line 1' in result.error_text(), result)
        expect((await session.run("x")).stdout == b"20\n", "an exception ended the session")
        result = await session.run("import time\nprint('in', flush=True)\ntime.sleep(30)", wall_s=0.4)
        expect(result.outcome == "timeout" and result.stdout == b"in\n" and not result.session_lost, result)
        expect((await session.run("x")).stdout == b"20\n", "an interrupt lost the state")
        result = await session.run(
            "while True:\n  try:\n    time.sleep(9)\n  except BaseException: pass", wall_s=0.4
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
        result = await session.run("echo in; sleep 30", wall_s=0.4)
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
        expect((await box.python("print(5)")).ok, "a fresh call beside sessions")


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
        answer = await session.query(endless, wall_s=0.4)
        expect(answer.result.outcome == "timeout", answer.result)
        expect((await session.query("select count(*) from t")).rows == [[3]], "the file is lost")


async def snapshots(stage: Stage) -> None:
    async with stage.box() as box:
        await box.put_tree({"a/b.txt": "1", "run.sh": "#!/bin/sh\necho ran"})
        await box.run("chmod 755 run.sh; ln -s b.txt a/link; mkdir hollow")
        state = await box.snapshot()
        await box.run("rm -rf a; echo junk > $TMPDIR/junk; echo junk > junk")
        session = await box.session("bash")
        await box.reset(state)
        names = (await box.run("find . | sort; readlink a/link; ls $TMPDIR | grep junk; ./run.sh")).text().split()
        expect(names == [".", "./a", "./a/b.txt", "./a/link", "./hollow", "./run.sh", "b.txt", "ran"], names)
        expect((await session.run("echo again")).stdout == b"again\n", "a session of before fails")
        await box.reset()
        expect(await box.list_dir() == [], "an empty reset is not empty")


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
        expect(0 < used.memory_bytes < 200 << 20, used)


async def calls_queue_up(stage: Stage) -> None:
    async with stage.box() as box:
        results = await asyncio.gather(*(box.python(f"print({i})") for i in range(20)))
        expect([r.text() for r in results] == [f"{i}\n" for i in range(20)], "answers are mixed up")


async def cancelling(stage: Stage) -> None:
    token = "agentrl-" + secrets.token_hex(8)
    async with stage.box() as box:
        task = asyncio.create_task(box.run(f"exec -a {token} sleep 60"))
        for _ in range(100):
            await asyncio.sleep(0.02)
            if stage.processes_with(token):
                break
        expect(bool(stage.processes_with(token)), "did not start")
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
            await box.run(["true"], limits=Limits(memory_mb=9999, workspace_mb=1))
        except ConfigError:
            return
        raise AssertionError("a call changed the memory of the box")


async def not_root(stage: Stage) -> None:
    async with stage.box() as box:
        result = await box.run("id -u; umask; echo $HOME; cat /proc/sys/kernel/hostname 2>/dev/null")
        lines = result.text().split()
        expect(lines[0] != "0" and lines[1] == "0022" and lines[2] == box.home, lines)


async def a_server_inside(stage: Stage) -> None:
    code = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
def serve():
    s, _ = server.accept()
    s.sendall(b"hello")
    s.close()
threading.Thread(target=serve).start()
with socket.create_connection(server.getsockname(), 2) as s:
    print(s.recv(10).decode())
"""
    async with stage.box() as box:
        result = await box.python(code)
        expect(result.stdout == b"hello\n" or stage.spec.backend == "landlock", result)


async def temporary_files(stage: Stage) -> None:
    async with stage.box() as box:
        code = "import tempfile, os\nwith tempfile.NamedTemporaryFile() as f: print(os.path.dirname(f.name))"
        result = await box.python(code + "\nprint(os.environ['TMPDIR'])")
        lines = result.text().split()
        expect(len(lines) == 2 and lines[0] == lines[1], result)
        result = await box.run("diff <(echo a) <(echo a) && echo same")
        expect(result.stdout == b"same\n" or stage.spec.backend == "landlock", result)


CONFINED = (not_root, permissions)


def checks() -> list[Check]:
    """All of them."""
    functions = (
        text_files, binary_files, large_files, overwriting, folders, removing_what_is_locked, file_errors,
        permissions, trees, large_trees, too_much_input, a_full_process_table, tree_limits, streams,
        large_output_is_exact, output_is_cut_in_the_middle,
        endless_output_ends,
        large_commands, stdin, cannot_start, environment, working_directory, timeouts, timeouts_kill_the_tree,
        cpu_limit, python_is_fresh, python_ends_like_python, python_can_import, python_is_reproducible,
        python_session, bash_session, background_jobs_of_a_session, sessions_live_side_by_side, sqlite_session,
        snapshots, a_used_box_is_never_handed_out, usage, calls_queue_up, cancelling, closing,
        limits_of_the_box_stay,
        not_root, a_server_inside, temporary_files,
    )  # fmt: skip
    return [Check(f.__name__, "conformance", f, isolating=f in CONFINED) for f in functions]
