"""Programs that break their own sandbox, so that the failure looks like the host's and the episode is replayed.

Whatever they do, each later call must be an ordinary outcome: an ExecResult, an OSError of a file operation, or
SandboxBroken, which scores the episode. Any other SandboxError would be an infrastructure failure, and a way out.
"""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import SandboxError
from agentrl.sandbox import Box, SandboxBroken
from agentrl.testing.sandbox_suite.stage import Check, Stage, expect

LONGEST_S = 50.0
"""Seconds that a call may keep us waiting after its sandbox has been tampered with; its own limit is 2."""
ACT_S = 1.0
"""Seconds that an act of sabotage may run."""


@dataclass(frozen=True)
class Sabotage:
    """One way to break a sandbox from inside: code for a fresh Python program, or for a session."""

    name: str
    code: str
    runs_in: Literal["fresh", "bash", "python"] = "fresh"
    act_s: float = ACT_S

    async def act(self, box: Box) -> None:
        """Do it."""
        if self.runs_in == "fresh":
            await box.python(self.code, wall_s=self.act_s)
        else:
            session = await box.session(self.runs_in)
            await session.run(self.code, wall_s=self.act_s)


HUNTER = """
import os
known = {name for name in os.listdir("/proc") if name.isdigit()}
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and name not in known and int(name) != os.getpid():
            try:
                os.kill(int(name), NUMBER)
            except OSError:
                pass
"""
FRAMES = """
import struct
def report(number):
    head = struct.pack(">IBBhQQddQII", number, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0)
    return struct.pack(">II", len(head), 0) + head
data = b"".join(report(number) for number in range(60))
"""


def _hunt(number: int) -> str:
    code = HUNTER.replace("NUMBER", str(number))
    return f"cat > hunter.py <<'END'\n{code}\nEND\npython3 hunter.py & sleep 0.2"


def _way(
    name: str, code: str, runs_in: Literal["fresh", "bash", "python"] = "fresh", act_s: float = ACT_S
) -> Sabotage:
    return Sabotage(name, textwrap.dedent(code).strip() + "\n", runs_in, act_s)


