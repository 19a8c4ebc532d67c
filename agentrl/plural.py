"""Numbers of things in messages: 1 episode, 2,000 episodes."""

from __future__ import annotations


def plural(count: float, noun: str) -> str:
    """The count with its noun, which takes an s unless the count is 1."""
    return f"{count:,.15g} {noun}{'' if count == 1 else 's'}"
