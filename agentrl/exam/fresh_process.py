"""Play scripts in a new process, with another hash seed and, if asked, another date.

Run as `python -m agentrl.exam.fresh_process`: for each line of standard input, a JSON request, a copy of the
process plays and writes the fingerprints by key as a line of standard output; an empty line says that it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO

from agentrl.config import RunConfig, dump_config, load_config
from agentrl.exam.arena import Arena
from agentrl.exam.clock import shift_clock
from agentrl.exam.examinee import named_policy, open_examinee
from agentrl.exam.repeats import Repeat, play_script
from agentrl.sandbox import close_pools
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


class FreshProcesses:
    """Processes that have imported agentrl but no env, one for each hash seed; copies of them play.

    Starting one takes half a second of CPU time, and copying it a few milliseconds.
    """

    def __init__(self) -> None:
        self._started: dict[int, _FreshProcess] = {}

    async def play(
        self,
        config: RunConfig,
        scripts: Sequence[Repeat],
        *,
        hash_seed: int,
        backward: bool,
        shifted: bool,
        hold_back: bool,
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
                "environ": dict(os.environ),
                "folder": os.getcwd(),
                "path": [place for place in sys.path if place],
            }
            try:
                asked = json.dumps(request)
            except TypeError as e:
                return f"the rows are not JSON: {e}"
            return await self._ask(hash_seed, asked)

    async def _ask(self, hash_seed: int, request: str) -> dict[str, str] | str:
        if hash_seed not in self._started:
            self._started[hash_seed] = _FreshProcess(hash_seed)
        process, answered = self._started[hash_seed], False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found: Mapping[str, str] = json.loads(await asyncio.to_thread(process.ask, request))
            answered = True
            return dict(found)
        except TimeoutError:
            return f"the process did not end within {TIMEOUT_S:g} s"
        except (OSError, ValueError):
            return f"the process failed: {process.last_words()}"
        finally:
            if not answered:
                self._started.pop(hash_seed).end()

    def close(self) -> None:
        """End the processes; idempotent."""
        while self._started:
            self._started.popitem()[1].end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _FreshProcess:
    """One process with this hash seed."""

    def __init__(self, hash_seed: int) -> None:
        path_here = os.pathsep.join(filter(None, sys.path))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.exam.fresh_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path_here},
            start_new_session=True, text=True, encoding="utf-8",
        )  # fmt: skip

    def ask(self, request: str) -> str:
        """The answer to a request; empty when there will be none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def last_words(self) -> str:
        """The end of what was written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-300:]

    def end(self) -> None:
        """Kill it with everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def main() -> None:
    """Answer the requests of standard input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the env prints
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imported"] if request["shift_s"] else ():
            importlib.import_module(name)
        pid = os.fork()
        if pid == 0:
            _answer(request, answers)
        if os.waitpid(pid, 0)[1] != 0:
            answers.write("\n")
            answers.flush()


def _answer(request: Mapping[str, Any], answers: TextIO) -> NoReturn:
    """Play in a copy of the process, which ends here."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["environ"])
        os.chdir(request["folder"])
        sys.path[:] = [request["folder"], *request["path"]]
        if request["shift_s"]:
            shift_clock(request["shift_s"])
        found = asyncio.run(_play(request["config"], request["scripts"], request["hold_back"]))
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)  # threads that an env left behind must not hold the process


async def _play(path: str, scripts: Sequence[Mapping[str, Any]], hold_back: bool) -> dict[str, str]:
    examinee = open_examinee(load_config(Path(path), check_paths=False), hold_back=hold_back)
    arena = Arena(examinee.make_env)
    found = {}
    try:
        for given in scripts:
            task, name = Task(**given["task"]), str(given["name"])
            script = Repeat(name, task, named_policy(examinee, name))
            found[script.key] = (await play_script(arena, script)).fingerprint
    finally:
        await close_pools()
    return found


if __name__ == "__main__":
    main()
