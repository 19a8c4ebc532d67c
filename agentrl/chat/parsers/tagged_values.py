"""Parse unquoted values according to the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set

from agentrl.chat.parsers.notation import Wrong, read_literal
from agentrl.chat.parsers.parser import Tools, unsound


def parameters_of(tools: Tools, name: str) -> Mapping[str, object]:
    """Return the schema of a tool's arguments; empty if the tool is unknown."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def types_of(parameters: Mapping[str, object], key: str) -> set[str]:
    """Return the JSON types that one of a tool's arguments may have; see `types_in`."""
    return types_in(schema_inside(parameters, key, 0, parameters), parameters)


def typed(text: str, types: Set[str]) -> object:
    """Return the value of `text`: JSON or a Python literal (`True`, `None`, `['a']`) if its type is one of `types`
    (or, for lists and objects, if `types` is empty); otherwise the text itself."""
    if types == {"string"}:
        return text
    value = from_json(text)
    if value is text and (types or text.lstrip()[:1] in ("[", "{")):
        value = _from_python(text)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not text and types and (not _fits(value, types) or (number and "string" in types)):
            return text  # `007` and `+1` are text where they may be
    if value is text or isinstance(value, str):
        return text
    return value if not types or _fits(value, types) or "string" not in types else text


def untexted(arguments: Mapping[str, object], tools: Tools, name: str) -> dict[str, object]:
    """Convert text arguments to the values they denote, where the schema does not allow text."""
    parameters = parameters_of(tools, name)

    def value(key: str, given: object) -> object:
        types = types_of(parameters, key)
        return typed(given, types) if types and isinstance(given, str) and "string" not in types else given

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


def _fits(value: object, types: Set[str]) -> bool:
    kind = _json_type(value)
    return kind in types or (kind == "integer" and "number" in types)


def types_in(schema: object, root: Mapping[str, object]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say.

    Args:
        root: the schema that references (`#/$defs/Color`) start from.
    """
    types: set[str] = set()
    nullable = False
    for option in options(schema, root):
        kind = option.get("type")
        if isinstance(values := option.get("enum"), list):
            types |= {_json_type(value) for value in values}
        elif "const" in option:
            types.add(_json_type(option["const"]))
        else:
            types |= {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
        nullable |= option.get("nullable") is True  # also next to a $ref or anyOf, where the types are elsewhere
    return types | {"null"} if types and nullable else types


def options(schema: object, root: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Yield a schema and all its branches, with local references followed, each once."""
    waiting, followed = [schema], set[str]()
    while waiting:
        option = waiting.pop()
        if not isinstance(option, Mapping):
            continue
        yield option
        reference = option.get("$ref")
        if isinstance(reference, str) and f"{reference}/".startswith("#/") and reference not in followed:
            followed.add(reference)
            waiting.append(_target(reference, root))
        for branches in (option.get(key) for key in ("anyOf", "oneOf", "allOf")):
            waiting += branches if isinstance(branches, list) else ()


def schema_inside(schema: object, key: str, position: int, root: Mapping[str, object]) -> object:
    """Return the schema of a key of an object, or of the item at a position of a list."""
    found: list[object] = []
    for option in options(schema, root):
        properties, items = option.get("properties"), option.get("items")
        if isinstance(properties, Mapping) and key in properties:
            found.append(properties[key])
        else:
            found.append(option.get("additionalProperties"))
        if key == "item":
            first = option.get("prefixItems", items)  # draft 7 has a list of items instead
            listed = first[position : position + 1] if isinstance(first, list) else []
            found += listed or [items]
    return {"anyOf": found}


def _target(reference: str, root: object) -> object:
    for part in reference.split("/")[1:]:
        if isinstance(root, list):
            root = {str(number): item for number, item in enumerate(root)}
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _json_type(value: object) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _refuse(name: str) -> None:
    raise ValueError(name)
