"""YAML in, RunConfig out: every mistake at once, each with its place, its value and what to do.

Paths in the file are relative to the file's folder; paths given by `--set` are relative to the current folder, as
the shell completes them. `load_config` makes them absolute, so that the resolved configuration means the same
wherever it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.choice import choice_of, is_own
from agentrl.config.datafiles import data_files, is_dataset_name
from agentrl.config.dump import RESOLVED
from agentrl.config.engine import EngineConfig
from agentrl.config.facts import DataFiles, NamesCode, PathTo, facts
from agentrl.config.hub import cached_snapshot, how_to_get, is_hub_id
from agentrl.config.run import RunConfig
from agentrl.config.schema import (
    alternatives,
    bounds,
    field_at,
    fields,
    first_sentence,
    kind_name,
    named_section_of,
    section_of,
    unknown_key,
    without_kinds,
)
from agentrl.config.schemes import SCHEMES, scheme_of
from agentrl.config.section import DeadKey, DeadKeys, dead_keys
from agentrl.config.source import Loc, Problem, Source, Spot, dotted, excerpt, read_source, read_value
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
    return _run_config(read_source(Path(path)), overrides, Path(path).absolute().parent, check_paths)


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


def _run_config(source: Source, overrides: Sequence[str], folder: Path, check_paths: bool) -> RunConfig:
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
        config = RunConfig.model_validate(source.data)
    except ValidationError as e:
        _add_errors(source, e, ())
    if config is not None:
        _add_dead_keys(source, dead_keys(config, strict=True), ())
    if source.problems or config is None:
        raise ConfigError(_report(source))
    return config


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
        _add_errors(source, e, ("engine",))
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
            source.spots[(*loc[:depth], long)] = source.spots[loc[:depth]]
        elif not isinstance(inner, dict):
            raise ConfigError(f"{flag}: {dotted(loc[:depth])} is {_show(inner)}, not a section; it has no keys")
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


def _get(data: Any, loc: Loc) -> Any:
    for part in loc:
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _blank_sections(source: Source) -> None:
    """A section whose keys are all commented out means its defaults; for an optional one that would be a guess."""
    for loc, field in fields():
        spot = source.spots.get(loc)
        if section_of(field) is None or spot is None or not spot.blank:
            continue
        if type(None) in alternatives(field.annotation):
            text = f"the section is empty; write `{loc[-1]}: {{}}` for the defaults or remove it"
            source.problems.append(Problem(loc, text, spot, on_key=True))
        else:
            parent = _get(source.data, loc[:-1])
            parent[loc[-1]] = {}


def _numbers(source: Source) -> None:
    """Pydantic would read `true` as 1 and the text "8" as 8."""
    for loc, field in fields(data=source.data):
        value, kinds = _get(source.data, loc), alternatives(field.annotation)
        if isinstance(value, bool | str) and (int in kinds or float in kinds) and type(value) not in kinds:
            text = f"must be {kind_name(field.annotation)}, got {_show(value)}"
            source.problems.append(Problem(loc, text, source.spot(loc)))
        elif type(value) is int and value > LARGEST and loc != ("seed",):  # which has a separate bound
            text = f"must be at most {LARGEST}, got {value}"
            source.problems.append(Problem(loc, text, source.spot(loc)))
        for kind in kinds if isinstance(value, dict) else ():
            if get_origin(kind) is dict and float in alternatives(get_args(kind)[1]):
                _numbers_by_name(source, loc, value)


def _numbers_by_name(source: Source, around: Loc, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, bool | str):
            loc = (*around, name)
            source.problems.append(Problem(loc, f"must be a number, got {_show(value)}", source.spot(loc)))


def _paths(source: Source, folder: Path, *, check: bool) -> None:
    """Make paths absolute and check that they exist, for every key declared as a path."""
    for loc, field in list(fields(data=source.data)):
        for path_to in facts(field, PathTo):
            _path(source, loc, path_to, folder, check=check)
        for files in facts(field, DataFiles):
            _data_path(source, loc, files.split, folder, check=check)
        for code in facts(field, NamesCode):
            _code_path(source, loc, code, folder, check=check)


def _path(source: Source, loc: tuple[str, ...], path_to: PathTo, folder: Path, *, check: bool) -> None:
    text = _get(source.data, loc)
    if not isinstance(text, str) or text in path_to.names:
        return
    path = _absolute(text, source.spot(loc), folder)
    if path_to.hub and not _exists(path, "folder"):
        path = cached_snapshot(text) or path
    _get(source.data, loc[:-1])[loc[-1]] = str(path)
    if not check or _exists(path, path_to.kind):
        return
    if path_to.kind == "file" and _exists(path, "folder"):
        problem = f"must be a file, {path} is a folder; name a file in it"
    elif path_to.kind == "folder" and _exists(path, "file"):
        problem = f"must be a folder, {path} is a file"
    else:
        problem = f"there is no {path_to.kind} {path}{_neighbours(path)}"
        if path_to.hub and is_hub_id(text):
            problem += f", and {how_to_get(text)}"
    source.problems.append(Problem(loc, problem, source.spot(loc)))


def _data_path(
    source: Source, loc: tuple[str, ...], split: Literal["train", "held_out"], folder: Path, *, check: bool
) -> None:
    """Files, lists of files, patterns and names of datasets."""
    given = _get(source.data, loc)
    texts = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(text, str) for text in texts):
        return
    base = Path.cwd() if (spot := source.spot(loc)) is not None and spot.flag else folder
    found = [text if is_dataset_name(text, base) else str(_absolute(text, spot, folder)) for text in texts]
    _get(source.data, loc[:-1])[loc[-1]] = found if isinstance(given, list) else "".join(found)
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
    short = isinstance(_get(source.data, loc[:-1]), str) and len(loc) > 1
    loc = loc[:-1] if short else loc  # `env: file.py:Class`
    text = _get(source.data, loc)
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
    if text == COMPOSED and isinstance(env := _get(source.data, loc[:-1]), dict) and loc[-1] == "use":
        options = env.setdefault("options", {})
        if isinstance(options, dict):
            options.setdefault("base", str(folder))  # its tools and rewards are named by paths as well
    if not module.endswith(".py"):
        return
    path = _absolute(module, source.spot(loc), folder)
    _get(source.data, loc[:-1])[loc[-1]] = f"{path}:{name}"
    if check and not _exists(path, "file"):
        source.problems.append(Problem(loc, f"there is no file {path}{_neighbours(path)}", source.spot(loc)))


def _scheme_path(source: Source, loc: Loc, scheme: tuple[str, str], folder: Path) -> None:
    """Make the path of a scheme that names one absolute."""
    name, rest = scheme
    if SCHEMES[name].path and rest:
        path, at, more = rest.partition("@")
        _get(source.data, loc[:-1])[loc[-1]] = f"{name}:{_absolute(path, source.spot(loc), folder)}{at}{more}"


def _absolute(text: str, spot: Spot | None, folder: Path) -> Path:
    base = Path.cwd() if spot is not None and spot.flag else folder
    return Path(os.path.normpath(base / Path(text).expanduser()))


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
        text = f"must not begin with a dot, got {_show(name)}: it names a folder"
        source.problems.append(Problem(("name",), text, source.spot(("name",))))


# --- pydantic's errors in plain language -------------------------------------------------------------------------


def _add_errors(source: Source, invalid: ValidationError, around: Loc) -> None:
    """Add pydantic's errors, except at locations already reported."""
    for error in invalid.errors(include_url=False):
        cause = error.get("ctx", {}).get("error")
        loc = (*around, *error["loc"])
        if isinstance(cause, DeadKeys):
            _add_dead_keys(source, cause.found, tuple(map(str, loc)))
        elif without_kinds(loc) not in {known.loc for known in source.problems}:
            source.problems.append(_problem(source, {**error, "loc": loc}))


