"""`agentrl show`: read the episodes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentrl.records import EpisodeRecord


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(help="Which step; the last one by default.", show_default=False)
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Failed and lowest-scoring episodes first.")] = False,
    episode: Annotated[str | None, typer.Option(help="One episode by its id.", show_default=False)] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=0, help="Episodes shown in full.")] = 3,
) -> None:
    """Read what the policy said, what the tools answered and what each episode scored."""
    from rich.console import Console

    from agentrl.errors import CheckpointError
    from agentrl.records import read_records, recorded_steps
    from agentrl.view.text import episode_text, step_table, worst_first

    console = Console()
    steps = recorded_steps(run)
    if not steps:
        what = "no run folder" if not (run / "config.yaml").is_file() else "has no episodes yet"
        raise CheckpointError(f"{run}: {what}")
    chosen = steps[-1] if step is None else step
    records = read_records(run, chosen)
    if episode is not None:
        records, num = _named(records, episode, f"step {chosen} of {run}"), 1
    elif worst:
        records = worst_first(records)
    if episode is None:
        console.print(f"[bold]step {chosen}[/bold] of {steps[0]} to {steps[-1]}: {len(records)} episodes\n")
        console.print(step_table(records[:20]))
        if len(records) > 20:
            console.print(f"[dim]... and {len(records) - 20} more[/dim]")
    for record in records[:num]:
        if episode is None:
            console.print()
            console.rule(style="dim")
        console.print(episode_text(record))


def _named(records: list[EpisodeRecord], name: str, where: str) -> list[EpisodeRecord]:
    import difflib

    from agentrl.errors import ConfigError

    found = [record for record in records if record.episode.id == name]
    if not found:
        ids = [record.episode.id for record in records]
        near = difflib.get_close_matches(name, ids, n=1, cutoff=0.3) or ids[:1]
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"--episode {name}: {where} has no such episode{hint}")
    return found