WAYS = [
    _way("lock_home", "import os; os.chmod(os.path.expanduser('~'), 0)"),
    _way("lock_everything", """
        import os
        for place in (os.path.expanduser("~"), os.environ["TMPDIR"], "/tmp", "/dev/shm"):
            try:
                os.chmod(place, 0)
            except OSError:
                pass
    """),
    _way("remove_home", """
        import os, shutil
        home = os.path.expanduser("~")
        shutil.rmtree(home, ignore_errors=True)
        for action in (lambda: os.rename(home, home + ".old"), lambda: os.symlink("/proc/self/fd", home)):
            try:
                action()
            except OSError:
                pass
    """),
    _way("unsay_the_start", """
        import os, sys
        frame = sys._getframe()
        while frame:
            for value in frame.f_locals.values():
                if type(value).__name__ == "mmap":
                    value[:] = bytes(len(value))
            frame = frame.f_back
        os._exit(0)
    """),
    _way("scribble_on_shared_pages", """
        import ctypes, os
        for line in open("/proc/self/maps"):
            if " rw-s " in line:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                ctypes.memset(first, 0xFF, last - first)
        os._exit(0)
    """),
    _way("kill_upward", """
        import os
        for number in (1, 2, 15, 19, 20, 9, 11, 6):
            for pid in (os.getppid(), 1, -1):
                try:
                    os.kill(pid, number) if pid > 0 or number != 9 else None
                except OSError:
                    pass
    """),
    _way("kill_everybody", "import os, signal; os.kill(-1, signal.SIGKILL)"),
    _way("stop_oneself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"),
    _way("fork_bomb", """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """, act_s=0.5),
    _way("leave_a_crowd", """
        import os, time
        for _ in range(200):
            try:
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(100)
                    os._exit(0)
            except OSError:
                break
    """),
    _way("memory", "held = []\nwhile True: held.append(b'x' * (1 << 20))"),
    _way("memory_of_many", """
        import os, time
        for _ in range(40):
            try:
                if os.fork() == 0:
                    held = b"x" * (60 << 20)
                    time.sleep(5)
                    os._exit(0)
            except OSError:
                break
        time.sleep(1)
    """),
    _way("memory_that_nobody_owns", """
        import ctypes, os
        for value in ("-1000", "-500", "0"):
            try:
                with open("/proc/self/oom_score_adj", "w") as f:
                    f.write(value)
                break
            except OSError:
                pass
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        for _ in range(100):
            found = libc.shmget(0, ctypes.c_size_t(32 << 20), 0o1666)
            if found < 0:
                break
            place = libc.shmat(found, None, 0)
            if place in (None, ctypes.c_void_p(-1).value):
                break
            ctypes.memset(place, 1, 32 << 20)
            libc.shmdt(ctypes.c_void_p(place))
    """),
    _way("fill_the_disk", """
        import os
        for place in (".", os.environ["TMPDIR"], "/dev/shm"):
            try:
                for number in range(100):
                    with open(f"{place}/full{number}", "wb") as f:
                        while True:
                            f.write(b"x" * (1 << 20))
            except OSError:
                pass
    """),
    _way("fill_the_inodes", """
        try:
            for number in range(10**6):
                open(f"i{number}", "w").close()
        except OSError:
            pass
    """),
    _way("a_very_deep_tree", """
        import os
        for _ in range(1500):
            try:
                os.mkdir("deep")
                os.chdir("deep")
            except OSError:
                break
    """),
    _way("names_that_are_no_text", """
        import os
        for name in (b"\\xff\\xfe", b"new\\nline", "\\u202egpj.exe".encode(), b"\\x1b[2J", b"a" * 255, b"-rf"):
            with open(name, "w") as f:
                f.write("x")
    """),
    _way("files_that_are_none", """
        import os
        os.mkfifo("fifo")
        os.symlink("loop", "loop")
        os.symlink("/dev/zero", "zero")
        os.symlink("/proc/self/mem", "mem")
        os.symlink("/", "root")
        with open("sparse", "wb") as f:
            f.truncate(50 << 20)
    """),
    _way("modules_of_its_own", """
        import os
        names = (
            "tarfile sqlite3 json os stat struct encodings codecs io abc sitecustomize usercustomize site types "
            "copy shutil random math _signal linecache traceback zlib bz2 lzma grp pwd contextlib functools"
        ).split()
        for name in names:
            with open(name + ".py", "w") as f:
                f.write("import os; os.kill(os.getpid(), 9)\\n")
        os.makedirs(".local/lib/python3.11/site-packages", exist_ok=True)
        with open(".local/lib/python3.11/site-packages/x.pth", "w") as f:
            f.write("import os; os.kill(os.getpid(), 9)\\n")
    """),
    _way("frames_on_every_descriptor", FRAMES + textwrap.dedent("""
        import os
        for fd in range(1, 1024):
            try:
                os.write(fd, data)
            except OSError:
                pass
    """)),
    _way("garbage_on_every_descriptor", """
        import os
        for fd in range(1024):
            try:
                os.write(fd, b"\\xff" * 65)
            except OSError:
                pass
            try:
                os.close(fd)
            except OSError:
                pass
        os._exit(255)
    """),
    _way("a_flood", "import os\nwhile True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)"),
    _way("deep_answers", "print('[' * 200_000); print('{\"a\":' * 60_000)"),
    _way("no_text", "import os; os.write(1, bytes(range(256)) * 100); os.write(2, b'\\xed\\xa0\\x80' * 100)"),
    _way("a_job_that_stays", """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    time.sleep(0.01)
            os._exit(0)
    """),
    _way("watches_and_queues", """
        import ctypes, os
        libc = ctypes.CDLL(None)
        held = [libc.inotify_init1(0) for _ in range(300)]
        held += [libc.msgget(0, 0o1666) for _ in range(300)] + [libc.semget(0, 10, 0o1666) for _ in range(300)]
        if os.fork() == 0:
            import time
            time.sleep(100)
    """),
    _way("memory_of_the_kernel", """
        import mmap, os, signal, socket, time
        for _ in range(20):
            try:
                if os.fork() == 0:
                    break
            except OSError:
                break
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        held = []
        try:
            while len(held) < 30_000:  # mappings, and buffers and descriptors in flight
                held += [mmap.mmap(-1, 4096, prot=1 + 2 * (n % 2)) for n in range(100)]
                one, other = socket.socketpair()
                one.setblocking(False)
                try:
                    while True:
                        socket.send_fds(one, [b"x" * 4096], [one.fileno(), other.fileno(), 1, 2])
                except BlockingIOError:
                    held += [one, other]
        except OSError:
            pass
        time.sleep(5)
    """),
    _way("signals_without_end", """
        import ctypes, os, signal
        libc = ctypes.CDLL(None)
        for number in range(1, 65):
            for pid in (1, os.getppid()):
                for _ in range(100):
                    if pid and libc.sigqueue(pid, number, ctypes.c_void_p(1)):
                        break
        if os.fork() == 0:
            os.setsid()
            for number in signal.valid_signals() - {9, 19}:
                signal.signal(number, signal.SIG_IGN)
            while True:
                try:
                    os.kill(-1, signal.SIGSTOP)
                except OSError:
                    pass
        while True:
            pass
    """, act_s=0.5),
    _way("modes_times_and_twins", """
        import os
        os.umask(0o777)
        os.mkdir("d")
        open("f", "w").close()
        for name in ("f", "d", "."):
            for action in (
                lambda: os.utime(name, ns=(-(1 << 62), 1 << 62)), lambda: os.chmod(name, 0o7000),
                lambda: os.setxattr(name, "user.x", b"x" * 1000), lambda: os.link("f", "twin"),
                lambda: os.mkfifo("answer.txt"), lambda: os.symlink("t", "t"),
            ):
                try:
                    action()
                except OSError:
                    pass
    """),
    _way("kill_newcomers", _hunt(9), "bash"),
    _way("stop_newcomers", _hunt(19), "bash"),
    _way("limits_of_nothing", "ulimit -n 0; ulimit -u 0; ulimit -f 0; ulimit -t 1; ulimit -v 1000", "bash"),
    _way("close_the_shells_descriptors", 'for n in $(seq 3 255); do eval "exec $n>&-"; done 2>/dev/null', "bash"),
    _way("become_another_program", "exec sleep 100", "bash"),
    _way("kill_the_shell", "kill -9 $$", "bash"),
    _way("a_shell_of_lies", """
        for fd in /proc/self/fd/*; do
          printf '%s 99999999999999999999\\n' 1 2 3 4 5 6 7 8 9 >&${fd##*/}
        done 2>/dev/null
        printf() { :; }; read() { :; }; eval() { :; }; exit() { :; }; builtin() { :; }; command() { :; }
        trap 'kill -STOP $$' DEBUG EXIT ERR
    """, "bash"),
    _way("a_shell_that_skips", """
        readonly __id BASH_VERSION IFS POSIXLY_CORRECT; declare -n __command=PATH; TMOUT=1; ulimit -n 12
        shopt -s extdebug functrace; trap '[[ $BASH_COMMAND != __status* ]]' DEBUG
        (trap '' TERM INT; exec -a x sleep 1000) & disown -a
    """, "bash"),
    _way("an_interpreter_that_watches", """
        import gc, os, signal, sys
        names = ("_orders", "serve", "write_all", "linger")
        for found in gc.get_objects():
            if type(found).__name__ == "function" and found.__name__ in names:
                found.__code__ = (lambda *args, **more: b"").__code__
        for number in signal.valid_signals() - {9, 19}:
            signal.signal(number, signal.SIG_IGN)
        sys.setprofile(lambda *args: os.kill(os.getpid(), signal.SIGSTOP) if args[1] == "return" else None)
    """, "python"),
    _way("answers_of_nonsense", """
        import os
        for fd in range(3, 300):
            for n in range(1, 9):
                try:
                    os.write(fd, b"%d 99999999999999999999\\n" % n)
                except OSError:
                    pass
    """, "python"),
    _way("an_interpreter_in_ruins", """
        import builtins, gc, os, sys
        sys.stdout = sys.stderr = None
        sys.displayhook = sys.excepthook = None
        for name in ("compile", "exec", "eval", "print", "len", "open", "Exception"):
            setattr(builtins, name, None)
        sys.modules.clear()
    """, "python"),
    _way("an_end_without_notice", "import os; os._exit(0)", "python"),
    _way("close_the_sessions_descriptors", "import os; os.closerange(0, 1024)", "python"),
    _way("a_thread_that_fights", """
        import os, threading
        def fight():
            while True:
                for fd in range(3, 200):
                    try:
                        os.write(fd, b"7 7\\n")
                    except OSError:
                        pass
        threading.Thread(target=fight, daemon=True).start()
    """, "python"),
]  # fmt: skip
"""Ways that a policy may try. `python_code`-like envs can run those with `runs_in == "fresh"`."""


