"""Check JSON data against an external JSON schema (from a YAML file or an MCP server).

The keywords that tool schemas use are checked: type, enum, const, properties, patternProperties, required,
additionalProperties, items, prefixItems, anyOf, oneOf, allOf, local $ref, and the bounds of numbers, texts and
arrays. Other keywords, and malformed ones, are ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import regex

from agentrl.env.toolenv.json_schema import InvalidArguments, shorten

PATTERN_S = 0.05
"""Seconds that a pattern may take: some take exponential time on the right text."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, Mapping),
    "array": lambda v: isinstance(v, list | tuple),
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: (
        (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer())
    ),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
}
_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "minimum": (operator.ge, "at least"),
    "maximum": (operator.le, "at most"),
    "exclusiveMinimum": (operator.gt, "more than"),
    "exclusiveMaximum": (operator.lt, "less than"),
}
_NAMING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords under which a schema may have names that are not in its own `properties`."""
_MAX_DEPTH = 50


def check_arguments(schema: Mapping[str, object], arguments: object) -> dict[str, Any]:
    """Validate the arguments of one call against `schema` (the schema of the argument object).

    Raises:
        InvalidArguments: each problem with its path.
    """
    if not isinstance(arguments, Mapping):
        raise InvalidArguments(f"args: expected object, got {shorten(arguments)}")
    names_all = "properties" in schema and not any(keyword in schema for keyword in _NAMING)
    closed = {"additionalProperties": False} | dict(schema) if names_all else schema
    try:
        problems = list(_problems(closed, arguments, "args", closed, 0))
    except (TypeError, AttributeError):  # the schema is malformed: whoever runs the tool decides
        return dict(arguments)
    if problems:
        raise InvalidArguments("; ".join(problems[:8]))
    return dict(arguments)


def _problems(schema: object, value: object, path: str, root: Mapping[str, object], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        if schema is False:
            yield f"{path}: not allowed"
        return
    if depth > _MAX_DEPTH:
        yield f"{path}: nested too deep"
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _problems(_resolve(reference, root), value, path, root, depth + 1)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if kinds and not any(_TYPES.get(kind, lambda _: True)(value) for kind in kinds):
        yield f"{path}: expected {' or '.join(kinds)}, got {shorten(value)}"
        return
    if "const" in schema and not _equal(value, schema["const"]):
        yield f"{path}: expected {schema['const']!r}, got {shorten(value)}"
    if isinstance(schema.get("enum"), list) and not any(_equal(value, option) for option in schema["enum"]):
        yield f"{path}: expected {' or '.join(map(repr, schema['enum']))}, got {shorten(value)}"
    yield from _branches(schema, value, path, root, depth)
    if isinstance(value, Mapping):
        yield from _object(schema, value, path, root, depth)
    elif isinstance(value, list | tuple):
        yield from _array(schema, value, path, root, depth)
    elif isinstance(value, str):
        yield from _text(schema, value, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _bounds(schema, value, path)


def _branches(
    schema: Mapping[str, Any], value: object, path: str, root: Mapping[str, object], depth: int
) -> Iterator[str]:
    for part in schema.get("allOf", ()):
        yield from _problems(part, value, path, root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if options := schema.get(keyword):
            found = [list(_problems(option, value, path, root, depth + 1)) for option in options]
            fits = sum(not problems for problems in found)
            if not fits:
                yield " or ".join(dict.fromkeys(problems[0] for problems in found))
            elif keyword == "oneOf" and fits > 1:
                yield f"{path}: fits more than one alternative, got {shorten(value)}"


def _object(
    schema: Mapping[str, Any], value: Mapping[str, object], path: str, root: Mapping[str, object], depth: int
) -> Iterator[str]:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: required"
    extra = schema.get("additionalProperties", True)
    for name, item in value.items():
        parts = [properties[name]] if name in properties else []
        parts += [part for pattern, part in patterns.items() if _matches(pattern, name)]
        if not parts and extra is False:
            yield f"{path}.{name}: unknown argument (known: {', '.join(properties) or 'none'})"
            continue
        for part in parts or [extra]:
            yield from _problems(part, item, f"{path}.{name}", root, depth + 1)


def _array(
    schema: Mapping[str, Any], value: Any, path: str, root: Mapping[str, object], depth: int
) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{path}: expected at least {schema['minItems']} items, got {len(value)}"
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        yield f"{path}: expected at most {schema['maxItems']} items, got {len(value)}"
    first = schema.get("prefixItems", ())
    for index, item in enumerate(value):
        part = first[index] if index < len(first) else schema.get("items", True)
        yield from _problems(part, item, f"{path}[{index}]", root, depth + 1)


def _text(schema: Mapping[str, Any], value: str, path: str) -> Iterator[str]:
    if len(value) < schema.get("minLength", 0):
        yield f"{path}: expected at least {schema['minLength']} characters, got {shorten(value)}"
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        yield f"{path}: expected at most {schema['maxLength']} characters, got {shorten(value)}"
    if isinstance(pattern := schema.get("pattern"), str) and not _matches(pattern, value):
        yield f"{path}: must match {pattern!r}, got {shorten(value)}"


def _matches(pattern: str, value: str) -> bool:
    """Whether a text matches; a pattern that cannot be read, or takes long, is left to whoever runs the tool."""
    try:
        return regex.search(pattern, value, timeout=PATTERN_S) is not None
    except (regex.error, TimeoutError):
        return True


def _bounds(schema: Mapping[str, object], value: float, path: str) -> Iterator[str]:
    for keyword, (fits, word) in _BOUNDS.items():
        bound = schema.get(keyword)
        if isinstance(bound, int | float) and not isinstance(bound, bool) and not fits(value, bound):
            yield f"{path}: must be {word} {bound}, got {shorten(value)}"


def _equal(a: object, b: object) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _resolve(reference: str, root: Mapping[str, object]) -> object:
    if not reference.startswith("#/"):
        return True
    node: object = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, Mapping) or part not in node:
            return True
        node = node[part]
    return node
