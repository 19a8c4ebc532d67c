"""A separate state of the global random generators for games that use them."""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Any

import numpy as np

_LOCK = threading.RLock()


class OwnRandom:
    """`with` it, a game draws from its own state of `random` and `numpy.random`, whoever plays at the same time.

    TextArena, GEM and some datasets of Reasoning Gym use the global generators. Blocks exclude each other.
    """

    def __init__(self, seed: int) -> None:
        self._own: tuple[Any, Any] = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )
        self._outside: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._outside = random.getstate(), np.random.get_state()
        random.setstate(self._own[0])
        np.random.set_state(self._own[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = random.getstate(), np.random.get_state()
        assert self._outside is not None
        random.setstate(self._outside[0])
        np.random.set_state(self._outside[1])
        _LOCK.release()
