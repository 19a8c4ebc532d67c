"""Where a value of a configuration is: the keys and numbers that lead to it."""

from __future__ import annotations

from collections.abc import Iterable

Loc = tuple[str | int, ...]


def dotted(loc: Iterable[str | int]) -> str:
    """`("env", "options", 0)` as `env.options[0]`; an empty name is `''`."""
    text = ""
    for part in loc:
        name = part if isinstance(part, int) else part or "''"
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text
