"""Play scripts in a new process, with another hash seed and, if asked, another date.

Run as `python -m agentrl.exam.fresh_process`: reads a JSON request from standard input, and writes the
fingerprints by key as the last line of standard output.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl.config import RunConfig, dump_config
from agentrl.exam.clock import shift_clock
from agentrl.exam.repeats import Repeat, play_script
from agentrl.scratch import ScratchFolder
from agentrl.types import Task

TIMEOUT_S = 300.0
_REAL_CLOCK = ("numpy", "pydantic", "httpx", "agentrl.exam.examinee", "agentrl.env.mcp", "gymnasium")
"""What must be imported before the clock is moved, if episodes here have imported it."""


def shift_s() -> int:
    """To another year, month, hour and parity of the second, and between working days and weekends."""
    today = datetime.date.today().weekday()
    to = 5 if today < 5 else 1
    days = 400 + (to - today - 400) % 7
    return days * 86_400 + 7 * 3_600 + 13 * 60 + 7


async def play_elsewhere(
    config: RunConfig, scripts: Sequence[Repeat], *, hash_seed: int, backward: bool, shifted: bool, hold_back: bool
) -> dict[str, str] | str:
    """The fingerprints of the scripts in a new process, or why it failed.

    Args:
        config: the view of the run with this env.
        backward: play the scripts from the last to the first.
        shifted: with another date and time.
    """
    with ScratchFolder("exam") as scratch:
        path = scratch.path / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        plain = [{"name": s.name, "task": asdict(s.task)} for s in scripts]
        request = {
            "config": str(path),
            "scripts": plain[::-1] if backward else plain,
            "shift_s": shift_s() if shifted else 0.0,
            "imported": [name for name in _REAL_CLOCK if name in sys.modules],
            "hold_back": hold_back,
        }
        try:
            asked = json.dumps(request)
        except TypeError as e:
            return f"the rows are not JSON: {e}"
        path_here = os.pathsep.join(filter(None, sys.path))
        environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path_here}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl.exam.fresh_process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=environ,
        )  # fmt: skip
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, err = await process.communicate(asked.encode())
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"the process did not end within {TIMEOUT_S:g} s"
    try:
        found: Mapping[str, str] = json.loads(out.decode().splitlines()[-1])
        return dict(found)
    except (ValueError, IndexError):
        return f"the process failed: {err.decode(errors='replace').strip()[-300:]}"


def main() -> None:
    """Play what standard input asks for."""
    request = json.load(sys.stdin)
    real_out, sys.stdout = sys.stdout, sys.stderr  # what the env prints
    if request["shift_s"]:
        for name in request["imported"]:
            importlib.import_module(name)
        shift_clock(request["shift_s"])
    found = asyncio.run(_play(request["config"], request["scripts"], request["hold_back"]))
    real_out.write(json.dumps(found) + "\n")
    real_out.flush()
    os._exit(0)  # threads that an env left behind must not hold the process


async def _play(path: str, scripts: Sequence[Mapping[str, object]], hold_back: bool) -> dict[str, str]:
    from agentrl.config import load_config
    from agentrl.exam.arena import Arena
    from agentrl.exam.examinee import named_policy, open_examinee
    from agentrl.sandbox import close_pools

    examinee = open_examinee("", load_config(Path(path), check_paths=False), hold_back=hold_back)
    arena = Arena(examinee.make_env)
    found = {}
    try:
        for given in scripts:
            fields = given["task"]
            assert isinstance(fields, dict)
            task, name = Task(**fields), str(given["name"])
            script = Repeat(name, task, named_policy(examinee, name))
            found[script.key] = (await play_script(arena, script)).fingerprint
    finally:
        await close_pools()
    return found


if __name__ == "__main__":
    main()
