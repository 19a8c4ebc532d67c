"""Every way a program can end is distinguishable, and its bytes arrive unchanged."""

from __future__ import annotations

import signal

from agentrl.sandbox import ExecResult
from agentrl.testing.sandbox_suite.stage import Check, Stage, expect

EXITS = (0, 1, 2, 124, 125, 126, 127, 128, 137, 139, 143, 255)
SIGNALS = (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGPIPE, signal.SIGINT)


def _is(result: ExecResult, outcome: str, code: int | None, number: int | None) -> None:
    expect((result.outcome, result.exit_code, result.signal) == (outcome, code, number), result)


async def exit_codes(stage: Stage) -> None:
    async with stage.box() as box:
        for code in EXITS:
            _is(await box.python(f"import os; os._exit({code})"), "exit", code, None)
        for code in EXITS:
            _is(await box.run(["sh", "-c", f"exit {code}"]), "exit", code, None)
        _is(await box.python("import os; os._exit(300)"), "exit", 44, None)


async def signals(stage: Stage) -> None:
    async with stage.box() as box:
        for number in SIGNALS:
            reset = f"signal.signal({number}, signal.SIG_DFL)" if number != 9 else ""
            code = f"import os, signal\n{reset}\nos.kill(os.getpid(), {number})"
            _is(await box.python(code), "signal", None, number)
            _is(await box.run(["sh", "-c", f"kill -{number} $$"]), "signal", None, number)


async def a_quick_death_is_no_timeout(stage: Stage) -> None:
    async with stage.box() as box:
        _is(await box.run("kill -9 $$", wall_s=5), "signal", None, 9)
        _is(await box.run("timeout 0.2 sleep 5"), "exit", 124, None)


async def running_out_of_memory(stage: Stage) -> None:
    async with stage.box() as box:
        hog = f"held = bytearray(b'x' * (1 << 20) * {stage.spec.memory_mb * 2})"
        result = await box.python(f"print('before', flush=True)\n{hog}", wall_s=45)  # slow on a busy machine
        expect(result.outcome in ("oom", "exit") and result.stdout == b"before\n", result)
        expect(result.outcome == "oom" or "MemoryError" in result.error_text(), result)
        _is(await box.run(["sh", "-c", "exit 137"]), "exit", 137, None)
        for _ in range(3):
            child = f"import os\nif os.fork() == 0:\n    {hog}\n    os._exit(0)\nos.wait()\nprint('parent')"
            result = await box.python(child)
            expect(result.stdout == b"parent\n" or result.outcome == "oom", result)
        expect((await box.python("print(1)")).stdout == b"1\n", "the box did not survive")


async def streams_at_every_end(stage: Stage) -> None:
    ends = {"exit": "os._exit(0)", "signal": "os.kill(os.getpid(), 9)", "timeout": "time.sleep(60)"}
    async with stage.box() as box:
        for outcome, end in ends.items():
            code = f"import os, time, sys\nos.write(1, b'\\xff\\0\\xfe\\r\\n')\nos.write(2, b'err')\n{end}"
            result = await box.python(code, wall_s=0.5)
            expect((result.outcome, result.stdout, result.stderr) == (outcome, b"\xff\0\xfe\r\n", b"err"), result)


def checks() -> list[Check]:
    """All of them."""
    functions = (exit_codes, signals, a_quick_death_is_no_timeout, streams_at_every_end)
    found = [Check(f.__name__, "fidelity", f, alone=f is streams_at_every_end) for f in functions]
    found.append(Check("running_out_of_memory", "fidelity", running_out_of_memory, "memory", isolating=True))
    return found
