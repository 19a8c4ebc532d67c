"""`agentrl config`: inspect, diff and document run configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from agentrl.clean import visible
from agentrl.cli.options import Overrides, YamlFile, new_file

app = typer.Typer(help="Inspect, diff and document run configurations.", no_args_is_help=True)


@app.command("schema")
def schema(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write to this file instead of printing.", show_default=False),
    ] = None,
) -> None:
    """Print the JSON schema of the YAML file, for editors.

    Put `# yaml-language-server: $schema=agentrl.schema.json` on the first line of a YAML file: editors that speak
    the YAML language server then complete and explain its keys.
    """
    from agentrl.config.describe import json_schema

    text = json.dumps(json_schema(), indent=2)
    if out is None:
        print(text)
    else:
        new_file(out, overwrite=True).write_text(text + "\n", encoding="utf-8")


@app.command("show")
def show(
    path: YamlFile,
    overrides: Overrides = [],  # noqa: B006
    everything: Annotated[
        bool, typer.Option("--all", help="Include advanced settings at their defaults.")
    ] = False,
) -> None:
    """Print the configuration of a run, defaults included."""
    from agentrl.config import dump_config, load_config

    print(dump_config(load_config(path, overrides, check_paths=False), everything=everything), end="")


@app.command("diff")
def diff(
    old: Annotated[Path, typer.Argument(help="A YAML file.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="The YAML file to compare it with.", show_default=False)],
) -> None:
    """Print what differs between two configurations, defaults included."""
    from agentrl.config import config_diff, load_config

    changes = config_diff(load_config(old, check_paths=False), load_config(new, check_paths=False))
    print(visible(changes) or "no difference")
