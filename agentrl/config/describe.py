"""The schema as text: a JSON schema for editors and a Markdown page for readers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from agentrl.config.choice import OneOf, choice_of
from agentrl.config.dump import yaml_value
from agentrl.config.facts import NamesCode, OnResume, PathTo, effects, facts, is_advanced
from agentrl.config.run import RunConfig
from agentrl.config.schema import (
    alternatives,
    bounds,
    entry_section_of,
    field_at,
    kind_name,
    named_section_of,
    section_of,
)
from agentrl.config.section import Section
from agentrl.config.sentences import sentence


def json_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of a run's YAML file; `env` and `warmup` may be text, their short forms."""
    schema = RunConfig.model_json_schema()
    for section in _sections(RunConfig, set()):
        described = schema if section is RunConfig else schema["$defs"][section.__name__]
        for name, about in described.get("properties", {}).items():
            if text := sentence(section, name):
                about["description"] = text
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "agentrl run"
    schema["required"].remove("env")  # `envs` may stand for it
    env = schema["properties"]["env"]
    schema["properties"]["env"] = {
        "description": env.get("description", EXTRA["env"]),
        "anyOf": [
            {"type": "string", "description": "`module:Class` or `path/to/file.py:Class`"},
            env["anyOf"][0],
        ],
    }
    warmup = schema["properties"]["warmup"]
    warmup["anyOf"] = [{"const": "oracle", "description": EXTRA["warmup"]}, *warmup["anyOf"]]
    return schema


