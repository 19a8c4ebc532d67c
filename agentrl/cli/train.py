"""`agentrl train`: train a policy, or resume its training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Overrides, YamlFile


def train(
    path: YamlFile,
    overrides: Overrides = [],  # noqa: B006
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run folder. [default: runs/NAME]", show_default=False)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; an earlier run of this name is renamed and kept.")
    ] = False,
) -> None:
    """Train a policy; run the same command again to resume.

    Ctrl-C saves a checkpoint and exits; a second Ctrl-C aborts.
    """
    from agentrl.config import load_config
    from agentrl.extras import require
    from agentrl.trainer.start_run import start_run

    config = load_config(path, overrides)
    require("train", "agentrl train")
    summary = start_run(config, run_dir=run_dir, fresh=fresh, again=_again())
    if not summary.finished:
        raise typer.Exit(130)


def _again() -> str:
    """The command line that resumes this run: this one, without starting over."""
    return shlex.join(["agentrl", *(word for word in sys.argv[1:] if word != "--fresh")])
