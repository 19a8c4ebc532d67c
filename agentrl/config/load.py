"""YAML in, RunConfig out: every mistake at once, each with its place, its value and what to do.

Paths in the file are relative to the file's folder; paths given by `--set` are relative to the current folder, as
the shell completes them. `load_config` makes them absolute, so that the resolved configuration means the same
wherever it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from agentrl.config.address import hide_credentials
from agentrl.config.choice import choice_of, is_own
from agentrl.config.datafiles import data_files, is_dataset_name
from agentrl.config.dump import RESOLVED
from agentrl.config.engine import EngineConfig
from agentrl.config.facts import DataFiles, NamesCode, PathTo, UnusedBy, facts
from agentrl.config.hub import cached_snapshot, how_to_get, is_hub_id
from agentrl.config.place import Loc, Places, dotted
from agentrl.config.run import RunConfig
from agentrl.config.schema import alternatives, field_at, fields, named_section_of, section_of
from agentrl.config.schemes import SCHEMES, scheme_of
from agentrl.config.section import dead_keys
from agentrl.config.source import Problem, Source, Spot, excerpt, read_source, read_value
from agentrl.config.wording import (
    VARIABLES,
    add_dead_keys,
    add_errors,
    as_written,
    got,
    has_variable,
    shown,
    wrong_scalars,
)
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean, nearest

COMPOSED = "agentrl.env.compose:ComposedEnv"
LARGEST = 10**9
"""Upper bound of every number: anything larger is a typo that would fill the memory."""


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, check_paths: bool = True
) -> RunConfig:
    """Read the YAML file of a run.

    Args:
        path: the file; an empty `name` becomes the name of its folder.
        overrides: `a.b=c` items, as given to `--set`; `c` is read as YAML and later items win.
        check_paths: False skips the check that files and folders exist.

    Raises:
        ConfigError: all mistakes of the file and of the overrides, one to a paragraph.
    """
    file = Path(os.path.expanduser(path))
    return _run_config(read_source(file), overrides, file.absolute().parent, check_paths)


def load_sampling_config(
    path: Path, overrides: Sequence[str] = (), *, check_paths: bool, rescores: bool = False
) -> RunConfig:
    """Read the configuration of a run for a command that plays or serves its policy, and trains nothing.

    Settings of training are dropped if the file is only valid without them: an override may contradict one of
    them, and a run's config.yaml may hold a combination that is refused since. The file of a run that is yet to be
    trained must be valid without the overrides.

    Args:
        path: `config.yaml` of a run or of an evaluation, or the YAML file of a run.
        overrides: as for `load_config`, of keys that affect sampling.
        check_paths: see `load_config`.
        rescores: keep the settings of training that rewards are computed from.

    Raises:
        ConfigError: all mistakes, one to a paragraph.
    """
    try:
        return load_config(path, overrides, check_paths=check_paths)
    except ConfigError as refused:
        source = read_source(path)
        if source.lines[:1] != [RESOLVED]:
            try:
                load_config(path, check_paths=check_paths)
            except ConfigError:
                raise refused from None  # it may lack what an override gives, and has the mistakes of both
        _drop_training(source, source.data, RunConfig, (), {"name", *(_OF_REWARDS if rescores else ())})
        return _run_config(source, overrides, path.absolute().parent, check_paths, trains=False)


def make_config(
    data: Mapping[str, Any], overrides: Sequence[str], outside: str, *, check_paths: bool = True
) -> RunConfig:
    """The configuration of something outside of a run: `data` with the overrides of the flags.

    Args:
        data: what a YAML file would hold; relative paths in it count from the current folder.
        overrides: `a.b=c` each, as given to `--set`.
        outside: what it is for, for errors.
        check_paths: see `load_config`.

    Raises:
        ConfigError: all mistakes, one to a paragraph.
    """
    return _run_config(Source(outside, data=dict(data)), overrides, Path.cwd(), check_paths)


def _run_config(
    source: Source, overrides: Sequence[str], folder: Path, check_paths: bool, *, trains: bool = True
) -> RunConfig:
    if source.lines[:1] == [RESOLVED]:
        _drop_defaults(source.data, RunConfig)
    for number, override in enumerate(overrides):
        _override(source, override, number)
    _blank_sections(source)
    _numbers(source)
    _paths(source, folder, check=check_paths)
    _name(source, folder)
    config: RunConfig | None = None
    try:
        config = RunConfig.model_validate(source.data, context={"trains": trains})
    except ValidationError as e:
        add_errors(source, e, ())
    if config is not None:
        add_dead_keys(source, dead_keys(config, strict=True), ())
    if source.problems or config is None:
        raise ConfigError(_report(source))
    config.written_at(Places({dotted(loc): _at(source, spot) for loc, spot in source.spots.items()}))
    return config


def _at(source: Source, spot: Spot) -> str:
    return spot.flag or f"{source.name}:{spot.key_line}:{spot.key_column}"


def load_engine(overrides: Sequence[str], outside: str) -> EngineConfig:
    """The engine of a model outside of a run: the defaults with the overrides of the flags.

    Args:
        overrides: `engine.a=b` each, as given to `--set`.
        outside: the model, for errors.

    Raises:
        ConfigError: all mistakes, one to a paragraph; also a key of another section.
    """
    source = Source("--set")
    for number, override in enumerate(overrides):
        if not override.strip().startswith("engine."):
            raise ConfigError(
                f"--set {override}: {outside} is a model outside of a run; only keys of `engine` can be set for it"
            )
        _override(source, override, number)
    _numbers(source)
    _paths(source, Path.cwd(), check=True)
    config: EngineConfig | None = None
    try:
        config = EngineConfig.model_validate(source.data.get("engine", {}))
    except ValidationError as e:
        add_errors(source, e, ("engine",))
    if source.problems or config is None:
        raise ConfigError(_report(source))
    return config


def _drop_defaults(data: dict[str, Any], section: type[BaseModel]) -> None:
    """Drop the defaults from a file that agentrl wrote in full: the user did not set them."""
    for name, field in section.model_fields.items():
        inner, value = section_of(field), data.get(name)
        choice = choice_of(field)
        if choice is not None and isinstance(value, dict):
            kind = choice.kind_of(value)
            if kind is not None:
                _drop_defaults(value, choice.kinds[kind])
            if kind in choice.names and kind != choice.default:
                value["name"] = kind
        elif inner is not None and isinstance(value, dict):
            _drop_defaults(value, inner)
        elif (each := named_section_of(field)) is not None and isinstance(value, dict) and value:
            for entry in value.values():
                _drop_defaults(entry, each)
        elif name in data and not field.is_required():
            default = field.get_default(call_default_factory=True)
            if value == (list(default) if isinstance(default, tuple) else default):
                del data[name]


_OF_REWARDS = ("reward_model", "overlong", "overlong_penalty")


def _drop_training(
    source: Source, data: dict[str, Any], section: type[BaseModel], around: Loc, keeps: Collection[str]
) -> None:
    """Drop the settings that an evaluation does not use, except for some. `data` is the section at `around`."""
    for name, field in section.model_fields.items():
        value, each, loc = data.get(name), named_section_of(field), (*around, name)
        if name not in keeps and any("eval" in fact.commands for fact in facts(field, UnusedBy)):
            data.pop(name, None)
            source.forget(loc)
        elif each is not None:
            for key, part in value.items() if isinstance(value, dict) else ():
                if isinstance(part, dict):
                    _drop_training(source, part, each, (*loc, key), keeps)
        elif (inner := section_of(field)) is not None and isinstance(value, dict):
            _drop_training(source, value, inner, loc, keeps)


# --- overrides -------------------------------------------------------------------------------------------------


def _override(source: Source, text: str, number: int) -> None:
    """Put the value of one `--set a.b=c` into the data."""
    flag = f"--set {text}"
    key, equals, value = text.partition("=")
    loc = tuple(part.strip() for part in key.split("."))
    if not equals or not all(loc):
        raise ConfigError(f"{flag}: write `--set section.key=value`")
    data = source.data
    for depth, part in enumerate(loc[:-1], start=1):
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
            source.spots[loc[:depth]] = Spot(key_line=number, flag=flag)
        elif isinstance(inner, str) and (long := _stands_for(loc[:depth], inner)) is not None:
            inner = data[part] = {long: inner}  # the short form `env: module:Class` or `loss: gspo`
            if (spot := source.spots.get(loc[:depth])) is not None:  # a mapping has no places
                source.spots[(*loc[:depth], long)] = spot
        elif not isinstance(inner, dict):
            raise ConfigError(f"{flag}: {dotted(loc[:depth])} is {shown(inner)}, not a section; it has no keys")
        data = inner
    source.forget(loc)
    source.problems = [problem for problem in source.problems if problem.loc[: len(loc)] != loc]
    given, field = read_value(value, flag), field_at(loc)
    if given is None and field is not None and type(None) not in alternatives(field.annotation):
        data.pop(loc[-1], None)  # back to the default, as if the file did not have the key
        return
    data[loc[-1]] = given
    source.spots[loc] = Spot(key_line=number, flag=flag)


def _stands_for(loc: Loc, text: str) -> str | None:
    """The key of a section that its short form, a text, gives; None if a section has no short form."""
    field = field_at(loc)
    if field is not None and choice_of(field) is not None:
        return "use" if is_own(text) else "name"
    return "use" if loc in (("env",), ("warmup",)) or (len(loc) == 2 and loc[0] == "envs") else None


# --- checks that pydantic does not make ------------------------------------------------------------------------


def _blank_sections(source: Source) -> None:
    """A section whose keys are all commented out means its defaults; for an optional one that would be a guess."""
    for loc, field in fields():
        spot = source.spots.get(loc)
        section = section_of(field)
        if section is None or spot is None or not spot.blank or field.is_required():
            continue
        if type(None) in alternatives(field.annotation):
            then = f"write `{loc[-1]}: {{}}` for the defaults" if _needs_nothing(section) else "give it its keys"
            text = f"the section is empty; {then} or remove it"
            source.problems.append(Problem(loc, text, spot, on_key=True))
        else:
            parent = as_written(source.data, loc[:-1])
            parent[loc[-1]] = {}


def _needs_nothing(section: type[BaseModel]) -> bool:
    try:
        section.model_validate({})
    except ValidationError:
        return False
    return True


def _numbers(source: Source) -> None:
    """Pydantic would read `true` as 1 and the text "8" as 8."""
    for loc, field in fields(data=source.data):
        value = as_written(source.data, loc)
        for at, text in wrong_scalars(field.annotation, value, loc):
            source.problems.append(Problem(at, text, source.spot(at)))
        if type(value) is int and value > LARGEST and loc != ("seed",):  # which has a separate bound
            text = f"must be at most {LARGEST}, {got(value)}"
            source.problems.append(Problem(loc, text, source.spot(loc)))


def _paths(source: Source, folder: Path, *, check: bool) -> None:
    """Make paths absolute and check that they exist, for every key declared as a path."""
    for loc, field in list(fields(data=source.data)):
        for path_to in facts(field, PathTo):
            _path(source, loc, path_to, folder, check=check)
        for files in facts(field, DataFiles):
            _data_path(source, loc, files.split, folder, check=check)
        for code in facts(field, NamesCode):
            _code_path(source, loc, code, folder, check=check)


def _path(source: Source, loc: Loc, path_to: PathTo, folder: Path, *, check: bool) -> None:
    text = as_written(source.data, loc)
    if not isinstance(text, str) or text in path_to.names:
        return
    if path_to.made and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
        return
    if not text.strip():
        problem = f"must be the path of a {path_to.kind}, {got(text)}"
        source.problems.append(Problem(loc, problem, source.spot(loc)))
        return
    path = _absolute(text, source.spot(loc), folder)
    if path_to.hub and not _exists(path, "folder"):
        path = cached_snapshot(text) or path
    as_written(source.data, loc[:-1])[loc[-1]] = str(path)
    if not check or _exists(path, path_to.kind) or (path_to.made and not _exists(path, "file")):
        return
    if path_to.kind == "file" and _exists(path, "folder"):
        problem = f"must be a file, {path} is a folder; name a file in it"
    elif path_to.kind == "folder" and _exists(path, "file"):
        problem = f"must be a folder, {path} is a file"
    else:
        problem = f"there is no {path_to.kind} {path}{_neighbours(path)}"
        problem += f"; {VARIABLES}" if has_variable(text) else ""
        if path_to.hub and is_hub_id(text):
            problem += f", and {how_to_get(text)}"
    source.problems.append(Problem(loc, problem, source.spot(loc)))


def _data_path(
    source: Source, loc: Loc, split: Literal["train", "held_out"], folder: Path, *, check: bool
) -> None:
    """Files, lists of files, patterns and names of datasets."""
    given = as_written(source.data, loc)
    texts = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(text, str) for text in texts):
        return
    if not all(text.strip() for text in texts):
        source.problems.append(Problem(loc, "must name files, the name of one is empty", source.spot(loc)))
        return
    base = Path.cwd() if (spot := source.spot(loc)) is not None and spot.flag else folder
    found = [text if is_dataset_name(text, base) else str(_absolute(text, spot, folder)) for text in texts]
    as_written(source.data, loc[:-1])[loc[-1]] = found if isinstance(given, list) else "".join(found)
    for text in found if check else ():
        try:
            data_files(text, split)
        except ConfigError as e:
            path = Path(text)
            near = "" if path.exists() or is_dataset_name(text, base) else _neighbours(path)
            source.problems.append(Problem(loc, f"{e}{near}", source.spot(loc)))
    if not found:
        source.problems.append(Problem(loc, "names no file: the list is empty", source.spot(loc)))


def _exists(path: Path, kind: Literal["file", "folder"]) -> bool:
    try:
        return path.is_dir() if kind == "folder" else path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def _code_path(source: Source, loc: Loc, code: NamesCode, folder: Path, *, check: bool) -> None:
    """`module:Name` or `path/to/file.py:Name`; a section that such a key stands for may be written as its text."""
    short = isinstance(as_written(source.data, loc[:-1]), str) and len(loc) > 1
    loc = loc[:-1] if short else loc  # `env: file.py:Class`
    text = as_written(source.data, loc)
    if not isinstance(text, str) or (code.or_word and ":" not in text):
        return
    if code.or_scheme and (scheme := scheme_of(text)) is not None:
        _scheme_path(source, loc, scheme, folder)
        return
    module, colon, name = text.rpartition(":")
    if not colon or not module or not all(part.isidentifier() for part in name.split(".")):
        what = code.kind.capitalize() if code.kind == "class" else code.kind
        problem = f"must be `module:{what}` or `path/to/file.py:{what}`, got {text!r}"
        if code.or_scheme:
            hint = did_you_mean(
                text.partition(":")[0], SCHEMES, otherwise=f"the schemes are: {', '.join(SCHEMES)}"
            )
            problem = problem.replace(", got", ", or SCHEME:REST (`agentrl envs` lists them), got") + f"; {hint}"
        source.problems.append(Problem(loc, problem, source.spot(loc)))
        return
    if text == COMPOSED and isinstance(env := as_written(source.data, loc[:-1]), dict) and loc[-1] == "use":
        options = env.setdefault("options", {})
        if isinstance(options, dict):
            options.setdefault("base", str(folder))  # its tools and rewards are named by paths as well
    if not module.endswith(".py"):
        return
    path = _absolute(module, source.spot(loc), folder)
    as_written(source.data, loc[:-1])[loc[-1]] = f"{path}:{name}"
    if check and not _exists(path, "file"):
        source.problems.append(Problem(loc, f"there is no file {path}{_neighbours(path)}", source.spot(loc)))


def _scheme_path(source: Source, loc: Loc, scheme: tuple[str, str], folder: Path) -> None:
    """Make the path of a scheme that names one absolute."""
    name, rest = scheme
    if SCHEMES[name].path and rest:
        path, at, more = rest.partition("@")
        as_written(source.data, loc[:-1])[loc[-1]] = (
            f"{name}:{_absolute(path, source.spot(loc), folder)}{at}{more}"
        )


def _absolute(text: str, spot: Spot | None, folder: Path) -> Path:
    base = Path.cwd() if spot is not None and spot.flag else folder
    return Path(os.path.normpath(base / os.path.expanduser(text)))


def _neighbours(path: Path) -> str:
    """A hint: the name in the same folder that looks most like the missing one."""
    for parent in path.parents:
        if _exists(parent, "folder"):
            wanted = path.relative_to(parent).parts[0]
            near = nearest(wanted, os.listdir(parent))
            return f"; did you mean {parent / near}?" if near else f" ({parent} has no {wanted!r})"
    return ""


def _name(source: Source, folder: Path) -> None:
    name = source.data.get("name", "")
    if name == "":
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.")
        source.data["name"] = name or "run"
    elif isinstance(name, str) and name.startswith("."):
        text = f"must not begin with a dot, got {shown(name)}: it names a folder"
        source.problems.append(Problem(("name",), text, source.spot(("name",))))


# --- the report ------------------------------------------------------------------------------------------------


def _report(source: Source) -> str:
    """All problems in the order of the file, those of flags last."""

    def place(problem: Problem) -> tuple[bool, int, int]:
        spot = problem.spot or Spot()
        return spot.flag is not None, spot.key_line, spot.key_column

    found = sorted(source.problems, key=place)
    unknown = [each for each in found if each.text.startswith("unknown key") and not place(each)[0]]
    file = Path(source.name)
    if unknown and file.name == "config.yaml" and (file.parent / "metrics.jsonl").is_file():
        return _other_version(file, [dotted(each.loc) for each in unknown])
    return "\n".join(_line(source, problem) for problem in found)


def _other_version(file: Path, unknown: Sequence[str]) -> str:
    """What to do about a run's configuration with keys that do not exist: nobody is to edit that file."""
    keys = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
    return (
        f"{file}: has keys that this version of agentrl does not know ({keys}): another version wrote it. Use "
        "that version for this command. To train on from its weights, start a new run with "
        f"`model: {{path: {file.parent}/checkpoints/step-N}}`; show, view, runs and export read this run as it is"
    )


def _line(source: Source, problem: Problem) -> str:
    key = dotted(problem.loc)
    joint = " " if problem.text.startswith(("must ", "is ", "has ")) else ": "
    what = f"{key}{joint}{problem.text}" if key and not problem.text.startswith(key) else problem.text
    what = hide_credentials(what)
    spot = problem.spot
    if spot is None:
        return f"{source.name}: {what}"
    if spot.flag:
        return f"{hide_credentials(spot.flag)}: {what}"
    line, column = (spot.key_line, spot.key_column) if problem.on_key else (spot.line, spot.column)
    return f"{source.name}:{line}:{column}: {what}{excerpt(source, line, column)}"
