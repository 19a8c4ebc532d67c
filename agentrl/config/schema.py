"""Queries on the tree of sections: which keys exist, and what an unknown key may have meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agentrl.config.choice import OWN, choice_of
from agentrl.config.dump import yaml_value
from agentrl.config.facts import metadata
from agentrl.config.place import Loc
from agentrl.config.run import RunConfig
from agentrl.config.section import Section
from agentrl.config.sentences import sentence
from agentrl.suggest import did_you_mean, nearest


@cache
def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds (also as `Section | None`), or None for a plain value and for a choice."""
    if choice_of(field) is not None:
        return None
    for kind in alternatives(field.annotation):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


@cache
def named_section_of(field: FieldInfo) -> type[Section] | None:
    """The section that each entry of a mapping of names holds (`envs`), or None."""
    for kind in alternatives(field.annotation):
        if (
            get_origin(kind) is dict
            and isinstance(inner := get_args(kind)[1], type)
            and issubclass(inner, Section)
        ):
            return inner
    return None


@cache
def entry_section_of(field: FieldInfo) -> type[Section] | None:
    """The section that each entry of a mapping of names (`envs`) or of a list (`loggers`) holds, or None."""
    listed = [get_args(kind)[0] for kind in alternatives(field.annotation) if get_origin(kind) is list]
    return named_section_of(field) or next(
        (kind for kind in listed if isinstance(kind, type) and issubclass(kind, Section)), None
    )


def alternatives(annotation: object) -> tuple[object, ...]:
    """The members of a union, or the annotation alone; without what `Annotated` adds to them."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in members)


def field_at(loc: Loc) -> FieldInfo | None:
    """The field at a location, None if the location is unknown or below a field (an item of a dict)."""
    return _walk(loc)[1]


def sentence_at(loc: Loc) -> str:
    """The sentence under the field at a location; empty if there is none."""
    owner = _walk(loc)[2]
    return sentence(owner, str(loc[-1])) if owner is not None else ""


def section_at(loc: Loc) -> type[BaseModel] | None:
    """The section at a location, None if there is none."""
    return _walk(loc)[0]


def _walk(loc: Loc) -> tuple[type[BaseModel] | None, FieldInfo | None, type[BaseModel] | None]:
    """The section and the field at a location, and the section that the field is in. pydantic's location of a
    choice includes the kind: `algorithm.loss.gspo.clip_low`; without it, the first kind with this key is used."""
    section: type[BaseModel] | None = RunConfig
    field: FieldInfo | None = None
    owner: type[BaseModel] | None = None
    named: type[Section] | None = None
    for part in loc:
        if named is not None:
            section, field, owner, named = named, None, None, None
            continue
        kinds = choice.kinds if field is not None and (choice := choice_of(field)) is not None else {}
        if section is None and part in kinds:
            section, owner = kinds[str(part)], None
            continue
        if section is None:
            section = next((kind for kind in kinds.values() if part in kind.model_fields), None)
        if section is None or not isinstance(part, str) or part not in section.model_fields:
            return None, None, None
        owner, field = section, section.model_fields[part]
        section, named = section_of(field), entry_section_of(field)
    return section, field, owner


def without_kinds(loc: Loc) -> Loc:
    """A pydantic location as the user wrote it: without the kinds of choices."""
    found: list[str | int] = []
    for end, part in enumerate(loc):
        before = field_at(loc[:end]) if end else None
        choice = choice_of(before) if before is not None else None
        if choice is None or part not in choice.kinds or (end > 1 and loc[end - 1] in choice.kinds):
            found.append(part)
    return tuple(found)


def fields(
    section: type[BaseModel] = RunConfig, loc: Loc = (), data: object = None
) -> Iterator[tuple[Loc, FieldInfo]]:
    """Every field below a section with its location, parents first.

    Args:
        data: the section as written; where it chooses a kind, the fields of that kind are among them.
    """
    for name, field in section.model_fields.items():
        yield (*loc, name), field
        inner: type[BaseModel] | None = section_of(field)
        value = data.get(name) if isinstance(data, dict) else None
        choice = choice_of(field)
        if choice is not None and value is not None:
            inner = choice.kinds.get(choice.kind_of(value) or "")
        if inner is not None:
            yield from fields(inner, (*loc, name), value)
        elif (each := entry_section_of(field)) is not None and isinstance(value, dict | list):
            for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                yield from fields(each, (*loc, name, key), entry)


def _every_key() -> Iterator[tuple[str, ...]]:
    """The location of every key, including the kinds of choices."""
    for place, field in fields():
        loc = tuple(map(str, place))
        yield loc
        choice = choice_of(field)
        kinds = choice.kinds.values() if choice is not None else ()
        yield from dict.fromkeys((*loc, key) for kind in kinds for key in kind.model_fields if key != "name")


def first_sentence(text: str) -> str:
    """The first sentence of a description, on one line."""
    return re.split(r"(?<=[.;:]) ", " ".join(text.split()), maxsplit=1)[0].rstrip(".;:")


FILTERS = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The sampling settings that other frameworks use in training."""


