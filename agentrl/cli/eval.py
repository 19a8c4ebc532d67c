"""`agentrl eval`: play held-out tasks with a checkpoint."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Overrides

if TYPE_CHECKING:
    from rich.text import Text

    from agentrl.config import RunConfig
    from agentrl.eval.run import EvalResult


class Split(StrEnum):
    """Which tasks are played."""

    HELD_OUT = "held_out"
    TRAIN = "train"


def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="A run folder, a checkpoint or a model.", show_default=False
        ),
    ],
    env: Annotated[
        str | None,
        typer.Option(
            help="Another env: `module:Class` or `file.py:Class`. [default: the run's]", show_default=False
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="How many tasks. [default: eval.tasks of the run]", show_default=False),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which tasks.")] = Split.HELD_OUT,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    overrides: Overrides = [],  # noqa: B006
) -> None:
    """Play tasks with a trained policy and say how many it solves."""
    from rich.console import Console

    from agentrl.run.display import make_display

    checkpoint, config = find(target, env, overrides)
    from agentrl.eval.run import evaluate as play
    from agentrl.rollout.setup import quiet_transformers

    quiet_transformers()
    with make_display(config.name, again="", console=Console(stderr=True)) as display:
        result = play(
            checkpoint,
            config,
            tasks=tasks,
            split="held_out" if split is Split.HELD_OUT else "train",
            temperature=temperature,
            reporter=display,
        )
    Console().print(_text(result, split), soft_wrap=True)


def find(target: Path, env: str | None, overrides: list[str]) -> tuple[Path, RunConfig]:
    """The weights, and the configuration of the run that they belong to (or one made for a bare model).

    Raises:
        CheckpointError: there are no good weights.
        ConfigError: a bare model needs an env, or the env or an override is wrong.
    """
    from agentrl.config import RunConfig, load_config
    from agentrl.errors import ConfigError
    from agentrl.run.store import find_checkpoint

    for run in (target, target.absolute().parent.parent):
        if (run / "config.yaml").is_file():
            changes = [f"env.use={env}", *overrides] if env else overrides
            return find_checkpoint(target).path, load_config(run / "config.yaml", changes, check_paths=False)
    if not (target / "config.json").is_file():
        return find_checkpoint(target).path, _no_config(target)
    if env is None:
        raise ConfigError(f"{target}: is a model outside of a run; name what it plays: --env module:Class")
    if overrides:
        raise ConfigError(f"--set {overrides[0]}: {target} is a model outside of a run; it has no configuration")
    module, _, name = env.rpartition(":")
    use = f"{os.path.abspath(module)}:{name}" if module.endswith(".py") else env
    return target, RunConfig.model_validate({"name": "eval", "env": use, "model": {"path": str(target)}})


def _no_config(target: Path) -> RunConfig:
    from agentrl.errors import ConfigError

    raise ConfigError(
        f"{target}: has no config.yaml; give a run folder, a checkpoint in one, or a model directory"
    )


def _text(result: EvalResult, split: Split) -> Text:
    from rich.text import Text

    from agentrl.run.display import duration, percent

    count = len(result.episodes)
    rewards = ", ".join(f"{name} {value:.3f}" for name, value in result.rewards.items())
    rows = [
        ("solved", f"{percent(result.solved)} of {count} {split.value.replace('_', '-')} tasks"),
        ("", f"between {percent(result.low)} and {percent(result.high)} with 95 % confidence"),
        ("reward", f"{result.reward:.3f}" + (f" ({rewards})" if rewards else "")),
        ("malformed", str(result.malformed)),
        ("limits", str(result.limits)),
        ("infra failures", str(result.infra_failures)),
        ("time", f"{duration(result.seconds)}, {result.sampled_tokens:,} sampled tokens"),
        ("checkpoint", result.checkpoint),
    ]
    return Text("\n").join(
        Text(f"{name:<16}", style="bold").append(value, style="not bold") for name, value in rows
    )
