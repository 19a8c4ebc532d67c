"""What docs/sandbox.md says of the suite and of what is removed between calls."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from agentrl.sandbox import SandboxPool
from agentrl.testing.sandbox import sandbox_checks
from tests.sandbox.sandbox_specs import spec_for

TEXT = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text(encoding="utf-8")
MAKE = """
import ctypes, os
made = ctypes.CDLL(None).shmget(0x1234, 4096, 0o1600)
open("/dev/shm/left", "w").close()
print(made >= 0)
"""
LOOK = """
import ctypes, os
print(ctypes.CDLL(None).shmget(0x1234, 0, 0) >= 0, os.path.exists("/dev/shm/left"))
"""
NAMES = ["namespace", pytest.param("docker", marks=pytest.mark.docker)]


def test_the_page_counts_the_checks_as_they_are() -> None:
    kinds = Counter(check.kind for check in sandbox_checks())
    assert (
        f"The suite has {kinds.total()} checks: {kinds['conformance']} of conformance, {kinds['fidelity']} of "
        f"fidelity, {kinds['hostile']} hostile programs, {kinds['sabotage']} of sabotage, {kinds['chaos']} of "
        "sudden deaths."
    ) in TEXT


def test_every_row_says_which_suite_was_run_and_no_row_holds_more_than_that() -> None:
    table = TEXT.partition("| back-end | where | suite | held |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 8
    for line in table:
        _, _, suite, held, _ = (cell.strip() for cell in line.strip("|").split("|"))
        version = re.match(r"(\d+)", suite)
        assert version is not None
        assert int(held) <= int(version[1]) <= len(sandbox_checks())


@pytest.mark.parametrize("name", NAMES)
async def test_kernel_objects_and_shared_files_go_when_the_page_says(name: str) -> None:
    async with SandboxPool(spec_for(name), min_idle=0) as pool, pool.lease() as box:
        assert pool.capabilities is not None
        if os.getuid() != 0 and "memory" not in pool.capabilities.kept:
            pytest.skip("no control group: System V objects are refused")
        assert (await box.python(MAKE)).text() == "True\n"
        assert (await box.python(LOOK)).text() == "False False\n"
        async with await box.session("bash") as shell:
            await shell.run("echo x > /dev/shm/left")
            assert (await box.python(MAKE)).text() == "True\n"
            assert (await box.python(LOOK)).text() == "True True\n"
        await box.write_file("a.txt", "x")
        assert (await box.python(LOOK)).text() == "True True\n"
        assert (await box.python(LOOK)).text() == "False False\n"
