"""Many leases while sandboxes are killed and calls are canceled: failures are typed, and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox import Sandbox, SandboxPool


@dataclass
class Chaos:
    """Results of a chaos run."""

    leases: int = 0
    answered: int = 0
    died: int = 0
    cancelled: int = 0
    killed: int = 0
    untyped: int = 0
    seconds: float = 0.0
    rss_kb_before: int = 0
    rss_kb_after: int = 0
    descriptors_before: int = 0
    descriptors_after: int = 0
    complaints: list[str] = field(default_factory=list)
    left: int = 0
    """New processes below this one, and cgroup directories of keepers that are gone."""


async def chaos(spec: Sandbox, *, leases: int, cancellations: int, at_once: int = 16, seed: int = 0) -> Chaos:
    """Episodes of three calls; 5 % lose their sandbox at a random moment, some of their calls are cancelled."""
    chance = random.Random(seed)
    seen = Chaos()
    others = children()
    waiting = iter(range(leases))
    async with SandboxPool(spec, min_idle=4, max_total=at_once + 4) as pool:

        async def episode() -> None:
            async with pool.lease() as box:
                seen.leases += 1
                if chance.random() < 0.05 and box._process is not None:
                    seen.killed += 1
                    delay = chance.random() * 0.01
                    process = box._process

                    async def kill() -> None:
                        await asyncio.sleep(delay)
                        await process.kill()

                    killing = asyncio.create_task(kill())
                else:
                    killing = None
                try:
                    for _ in range(3):
                        call = asyncio.create_task(box.run("sleep 0.005; echo 1"))
                        if seen.cancelled < cancellations and chance.random() < cancellations / leases:
                            await asyncio.sleep(chance.random() * 0.01)
                            if call.cancel():
                                seen.cancelled += 1
                            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                                await call
                            continue
                        result = await call
                        seen.answered += result.stdout == b"1\n"
                except SandboxError:
                    seen.died += 1
                except Exception as error:  # whatever comes untyped is a finding
                    seen.untyped += 1
                    seen.complaints.append(repr(error))
                finally:
                    if killing is not None:
                        await killing

        async def worker() -> None:
            for _ in waiting:
                await episode()

        for _ in range(at_once):
            await episode()
        seen.rss_kb_before, seen.descriptors_before = _resident_kb(), len(os.listdir("/proc/self/fd"))
        began = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        seen.seconds = time.monotonic() - began
        await asyncio.sleep(0.5)
        seen.rss_kb_after, seen.descriptors_after = _resident_kb(), len(os.listdir("/proc/self/fd"))
    seen.left = leftovers(others)
    return seen


def _resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10


def children() -> set[int]:
    """Living children of this process."""
    found = {int(pid) for task in Path("/proc/self/task").iterdir() for pid in _text_of(task / "children").split()}
    return {pid for pid in found if ") Z " not in _text_of(Path(f"/proc/{pid}/stat"))}


def _text_of(file: Path) -> str:
    """What the file of a thread or process says; a zombie's state if it has ended meanwhile."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "" if file.name == "children" else ") Z "


def leftovers(others: set[int]) -> int:
    """Living children of this process except `others`, and control-group directories of its keepers."""
    groups = 0
    for path in Path("/sys/fs/cgroup").glob("*/agentrl/*"):
        owner = path.name.partition("-")[0]
        groups += owner.isdigit() and not Path(f"/proc/{owner}").exists()
    return len(children() - others) + groups
