"""`agentrl plan`: estimate what a run will cost and where it will run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agentrl.cli.options import Overrides, YamlFile
from agentrl.errors import ConfigError


def plan(
    path: YamlFile,
    overrides: Overrides = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    memory_gib: Annotated[
        float | None,
        typer.Option("--memory", help="GiB per GPU, to plan for another machine.", show_default=False),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NxCARD", help="Plan for these GPUs, e.g. 8xH100-80GB, and predict a step.", show_default=False
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="With --gpus: number of nodes with these GPUs.")] = 1,
) -> None:
    """Estimate batches, memory, checkpoints and placement from the YAML and the model's config.json.

    Needs no weights or GPU. Lists likely problems last; exits with 2 if the run would fail.
    """
    from agentrl.config import load_config
    from agentrl.preflight.machines import machine_of
    from agentrl.preflight.plan import GIB, make_plan
    from agentrl.preflight.plan_text import lines

    if gpus is not None and memory_gib is not None:
        raise ConfigError("--gpus and --memory: give one of them; a card has its memory")
    if gpus is None and nodes > 1:
        raise ConfigError("--nodes has no effect without --gpus")
    if memory_gib is not None and not 1 <= memory_gib * GIB < float("inf"):
        raise ConfigError(f"--memory {memory_gib:g}: give a positive number of GiB")
    given = None if memory_gib is None else int(memory_gib * GIB)
    machine = None if gpus is None else machine_of(gpus, nodes)
    config = load_config(path, overrides)
    found = make_plan(config, memory_bytes=given, gpu=None if given is None else True, machine=machine)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        for line in lines(found):
            typer.echo(line)
        for finding in found.findings:
            typer.echo(f"{finding.level:<8}{finding.code}  {finding.text}\n{'':14}-> {finding.fix}")
    if any(finding.level == "error" for finding in found.findings):
        raise typer.Exit(2)
