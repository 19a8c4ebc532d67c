"""Arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import CheckpointError, ConfigError

YamlFile = Annotated[
    Path, typer.Argument(metavar="TOOLS.YAML", help="The YAML file of the run.", show_default=False)
]

Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value, e.g. `--set optim.lr=1e-5`; `KEY=null` restores the default. Values are "
        "parsed as YAML; paths are relative to the current folder. Repeatable.",
        show_default=False,
    ),
]

PlayOverrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one value, e.g. `--set engine.max_slots=64`; only keys that affect sampling. Repeatable.",
        show_default=False,
    ),
]


def require_run(folder: Path) -> None:
    """Check that this is the folder of a run.

    Raises:
        CheckpointError: it has no configuration.
    """
    from agentrl.run_folder.run_reader import is_run

    if not (folder / "config.yaml").is_file():
        recording = "; it holds recorded episodes, which `agentrl show`, `view` and `export` read"
        more = recording if is_run(folder) else ""
        raise CheckpointError(f"{folder}: is not a run folder: it has no config.yaml{more}")


def no_run(place: object) -> ConfigError:
    """The error for a place without runs and recordings."""
    return ConfigError(f"{place}: no run is there; a run folder has a config.yaml and episodes/")


def new_file(path: Path, *, overwrite: bool = False) -> Path:
    """Check that a file can be created there.

    Raises:
        ConfigError: the path exists, is a folder, or its folder is missing.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a file in it")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path}: already exists; nothing was changed, choose another name")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    except OSError as e:
        raise ConfigError(f"{str(path)[:200]}: {e.strerror}") from None
    return path


def given_options(context: typer.Context) -> list[str]:
    """The options that the command line gives, by their long names, also where the value is the default."""

    def given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    options = [param for param in context.command.params if param.param_type_name == "option"]
    return [max(option.opts, key=len) for option in options if option.name and given(option.name)]


def client_secret(host: str, name: str | None, option: str, what: str, server: str) -> str | None:
    """The secret that clients must send, from the environment variable that an option names.

    Args:
        host: address to listen on.
        name: the variable; None where the option was not given.
        option: the option, for errors.
        what: what the secret is called there: "key" or "token".
        server: what it protects, for errors.

    Raises:
        ConfigError: the variable is not set, or others could reach the server without a secret.
    """
    from agentrl.serve.listen import is_loopback

    if name is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host}: others could use the {server}; put a {what} into an environment variable, name "
                f"it with {option}, or listen on 127.0.0.1"
            )
        return None
    if not (secret := os.environ.get(name, "")):
        raise ConfigError(f"{option} {name}: this environment variable is not set")
    return secret
