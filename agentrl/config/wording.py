"""What is wrong with a configuration, in plain language: pydantic's errors, keys without effect, wrong types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.choice import choice_of
from agentrl.config.facts import NamesCode, facts
from agentrl.config.place import Loc, dotted
from agentrl.config.schema import (
    alternatives,
    bounds,
    entry_section_of,
    field_at,
    first_sentence,
    kind_name,
    section_of,
    sentence_at,
    unknown_key,
    without_kinds,
)
from agentrl.config.section import DeadKey, DeadKeys
from agentrl.config.source import Problem, Source
from agentrl.suggest import did_you_mean


def add_errors(source: Source, invalid: ValidationError, around: Loc) -> None:
    """Add pydantic's errors, except at locations already reported."""
    for error in invalid.errors(include_url=False):
        cause = error.get("ctx", {}).get("error")
        loc = (*around, *error["loc"])
        union = _union_around(loc)
        if isinstance(cause, DeadKeys):
            add_dead_keys(source, cause.found, without_kinds(loc))
        elif union is not None:
            _add(source, _union_problems(source, *union))
        else:
            _add(source, [_problem(source, {**error, "loc": loc})])


def add_dead_keys(source: Source, found: Iterable[DeadKey], around: Loc) -> None:
    """Add keys without effect; `around` leads to the section in which they were found."""
    for key in found:
        loc, text = (*around, *key.loc), key.text(around)
        spot, causes = source.spot(loc), [source.spot((*around, *other)) for other in key.others]
        if any(cause and cause.flag for cause in causes) and not (spot and spot.flag):
            text += f" (--set {dotted(loc)}=null takes it back)"
        _add(source, [Problem(loc, text, spot, on_key=True)])


def _add(source: Source, problems: Iterable[Problem]) -> None:
    """Add problems at places that have none yet."""
    for problem in problems:
        if problem.loc not in {other.loc for other in source.problems}:
            source.problems.append(problem)


