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
    schema = _resolved(schema, root)
    if branches := [one for key in ("anyOf", "oneOf") for one in schema.get(key, ()) if _fits(one, value, root)]:
        found = [next(mistaken(branch, value, root, path), None) for branch in branches]
        others = [str(branch.get("type")) for branch, one in zip(branches, found, strict=True) if one is None]
        # A branch without a type takes anything.
        kinds = {"boolean", "None"} if isinstance(value, bool) else {"integer", "number", "None"}
        wrong = [one for one in found if one is not None]
        if wrong and (not others or (isinstance(value, int | float) and kinds.isdisjoint(others))):
            yield wrong[0][0], " or ".join([*dict.fromkeys(one[1] for one in wrong), *others]), wrong[0][2]
        return
    listed = _listed(schema)
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


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(reference := schema.get("$ref"), str):
        found: Mapping[str, Any] = root.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
        return found
    return schema


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    found: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found


def _fits(branch: Any, value: object, root: Mapping[str, Any]) -> bool:
    """Whether a value may be of this branch: an object of another kind has other fixed values.

    In a recursive union of kinds, each branch would otherwise check all that is inside.
    """
    if not isinstance(branch, Mapping) or not isinstance(value, Mapping):
        return isinstance(branch, Mapping)
    fields = _resolved(branch, root).get("properties", {})
    lists = {name: _listed(field) for name, field in fields.items() if isinstance(field, Mapping)}
    return all(value[name] in listed for name, listed in lists.items() if listed is not None and name in value)
