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
    seconds = asked_wait(error)
    return seconds if seconds <= LONGEST_S else 0.0


def asked_wait(error: BaseException) -> float:
    """The seconds that the server asks to wait, however many; 0 if it does not ask."""
    response = getattr(error, "response", None)
    headers: Mapping[str, str] = getattr(response, "headers", {})
    for name, read in (("retry-after-ms", _milliseconds), ("retry-after", float), ("retry-after", _until)):
        try:
            seconds = read(headers.get(name, ""))
        except (ValueError, TypeError, OverflowError):
            continue
        return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
    return 0.0


def _milliseconds(text: str) -> float:
    return float(text) / 1000  # the header of OpenAI's servers


def _until(date: str) -> float:
    when = email.utils.parsedate_tz(date)
    return email.utils.mktime_tz(when) - time.time() if when else 0.0
