"""Answers as JSON that every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any


def json_text(body: Any, *, ascii: bool = True) -> str:
    """Nothing infinite, and a date or so as its text; with `ascii`, no half of a surrogate pair unescaped."""
    dumps = partial(json.dumps, allow_nan=False, ensure_ascii=ascii, separators=(",", ":"), default=str)
    try:
        return dumps(body)
    except (ValueError, TypeError):  # not finite, or a key that JSON does not know
        return dumps(_finite(body))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
