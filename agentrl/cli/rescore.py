"""`agentrl rescore`: compute the rewards of recorded episodes again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.errors import ConfigError
from agentrl.extras import require
from agentrl.plural import plural

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.config import RunConfig
    from agentrl.eval.rescore import RescoredEpisode, Rescoring

SHOWN = 10
"""Episodes with the largest differences that are printed."""


def rescore(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            metavar="ENV",
            help="Score with this env: file.py:Class, module:Class or SCHEME:REST; with several envs, NAME=ENV. "
            "[default: the run's, with its current code]",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        list[int], typer.Option("--step", help="Only this step. Repeatable. [default: all]", show_default=False)
    ] = [],  # noqa: B006 - typer reads it
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key of the env, e.g. `--set env.reward_weights.cost=-0.1`. Repeatable.",
            show_default=False,
        ),
    ] = [],  # noqa: B006
    play: Annotated[
        bool, typer.Option("--play", help="Call tools that act outside of the episode (MCP, HTTP) again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every episode.")] = False,
) -> None:
    """Compute the rewards of recorded episodes again, and show what differs.

    Replays the policy's messages on a new env. If the env answers as it did, every reward is computed; otherwise
    those that read only the recorded episode. Changes nothing in the run folder.
    """
    from agentrl.cli.options import require_run
    from agentrl.eval.rescore import RescoreOptions
    from agentrl.eval.rescore import rescore as rescored
    from agentrl.reporting.display import quiet_transformers
    from agentrl.reporting.safe_console import SafeConsole

    require("train", "agentrl rescore")
    require_run(run)
    config = _config(run, env, overrides)
    quiet_transformers()
    # What the env prints does not belong to what --json prints.
    with SafeConsole(stderr=True).status("rescoring") as status, contextlib.redirect_stdout(sys.stderr):
        found = rescored(
            run, config, RescoreOptions(tuple(dict.fromkeys(steps)), play), lambda text: status.update(text)
        )
    if as_json:
        body = {"episodes": [_json(episode) for episode in found.episodes], "left_out": dict(found.left_out)}
        typer.echo(json.dumps(body, indent=1, allow_nan=False))
    else:
        _print(SafeConsole(), found)


def _config(run: Path, env: str | None, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration with another env. Raises ConfigError if the override is not one of the env's."""
    from agentrl.config.load import load_sampling_config
    from agentrl.config.overrides import keys_set

    for text in overrides:
        if not all(map(_counts, keys_set(text))):
            raise ConfigError(
                f"--set {text}: has no effect on rewards; only the keys of `env` do, also under `envs.NAME`, and "
                "reward_model=null, which leaves out the recorded scores"
            )
    config = load_sampling_config(run / "config.yaml", check_paths=False, rescores=True)
    changes = []
    if env is not None:
        name, given, use = env.partition("=")
        if config.envs and (not given or name not in config.envs):
            names = " or ".join(f"{each}={use or name}" for each in config.envs)
            raise ConfigError(f"--env {env}: the run has several envs; say which: {names}")
        key = f"envs.{name}" if config.envs else "env"
        changes = [f"{key}.use={use if config.envs else env}"]
    return load_sampling_config(run / "config.yaml", [*changes, *overrides], check_paths=False, rescores=True)


def _counts(loc: Sequence[str]) -> bool:
    """Whether a key can change a reward that is computed again: the score of a reward model is not."""
    from agentrl.config.run import EnvConfig

    several = loc[0] == "envs" and (len(loc) < 3 or loc[2] in EnvConfig.model_fields)
    return several or loc[0] == "env" or tuple(loc) == ("reward_model",)


def _json(episode: RescoredEpisode) -> dict[str, object]:
    parts = {name: dataclasses.asdict(part) | {"changed": part.changed} for name, part in episode.parts.items()}
    return dataclasses.asdict(episode) | {"parts": parts}


