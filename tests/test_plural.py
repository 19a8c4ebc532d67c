"""Counts in messages."""

import pytest

from agentrl.plural import plural


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 tasks"), (1, "1 task"), (1.0, "1 task"), (2, "2 tasks"), (12_345, "12,345 tasks"), (0.5, "0.5 tasks")],
)
def test_a_noun_is_singular_for_one_thing_only(count: float, said: str) -> None:
    assert plural(count, "task") == said