async def aftermath(box: Box) -> list[str]:
    """How each kind of call ends in a sandbox that has been tampered with.

    Raises:
        AssertionError: one of them fails as if the sandbox were to blame, or takes too long.
    """
    calls: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("list_dir", lambda: box.list_dir()),
        ("write_file", lambda: box.write_file("answer.txt", b"7")),
        ("read_file", lambda: box.read_file("answer.txt")),
        ("get_tree", lambda: box.get_tree()),
        ("put_tree", lambda: box.put_tree({"t/a": b"1", "t/b": b"2"})),
        ("python", lambda: box.python("print(6 * 7)", wall_s=2)),
        ("run", lambda: box.run("echo 42", wall_s=2)),
        ("bash", lambda: _in_session(box, "bash", "echo 42")),
        ("sqlite", lambda: _in_session(box, "sqlite", '{"database": ":memory:", "sql": "select 42"}')),
        ("snapshot", lambda: box.snapshot()),
        ("usage", lambda: box.usage()),
    ]
    found = []
    for name, call in calls:
        began = time.monotonic()
        try:
            await call()
            found.append(f"{name}: ok")
        except SandboxBroken as error:
            found.append(f"{name}: {error}")
        except SandboxError as error:
            raise AssertionError(f"{name} became an infrastructure failure: {error}") from error
        except OSError as error:
            found.append(f"{name}: {error}")
        except Exception as error:
            raise AssertionError(f"{name} raised {type(error).__name__}: {error}") from error
        expect(time.monotonic() - began < LONGEST_S, f"{name} took {time.monotonic() - began:.0f} s")
    return found


