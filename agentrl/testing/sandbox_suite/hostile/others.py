"""Programs that attack other processes, and the supervisor that speaks for them."""

from __future__ import annotations

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.hostile.program import program
from agentrl.testing.sandbox_suite.stage import Stage, expect


async def _victim_lives(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(stage.victim.poll() is None, "the process outside has been killed")


async def _truth_after_forgery(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.exit_code == 3, f"the forged frame was believed: {result}")
    again = await box.run(["sh", "-c", "echo real; exit 7"])
    expect((again.exit_code, again.stdout) == (7, b"real\n"), f"the next call got {again}")


async def _nothing_is_left_between_calls(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    look = """
import ctypes, os
libc = ctypes.CDLL(None)
calls = (("shmget", (0, 0)), ("semget", (0, 0)), ("msgget", (0,)))
print([getattr(libc, name)(0x1234, *rest) >= 0 for name, rest in calls],
      libc.mq_open(b"/left", os.O_RDONLY) >= 0, os.path.exists("/dev/shm/left"))
"""
    found = await box.python(look)
    expect(found.text() == "[False, False, False] False False\n", found)


async def _another_is_not_starved(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect("held" in result.text(), result)
    take = """
import fcntl, os
ends = os.pipe()
print(fcntl.fcntl(ends[0], 1032), inotify() >= 0)
"""
    async with stage.box() as other:
        session = await box.session("bash")
        await box.write_file("hog.py", HOG + "print('held', flush=True)\ntime.sleep(60)\n")
        await session.run("for i in $(seq 30); do python3 -S hog.py > said$i & done; sleep 1")
        said = await box.run("cat said1")
        found = await other.python(HOG.partition("#")[0] + take)
        expect(found.text() == "65536 True\n", f"another sandbox gets {found}, after {said}")
        await session.close()


HOG = """
import ctypes, fcntl, os, time
libc = ctypes.CDLL(None)
def inotify():
    return libc.inotify_init1(0)
# until there is no more
held = []
while inotify() >= 0:
    pass
try:
    while True:
        held.append(os.pipe())
        fcntl.fcntl(held[-1][0], 1031, 1 << 20)
except OSError:
    pass
"""

OTHERS = [
    program("left_in_the_kernel", None, """
        made = [libc.shmget(0x1234, 1 << 20, 0o1600), libc.semget(0x1234, 5, 0o1600), libc.msgget(0x1234, 0o1600),
                libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o600, None)]
        made += [libc.shmget(0, 4096, 0o1600) for _ in range(50)]
        print("made", made)
        try:
            open("/dev/shm/left", "w").write("x")
        except OSError as error:
            print("stopped:", error)
    """, _nothing_is_left_between_calls),
    program("change_scheduling", "processes", """
        for pid in (order["victim"], order["harness"]):
            if pid not in (os.getpid(), os.getppid()):
                attempt(lambda: os.sched_setaffinity(pid, os.sched_getaffinity(pid)))
                attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid)))
                attempt(lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)))
                result, code = syscall(251, 30, 1, pid, (2 << 13) | 7)  # ioprio_set
                escaped("ioprio") if result == 0 else print("stopped:", os.strerror(code))
    """),
    program("starve_the_others", "own_quotas", HOG + "print('held')", _another_is_not_starved),
    program("schedule_the_supervisor", "processes", """
        for pid in (1, os.getppid()):
            if pid != order["harness"] and pid > 0:
                attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
                attempt(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
                attempt(lambda: os.sched_setaffinity(pid, {0}))
    """),
    program("kill_parent", None, """
        for pid in (1, os.getppid()):
            if pid != order["harness"] and pid > 0:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP):
                    try:
                        os.kill(pid, number)
                    except OSError as error:
                        print("stopped:", error)
    """),
    program("kill_host_proc", "processes", """
        try:
            os.kill(order["victim"], signal.SIGKILL)
        except OSError as error:
            print("stopped:", error)
    """, _victim_lives),
    program("kill_everybody", "processes", """
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError as error:
            print("stopped:", error)
    """, _victim_lives),
    program("ptrace_others", "processes", """
        for pid in (order["victim"], order["harness"], os.getppid(), 1):
            result, code = syscall(101, 117, 0x4206, pid, 0, 0)  # PTRACE_SEIZE
            escaped(pid) if result == 0 and pid > 0 else print("stopped:", os.strerror(code))
    """),
    program("read_memory", "processes", """
        for pid in (order["victim"], order["harness"], os.getppid() or 1, 1):
            attempt(lambda: open("/proc/%d/mem" % pid, "rb").close())
            attempt(lambda: open("/proc/%d/maps" % pid).read(1) or (_ for _ in ()).throw(ValueError("empty")))
            attempt(lambda: os.listdir("/proc/%d/fd" % pid))
    """),
    program("oom_score", "memory", """
        # Make the supervisor the likelier victim, then run out of memory: it must not be the one that goes.
        attempt(lambda: open("/proc/%d/oom_score_adj" % (os.getppid() or 1), "w").write("1000"))
        for value in (-1000, -500, 0):
            try:
                with open("/proc/self/oom_score_adj", "w") as f:
                    f.write(str(value))
                break
            except OSError as error:
                print("stopped:", error, flush=True)
        for _ in range(12):
            if os.fork() == 0:
                held = bytearray(b"x" * (40 << 20))
                time.sleep(60)
        time.sleep(1)
    """),
    program("starve_supervisor", "processes", """
        parent = os.getppid() or 1
        result, code = syscall(302, 261, parent, resource.RLIMIT_NOFILE, 0, 0)
        escaped("prlimit") if result == 0 else print("stopped:", os.strerror(code))
        limit = (ctypes.c_ulong * 2)(0, 0)
        ctypes.set_errno(0)
        if libc.prlimit(parent, resource.RLIMIT_NOFILE, limit, None) == 0:
            escaped("prlimit")
        attempt(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
        attempt(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
    """),
    program("forged_frames", None, """
        import struct
        def report(number):
            head = struct.pack(">IBBhQQddQII", number, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0)
            return struct.pack(">II", len(head), 0) + head
        frame = b"".join(report(number) for number in range(1, 20))
        for fd in range(3, 1024):
            try:
                os.write(fd, frame)
            except OSError:
                pass
        for pid in (1, os.getppid() or 1):
            for fd in range(0, 64):
                try:
                    with open("/proc/%d/fd/%d" % (pid, fd), "wb", buffering=0) as f:
                        f.write(frame)
                except OSError:
                    pass
        sys.stdout.buffer.write(frame)
        sys.stdout.flush()
        sys.exit(3)
    """, _truth_after_forgery),
]  # fmt: skip