def _add_dead_keys(source: Source, found: Iterable[DeadKey], around: tuple[str, ...]) -> None:
    """Add keys without effect; `around` leads to the section in which they were found."""
    for key in found:
        loc = (*around, *key.loc)
        if loc not in {known.loc for known in source.problems}:
            source.problems.append(Problem(loc, key.text(around), source.spot(loc), on_key=True))


def _problem(source: Source, error: ErrorDetails) -> Problem:
    tagged, kind = error["loc"], error["type"]
    loc = without_kinds(tagged)
    if kind == "extra_forbidden":
        return Problem(loc, unknown_key(tagged, error["input"]), source.spot(loc), on_key=True)
    if kind == "missing":
        field = field_at(tagged)
        hint = f": {first_sentence(field.description)}" if field is not None and field.description else ""
        return Problem(loc, f"is missing{hint}", source.spot(loc[:-1]), on_key=True)
    if kind == "value_error":
        text = error["msg"].removeprefix("Value error, ")
        return Problem(loc, text, source.spot(_mentioned(source, text) or loc), on_key=True)
    return Problem(loc, _wrong_value(tagged, error), source.spot(loc))


def _wrong_value(loc: Loc, error: ErrorDetails) -> str:
    value, field = error["input"], field_at(loc)
    if field is not None:
        limits = bounds(field)
        if error["type"] in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"} and limits:
            return f"must be {limits}, got {_show(value)}"
        if error["type"] in _TYPE_ERRORS:
            text = f"must be {kind_name(field.annotation)}, got {_show(value)}"
            return text + _nearest_choice(field.annotation, value)
    if error["type"] == "model_type":
        return f"must be a section (keys and values), got {_show(value)}"
    if error["type"] == "string_pattern_mismatch" and loc == ("name",):
        return f"must be made of letters, digits, '.', '_' and '-' (it names a folder), got {_show(value)}"
    if error["type"] == "string_pattern_mismatch" and loc[-1:] == ("device",):
        return f"must be `auto`, `cpu`, `cuda` or `cuda:N`, got {_show(value)}"
    message = re.sub(r"^(Input|Value|String) should ", "must ", error["msg"])
    return f"{message[:1].lower()}{message[1:]}, got {_show(value)}"


