"""A Python program that ends says so, and is answered for before the kernel has taken it down."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import AsyncIterator

import pytest

from agentrl.sandbox import Box, SandboxPool
from tests.sandbox.sandbox_specs import spec_for

LIE = """
import ctypes, os, struct
def say(word):
    lines = [line for line in open("/proc/self/maps") if " rw-s " in line and "/dev/zero" in line]
    for line in lines:
        ctypes.memmove(int(line.split("-")[0], 16), word, len(word))
    assert lines
def lie():
    say(struct.pack("=?BI", True, 7, 1000))
    os.closerange(1, 3)
"""


@pytest.fixture(params=["namespace", "namespace_user"])
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    async with SandboxPool(spec_for(request.param), min_idle=0) as pool, pool.lease() as leased:
        yield leased


async def left_behind(box: Box) -> int:
    """How many processes there are, except for the supervisor and the program that looks."""
    found = await box.python("import os; print(sum(p.isdigit() for p in os.listdir('/proc')))")
    return int(found.text()) - 2


async def test_output_status_and_costs_are_those_of_the_program(box: Box) -> None:
    for status in (0, 3, 255):
        began = time.monotonic()
        result = await box.python(f"print('x' * 100_000)\nsum(range(3_000_000))\nraise SystemExit({status})")
        assert (result.outcome, result.exit_code) == ("exit", status)
        assert (result.stdout_total, result.reaped) == (100_001, 0)
        assert 0.01 < result.cpu_s <= result.wall_s + 0.05
        assert 5_000 < result.max_rss_kb < 100_000
        assert result.wall_s <= time.monotonic() - began
    before = (await box.usage()).cpu_s
    await box.python("sum(range(3_000_000))")
    assert (await box.usage()).cpu_s > before + 0.01


async def test_a_program_that_lies_about_its_end_is_ended(box: Box) -> None:
    more = "while True: time.sleep(0.01); open('later', 'a').write('x')"
    result = await box.python(LIE + f"import time\nprint('said', flush=True)\nlie()\n{more}", wall_s=20)
    assert (result.outcome, result.exit_code, result.stdout) == ("exit", 7, b"said\n")
    await asyncio.sleep(0.1)
    files = {entry.name: entry.size for entry in await box.list_dir()}
    await asyncio.sleep(0.1)
    assert {entry.name: entry.size for entry in await box.list_dir()} == files
    assert await left_behind(box) == 0


async def test_nobody_stays_behind_a_lie(box: Box) -> None:
    for when in ("before", "after"):
        fork = "import os, time\nif os.fork() == 0: time.sleep(60)\n"
        program = LIE + (fork + "lie()\n" if when == "before" else "lie()\n" + fork)
        result = await box.python(program + "time.sleep(0.2)", wall_s=20)
        assert result.outcome == "exit"
        assert await left_behind(box) == 0


async def test_a_copy_that_reaches_the_end_is_not_the_program(box: Box) -> None:
    result = await box.python(
        textwrap.dedent("""
            import os, time
            if os.fork():
                time.sleep(0.3)
                print("the program")
                os.wait()
                raise SystemExit(4)
            raise SystemExit(9)
        """)
    )
    assert (result.exit_code, result.stdout) == (4, b"the program\n")


async def test_what_children_have_used_is_counted(box: Box) -> None:
    busy = "while time.process_time() < 0.2: pass"
    result = await box.python(f"import os, time\nif os.fork() == 0:\n  {busy}\n  os._exit(0)\nos.wait()")
    assert result.cpu_s > 0.15


async def test_other_words_change_nothing(box: Box) -> None:
    for word in (b"\0" * 7, b"\1\0" + b"\xff" * 5, b"\0\1" + b"\xff" * 5, b"\1\1" + b"\xff" * 5):
        result = await box.python(LIE + f"say({word!r})\nprint(1)\nraise SystemExit(5)")
        assert (result.outcome, result.exit_code, result.stdout) == ("exit", 5, b"1\n")
        assert (await box.python("print(2)")).text() == "2\n"
    for closed in ("os.closerange(1, 3)", "os.close(1)", "os.close(2)", "os.closerange(0, 50)"):
        result = await box.python(f"import os, time\nprint(1, flush=True)\n{closed}\ntime.sleep(0.1)\nos._exit(6)")
        assert (result.exit_code, result.stdout) == (6, b"1\n")


async def test_a_program_without_streams_goes_on_to_its_end(box: Box) -> None:
    result = await box.python(
        "import os, time\nos.closerange(0, 3)\ntime.sleep(0.2)\nopen('made', 'w').write('x')\nos._exit(8)"
    )
    assert result.exit_code == 8
    assert await box.read_file("made") == b"x"


@pytest.mark.parametrize(("left", "end"), [(1, ""), (30_000, ""), (30_000, "os._exit(0)")])
async def test_output_beyond_the_limit_in_the_last_bytes(box: Box, left: int, end: str) -> None:
    total = box.spec.output_total_mb << 20
    code = f"import os\nos.write(1, b'x')\nn = {total} - 1\nwhile n: n -= os.write(1, b'x' * min(n, 60_000))\n"
    result = await box.python(code + f"os.write(1, b'x' * {left})\n{end}")
    assert (result.outcome, result.stdout_total) == ("output_limit", total + left)
    assert (await box.python("print(1)")).text() == "1\n"
