"""`agentrl plan`: estimate what a run will cost and where it will run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agentrl.cli.options import Overrides, YamlFile


def plan(
    path: YamlFile,
    overrides: Overrides = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory", help="GiB per GPU, to plan for another machine.", show_default=False),
    ] = None,
) -> None:
    """Estimate batches, memory, checkpoints and placement from the YAML and the model's config.json.

    Needs no weights or GPU. Lists likely problems last; exits with 2 if the run would fail.
    """
    from agentrl.config import load_config
    from agentrl.preflight.plan import GIB, lines, make_plan

    given = None if memory_gib is None else int(memory_gib * GIB)
    found = make_plan(load_config(path, overrides), memory_bytes=given, gpu=None if given is None else True)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        for line in lines(found):
            typer.echo(line)
        for finding in found.findings:
            typer.echo(f"{finding.level:<8}{finding.code}  {finding.text}\n{'':14}-> {finding.fix}")
    if any(finding.level == "error" for finding in found.findings):
        raise typer.Exit(2)
