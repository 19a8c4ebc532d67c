"""Programs that do not want to end."""

from __future__ import annotations

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.hostile.program import program
from agentrl.testing.sandbox_suite.stage import LATE_S, Stage, expect

LIMIT_S = 1.2
BUSY_S = 0.7
"""The limit of programs that keep cores busy."""


async def _timed_out(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.outcome == "timeout", f"outcome {result.outcome}, not timeout")
    expect(result.wall_s <= LIMIT_S + LATE_S, f"ended after {result.wall_s:.2f} s of {LIMIT_S:g}")
    await stage.nothing_left(token)


async def _quick(stage: Stage, box: Box, result: ExecResult, token: str) -> None:
    expect(result.outcome == "exit", f"outcome {result.outcome}")
    expect(result.wall_s < LATE_S, f"the call took {result.wall_s:.2f} s")
    await stage.nothing_left(token)


TIME = [
    program("cpu_loop", None, "while True: pass", _timed_out, wall_s=BUSY_S),
    program("cpu_all_cores", None, """
        for _ in range(8):
            if os.fork() == 0:
                break
        while True: pass
    """, _timed_out, wall_s=BUSY_S),
    program("sigterm_ignored", None, """
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True: time.sleep(1)
    """, _timed_out, wall_s=LIMIT_S),
    program("stopped_process", None, "os.kill(os.getpid(), signal.SIGSTOP)", _timed_out, wall_s=LIMIT_S),
    program("timeout_grandchild", None, """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", [order["token"], "100"])
            os._exit(0)
        time.sleep(100)
    """, _timed_out, wall_s=LIMIT_S),
    program("fork_tree", None, """
        def grow(depth):
            if depth:
                for _ in range(2):
                    if os.fork() == 0:
                        os.setsid()
                        grow(depth - 1)
            time.sleep(100)
        grow(4)
    """, _timed_out, wall_s=LIMIT_S),
    program("background_daemon", None, """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(3):
                    os.close(fd)
                os.execvp("sleep", [order["token"], "100"])
            os._exit(0)
        os.wait()
    """, _quick),
    program("daemon_holds_stdout", None, """
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", [order["token"], "100"])
    """, _quick),
    program("nohup_loop", None, """
        subprocess.Popen(["nohup", "sh", "-c", "while :; do sleep 0.1; : %s; done" % order["token"]],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    """, _quick),
    program("first_thread_ends", None, """
        import threading
        def go_on():
            subprocess.run(["sh", "-c", "while :; do sleep 0.1; : %s; done" % order["token"]])
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 3)
            threading.Thread(target=go_on).start()
            libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # ends this thread alone
        time.sleep(0.3)
    """, _quick),
    program("stdin_read", None, "sys.stdin.read(); os.read(0, 10); print('read')", _quick),
    program("closed_stdout", None, "os.close(1); os.close(2); time.sleep(0.05)", _quick),
]  # fmt: skip
