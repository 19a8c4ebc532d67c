"""Parse unquoted values according to the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentrl.chat.parsers.notation import Wrong, read_literal
from agentrl.chat.parsers.parser import Tools, unsound


def schema_of(tools: Tools, name: str) -> Mapping[str, object]:
    """Return the properties of a tool's parameters; empty if the tool is unknown."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def typed(text: str, schema: object) -> object:
    """Return the value of `text`: JSON or a Python literal (`True`, `None`, `['a']`) if the schema allows that
    type (or, for lists and objects, gives none); otherwise the text itself."""
    types = _types(schema)
    if types == {"string"}:
        return text
    value = from_json(text)
    if value is text and (types or text.lstrip()[:1] in ("[", "{")):
        value = _from_python(text)
        if value is not text and types and not _fits(value, types):
            return text
    if value is text or isinstance(value, str):
        return text
    return value if not types or _fits(value, types) or "string" not in types else text


def untexted(arguments: Mapping[str, object], tools: Tools, name: str) -> dict[str, object]:
    """Convert text arguments to the values they denote, where the schema does not allow text."""
    properties = schema_of(tools, name)

    def value(key: str, given: object) -> object:
        types = _types(properties.get(key))
        return (
            typed(given, properties.get(key))
            if types and isinstance(given, str) and "string" not in types
            else given
        )

    return {key: value(key, given) for key, given in arguments.items()}


def from_json(text: str) -> object:
    """Return the JSON value of `text`, or `text` itself if it has no usable value."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return text if unsound(value) else value


def _from_python(text: str) -> object:
    try:
        value = read_literal(text)
    except (Wrong, RecursionError):
        return text
    return text if isinstance(value, str) or unsound(value) else value


def _fits(value: object, types: set[str]) -> bool:
    kind = _json_type(value)
    return kind in types or (kind == "integer" and "number" in types)


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(schema.get("enum"), list):
        return {_json_type(value) for value in schema["enum"]}
    if "const" in schema:
        return {_json_type(schema["const"])}
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for branch in ("anyOf", "oneOf"):
        types |= {t for option in schema.get(branch, ()) for t in _types(option)}
    return types | {"null"} if types and schema.get("nullable") is True else types


def _json_type(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _refuse(name: str) -> None:
    raise ValueError(name)