_RAY = "unknown key; a run has one Ray cluster, whose address is now `ray: {address}` at the top level"
MOVED = {
    "learner.ray": f"{_RAY}; learner.ranks above 1 puts the learner on it",
    "rollout.ray": f"{_RAY}; rollout.workers and reward_model.workers use it",
    "engine.server.ray": f"{_RAY}, and `engine: {{{{server: {{{{launch: ray}}}}}}}}` starts the servers on it",
}
"""Messages about keys of earlier versions; `{address}` is the given value."""


def unknown_key(loc: Loc, value: object = None) -> str:
    """The message about an unknown key with this value."""
    *parent, key = (str(part) for part in loc)
    if odd := ", ".join(f"U+{ord(c):04X}" for c in dict.fromkeys(key) if not c.isascii()):
        plain = unknown_key((*parent, "".join(c for c in key if c.isascii())), value).removeprefix("unknown key")
        return f"unknown key (it has the characters {odd}){plain}"
    if (moved := MOVED.get(".".join((*parent, key)))) is not None:
        return moved.format(address=value if value not in (None, "local") else "ADDRESS")
    if other := _parameter_of_another_kind(parent, key):
        return other
    section = section_at(tuple(parent)) or RunConfig
    if outside := _section_beside_a_name(section, key, value):
        return outside
    if key in FILTERS and parent in (["rollout"], ["engine"], ["algorithm"]):
        return (
            f"training samples from the whole distribution (at rollout.temperature): with {key} the learner's "
            "log-probabilities would be those of another distribution than the one sampled from; remove it. "
            "evaluations take filters: `eval.top_p`, `eval.top_k`, `eval.min_p`, and the same flags of `agentrl "
            "eval`"
        )
    known = list(section.model_fields)

    if "." in key and field_at((*parent, *key.split("."))) is not None:
        first, _, rest = key.partition(".")
        return f"unknown key; write `{first}:` and, indented below it, `{rest}:`"
    if near := did_you_mean(key, known, cutoff=0.75):
        return f"unknown key; {near}"
    elsewhere = [path for path in _every_key() if path[-1] == key]
    if elsewhere:
        return f"unknown key; `{key}` belongs {_under(elsewhere)}"
    by_name: dict[str, list[tuple[str, ...]]] = {}
    for path in _every_key():
        by_name.setdefault(path[-1], []).append(path)
    if far := nearest(key, by_name, cutoff=0.8):
        return f"unknown key; did you mean `{far}`, which belongs {_under(by_name[far])}?"
    return "unknown key; " + did_you_mean(key, known, otherwise=f"the keys here are {', '.join(known)}")


