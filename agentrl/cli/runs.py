"""`agentrl runs` and `agentrl compare`: runs as tables in a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.clean import visible
from agentrl.cli.options import no_run
from agentrl.errors import ConfigError
from agentrl.plural import plural

if TYPE_CHECKING:
    from agentrl.run_folder.run_reader import Json

ROWS = 20
"""Tasks listed by `agentrl compare`."""


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs, or a run.")] = Path(
        "runs"
    ),
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """List runs: status, tags, step, held-out result before and after, and wall time."""
    from rich.table import Table

    from agentrl.reporting.safe_console import SafeConsole
    from agentrl.suggest import did_you_mean
    from agentrl.view.as_json import json_text
    from agentrl.view.library import Library

    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name one with runs")
    found = Library([folder]).all_runs()
    tags = sorted({each for run in found["runs"] for each in run["tags"]})
    if tag is not None:
        found["runs"] = [run for run in found["runs"] if tag in run["tags"]]
    if as_json:
        print(json_text(found))
        return
    if not found["runs"] and tag is not None:
        hint = did_you_mean(tag, tags, otherwise=f"the tags there are: {', '.join(tags) or 'none'}")
        raise ConfigError(f"--tag {tag}: no run in {folder} has it; {hint}")
    if not found["runs"]:
        raise no_run(folder)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("status", no_wrap=True)
    if tags:
        table.add_column("tags", overflow="fold")
    for heading in ("step", "before", "after", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    names = {Path(os.path.realpath(each)): each.name for each in folder.iterdir()}
    for run in found["runs"]:
        steps = "" if run["steps"] is None else f"/{run['steps']}"
        table.add_row(
            *(_text(_inside(Path(run["path"]), folder, names)), _text(run["status"])),
            *([_text(" ".join(run["tags"]))] if tags else []),
            _text(f"{run['step']}{steps}"),
            *(_number(run["held_out_before"]), _number(run["held_out_after"]), _time(run["wall_seconds"])),
        )
    SafeConsole().print(table)


def _inside(path: Path, folder: Path, names: Mapping[Path, str]) -> str:
    """The path of a run in a folder, through a link in it or not, or its name if it is the folder itself.

    Args:
        names: of what is in the folder, by its real path.
    """
    if path == folder.resolve():
        return path.name
    for up in (path, *path.parents):
        if up in names:
            return str(Path(names[up], path.relative_to(up)))
    return str(path)


def tag(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    tags: Annotated[
        list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.", show_default=False)
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="A tag to remove; may be given several times.")
    ] = None,
) -> None:
    """Tag a run, and print its tags.

    `agentrl runs` and the pages of `agentrl view` find runs by their tags.
    """
    from agentrl.run_folder.run_reader import is_run
    from agentrl.run_folder.tags import read_tags, write_tags

    if not is_run(run):
        raise no_run(run)
    there = read_tags(run)
    for old in remove or ():
        if old not in there:
            raise ConfigError(f"--remove {old}: {run} has no such tag; it has: {', '.join(there) or 'none'}")
    if tags or remove:
        there = write_tags(run, [*(old for old in there if old not in (remove or ())), *(tags or ())])
    for each in there:
        print(visible(each))


def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare runs: settings that differ, and tasks of the first run next to the same tasks of the last one.

    A task's reward is its mean over the last five steps of a run. Tasks that lost most come first.
    """
    from agentrl.run_folder.run_reader import is_run
    from agentrl.view.as_json import json_text
    from agentrl.view.library import Library

    for path in paths:
        if not is_run(path):
            raise no_run(path)
    given = {path.resolve(): path for path in reversed(paths)}
    places = list(dict.fromkeys(path.resolve() for path in paths))
    if len(places) < 2:
        raise ConfigError(f"{paths[0]}: one run only; name two or more")
    library = Library(places)
    ids = {reader.path: id for id, reader in library.runs.items()}
    compared = library.compare([ids[place] for place in places])
    if as_json:
        print(json_text(compared))
        return
    names = [place.name for place in places]
    _print(compared, names if len(set(names)) == len(names) else [str(given[place]) for place in places])


def _print(compared: Json, names: list[str]) -> None:
    """Print the comparison, with the names of the runs in the order they were given."""
    from rich.table import Table

    from agentrl.reporting.safe_console import SafeConsole
    from agentrl.view.run_page import LAST_STEPS

    console = SafeConsole()
    ids = [run["id"] for run in compared["runs"]]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(_text(name), justify="right", overflow="fold")
    for title, key in (("held out before", "held_out_before"), ("held out after", "held_out_after")):
        table.add_row(title, *(_number(run[key]) for run in compared["runs"]))
    table.add_row("wall time", *(_time(run["wall_seconds"]) for run in compared["runs"]))
    for row in compared["config_diff"]:
        table.add_row(_text(row["key"]), *(_value(row["values"][id]) for id in ids))
    console.print(table)
    tasks, lost = compared["tasks"], len(compared["regressions"])
    if not tasks:
        console.print(f"\nno task in common in the last {LAST_STEPS} steps of each")
        return
    console.print(
        f"\n{plural(len(tasks), 'task')} in common, {lost} with a lower reward in {names[-1]}", markup=False
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", overflow="fold")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for task in tasks[:ROWS]:
        style = "red" if task["delta"] < 0 else ""
        change = f"{task['delta']:+.3g}" if task["delta"] else "0"
        table.add_row(_text(task["task"]), _number(task["before"]), _number(task["after"]), change, style=style)
    console.print(table)
    if len(tasks) > ROWS:
        console.print(f"[dim]... and {len(tasks) - ROWS} more[/dim]")


def _text(value: object) -> str:
    from rich.markup import escape

    return escape(visible(str(value)))


def _value(value: object) -> str:
    return "-" if value is None else _text(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _time(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"
