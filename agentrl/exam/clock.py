"""Move the clock that an env sees: dates and times of `time` and `datetime`, not timers."""

from __future__ import annotations

import datetime
import sys
import time
from typing import Any, cast

_INTERNAL = (
    "asyncio",
    "concurrent",
    "threading",
    "queue",
    "selectors",
    "subprocess",
    "logging",
    "agentrl.sandbox",
)


def shift_clock(seconds: float) -> None:
    """Move `time.time` and its relatives and `datetime.datetime.now` by `seconds` in this process.

    Timers (`monotonic`, `perf_counter`) are left alone. Modules that imported the functions earlier keep the real
    ones, so this comes before the env is imported.
    """
    real, real_ns = time.time, time.time_ns
    gmtime, localtime, strftime = time.gmtime, time.localtime, time.strftime

    def internal() -> bool:
        return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_INTERNAL)

    time.time = lambda: real() if internal() else real() + seconds
    time.time_ns = lambda: real_ns() if internal() else real_ns() + int(seconds * 1e9)
    time.gmtime = lambda at=None: gmtime(real() + seconds if at is None else at)
    time.localtime = lambda at=None: localtime(real() + seconds if at is None else at)
    time.strftime = lambda form, at=None: strftime(form, time.localtime() if at is None else at)
    _shift_datetime(datetime.timedelta(seconds=seconds))


def _shift_datetime(by: datetime.timedelta) -> None:
    real_datetime: Any = datetime.datetime
    real_date: Any = datetime.date

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, real_datetime if issubclass(cls, real_datetime) else real_date)

        def __subclasscheck__(cls, other: type) -> bool:
            return real_datetime in other.__mro__ if real_datetime in cls.__mro__ else real_date in other.__mro__

    class ShiftedDatetime(real_datetime, metaclass=Kind):  # type: ignore[misc]
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return real_datetime.now(tz) + by

        @classmethod
        def utcnow(cls) -> Any:
            return real_datetime.now(datetime.UTC).replace(tzinfo=None) + by

        @classmethod
        def today(cls) -> Any:
            return real_datetime.now() + by

    class ShiftedDate(real_date, metaclass=Kind):  # type: ignore[misc]
        @classmethod
        def today(cls) -> Any:
            return (real_datetime.now() + by).date()

    module = cast(Any, datetime)
    module.datetime, module.date = ShiftedDatetime, ShiftedDate