def _print(console: Console, found: Rescoring) -> None:
    from rich.table import Table

    episodes = found.episodes
    replayed = sum(not episode.replayed for episode in episodes)
    console.print(f"{plural(len(episodes), 'episode')}, {replayed:,} replayed exactly", highlight=False)
    for reason, count in _counted([episode.replayed for episode in episodes]):
        console.print(f"  {count:,} not replayed: {reason}", highlight=False, markup=False, soft_wrap=True)
    for reason, count in sorted(found.left_out.items()):
        console.print(f"  {count:,} left out: {reason}", highlight=False, markup=False, soft_wrap=True)
    table = Table("part", box=None, pad_edge=False)
    for column in ("recorded", "rescored", "changed", "computed"):
        table.add_column(column, justify="right")
    notes = []
    for name, parts in found.parts():
        known = [part for part in parts if not part.reason]
        changed = sum(part.changed for part in known)
        missing = 0.0 if any(part.recorded is not None for part in parts) else None
        table.add_row(  # both means are of the same episodes
            name,
            _mean([missing if part.recorded is None else part.recorded for part in known or parts]),
            _mean([part.rescored for part in known]),
            f"{changed:,}",
            f"{len(known):,} of {len(parts):,}",
        )
        notes += [(name, reason, count) for reason, count in _counted([part.reason for part in parts])]
    console.print(table)
    for name, reason, count in notes:
        console.print(f"  {name}: {count:,} not computed: {reason}", highlight=False, markup=False, soft_wrap=True)
    _print_raised(console, episodes)
    changed_steps = [(step, of_step) for step, of_step in found.steps() if any(map(_changed, of_step))]
    if not changed_steps:
        console.print("no episode changed")
        return
    table = Table("step", box=None, pad_edge=False)
    for column in ("reward", "rescored", "solved", "now", "changed"):
        table.add_column(column, justify="right")
    for step, of_step in changed_steps:
        judged = [episode for episode in of_step if episode.solved is not None]
        table.add_row(
            str(step),
            _mean([episode.recorded for episode in of_step]),
            _mean([episode.rescored for episode in of_step]),
            _share([episode.solved_recorded for episode in judged or of_step]),
            _share([episode.solved for episode in judged]),
            f"{sum(_changed(episode) for episode in of_step):,}",
        )
    console.print(table)
    _print_changed(console, episodes)


def _print_changed(console: Console, episodes: Sequence[RescoredEpisode]) -> None:
    """The episodes whose reward changed most."""
    most = sorted((e for e in episodes if _changed(e)), key=lambda e: -abs(e.rescored - e.recorded))
    for episode in most[:SHOWN]:
        parts = ", ".join(
            f"{name} {_number(part.recorded)} -> {_number(part.rescored)}"
            for name, part in episode.parts.items()
            if part.changed
        )
        text = f"{episode.id} ({episode.task}): {episode.recorded:.4g} -> {episode.rescored:.4g}; {parts}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if len(most) > SHOWN:
        console.print(f"and {len(most) - SHOWN:,} more; --json has all", highlight=False)


def _print_raised(console: Console, episodes: Sequence[RescoredEpisode]) -> None:
    """The first reward that raised."""
    raised = [episode for episode in episodes if episode.faults]
    if raised:
        name, text = next(iter(raised[0].faults.items()))
        said = f"rewards raised in {plural(len(raised), 'episode')}; {raised[0].id}, {name}: {text}"
        console.print(said, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _counted(reasons: Sequence[str]) -> list[tuple[str, int]]:
    """The reasons that are not empty, the most frequent first."""
    return sorted(((r, reasons.count(r)) for r in set(reasons) if r), key=lambda pair: (-pair[1], pair[0]))


def _changed(episode: RescoredEpisode) -> bool:
    return any(part.changed for part in episode.parts.values())


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.4g}" if known else ""


def _share(values: Sequence[bool | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.0%}" if known else ""


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
