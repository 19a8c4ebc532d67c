"""`agentrl import-verl`: translate a verl configuration and report what became of each key."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.clean import visible
from agentrl.cli.options import new_file


def import_verl(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A YAML file, or a shell script that sets key=value.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write the YAML to. [default: stdout]", show_default=False)
    ] = None,
) -> None:
    """Translate a verl configuration into a tools.yaml; stderr reports what became of each key."""
    from io import StringIO

    from ruamel.yaml import YAML

    from agentrl.import_verl import import_verl as translate

    if out is not None:
        new_file(out)
    imported = translate(source)
    text = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump(imported.config, text)
    for kind in ("by hand", "refused", "no effect", "same", "taken"):
        for note in imported.notes:
            if note.kind == kind:
                print(visible(str(note)), file=sys.stderr)
    if out is None:
        print(text.getvalue(), end="")
        return
    out.write_text(text.getvalue(), encoding="utf-8")
    print(f"made {out}")
    print(f"next: agentrl check {out}")
