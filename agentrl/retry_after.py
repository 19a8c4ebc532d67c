"""How long an HTTP server asks to wait before a request is sent again."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping

LONGEST_S = 600.0
"""Longer waits are not obeyed: a quota that returns tomorrow is no reason to wait today."""


def retry_after(error: BaseException) -> float:
    """The seconds of `Retry-After` in an error of httpx or of the official `openai` client.

    Returns:
        At most `LONGEST_S`; 0 if the server does not ask to wait, or asks to wait longer than that.
    """
    response = getattr(error, "response", None)
    headers: Mapping[str, str] = getattr(response, "headers", {})
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        when = email.utils.parsedate_tz(value)
        seconds = email.utils.mktime_tz(when) - time.time() if when else 0.0
    return seconds if math.isfinite(seconds) and 0 < seconds <= LONGEST_S else 0.0