_TYPE_ERRORS = {
    *("bool_parsing", "bool_type", "dict_type", "float_parsing", "float_type", "int_from_float", "int_parsing"),
    *(
        "int_type",
        "list_type",
        "literal_error",
        "model_type",
        "model_attributes_type",
        "string_type",
        "tuple_type",
    ),
}


def _nearest_choice(annotation: Any, value: Any) -> str:
    choices = [str(c) for kind in alternatives(annotation) if get_origin(kind) is Literal for c in get_args(kind)]
    near = did_you_mean(str(value), choices, cutoff=0.5)
    return f"; {near}" if near else ""


def _mentioned(source: Source, text: str) -> Loc:
    """The first key named in a message about several sections that the user wrote."""
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text):
        loc = tuple(word.split("."))
        if loc in source.spots:
            return loc
    return ()


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return f"a section with {', '.join(map(str, value)) or 'no keys'}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _report(source: Source) -> str:
    """All problems in the order of the file, those of flags last."""

    def place(problem: Problem) -> tuple[bool, int, int]:
        spot = problem.spot or Spot()
        return spot.flag is not None, spot.key_line, spot.key_column

    return "\n".join(_line(source, problem) for problem in sorted(source.problems, key=place))


def _line(source: Source, problem: Problem) -> str:
    key = dotted(problem.loc)
    joint = " " if problem.text.startswith(("must ", "is ", "has ")) else ": "
    what = f"{key}{joint}{problem.text}" if key and not problem.text.startswith(key) else problem.text
    spot = problem.spot
    if spot is None:
        return f"{source.name}: {what}"
    if spot.flag:
        return f"{spot.flag}: {what}"
    line, column = (spot.key_line, spot.key_column) if problem.on_key else (spot.line, spot.column)
    return f"{source.name}:{line}:{column}: {what}{excerpt(source, line, column)}"
