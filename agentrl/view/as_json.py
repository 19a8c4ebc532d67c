"""Answers as JSON that every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(body: Any) -> str:
    """Nothing infinite, no half of a surrogate pair unescaped, and a date or so as its text."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":"), default=str)
    except (ValueError, TypeError):  # not finite, or a key that JSON does not know
        return json.dumps(_finite(body), allow_nan=False, separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
