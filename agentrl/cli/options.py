"""Arguments that several commands share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from agentrl.config.facts import Command

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


def policy_folder(target: Path) -> Path:
    """The folder that an argument means: itself, the checkpoint of `RUN@STEP` or `RUN@best`, or the snapshot of a
    Hugging Face id in the local cache.

    Raises:
        CheckpointError: the run has no such checkpoint.
        ConfigError: the folder is neither local nor in the cache, or contains only an adapter.
    """
    from agentrl.config.hub import cached_snapshot, how_to_get, is_hub_id
    from agentrl.models.folder import refuse_adapter
    from agentrl.run_folder.fork import parse_source

    text = str(target)
    if "@" in text and not target.exists() and (Path(text.rpartition("@")[0]) / "config.yaml").is_file():
        run, step = parse_source(text, "")
        return run / "checkpoints" / f"step-{step}"
    if target.exists() or not is_hub_id(text):
        trained = (target.absolute().parent / "manifest.json").is_file()
        merged = (
            f"name the checkpoint, {target.parent}, which has it merged into the model, or " if trained else ""
        )
        refuse_adapter(target, text, merged)
        return target
    if (snapshot := cached_snapshot(text)) is None:
        raise ConfigError(
            f"{text}: no such folder; give a run folder, a checkpoint or a model. If it is a Hugging Face id: "
            f"{how_to_get(text)}"
        )
    refuse_adapter(snapshot, text)
    return snapshot


def trained_by(policy: Path) -> Path | None:
    """The folder whose config.yaml says how a policy was trained: a run, or a checkpoint in one.

    None for any other model folder: its config.yaml is not read, because a configuration names code to run.
    """
    checkpoints = policy.resolve().parent
    above = checkpoints.parent
    in_run = checkpoints.name == "checkpoints" and (above / "config.yaml").is_file()
    if not in_run and (policy / "config.json").is_file():
        return None
    return next((folder for folder in (policy, above)[: 1 + in_run] if (folder / "config.yaml").is_file()), None)


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


def check_effect(
    overrides: Sequence[str], command: Command, what: str, instead: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that every `--set` has an effect for a command that only samples from a policy.

    Args:
        command: the name under which keys declare that they have no effect.
        what: where an effect was expected, for errors: `on serving`.
        instead: options that do what the key would.

    Raises:
        ConfigError: one of them has no effect.
    """
    from agentrl.config.facts import UnusedBy, facts
    from agentrl.config.schema import field_at

    for text in overrides:
        for loc in keys_set(text):
            for end in range(1, len(loc) + 1):
                field = field_at(loc[:end])
                unused = {each for fact in facts(field, UnusedBy) for each in fact.commands} if field else ()
                if command in unused:
                    key = ".".join(loc[:end])
                    why = ", which updates no weights" if end > 1 and {"eval", "serve"} <= {*unused} else ""
                    remedy = f"use {instead[key]}" if key in instead else "leave it out"
                    raise ConfigError(f"--set {text}: `{key}` has no effect {what}{why}; {remedy}")


def keys_set(override: str) -> Iterator[tuple[str, ...]]:
    """The location of each key that one `--set a.b=c` sets; several where its value is a section.

    Raises:
        ConfigError: the value is not YAML.
    """
    from agentrl.config.source import read_value

    key, _, value = override.partition("=")

    def below(loc: tuple[str, ...], given: object) -> Iterator[tuple[str, ...]]:
        if not isinstance(given, dict) or not given:
            yield loc
            return
        for name, inner in given.items():
            yield from below((*loc, name), inner)

    return below(tuple(part.strip() for part in key.split(".")), read_value(value, f"--set {override}"))


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
