"""`agentrl train`: train a policy, or resume its training."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from agentrl.cli.options import Overrides, YamlFile
from agentrl.errors import ConfigError
from agentrl.extras import require


def train(
    path: YamlFile,
    overrides: Overrides = [],  # noqa: B006
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="The run folder. [default: runs/NAME]", show_default=False)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; an earlier run of this name is renamed and kept.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Fork this run at its newest checkpoint, or at STEP or `best`.",
            show_default=False,
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="With --from: take the weights alone, and start from step 1.")
    ] = False,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="Resume although code of env or rewards, or tasks, changed.")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke",
            help="Try the file on a CPU: two small steps with tiny random weights of its model's architecture.",
        ),
    ] = False,
) -> None:
    """Train a policy; run the same command again to resume, also with more steps or other settings.

    Ctrl-C saves a checkpoint and exits; a second Ctrl-C aborts.
    """
    from agentrl.config import load_config
    from agentrl.run_folder.fork import fork_again, fork_run
    from agentrl.run_folder.own_start import with_own_start
    from agentrl.trainer.start_run import start_run

    if smoke:
        if fresh or source is not None or weights_only or accept_code:
            raise ConfigError("--smoke excludes --fresh, --from, --weights-only and --accept-code")
        require("train", "agentrl train --smoke")
        _smoke(path, overrides, run_dir)
        return
    if fresh and accept_code:
        raise ConfigError("--accept-code has no effect with --fresh, which resumes nothing")
    config, pinned = load_config(path, overrides), ""
    require("train", "agentrl train")
    if source is not None:
        if fresh:
            raise ConfigError("--from and --fresh exclude each other: a fork gets a new folder")
        run_dir = fork_run(config, source, run_dir=run_dir, weights_only=weights_only)
        config, pinned = with_own_start(config, run_dir), fork_again(source, run_dir)
    elif weights_only:
        raise ConfigError("--weights-only has no effect without --from RUN")
    again = _again({source: pinned, f"--from={source}": f"--from={pinned}"})
    summary = start_run(config, run_dir=run_dir, fresh=fresh, again=again, accept_code=accept_code)
    if not summary.finished:
        raise typer.Exit(130)


def _smoke(path: Path, overrides: list[str], run_dir: Path | None) -> None:
    """Train two steps of a small copy of the run; an earlier one is replaced."""
    from agentrl.preflight.smoke import STEPS, architecture, empty_folder, smoke_config
    from agentrl.trainer.start_run import start_run

    folder = run_dir or Path("runs") / f"{path.stem}-smoke"
    empty_folder(folder)
    config = smoke_config(path, overrides, folder)
    if not start_run(config, run_dir=folder / "run", again=_again()).finished:
        raise typer.Exit(130)
    print(f"smoke: {STEPS} steps of {path} with a tiny, random {architecture(config, folder / 'run')} are done")


def _again(instead: Mapping[str | None, str] = MappingProxyType({})) -> str:
    """The command line that resumes this run: this one, without starting over.

    Args:
        instead: other words for some of its words.
    """
    return shlex.join(["agentrl", *(instead.get(word, word) for word in sys.argv[1:] if word != "--fresh")])
