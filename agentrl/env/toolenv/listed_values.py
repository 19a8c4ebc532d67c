"""Tell booleans and numbers apart where a schema lists values: to Python and pydantic, `true` is 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def mistaken(
    schema: Any, value: object, root: Mapping[str, Any], path: str = "args"
) -> Iterator[tuple[str, str, object]]:
    """Find booleans where the schema lists numbers, and numbers where it lists booleans.

    Args:
        schema: of this value, as pydantic writes it.
        value: JSON data that pydantic takes.
        root: the whole schema, which has the definitions.
        path: where the value is in the data.

    Yields:
        The path of each such value, what is expected there, and the value.
    """
    if not isinstance(schema, Mapping):
        return
    if isinstance(reference := schema.get("$ref"), str):
        schema = root.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
    if branches := [one for key in ("anyOf", "oneOf") for one in schema.get(key, ()) if isinstance(one, Mapping)]:
        found = [next(mistaken(branch, value, root, path), None) for branch in branches]
        others = [str(branch.get("type")) for branch, one in zip(branches, found, strict=True) if one is None]
        kinds = {"boolean", "None"} if isinstance(value, bool) else {"integer", "number", "None"}
        wrong = [one for one in found if one is not None]
        if wrong and (not others or (isinstance(value, int | float) and kinds.isdisjoint(others))):
            yield wrong[0][0], " or ".join([*dict.fromkeys(one[1] for one in wrong), *others]), wrong[0][2]
        return
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if listed is not None and isinstance(value, int | float):
        same = [isinstance(one, bool) == isinstance(value, bool) for one in listed if one == value]
        if same and not any(same):
            yield path, " or ".join(map(repr, listed)), value
    elif isinstance(value, Mapping):
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties")
        for name, item in value.items():
            yield from mistaken(fields.get(name, rest), item, root, f"{path}.{name}")
    elif isinstance(value, list):
        places, rest = schema.get("prefixItems", ()), schema.get("items")
        for n, item in enumerate(value):
            yield from mistaken(places[n] if n < len(places) else rest, item, root, f"{path}[{n}]")