def as_written(data: Any, loc: Loc) -> Any:
    """The value at a location of plain data; None if there is none."""
    for part in loc:
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def wrong_scalars(annotation: object, value: Any, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Text and `true` where a number is wanted, also within lists and sections, with what to say about each."""
    member = _member(annotation, value)
    if isinstance(value, dict | list):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            if (inner := _item(member, part)) is not None:
                yield from wrong_scalars(inner, item, (*loc, part))
    elif isinstance(value, bool | str):
        kinds = alternatives(annotation)
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        if (int in kinds or float in kinds) and type(value) not in kinds and value not in words:
            yield loc, f"must be {kind_name(annotation)}, {got(value)}"


# --- unions ------------------------------------------------------------------------------------------------------


def _union_around(loc: Loc) -> tuple[Loc, object] | None:
    """The first value on the way to a location of pydantic's that may have several types, with its place: what
    follows in the location is pydantic's own name of one of them."""
    for end in range(1, len(loc)):
        field = field_at(loc[:end])
        if field is None or choice_of(field) or section_of(field) or entry_section_of(field):
            continue
        annotation: object = field.annotation
        for depth in range(end, len(loc)):
            kinds = _without_null(annotation)
            if len(kinds) > 1:
                return loc[:depth], annotation
            annotation = _item(kinds[0] if kinds else None, loc[depth])
        return None
    return None


def _union_problems(source: Source, place: Loc, annotation: object) -> Iterator[Problem]:
    """What is wrong with a value that may have several types, or with what is in it, where it has the shape of
    one."""
    loc = without_kinds(place)
    value = as_written(source.data, loc)
    member = _member(annotation, value)
    if member is not None and isinstance(value, dict | list):
        adapter: TypeAdapter[object] = TypeAdapter(member, config=ConfigDict(allow_inf_nan=False))
        try:
            adapter.validate_python(value)
        except ValidationError as e:
            errors = e.errors(include_url=False)
            if not any(_is_length(error) for error in errors):
                for error in errors:
                    yield _problem(source, {**error, "loc": (*place, *error["loc"])})
                return
    yield Problem(loc, _not_of_kind(annotation, value), source.spot(loc))


def _member(annotation: object, value: object) -> Any:
    """The alternative whose shape a value has; None if there is none, or several."""
    wanted = (dict,) if isinstance(value, dict) else (list, tuple) if isinstance(value, list) else ()
    found = [kind for kind in _without_null(annotation) if get_origin(kind) in wanted]
    return found[0] if len(found) == 1 else None


def _item(kind: object, part: object) -> object:
    """The type of an item of a list or a dictionary; None if it is neither."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        return inner[1]
    if origin is tuple:
        return inner[part] if isinstance(part, int) and part < len(inner) and ... not in inner else inner[0]
    return inner[0] if origin is list else None


def _without_null(annotation: object) -> list[object]:
    return [kind for kind in alternatives(annotation) if kind is not type(None)]


def _is_length(error: ErrorDetails) -> bool:
    """Whether a list has too few or too many items."""
    by_place = error["type"] == "missing" and isinstance(error["loc"][-1], int)
    return by_place or error["type"] in ("too_long", "too_short")


# --- single errors -----------------------------------------------------------------------------------------------


def _problem(source: Source, error: ErrorDetails) -> Problem:
    tagged, kind = error["loc"], error["type"]
    if _is_length(error):
        tagged = tagged[:-1] if kind == "missing" else tagged
        loc = without_kinds(tagged)
        annotation = _annotation_at(tagged)
        return Problem(loc, _not_of_kind(annotation, as_written(source.data, loc)), source.spot(loc))
    loc = without_kinds(tagged)
    if kind == "extra_forbidden":
        return Problem(loc, unknown_key(tagged, error["input"]), source.spot(loc), on_key=True)
    if kind == "missing":
        return Problem(loc, f"is missing{_meaning(tagged)}", source.spot(loc[:-1]), on_key=True)
    if kind == "value_error":
        text = _absolute(error["msg"].removeprefix("Value error, "), loc)
        return Problem(loc, text, source.spot(_mentioned(source, text) or loc), on_key=True)
    return Problem(loc, _wrong_value(tagged, error), source.spot(loc))


def _meaning(loc: Loc) -> str:
    """What a missing key is, for the end of a message."""
    field = field_at(loc)
    section = None if field is None else section_of(field)
    about = sentence_at(loc) or (section.__doc__ if section else None)
    if field is None or not about:
        return ""
    words = [kind_name(field.annotation)] if any(get_origin(k) is Literal for k in _kinds_of(field)) else []
    return f": {'; '.join([*words, first_sentence(about)])}"


def _kinds_of(field: Any) -> tuple[object, ...]:
    return alternatives(field.annotation)


def _annotation_at(loc: Loc) -> object:
    """The type of a field, or of an item of one."""
    for end in range(len(loc), 0, -1):
        if (field := field_at(loc[:end])) is not None:
            annotation: object = field.annotation
            for part in loc[end:]:
                kinds = _without_null(annotation)
                annotation = _item(kinds[0] if kinds else None, part)
            return annotation
    return None


def _wrong_value(loc: Loc, error: ErrorDetails) -> str:
    value, field, kind = error["input"], field_at(loc), error["type"]
    if field is not None:
        limits = bounds(field)
        if kind in _BOUNDS and limits:
            return f"must be {limits}, {got(value)}"
        if kind in _TYPE_ERRORS or kind == "literal_error":
            return _not_of_kind(field.annotation, value, _short_form(loc)) + _itself(field, value)
    if kind == "model_type" and (short := _short_form(loc)):
        return f"must be {short} or a section (keys and values), {got(value)}"
    if kind in _TYPE_ERRORS:
        return f"must be {_TYPE_ERRORS[kind]}, {got(value)}"
    if kind == "string_pattern_mismatch" and loc == ("name",):
        return f"must be made of letters, digits, '.', '_' and '-' (it names a folder), {got(value)}"
    if kind == "string_pattern_mismatch" and loc[-1:] == ("device",):
        return f"must be `auto`, `cpu`, `cuda` or `cuda:N`, {got(value)}"
    message = re.sub(r"^(Input|Value|String) should ", "must ", error["msg"])
    return f"{message[:1].lower()}{message[1:]}, {got(value)}"


_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "int_parsing_size"}

_TYPE_ERRORS = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "a whole number"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a section (keys and values)"),
    "string_type": "text",
}
"""pydantic's errors about types, with the type that each wants."""


def _short_form(loc: Loc) -> str:
    """The text that may stand for the section at a location; else empty."""
    if loc == ("env",) or (len(loc) == 2 and loc[0] == "envs"):
        return "`module:Class`, `path/to/file.py:Class`"
    if loc == ("warmup",):
        return "`demonstrations`, `oracle`"
    return "the name of a logger" if len(loc) == 2 and loc[0] == "loggers" else ""


def _itself(field: Any, value: object) -> str:
    """What to pass from Python in place of an instance, where a class or function may stand for its name."""
    section = section_of(field)
    named = field if section is None else section.model_fields.get("use")
    code = None if named is None else next(iter(facts(named, NamesCode)), None)
    if code is None or value is None or isinstance(value, bool | int | float | str | list | dict):
        return ""
    name = "Class" if code.kind == "class" else "function"
    return f"; pass the {code.kind} itself, or its name as `module:{name}`"


def _not_of_kind(annotation: object, value: object, short: str = "") -> str:
    """What to say about a value of another type than is wanted."""
    wanted = kind_name(annotation)
    wanted = f"{short} or {wanted.removesuffix(' or null')}" if short else wanted
    text = f"must be {wanted}, {got(value)}"
    kinds = _without_null(annotation)
    if isinstance(value, str):
        return text + (_nearest_choice(annotation, value) or _rewritten(kinds, value))
    return text


def _nearest_choice(annotation: object, value: str) -> str:
    choices = [str(c) for kind in alternatives(annotation) if get_origin(kind) is Literal for c in get_args(kind)]
    near = did_you_mean(value, choices, cutoff=0.5)
    return f"; {near}" if near else ""


def _rewritten(kinds: Iterable[object], value: str) -> str:
    """How to write a text as what is wanted: in a list, or as the code that a section names."""
    for kind in kinds:
        if get_origin(kind) is list and value and " " not in value:
            return f"; write `[{value}]`"
        code = getattr(kind, "model_fields", {}).get("use")
        if code is not None and any(facts(code, NamesCode)) and re.fullmatch(r"[^\s:]+:[A-Za-z_]\w*", value):
            return f"; write `{{use: {value}}}`"
    return ""


def _absolute(text: str, loc: Loc) -> str:
    """The message of a section with its keys named as they are where the section is: `envs.a.eval.every`."""
    if len(loc) < 2:
        return text

    def named(match: re.Match[str]) -> str:
        return match[0] if field_at((*loc, match[1])) is None else f"{dotted(loc)}.{match[1]}"

    return re.sub(rf"(?<![\w.]){re.escape(str(loc[-1]))}\.([a-z_]+)", named, text)


def _mentioned(source: Source, text: str) -> Loc:
    """The first key named in a message about several sections that the user wrote, else what the message is
    about."""
    for word in re.findall(r"[a-z_]+(?:\.[A-Za-z0-9_-]+)+", text):
        loc = tuple(word.split("."))
        if loc in source.spots:
            return loc
    first = re.match(r"[a-z_]+", text)
    return (first[0],) if first is not None and (first[0],) in source.spots else ()


def got(value: object) -> str:
    """`got VALUE`, with a remark if it looks like a variable of the environment."""
    said = f"got {shown(value)}"
    return said + (f"; {VARIABLES}" if isinstance(value, str) and has_variable(value) else "")


VARIABLES = "environment variables are not substituted: pass the value with --set, where the shell does it"


def has_variable(text: str) -> bool:
    """Whether a text has `$NAME` or `${NAME}`."""
    return re.search(r"\$(\{|[A-Za-z_])", text) is not None


def shown(value: object) -> str:
    """A value as messages show it, on one line of bounded length."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        text = f"a section with {', '.join(map(str, value)) or 'no keys'}"
    elif isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {len(str(abs(value))) if abs(value) < 10**4000 else 'more than 4,000'} digits"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
