"""Type checks of user-supplied values for the fields of a dataclass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import ConfigError


def check_types(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Check that each value has the type of its field; neither text nor true is a number.

    Raises:
        ConfigError: `where.field must be a number, got '3'`.
    """
    hints = get_type_hints(cls)
    for name, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{where}.{name} must be a number, got nan")
        adapter: TypeAdapter[Any] = TypeAdapter(hints[name])
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError as e:
            from agentrl.config.schema import kind_name

            first = e.errors(include_url=False)[0]
            if (
                isinstance(value, tuple) and get_origin(hints[name]) is tuple and first["loc"]
            ):  # one item of a list
                number, kind = int(first["loc"][0]), kind_name(get_args(hints[name])[0])
                raise ConfigError(
                    f"{where}.{name}[{number}] must be {kind}, got {value[number]!r}"[:200]
                ) from None
            inner = "".join(f".{part}" for part in first["loc"] if isinstance(value, Mapping) and part in value)
            said = (
                first["msg"].replace("Input should be", "must be")
                if inner
                else f"must be {kind_name(hints[name])}"
            )
            got = repr(first["input"] if inner else list(value) if isinstance(value, tuple) else value)
            raise ConfigError(f"{where}.{name}{inner} {said}, got {got[:80]}") from None
