"""JSON for the actions of a Gymnasium game: the schema of its action space, and the conversion to actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from agentrl.env.toolenv.json_schema import InvalidArguments, shorten
from agentrl.errors import ConfigError

Read = Callable[[object, str], object]
"""Converts a JSON value at a path for messages (`args.action[1]`). Raises InvalidArguments."""
MOST = 16
"""Maximum numbers of a Box: more cannot sensibly be written one by one."""
LISTED = 128
"""Maximum characters of a Text that its schema lists."""


class ActionReader:
    """The arguments of the tool `act`: one for each key of a Dict space, otherwise `action`.

    Attributes:
        schema: JSON schema of an action.
        parameters: JSON schema of the arguments.
    """

    def __init__(self, space: spaces.Space[Any], schema: Mapping[str, object], read: Read) -> None:
        self._space, self._read, self.schema = space, read, schema
        self._by_key = isinstance(space, spaces.Dict)
        self.parameters = schema if self._by_key else _object({"action": schema})

    def arguments(self, given: Mapping[str, object]) -> object:
        """The action that the arguments of a call represent. Raises InvalidArguments."""
        if self._by_key:
            return self.read(given, "args")
        return self.read(_keys(given, ("action",), "args")["action"])

    def read(self, value: object, path: str = "args.action") -> object:
        """The action that a JSON value represents. Raises InvalidArguments."""
        action = self._read(value, path)
        if not self._space.contains(action):
            raise InvalidArguments(f"{path}: not in the action space {self._space!s:.200}, got {shorten(value)}")
        return action


def reader_of(space: spaces.Space[Any], names: Sequence[str], env_id: str) -> ActionReader:
    """Map the actions of `space` to JSON for a language model.

    Args:
        names: names of a Discrete space's actions; empty for their numbers.

    Raises:
        ConfigError: the space is not Discrete, MultiDiscrete, MultiBinary, Text, a Box of at most 16 numbers, or a
            Dict or Tuple of these.
    """
    if names and not isinstance(space, spaces.Discrete):
        raise ConfigError(f"{env_id}: `actions` names the actions of a Discrete space, not of {space}")
    schema, read = _named(space, names, env_id) if names else _of(space, env_id)
    return ActionReader(space, schema, read)


def _of(space: spaces.Space[Any], env_id: str) -> tuple[Mapping[str, object], Read]:
    if isinstance(space, spaces.Dict) and space.spaces and all(isinstance(key, str) for key in space.spaces):
        return _dict({key: _of(part, env_id) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple) and space.spaces:
        return _tuple([_of(part, env_id) for part in space.spaces])
    if isinstance(space, spaces.Text):
        return _text(space)
    if isinstance(space, spaces.Discrete):
        return _discrete(space)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return _numbers(
            "integer", [(int(s), int(s + n - 1)) for s, n in zip(space.start, space.nvec, strict=True)], space
        )
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return _numbers("integer", [(0, 1)] * space.shape[0], space)
    if isinstance(space, spaces.Box) and 1 <= np.prod(space.shape) <= MOST and len(space.shape) == 1:
        whole = np.issubdtype(space.dtype, np.integer)
        # float(str(x)) is 0.9 for the limit 0.9 of float32, which as a number of Python is a little less.
        bounds: list[tuple[float, float]] = [
            (int(lo), int(hi)) if whole else (float(str(lo)), float(str(hi)))
            for lo, hi in zip(space.low, space.high, strict=True)
        ]
        return _numbers("integer" if whole else "number", bounds, space)
    raise ConfigError(f"{env_id}: action space {space} cannot be played through a tool")


def _object(properties: Mapping[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _array(items: Sequence[Mapping[str, object]]) -> dict[str, object]:
    same = all(item == items[0] for item in items)
    listed: dict[str, object] = {"items": items[0]} if same else {"prefixItems": list(items)}
    return {"type": "array", **listed, "minItems": len(items), "maxItems": len(items)}


def _keys(value: object, known: Sequence[str], path: str) -> Mapping[str, object]:
    """An object with these keys and no others."""
    if not isinstance(value, Mapping):
        raise InvalidArguments(f"{path}: expected object, got {shorten(value)}")
    if missing := [name for name in known if name not in value]:
        raise InvalidArguments(f"{path}.{missing[0]}: required")
    if unknown := [name for name in value if name not in known]:
        raise InvalidArguments(f"{path}.{unknown[0]}: unknown argument (known: {', '.join(known)})")
    return value


def _dict(parts: Mapping[str, tuple[Mapping[str, object], Read]]) -> tuple[Mapping[str, object], Read]:
    def read(value: object, path: str) -> object:
        given = _keys(value, list(parts), path)
        return {key: inner(given[key], f"{path}.{key}") for key, (_, inner) in parts.items()}

    return _object({key: schema for key, (schema, _) in parts.items()}), read


def _tuple(parts: Sequence[tuple[Mapping[str, object], Read]]) -> tuple[Mapping[str, object], Read]:
    def read(value: object, path: str) -> object:
        given = _list(value, len(parts), "values", path)
        return tuple(inner(given[i], f"{path}[{i}]") for i, (_, inner) in enumerate(parts))

    return _array([schema for schema, _ in parts]), read


def _list(value: object, length: int, what: str, path: str) -> list[object]:
    if not isinstance(value, list) or len(value) != length:
        raise InvalidArguments(f"{path}: expected array of {length} {what}, got {shorten(value)}")
    return value


def _text(space: spaces.Text) -> tuple[Mapping[str, object], Read]:
    low, high = space.min_length, space.max_length
    schema: dict[str, object] = {"type": "string", "minLength": low, "maxLength": high}
    # A subclass may accept other characters than it samples.
    plain = type(space) is spaces.Text
    if plain and 0 < len(space.character_set) <= LISTED:
        escaped = re.sub(r"([\\\[\]^-])", r"\\\1", "".join(sorted(space.character_set)))
        schema["pattern"] = f"^[{escaped}]*$"

    allowed = shorten("".join(sorted(space.character_set)), 2 * LISTED)

    def read(value: object, path: str) -> object:
        if not isinstance(value, str):
            raise InvalidArguments(f"{path}: expected string, got {shorten(value)}")
        if not low <= len(value) <= high:
            raise InvalidArguments(f"{path}: must have {low} to {high} characters, has {len(value)}")
        if plain and (wrong := [c for c in value if c not in space.character_set]):
            raise InvalidArguments(f"{path}: must not contain {wrong[0]!r}; it may: {allowed}")
        return value

    return schema, read


def _discrete(space: spaces.Discrete) -> tuple[Mapping[str, object], Read]:
    low, high = int(space.start), int(space.start) + int(space.n) - 1

    def read(value: object, path: str) -> object:
        return int(_number(value, "integer", (low, high), path))

    return {"type": "integer", "minimum": low, "maximum": high}, read


def _named(space: spaces.Space[Any], names: Sequence[str], env_id: str) -> tuple[Mapping[str, object], Read]:
    assert isinstance(space, spaces.Discrete)
    start, count = int(space.start), int(space.n)
    if len(names) != count or len(set(names)) != count:
        raise ConfigError(f"{env_id}: {count} different action names are needed, got {list(names)}")
    numbers = {name: start + i for i, name in enumerate(names)}

    def read(value: object, path: str) -> object:
        if not isinstance(value, str) or value not in numbers:
            wanted = " or ".join(repr(n) for n in names)
            raise InvalidArguments(f"{path}: expected {wanted}, got {shorten(value)}")
        return numbers[value]

    return {"type": "string", "enum": list(names)}, read


def _numbers(
    kind: str, bounds: Sequence[tuple[float, float]], space: spaces.Space[Any]
) -> tuple[Mapping[str, object], Read]:
    def part(low: float, high: float) -> dict[str, object]:
        limits = {"minimum": low, "maximum": high}
        return {"type": kind} | {k: v for k, v in limits.items() if np.isfinite(v)}

    def read(value: object, path: str) -> object:
        given = _list(value, len(bounds), "numbers", path)
        checked = [_number(v, kind, b, f"{path}[{i}]") for i, (v, b) in enumerate(zip(given, bounds, strict=True))]
        try:
            with np.errstate(over="ignore"):
                action = np.asarray(checked, dtype=space.dtype)
            if np.isfinite(action).all():
                return action
        except OverflowError:  # a whole number beyond every float
            pass
        raise InvalidArguments(f"{path}: too large for {space.dtype}, got {shorten(value)}")

    return _array([part(*b) for b in bounds]), read


def _number(value: object, kind: str, bounds: tuple[float, float], path: str) -> float:
    wanted = int if kind == "integer" else int | float
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise InvalidArguments(f"{path}: expected {kind}, got {shorten(value)}")
    if not bounds[0] <= value <= bounds[1]:
        raise InvalidArguments(f"{path}: must be from {bounds[0]:g} to {bounds[1]:g}, got {shorten(value)}")
    return value