def _sections(section: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """A section and all those below it, each once."""
    if section in seen:
        return
    seen.add(section)
    yield section
    for field in section.model_fields.values():
        choice = choice_of(field)
        below = choice.kinds.values() if choice is not None else (section_of(field), entry_section_of(field))
        for inner in below:
            if inner is not None:
                yield from _sections(inner, seen)


EXTRA = {
    "env": "The environment; `env: module:Class` is short for `env: {use: module:Class}`.",
    "warmup": "`warmup: oracle` is short for `warmup: {use: oracle}`: the env's oracle writes the demonstrations.",
}
"""What the schema alone does not express about a key."""

HEAD = """\
# The YAML file of a run

*Written by `scripts/config-docs` from the schema; change the schema, not this page.*

A run is one YAML file (YAML 1.2: `1e-6` is a number, `no` is a word). It holds only what differs from the defaults
below; `env` and `model` are all that is needed:

```yaml
env: env.py:Shop
model:
  path: models/qwen3-0.6b
```

- Any value can be changed on the command line: `agentrl train tools.yaml --set optim.lr=1e-5 --set warmup=null`.
- `--set KEY=null` takes back what the file says about a key, so that its default applies.
- A key that has no effect in the chosen set-up is an error, even where it is written with its default value. Files
  that agentrl wrote itself (`config show`, a run folder's `config.yaml`) load again as they are.
- Relative paths in the file are relative to the file; relative paths given by `--set` to the current folder. `~`
  is the home folder.
- An unknown key, a wrong value or a missing file stops the run before it starts, all mistakes at once, each with
  `file:line:column`.
- A run may be [resumed with other settings](runs.md): keys marked *free* change without a trace, *fixed* ones
  never, and every other change is recorded in its history. A mark on a section holds for all its keys.
- `agentrl config show tools.yaml` prints the whole configuration, defaults included; a run folder keeps it as
  `config.yaml`. `agentrl config diff a.yaml b.yaml` compares two.
- `agentrl config schema -o agentrl.schema.json` writes a JSON schema. Editors that speak the YAML language server
  complete and explain keys when the file begins with `# yaml-language-server: $schema=agentrl.schema.json`.
"""


def page() -> str:
    """The page about every key, in Markdown."""
    parts = [HEAD, "## Top level\n", *_rows(RunConfig, own=True)]
    for name, field in RunConfig.model_fields.items():
        section = section_of(field)
        if section is not None:
            parts += ["", *_section(name, field, section)]
        elif (each := named_section_of(field)) is not None:
            parts += ["", *_named(name, each)]
    parts += ["", ADVANCED, *TABLE, *_advanced()]
    return "\n".join(parts) + "\n"


ADVANCED = """\
## Advanced settings

Few runs change these. `agentrl config show` prints those that differ from their defaults, or all with `--all`.
"""


def with_kinds(text: str) -> str:
    """A page with the kinds that KEY chooses from between `<!-- kinds: KEY -->` and `<!-- end of kinds -->`.

    Raises:
        ValueError: KEY does not choose between kinds.
    """

    def tables(match: re.Match[str]) -> str:
        field = field_at(tuple(match["key"].split(".")))
        choice = choice_of(field) if field is not None else None
        if choice is None:
            raise ValueError(f"{match['key']} does not choose between kinds")
        return "\n".join([f"<!-- kinds: {match['key']} -->", *_kinds(choice), "<!-- end of kinds -->"])

    return re.sub(r"<!-- kinds: (?P<key>[\w.]+) -->\n.*?<!-- end of kinds -->", tables, text, flags=re.DOTALL)


def _kinds(choice: OneOf) -> Iterator[str]:
    """What each kind is, and the parameters of each."""
    names: dict[type[BaseModel], list[str]] = {}
    for name in choice.names:
        names.setdefault(choice.kinds[name], []).append(f"`{name}`")
    yield "| name | what it is | source |"
    yield "|---|---|---|"
    for kind, called in names.items():
        about, _, source = " ".join((kind.__doc__ or "").split()).replace("|", "\\|").partition(" Source: ")
        yield f"| {', '.join(called)} | {about.rstrip('.')} | {source.rstrip('.')} |"
    yield ""
    yield "| name | parameter | type | default | |"
    yield "|---|---|---|---|---|"
    for kind, called in names.items():
        for name, field in kind.model_fields.items():
            if name != "name":
                about = " ".join(sentence(kind, name).split()).replace("|", "\\|")
                yield f"| {', '.join(called)} | `{name}` | {_kind(field)} | {_default(field)} | {about} |"


def _section(name: str, field: FieldInfo, section: type[Section]) -> Iterator[str]:
    yield f"## `{name}:`\n"
    yield cleandoc(section.__doc__ or "") + "\n"
    if type(None) in alternatives(field.annotation):
        yield f"{_optional(name, field, section)}\n"
    if name in EXTRA:
        yield EXTRA[name] + "\n"
    yield from _rows(section)
    for inner_name, inner_field in section.model_fields.items():
        inner = section_of(inner_field)
        if inner is not None:
            yield f"\n### `{name}.{inner_name}:`\n"
            yield cleandoc(inner.__doc__ or "") + "\n"
            yield from _rows(inner)
        elif (each := named_section_of(inner_field)) is not None:
            yield f"\n### `{name}.{inner_name}.NAME:`\n"
            yield cleandoc(each.__doc__ or "") + "\n"
            yield from _rows(each)


def _named(name: str, section: type[Section]) -> Iterator[str]:
    """A mapping of names: the keys that its entries have beyond those of the section they extend. An advanced
    section is below the table only."""
    base = section.__base__
    known = base.model_fields if isinstance(base, type) and issubclass(base, Section) else {}
    yield f"## `{name}.NAME:`\n"
    yield cleandoc(section.__doc__ or "") + "\n"
    yield from TABLE
    own = {key: field for key, field in section.model_fields.items() if key not in known}
    for key in (key for key, field in own.items() if not is_advanced(field)):
        yield _row(section, key)
    for key, field in own.items():
        inner = section_of(field)
        if inner is not None and inner not in {section_of(f) for f in RunConfig.model_fields.values()}:
            yield f"\n### `{name}.NAME.{key}:`\n"
            yield cleandoc(inner.__doc__ or "") + "\n"
            yield from _rows(inner)


def _optional(name: str, field: FieldInfo, section: type[Section]) -> str:
    """How to enable an optional section."""
    conditions = "".join(f"{fact.condition()} " for fact in effects(field))
    try:
        section.model_validate({})
    except ValidationError:
        keys = "set the required keys in the table below"
        return f"{conditions}Off by default. `{name}: {{}}` is not enough to enable it: {keys}."
    if conditions:
        return f"{conditions}Without the section its defaults apply."
    return f"Off by default; `{name}: {{}}` enables it with the defaults below."


def _rows(section: type[Section], *, own: bool = False) -> Iterator[str]:
    """The table of a section, without its advanced keys; with `own`, its inner sections get separate pages."""
    shown = [k for k, f in section.model_fields.items() if not (is_advanced(f) or (own and section_of(f)))]
    if not shown:
        yield "All of it is [advanced](#advanced-settings)."
        return
    yield from TABLE
    for name in shown:
        yield _row(section, name)


ON_RESUME = {"free": "*Free on resume.*", "fixed": "*Fixed on resume.*"}

TABLE = ("| key | type | default | |", "|---|---|---|---|")


def _advanced(section: type[BaseModel] = RunConfig, above: str = "") -> Iterator[str]:
    """The rows of all advanced keys, by their full names."""
    for name, field in section.model_fields.items():
        if is_advanced(field):
            yield _row(section, name, above)
        if (inner := section_of(field)) is not None:
            yield from _advanced(inner, f"{above}{name}.")


def _row(section: type[BaseModel], name: str, above: str = "") -> str:
    """The row of a key; `above` is where its section is, in tables of several sections."""
    field = section.model_fields[name]
    known = [fact.condition() for fact in effects(field)]
    known += [ON_RESUME[fact.kind] for fact in facts(field, OnResume)]
    about = " ".join([*sentence(section, name).split(), *known]).replace("|", "\\|")
    return f"| `{above}{name}` | {_kind(field)} | {_default(field)} | {about} |"


def _kind(field: FieldInfo) -> str:
    inner = section_of(field)
    if inner is not None:
        return "section"
    if choice_of(field) is not None:
        return "name or section"
    limits = bounds(field)
    if get_origin(field.annotation) is dict:
        return "keys and values"
    if any(facts(field, PathTo)):
        return " or ".join(f"path of a {fact.kind}" for fact in facts(field, PathTo))
    if any(facts(field, NamesCode)):
        return "name"
    return kind_name(field.annotation).replace("'", "`") + (f" {limits}" if limits else "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    if section_of(field) is not None:
        return ""
    value = field.get_default(call_default_factory=True)
    if (choice := choice_of(field)) is not None and value is not None:
        value = choice.default
    return "" if value is None else f"`{yaml_value(value)}`"