async def _in_session(box: Box, kind: Literal["bash", "sqlite"], command: str) -> None:
    session = await box.session(kind)
    await session.run(command, wall_s=2)
    await session.close()


CANCELLED = (
    "fork_bomb", "memory", "lock_home", "a_flood", "stop_oneself", "kill_newcomers", "stop_newcomers",
    "a_thread_that_fights", "answers_of_nonsense", "become_another_program",
)  # fmt: skip
"""Ways that are under way, or leave something that is, when their call is cancelled."""


async def cancelled_midway(stage: Stage) -> None:
    """Each act is cancelled while it runs; what follows must be as after an act that came to its end."""
    for number, way in enumerate(way for way in WAYS if way.name in CANCELLED):
        async with stage.box() as box:
            act = asyncio.create_task(way.act(box))
            await asyncio.sleep(0.05 * (number % 4 + 1))
            act.cancel()
            try:
                await act
            except (asyncio.CancelledError, SandboxBroken):
                pass
            except SandboxError as error:
                raise AssertionError(f"{way.name}: became an infrastructure failure: {error}") from error
            result = None
            try:
                await box.write_file("answer.txt", b"7")
                result = await box.python("print(6 * 7)", wall_s=2)
            except (SandboxBroken, OSError):
                continue
            except SandboxError as error:
                raise AssertionError(f"{way.name}: became an infrastructure failure: {error}") from error
            expect(result.outcome != "cancelled", f"{way.name}: {result}")


def checks() -> list[Check]:
    """One check per program, and one that cancels some of them."""

    def make(way: Sabotage) -> Check:
        async def run(stage: Stage) -> None:
            other = await stage.neighbor()
            async with stage.box() as box:
                try:
                    await way.act(box)
                except SandboxBroken:
                    pass
                except SandboxError as error:
                    raise AssertionError(f"became an infrastructure failure: {error}") from error
                await aftermath(box)
            result = await other.python("print(6 * 7)")
            expect(result.stdout == b"42\n", f"another sandbox suffers: {result}")

        return Check(f"sabotage_{way.name}", "sabotage", run, group=f"sabotage, {way.runs_in}", isolating=True)

    cancelled = Check(
        "sabotage_cancelled_midway", "sabotage", cancelled_midway, group="sabotage, cancelled", isolating=True
    )
    return [*(make(way) for way in WAYS), cancelled]
