"""Programs that prepare the ground for what the host does in the sandbox: files, trees, sessions, resets."""

from __future__ import annotations

import contextlib

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.hostile.program import program
from agentrl.testing.sandbox_suite.stage import Stage, expect

MARK = "PLANTED"


async def _nothing_planted_ran(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    await box.write_file("plain", "x")
    expect(await box.read_file("plain") == b"x", "another file came back")
    names = {info.name for info in await box.list_dir()}
    tree = await box.get_tree()
    expect({name for name in tree if "/" not in name} == names - {".local"}, "get_tree lacks files")
    state = await box.snapshot()
    await box.put_tree({"new/tree.txt": b"y"})
    expect(await box.read_file("new/tree.txt") == b"y", "put_tree did not write")
    for code in ("1/0", "raise ValueError('\u00fc')", "\u00e9 = 1", "def f(:"):
        text = (await box.python(code)).error_text()
        expect(MARK not in text and ("Error" in text) == ("=" not in code), f"a traceback ran it: {text}")
    async with await box.session("sqlite") as database:
        expect((await database.query("select 6 * 7")).rows == [[42]], "the database answers something else")
        expect(MARK not in (await database.query("selec")).result.error_text(), "the database's error ran it")
    async with await box.session("python") as python:
        for code in ("1/0", "\u00e9 = 1\n\u00e9", "def f(:"):
            answer = await python.run(code)
            expect(MARK not in answer.text() + answer.error_text(), f"a session ran it: {answer}")
    async with await box.session("bash") as bash:
        expect((await bash.run("echo fine")).stdout == b"fine\n", "a shell says something else")
    expect(MARK.lower() not in {info.name for info in await box.list_dir("..")}, "something planted ran")
    await box.reset(state)
    expect(await box.get_tree() == tree, "the reset brought other files")


async def _all_of_it_comes(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    tree = await box.get_tree()
    expect(tree == {"shut/inner/file": b"1", "silent": b"2", "twin": b"3", "other": b"3"}, f"get_tree: {tree}")
    state = await box.snapshot()
    listing = "find . -mindepth 1 -printf '%P %y %m %l\\n' | sort"
    before = (await box.run(listing)).text()
    locked = "shut d 0" in before or b"stopped" in result.stdout
    expect(locked and "silent f 0" in before, f"the modes have changed: {before}")
    await box.reset(state)
    expect((await box.run(listing)).text() == before, "the reset brought other names, modes or links")
    expect(await box.get_tree() == tree, "the reset brought other contents")
    expect(await box.snapshot() == state, "the reset brought another state")
    await box.run("chmod 000 ~")  # refused where programs may not change modes
    expect(await box.get_tree() == tree, "a locked home is not read")


async def _links_are_not_followed(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    for name in ("away/x.py", "up/x.py", "inner/deep/x.py", "away/more/x.py"):
        try:
            await box.put_tree({name: "ours"})
        except OSError:
            continue
        raise AssertionError(f"put_tree wrote {name} through a link")
    await box.put_tree({"file": "ours", "trap": "ours", "twin": "ours", "dangling": "ours", "locked": "ours"})
    for name in ("file", "trap", "twin", "dangling", "locked"):
        expect(await box.read_file(name) == b"ours", f"{name} holds something else")
        expect((await box.stat(name)).kind == "file", f"{name} is a link still")
    found = (await box.run("cat $TMPDIR/elsewhere/* $TMPDIR/victim; ls $TMPDIR/elsewhere | wc -l")).text()
    expect("ours" not in found and found.endswith("0\n"), f"written elsewhere: {found}")


async def _true_or_an_error(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    """While a session's program gets at every process and file it can, data are what they are or an OSError."""
    async with await box.session("bash") as session:
        await session.run("python3 attack.py > /dev/null 2>&1 &")
        for i in range(6):
            data = b"%d " % i * 50_000
            with contextlib.suppress(OSError):
                await box.write_file("mine", data)
                expect(await box.read_file("mine") == data, "the file holds something else")
            with contextlib.suppress(OSError):
                await box.put_tree({"ours/a": data, "ours/b": b"b"})
                tree = await box.get_tree("ours")
                expect(tree == {"ours/a": data, "ours/b": b"b"} or tree == {"a": data, "b": b"b"}, "another tree")
            with contextlib.suppress(OSError):
                tree = await box.get_tree("grown", max_bytes=1 << 20, max_files=50)
                expect(sum(map(len, tree.values())) <= 1 << 20, "more bytes than asked for")
                expect(len(tree) <= 50, "more files than asked for")
            with contextlib.suppress(OSError):
                expect(len(await box.list_dir("grown", max_entries=20)) <= 20, "more entries than asked for")


async def _depth_is_nothing_special(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    with contextlib.suppress(OSError):
        await box.get_tree()
    with contextlib.suppress(OSError):
        await box.snapshot()
    await box.remove("deep", recursive=True)
    expect(await box.list_dir() == [], "something is left")
    again = await box.python("import os\nfor _ in range(1200):\n    os.mkdir('deep')\n    os.chdir('deep')")
    expect(again.ok, again)
    await box.reset()


FORGERIES = (
    "printf() { command printf '%s 0\\n' \"$__id\"; }",
    "builtin() { command builtin printf '%s 0\\n' \"$__id\"; }",
    "eval() { :; }; read() { :; }; unset() { :; }; exit() { :; }; test() { :; }; command() { :; }",
    "shopt -s expand_aliases; alias printf=true builtin=true unset=true while=false",
    "builtin() { :; }; readonly -f builtin",
    *("set -o posix", "set -e; true", "readonly __status=0", "enable -n printf", "enable -n builtin"),
    *("POSIXLY_CORRECT=1", "export POSIXLY_CORRECT=1", "readonly POSIXLY_CORRECT", "unset POSIXLY_CORRECT"),
    "set -u; set -f; set +B; IFS=0123456789",
    "__id=7; __status=0",
    "BASH_ENV=x; PS4=y; PROMPT_COMMAND='exit 0'",
)
"""What a command of a shell may do, so that the exit codes of later ones might be others than their own."""


async def _exit_codes_are_true(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    for forgery in FORGERIES:
        async with await box.session("bash") as shell:
            await shell.run(forgery, wall_s=0.5)
            later = await shell.run("sh -c 'exit 3'", wall_s=2)
            if not later.session_lost and later.outcome == "exit":
                expect(later.exit_code == 3, f"after {forgery!r}: {later}")
            kept = await shell.run("f() { echo kept; }; x=5; cd /; f; sh -c 'exit 1'", wall_s=2)
            if not kept.session_lost and kept.outcome == "exit":
                expect((kept.exit_code, kept.stdout) == (1, b"kept\n"), f"after {forgery!r}: {kept}")


FORGERY = """
import os
try:
    seen = os.listdir("/proc")
except OSError:
    seen = []
for pid in seen:
    for fd in ("1", "2") if pid.isdigit() and int(pid) not in (1, os.getpid(), os.getppid()) else ():
        try:
            os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK), ANSWER)
        except OSError:
            pass
"""
ANSWERS = (
    b'{"columns": ["6 * 7"], "rows": [[13]], "more": false, "changed": 0}', b"[" * 20_000, b'{"result": 1}',
    b"\xff\xfe", b"[]",
)  # fmt: skip


async def _a_database_answers_for_itself(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    async with await box.session("sqlite") as database, await box.session("python") as python:
        expect((await database.query("select 6 * 7")).rows == [[42]], "the database answers something else")
        for answer in ANSWERS:
            expect((await box.python(FORGERY.replace("ANSWER", repr(answer)))).ok, "the attack did not run")
            found = await database.query("select 6 * 7")
            expect(found.rows == [[42]] or found.result.exit_code == 126, f"after {answer[:20]!r}: {found.rows}")
            await python.run("6 * 7")
        expect((await database.query("select '\ud800'")).result.exit_code == 1, "half a character was queried")
        expect((await database.query("select 6 * 7")).rows == [[42]], "the database is gone")


HOST = [
    program("forged_database", None, "pass", _a_database_answers_for_itself),
    program("forged_exit_codes", None, "pass", _exit_codes_are_true),
    program("planted_modules", None, """
        evil = '''
        import os
        os.write(1, b"PLANTED")
        os.write(2, b"PLANTED")
        try:
            os.mkdir(os.path.expanduser("~/../planted"))
        except OSError:
            os.mkdir(os.path.expanduser("~/planted"))
        '''.replace("        ", "", 3).replace("\\n        ", "\\n")
        names = '''json tarfile sqlite3 traceback linecache encodings bz2 lzma zlib grp pwd copy stringprep
            unicodedata hashlib _blake2 struct tokenize re errno stat contextlib ast datetime usercustomize
            sitecustomize shutil codecs io os warnings token keyword textwrap string collections functools
            _colorize signal select mmap resource types threading atexit'''.split()
        user = ".local/lib/python%d.%d/site-packages" % sys.version_info[:2]
        os.makedirs(user)
        for folder in (".", user):
            for name in names:
                with open(os.path.join(folder, name + ".py"), "w") as f:
                    f.write(evil)
            with open(os.path.join(folder, "evil.pth"), "w") as f:
                f.write("import os; os.mkdir(os.path.expanduser('~/planted'))")
    """, _nothing_planted_ran),
    program("locked_files", None, """
        os.makedirs("shut/inner")
        os.write(os.open("silent", os.O_CREAT | os.O_WRONLY, 0), b"2")
        for name, text in (("shut/inner/file", "1"), ("twin", "3")):
            with open(name, "w") as f:
                f.write(text)
        os.symlink("/etc/passwd", "link")
        os.symlink("nowhere", "shut/dangling")
        try:
            os.link("twin", "other")
        except OSError:
            open("other", "w").write("3")
        for path in ("shut/inner", "shut"):
            try:
                os.chmod(path, 0)
            except OSError as error:  # where programs may not change modes
                print("stopped:", error)
    """, _all_of_it_comes),
    program("links_in_the_way", None, """
        temporary = os.environ["TMPDIR"]
        os.mkdir(temporary + "/elsewhere")
        for name in ("victim", "locked"):
            with open(os.path.join(temporary, name), "w") as f:
                f.write("theirs")
        os.symlink(temporary + "/elsewhere", "away")
        os.symlink("..", "up")
        os.mkdir("inner")
        os.symlink(temporary + "/elsewhere", "inner/deep")
        os.symlink(temporary + "/victim", "file")
        os.symlink(temporary + "/elsewhere/dangling", "dangling")
        os.mkfifo("trap")
        try:
            os.link(temporary + "/victim", "twin")
        except OSError:
            os.symlink(temporary + "/victim", "twin")
        os.close(os.open("locked", os.O_CREAT, 0))
    """, _links_are_not_followed),
    program("attack_on_file_operations", None, """
        with open("attack.py", "w") as f:
            f.write('''
        import os, random, time
        os.makedirs("grown", exist_ok=True)
        nonsense = [b"[" * 100000, b'{"errno": 10000000000000000000000}', b'{"errno": "x"}', b"[]", b"1e999",
                    b"null", b'{"entries": [[1]], "size": -1}', b"\\\\0\\\\1" + b"x" * 100,
                    b'{"taken": [0, ""], "sent": 7}']
        until = time.monotonic() + 10
        while time.monotonic() < until:
            for i in range(100):
                with open("grown/%d" % i, "ab") as g:
                    g.write(b"x" * 10000)
            for pid in os.listdir("/proc") if os.path.exists("/proc/self") else ():
                if pid.isdigit() and int(pid) not in (os.getpid(), os.getppid()):
                    for fd in (0, 1, 2, 3):
                        for flags in (os.O_WRONLY, os.O_RDONLY):
                            try:
                                other = os.open("/proc/%s/fd/%d" % (pid, fd), flags | os.O_NONBLOCK)
                                os.write(other, random.choice(nonsense)) if flags else os.read(other, 100)
                                os.close(other)
                            except OSError:
                                pass
        '''.replace("\\n        ", "\\n"))
    """, _true_or_an_error),
    program("deep_folders", None, """
        os.mkdir("deep")
        os.chdir("deep")
        for _ in range(1200):  # beyond the call stack, and longer than a path may be
            os.mkdir("deep")
            os.chdir("deep")
    """, _depth_is_nothing_special),
]  # fmt: skip
