"""Groups of which some episodes are solved."""

from __future__ import annotations

from agentrl.types import Episode, Group, StopReason, Task


def solved(count: int, of: int = 10) -> Group:
    """A group of which this many episodes are solved."""
    task = Task("t")
    each = [Episode("e", task, (), (), (), StopReason.ANSWERED, 0.0, solved=n < count) for n in range(of)]
    return Group(task, tuple(each))
