"""`agentrl new`: a folder with an environment, its YAML file, its tests and its README, ready to train."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import ConfigError


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Created if it does not exist.", show_default=False)
    ],
) -> None:
    """Create an environment: env.py, tools.yaml, tests and a README, ready to train."""
    from importlib.resources import files

    template = files("agentrl.cli") / "template"
    names = ("env.py", "tools.yaml", "test_env.py", "README.md")
    taken = [name for name in names if (folder / name).exists()]
    if taken:
        raise ConfigError(
            f"{folder}: already holds {', '.join(taken)}; nothing was changed, choose another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"{folder}: cannot make the folder: {e.strerror}") from None
    for name in names:
        source = template / ("test_env.py.in" if name == "test_env.py" else name)
        (folder / name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"made {', '.join(str(folder / name) for name in names)}")
    named = shlex.quote(str(folder / "tools.yaml"))
    print(f"next: agentrl check {named}")
    print(f"      agentrl train {named}")
