"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

YamlFile = Annotated[
    Path, typer.Argument(metavar="TOOLS.YAML", help="The YAML file of the run.", show_default=False)
]

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one value, e.g. `--set optim.lr=1e-5`. The value is read as YAML; a path is relative to the "
        "current folder. May be given several times.",
        show_default=False,
    ),
]
