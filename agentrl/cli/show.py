"""`agentrl show`: read the episodes of a run, or search them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.clean import visible
from agentrl.errors import CheckpointError, ConfigError
from agentrl.plural import plural

if TYPE_CHECKING:
    from agentrl.run_folder.records import EpisodeRecord
    from agentrl.run_folder.search_index import Query

ROWS = 20
"""Episodes in the table."""


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    step: Annotated[
        int | None,
        typer.Option(
            help="Which step. [default: the last one; all of them with --worst, a filter or --episode]",
            show_default=False,
        ),
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="Failed and lowest-scoring episodes first.")] = False,
    episode: Annotated[
        str | None, typer.Option(help="One episode by its id, e.g. s12/g0/e3.", show_default=False)
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=0, help="Episodes shown in full.")] = 3,
    tool: Annotated[str | None, typer.Option(help="Only with a call of this tool.", show_default=False)] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Only with this call outcome, e.g. tool_exception.", show_default=False)
    ] = None,
    stop: Annotated[
        str | None, typer.Option(help="Only with this stop reason, e.g. max_turns.", show_default=False)
    ] = None,
    reward_min: Annotated[float | None, typer.Option(help="Minimum reward.", show_default=False)] = None,
    reward_max: Annotated[float | None, typer.Option(help="Maximum reward.", show_default=False)] = None,
    task: Annotated[str | None, typer.Option(help="Only episodes of this task.", show_default=False)] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only with this text, ignoring case.", show_default=False)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Only matches of this regular expression.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the number of episodes and the first --num records as JSON.")
    ] = False,
) -> None:
    """Read what the policy said, what the tools answered and what each episode scored."""
    from agentrl.run_folder.records import read_records, recorded_steps
    from agentrl.run_folder.search_index import Query
    from agentrl.view.episode_text import worst_first

    if grep is not None and regex is not None:
        raise ConfigError("--grep and --regex: give one of them")
    query = Query(
        *(grep or regex or "", regex is not None, tool, outcome, stop, reward_min, reward_max, step, step, task),
        worst_first=worst,
    )
    _check(query, (("--grep", grep), ("--regex", regex)))
    filtered = replace(query, step_min=None, step_max=None, worst_first=False) != Query()
    if filtered and episode is not None:
        raise ConfigError("--episode: names one episode; leave out the filters")
    if worst and episode is not None:
        raise ConfigError("--worst has no effect with --episode, which names one episode")
    steps = recorded_steps(run)
    if not steps:
        raise CheckpointError(f"{run}: {_why_nothing(run)}")
    chosen = steps[-1] if step is None else step
    where = _place(chosen, steps)
    if episode is not None:
        records = _named(run, episode, steps if step is None else [step])
        _print(records, 1, 1, None, as_json)
        return
    if filtered or (worst and step is None):
        if step is not None and step not in steps:
            read_records(run, step)  # raises an error that names the recorded steps
        total, records = _found(run, replace(query, limit=num if as_json else max(ROWS, num)))
        where = f"steps {steps[0]} to {steps[-1]}" if step is None else where
    else:
        records = read_records(run, chosen)
        records, total = worst_first(records) if worst else records, len(records)
    if not as_json:
        _tell_history(run)
    _print(records, total, num, where, as_json)


def _why_nothing(run: Path) -> str:
    """Why there are no episodes at this path."""
    from agentrl.run_folder.records import recorded_steps

    if (run / "manifest.json").is_file():
        return "a checkpoint; its episodes are in the folder of the run"
    if (run / "config.yaml").is_file():
        return "has no episodes yet"
    folder, _, step = str(run).rpartition("@")
    if folder and step.isdecimal() and recorded_steps(Path(folder)):
        return f"no run folder; write `agentrl show {folder} --step {step}`"
    return "no run folder"


def _place(step: int, steps: Sequence[int]) -> str:
    """A step among those that are recorded."""
    return f"step {step}" + (f" (recorded: {steps[0]} to {steps[-1]})" if len(steps) > 1 else "")


def _tell_history(run: Path) -> None:
    """Say where a run came from and what was changed on resuming."""
    from agentrl.run_folder.history import read_history, read_lineage, told_changes

    lineage = read_lineage(run)
    if lineage is not None:
        print(visible(f"forked from {lineage}"))
    for entry in read_history(run):
        changes = entry["changes"]
        for line in told_changes(changes) if isinstance(changes, dict) else ():
            print(visible(f"changed after step {entry.get('step')}: {line}"))


def _check(query: Query, texts: Sequence[tuple[str, str | None]]) -> None:
    """Refuse filters that no episode can pass."""
    from agentrl.suggest import did_you_mean
    from agentrl.types import StopReason

    for name, text in (*texts, ("--tool", query.tool), ("--outcome", query.outcome), ("--task", query.task)):
        if text == "":
            raise ConfigError(f"{name}: is empty; leave it out to allow everything")
        if text is not None and any("\ud800" <= sign <= "\udfff" for sign in text):  # how Python reads other bytes
            raise ConfigError(f"{name} {text[:80]!r}: not UTF-8; look for a part of it that is")
    reasons = [reason.value for reason in StopReason]
    if query.stop is not None and query.stop not in reasons:
        hint = did_you_mean(query.stop, reasons, otherwise=f"one of {', '.join(reasons)}")
        raise ConfigError(f"--stop {query.stop}: no such stop reason; {hint}")
    low, high = query.reward_min, query.reward_max
    for name, value in (("--reward-min", low), ("--reward-max", high)):
        if value is not None and math.isnan(value):
            raise ConfigError(f"{name} nan: not a number")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"--reward-min {low:g} is above --reward-max {high:g}")


def _found(run: Path, query: Query) -> tuple[int, list[EpisodeRecord]]:
    """How many episodes of a run match, and the records of the first ones."""
    import sys

    from agentrl.run_folder.records import read_records
    from agentrl.run_folder.search_index import MAX_TEXT, open_index

    index = open_index([run])
    index.refresh()
    for problem in index.problems():
        print(f"not searched: {visible(problem)}", file=sys.stderr)
    found = index.search(query)
    if found.cut and query.text:
        print(f"{found.cut} episodes: only the first {MAX_TEXT:,} characters were searched", file=sys.stderr)
    if not found.total and (hint := _unknown_calls(query, index.calls())):
        print(visible(hint), file=sys.stderr)
    wanted = {(hit.step, hit.episode) for hit in found.hits}
    records = {
        (step, record.episode.id): record
        for step in {hit.step for hit in found.hits}
        for record in read_records(run, step)
        if (step, record.episode.id) in wanted
    }
    keys = [(hit.step, hit.episode) for hit in found.hits]
    return found.total, [records[key] for key in keys if key in records]


def _unknown_calls(query: Query, calls: Collection[tuple[str, str]]) -> str:
    """What to say of a tool or an outcome that no call of the run has; empty if both occur."""
    from agentrl.suggest import did_you_mean

    tools, outcomes = ({call[place] for call in calls} - {""} for place in (0, 1))
    for name, wanted, seen in (("--tool", query.tool, tools), ("--outcome", query.outcome, outcomes)):
        if wanted is not None and wanted not in seen:
            there = f"there are {', '.join(sorted(seen))}" if seen else "this run has no calls"
            hint = did_you_mean(wanted, sorted(seen), otherwise=there)
            return f"{name} {wanted}: no call in this run has it; {hint}"
    return ""


def _print(records: Sequence[EpisodeRecord], total: int, num: int, where: str | None, as_json: bool) -> None:
    """Show a table (not where `where` is None: one episode was named) and the first `num` records in full."""
    from agentrl.reporting.safe_console import SafeConsole
    from agentrl.run_folder.records import encode
    from agentrl.view.episode_text import episode_text, step_table

    if as_json:
        lines = ",".join(encode(record).decode() for record in records[:num])
        print(f'{{"total":{total},"episodes":[{lines}]}}')
        return
    console = SafeConsole()
    if where is not None:
        console.print(f"[bold]{where}[/bold]: {plural(total, 'episode')}\n")
        if not records:
            return
        console.print(step_table(records[:ROWS]))
        if total > ROWS:
            console.print(f"[dim]... and {total - ROWS} more[/dim]")
    for record in records[:num]:
        if where is not None:
            console.print()
            console.rule(style="dim")
        console.print(episode_text(record))


def _named(run: Path, name: str, steps: list[int]) -> list[EpisodeRecord]:
    """The episode with this id."""
    from agentrl.run_folder.records import likely_steps, read_records
    from agentrl.suggest import did_you_mean

    ids: list[str] = []
    for step in likely_steps(name, steps):
        records = read_records(run, step)
        if found := [record for record in records if record.episode.id == name]:
            return found
        ids = ids or [record.episode.id for record in records]
    hint = did_you_mean(name, ids, cutoff=0.3, otherwise=f"there is {ids[0]!r}" if ids else "")
    hint = f"; {hint}" if hint else ""
    where = f"not in step {steps[0]}" if len(steps) == 1 else "not in any step"
    raise ConfigError(f"--episode {name}: {where} of {run}{hint}")
