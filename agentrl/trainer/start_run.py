"""Start a run: the run folder, the display and the signal handlers around `train_run`."""

from __future__ import annotations

import re
import warnings
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TextIO

from rich.console import Console

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError
from agentrl.extras import require
from agentrl.reporting.display import make_display
from agentrl.reporting.report import Reporter, Summary
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.run_folder.files import at_home
from agentrl.run_folder.store import RunStore
from agentrl.trainer.signals import StopRequest


def start_run(
    config: RunConfig,
    *,
    run_dir: Path | str | None = None,
    fresh: bool = False,
    again: str = "the same command",
    console: Console | None = None,
    stop: StopRequest | None = None,
    accept_code: bool = False,
) -> Summary:
    """Train (or resume training) with a progress display; returns the summary that is also in summary.json.

    Needs a thread without a running event loop; `agentrl.train` and `agentrl.train_blocking` do not.

    Args:
        config: the run, from `load_config`.
        run_dir: the run folder; `runs/<name>` by default. A run without a name gets a new one.
        fresh: start over if the folder contains an earlier run, which is moved to a sibling folder.
        again: the command to resume with; printed if the run is stopped before its end.
        console: where progress goes; standard output by default.
        stop: asks the run to save and end; by default only signals do.
        accept_code: resume also if the code of env and rewards, or the tasks, have changed.

    Raises:
        ConfigError: the configuration, the env or the model is invalid, or the folder contains another run.
    """
    require("train", "training")
    if run_dir is None and not config.name:
        config = config.model_copy(update={"name": _new_name(config)})
    with (
        make_display(config.name, again=again, console=console) as display,
        RunStore.open(config, None if run_dir is None else at_home(run_dir), fresh=fresh) as store,
        _warnings_noted(display, store),
    ):
        try:
            if store.resumed:
                display.note(f"resumes the run in {store.path}")
            if store.changes:
                display.note(f"changed settings: {'; '.join(map(str, store.changes))}")
            if any(part.startswith("_ray_pkg_") for part in store.path.absolute().parts):
                display.note(
                    f"{store.path} is in Ray's temporary copy of the job's working directory, which Ray deletes; "
                    "name a folder elsewhere with --run-dir, in Python run_dir="
                )
            display.phase("start")
            display.within("importing torch")  # many seconds on a cold disk
            from agentrl.rollout.build import expect_engine

            expect_engine(config)
            from agentrl.reporting.display import quiet_transformers

            quiet_transformers()
            from agentrl.torch_threads import one_after_fork
            from agentrl.trainer.run import train_run

            if one_after_fork():
                display.note(
                    "torch computes with one thread: this process was forked after a run in its parent; start it "
                    "with multiprocessing's spawn method to use all"
                )

            summary = train_run(config, store, display, stop, accept_code=accept_code)
        except AgentRLError:
            store.discard()
            raise
        except (KeyboardInterrupt, CancelledError):
            step = max(steps_saved(store.path / "checkpoints"), default=0)
            display.note(f"aborted; {again} " + (f"resumes after step {step}" if step else "starts it again"))
            raise
        display.done(summary)
    return summary


def _new_name(config: RunConfig) -> str:
    """A name that no run has: the env's, with a number. Makes the folder, so that no other run takes it."""
    env = next(iter(config.by_env.values())).sole_env.shown.rpartition(":")[2]
    word = re.sub(r"[^a-z0-9]+", "-", env.lower()).strip("-") or "run"
    for number in count(1):
        name = f"{word}-{number}"
        with suppress(FileExistsError):
            Path("runs", name).mkdir(parents=True)
            return name
    raise AssertionError


@contextmanager
def _warnings_noted(reporter: Reporter, store: RunStore) -> Iterator[None]:
    """Show each Python warning once, as a note of the run, instead of tearing the display."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | ImportWarning):
            reporter.note(str(message))
            store.event(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
