"""`agentrl show`: read the episodes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentrl.run_folder.records import EpisodeRecord


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(help="Which step. [default: the last one, or that of --episode]", show_default=False),
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Failed and lowest-scoring episodes first.")] = False,
    episode: Annotated[
        str | None, typer.Option(help="One episode by its id, e.g. s12/g0/e3.", show_default=False)
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=0, help="Episodes shown in full.")] = 3,
) -> None:
    """Read what the policy said, what the tools answered and what each episode scored."""
    from rich.console import Console

    from agentrl.errors import CheckpointError
    from agentrl.run_folder.records import read_records, recorded_steps
    from agentrl.view.episode_text import episode_text, step_table, worst_first

    console = Console()
    steps = recorded_steps(run)
    if not steps:
        what = "no run folder" if not (run / "config.yaml").is_file() else "has no episodes yet"
        raise CheckpointError(f"{run}: {what}")
    chosen = steps[-1] if step is None else step
    if episode is not None:
        records, num = _named(run, episode, steps if step is None else [step]), 1
    else:
        records = read_records(run, chosen)
    if worst:
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


def _named(run: Path, name: str, steps: list[int]) -> list[EpisodeRecord]:
    """The episode with this id; the step in its name (s12/...) is searched first, then other steps, latest
    first."""
    import re

    from agentrl.errors import ConfigError
    from agentrl.run_folder.records import read_records
    from agentrl.suggest import did_you_mean

    said = re.match(r"s(\d+)/", name)
    likely = int(said[1]) if said else steps[-1]
    ids: list[str] = []
    for step in sorted(steps, key=lambda step: (step != likely, -step)):
        records = read_records(run, step)
        if found := [record for record in records if record.episode.id == name]:
            return found
        ids = ids or [record.episode.id for record in records]
    hint = did_you_mean(name, ids, cutoff=0.3, otherwise=f"there is {ids[0]!r}" if ids else "")
    hint = f"; {hint}" if hint else ""
    where = f"not in step {steps[0]}" if len(steps) == 1 else "not in any step"
    raise ConfigError(f"--episode {name}: {where} of {run}{hint}")
