"""RunConfig out: the resolved YAML that is saved with a run, and what differs between two of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from agentrl.config.address import hide_credentials
from agentrl.config.facts import is_advanced
from agentrl.config.run import RunConfig
from agentrl.config.section import Section

RESOLVED = "# Written by agentrl with all defaults. A value that equals its default counts as not written."
"""The first line of such a file; there, a key without effect is not an error if it has its default."""


def dump_config(config: RunConfig, *, everything: bool = True) -> str:
    """The configuration as YAML, defaults included; `load_config` reads an equal one from it.

    Args:
        everything: include advanced settings that have their defaults.
    """
    data = config.model_dump() if everything else _everyday(config)
    return "".join(f"{line}\n" for line in (RESOLVED, *_block(data, "")))


def _everyday(section: BaseModel) -> dict[str, Any]:
    """A section without the advanced settings that have their defaults."""
    found: dict[str, Any] = {}
    dumped = section.model_dump()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        default = value == field.get_default(call_default_factory=True, validated_data={})
        inner = _everyday(value) if isinstance(value, Section) else dumped[name]
        if not (default and (is_advanced(field) or (isinstance(value, Section) and not inner))):
            found[name] = inner
    return found


def _block(data: dict[str, Any], indent: str) -> Iterator[str]:
    """The lines of a mapping: inner mappings indented, lists on one line."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield f"{indent}{yaml_value(str(key))}:"
            yield from _block(value, indent + "  ")
        else:
            yield f"{indent}{yaml_value(str(key))}: {yaml_value(value)}"


def yaml_value(value: Any) -> str:
    """A value on one line, in YAML 1.2."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_value(str(key))}: {yaml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


_PLAIN = re.compile(r"[A-Za-z_/](?:[\w./-]|:(?=\w))*", re.ASCII)
"""Text that needs no quotes in any reader of YAML."""

_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def _quoted(text: str) -> str:
    """Double quotes; what a reader could take for a line break or cannot see is escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def config_diff(old: RunConfig, new: RunConfig) -> str:
    """One line for each key whose value differs, `rollout.group_size: 8 -> 16`; empty when the two are equal."""
    return "\n".join(f"{'.'.join(loc)}: {before} -> {after}" for loc, before, after in config_changes(old, new))


def config_changes(old: RunConfig, new: RunConfig) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Each key whose value differs: its location, and both values as text. A section that only one has is one."""
    for loc, before, after in _differing(old.model_dump(), new.model_dump(), ()):
        yield loc, _show(before), _show(after)


_ABSENT = object()
LONGEST = 240
"""Characters of a section that are shown."""


def _differing(old: object, new: object, loc: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object, object]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differing(old.get(name, _ABSENT), new.get(name, _ABSENT), (*loc, str(name)))
    elif old != new:
        yield loc, old, new


def _show(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    if value is None:
        return "null"
    if isinstance(value, dict):  # what is deeper inside may be a secret, which is recognized by its key
        inner = {k: "{...}" if isinstance(v, dict) and v else yaml_value(v) for k, v in value.items()}
        text = hide_credentials(", ".join(f"{k}: {v}" for k, v in inner.items()))
        return f"{{{text if len(text) <= LONGEST else f'{text[:LONGEST]}...'}}}"
    return str(value).lower() if isinstance(value, bool) else hide_credentials(repr(value))
