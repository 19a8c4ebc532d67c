"""Track external requests of a running reward: pending services and unusable answers.

A reward that times out while waiting for a judge is not at fault, and unreadable answers of a judge are counted
whoever sent the request: `ask_reward` opens an `Asked`, and judges record into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl.env.toolenv.threads import Abandoned, CallTimeout, name_of

T = TypeVar("T")


@dataclass(slots=True)
class Asked:
    """Attributes:
    waiting: services that had not answered when the reward was cancelled.
    unusable: answers that could not be read, in words.
    sandbox: the reward raised an error of a file operation inside a sandbox.
    """

    waiting: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    sandbox: bool = False


_asked: ContextVar[Asked | None] = ContextVar("agentrl_asked", default=None)


@contextmanager
def asking() -> Iterator[Asked]:
    """Track requests made inside the block."""
    token = _asked.set(asked := Asked())
    try:
        yield asked
    finally:
        _asked.reset(token)


def tracked(function: Callable[[], T]) -> Callable[[], T]:
    """`function` for a thread, which has its own context variables: requests are tracked as they are here."""
    asked = _asked.get()
    if asked is None:
        return function

    def call() -> T:
        token = _asked.set(asked)
        try:
            return function()
        finally:
            _asked.reset(token)

    call.__name__ = name_of(function)
    return call


@contextmanager
def waits_for(service: str) -> Iterator[None]:
    """Mark the block as waiting for this service; the mark stays if the wait is cancelled."""
    asked = _asked.get()
    if asked is None:
        yield
        return
    asked.waiting.append(service)
    try:
        yield
    except (asyncio.CancelledError, CallTimeout, Abandoned):
        raise
    except BaseException:
        asked.waiting.remove(service)
        raise
    else:
        asked.waiting.remove(service)


def found_unusable(text: str) -> None:
    """Record an answer that could not be parsed."""
    if (asked := _asked.get()) is not None:
        asked.unusable.append(text)
