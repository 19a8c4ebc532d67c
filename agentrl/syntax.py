"""Python source and its syntax tree, from any thread.

CPython 3.11 counts the depth of the trees of all threads in one place, and raises SystemError if a garbage
collection lets another thread begin (python/cpython#106905).
"""

from __future__ import annotations

import ast
import inspect
import threading
from typing import Any

_one_at_a_time = threading.RLock()


def parse(text: str) -> ast.Module:
    """`ast.parse`, one thread at a time."""
    with _one_at_a_time:
        return ast.parse(text)


def parse_expression(text: str) -> ast.expr:
    """The tree of a single expression, one thread at a time."""
    with _one_at_a_time:
        return ast.parse(text, mode="eval").body


def source_of(found: Any) -> str:
    """`inspect.getsource`, which parses the file of a class, one thread at a time."""
    with _one_at_a_time:
        return inspect.getsource(found)
