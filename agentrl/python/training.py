"""Train from Python: awaited or blocking."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from agentrl.config.run import RunConfig
from agentrl.python.configure import configure
from agentrl.reporting.report import Summary
from agentrl.trainer.signals import POLL_S, StopRequest, stop_requested
from agentrl.trainer.start_run import start_run

RunSettings = RunConfig | Mapping[str, object] | str | os.PathLike[str]
"""A configuration, its data, or a YAML file; see `configure`."""


async def train(
    config: RunSettings,
    *,
    run_dir: Path | str | None = None,
    fresh: bool = False,
    accept_code: bool = False,
    console: Console | None = None,
) -> Summary:
    """Train (or resume training) and return the summary; other tasks of the event loop continue meanwhile.

    The run has a thread and an event loop to itself. If this coroutine is cancelled, the run saves a checkpoint
    after the current step, as after Ctrl-C, and the cancellation continues then, however often it was asked for.
    The same call resumes it.

    Args:
        config: the configuration; see `configure` for its forms.
        run_dir: the run folder; `runs/<name>` by default. A configuration without a name gets a new one.
        fresh: start over if the folder contains an earlier run, which is moved to a sibling folder.
        accept_code: resume also if the code of env and rewards, or the tasks, have changed.
        console: where progress goes; standard output by default.

    Raises:
        ConfigError: the configuration, the env or the model is invalid, or the folder contains something else.
        RuntimeError: it was not awaited under asyncio.
    """
    from agentrl.python.blocking import expect_asyncio

    expect_asyncio("`await agentrl.train(...)`", "call agentrl.train_blocking")
    stop = StopRequest()
    ready = configure(config)
    call = partial(start_run, run_dir=run_dir, fresh=fresh, accept_code=accept_code, again="the same call")
    run = asyncio.create_task(asyncio.to_thread(call, ready, console=console, stop=stop))
    try:
        while not run.done():
            await asyncio.wait({run}, timeout=POLL_S)  # an interrupt in Jupyter does not wake an idle loop
        return run.result()
    except asyncio.CancelledError:
        stop.ask("cancellation")
        while not run.done():  # a thread cannot be ended, and it holds the run folder
            with suppress(asyncio.CancelledError):
                await asyncio.wait({run})
        run.exception()  # looked at, so that nobody warns about it
        raise


def train_blocking(
    config: RunSettings,
    *,
    run_dir: Path | str | None = None,
    fresh: bool = False,
    accept_code: bool = False,
    console: Console | None = None,
) -> Summary:
    """Train (or resume training) and return the summary; the blocking form of `train`, which also works in a
    notebook. The first KeyboardInterrupt saves a checkpoint and returns, the second one aborts.

    Takes what `train` takes, and raises what it raises.
    """
    from agentrl.python.blocking import Worker, in_event_loop

    ready = configure(config)
    stop = StopRequest()

    def call() -> Summary:
        made = partial(start_run, run_dir=run_dir, fresh=fresh, accept_code=accept_code, again="the same call")
        return made(ready, console=console, stop=stop)

    if not in_event_loop():
        return call()

    with stop_requested(request=stop):
        return Worker(call, lambda: stop.abort(), "agentrl-run").result()
