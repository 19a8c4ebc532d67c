"""What a reward asks of others while it runs: whom it waits for, and which answers cannot be used.

A reward that runs out of time while it waits for a judge is not at fault, and a judge's answer that cannot be read
is to be counted, whoever asked: `ask_reward` opens an `Asked`, and judges write into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from agentrl.env.toolenv.threads import CallTimeout


@dataclass(slots=True)
class Asked:
    """Attributes:
    waiting: services that had not answered when the reward was cancelled.
    unusable: answers that could not be read, in words.
    sandbox: the reward raised what a file operation met inside a sandbox.
    """

    waiting: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    sandbox: bool = False


_asked: ContextVar[Asked | None] = ContextVar("agentrl_asked", default=None)


@contextmanager
def asking() -> Iterator[Asked]:
    """Collect what is asked inside the block."""
    token = _asked.set(asked := Asked())
    try:
        yield asked
    finally:
        _asked.reset(token)


@contextmanager
def waits_for(service: str) -> Iterator[None]:
    """The block waits for this service; it stays noted where the wait is cancelled."""
    asked = _asked.get()
    if asked is None:
        yield
        return
    asked.waiting.append(service)
    try:
        yield
    except (asyncio.CancelledError, CallTimeout):
        raise
    except BaseException:
        asked.waiting.remove(service)
        raise
    else:
        asked.waiting.remove(service)


def found_unusable(text: str) -> None:
    """Note an answer that could not be read."""
    if (asked := _asked.get()) is not None:
        asked.unusable.append(text)