def _section_beside_a_name(section: type[BaseModel], key: str, value: object) -> str | None:
    """The message about parameters outside of their choice: `gspo: {...}` next to `loss: gspo`."""
    for name, field in section.model_fields.items():
        choice = choice_of(field)
        if choice is None:
            continue
        written = value if isinstance(value, dict) else {}
        if key == f"{name}_options":
            short = yaml_value({"use": "module:function", "options": written})
            return f"unknown key; options belong to the function: write `{name}: {short}`"
        kind = "dppo_tv" if key == "dppo" else key
        if kind in choice.names:
            spelled = yaml_value({"name": kind, **written})
            return f"unknown key; parameters belong to the name: write `{name}: {spelled}`"
    return None


def _parameter_of_another_kind(parent: Sequence[str], key: str) -> str | None:
    """What to say about a key that the kind of a choice does not have; `parent` ends in the kind."""
    field = field_at(tuple(parent[:-1]))
    choice = choice_of(field) if field is not None else None
    if choice is None or parent[-1] not in choice.kinds:
        return None
    kind, where = parent[-1], ".".join(parent[:-1])
    known = [name for name in choice.kinds[kind].model_fields if name != "name"]
    if kind == OWN:
        return f"unknown key; a function of your own takes its arguments under `{where}.options`"
    if key == "options":
        return "unknown key; options are for a function of your own: name it as `use: module:function`"
    if near := did_you_mean(key, known, cutoff=0.75):
        return f"unknown key; {near}"
    takes = f"{kind} takes {', '.join(known)}" if known else f"{kind} has no parameters"
    others = [name for name in choice.names if key in choice.kinds[name].model_fields]
    return f"unknown key; {takes}" + (f" (`{key}` is a parameter of {', '.join(others)})" if others else "")


def _under(paths: list[tuple[str, ...]]) -> str:
    sections = [f"`{'.'.join(path[:-1])}:`" for path in paths if path[:-1]]
    top = ["at the top level"] if len(sections) < len(paths) else []
    return " or ".join(top + (["under " + " or ".join(sections)] if sections else []))


def bounds(field: FieldInfo) -> str | None:
    """The allowed range of a number in words ("in (0, 1)", "at least 1"), None without bounds."""
    low: tuple[str, object] | None = None
    high: tuple[str, object] | None = None
    for item in metadata(field):
        if isinstance(item, annotated_types.Gt):
            low = ("(", item.gt)
        elif isinstance(item, annotated_types.Ge):
            low = ("[", item.ge)
        elif isinstance(item, annotated_types.Lt):
            high = (")", item.lt)
        elif isinstance(item, annotated_types.Le):
            high = ("]", item.le)
    if low and high:
        return f"in {low[0]}{_number(low[1])}, {_number(high[1])}{high[0]}"
    if low:
        return f"{'greater than' if low[0] == '(' else 'at least'} {_number(low[1])}"
    if high:
        return f"{'less than' if high[0] == ')' else 'at most'} {_number(high[1])}"
    return None


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def kind_name(annotation: object) -> str:
    """A type in plain language: "a whole number", "text", "'grpo' or 'rloo'"."""
    names: list[str] = []
    words: list[str] = []
    for kind in alternatives(annotation):
        origin = get_origin(kind) or kind
        if origin is Literal:
            words += map(repr, get_args(kind))
        elif isinstance(origin, type) and issubclass(origin, Section):
            names.append("a section (keys and values)")
        elif origin is tuple and len(set(inner := get_args(kind))) == 1:
            names.append(f"a list of {len(inner)} numbers")
        else:
            names.append(_KINDS.get(origin, str(kind)))
    first, null = [*words, *names], _KINDS[type(None)]
    first = [name for name in first if name != null] + [null] * (null in first)
    return " or ".join(", ".join(first).rsplit(", ", 1)) if words else " or ".join(first)


_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a section (keys and values)",
    Mapping: "a section (keys and values)",
    Sequence: "a list",
    type(None): "null",
}
