"""Toolboxes: plain classes with `@tool` methods, created for each episode and shared by many envs.

A toolbox with a `sandbox` attribute gets its sandbox as `self.box`; optional `setup()` and `teardown()` methods,
plain or async, run at the start and the end of the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from agentrl.env.toolenv.declare import TOOL_MARK
from agentrl.env.toolenv.dispatch import BoundTool, call_function
from agentrl.env.toolenv.observe import error_text
from agentrl.env.toolenv.spec import ToolSpec, check_methods, place_of, tool_spec
from agentrl.env.toolenv.threads import ToolRaised
from agentrl.errors import ConfigError


def toolbox_tools(toolbox: object) -> list[BoundTool]:
    """The marked methods of one instance, in the order of definition, base classes first.

    Raises:
        ConfigError: there are no tools, or one has no valid schema.
    """
    cls: type = type(toolbox)
    marked: dict[str, Callable[..., object]] = {}
    for attribute in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        function = getattr(cls, attribute, None)
        if function is not None and hasattr(function, TOOL_MARK):
            marked[attribute] = function
    known = _READ.get(cls)
    if known is None or known[0] != marked:
        known = _READ[cls] = marked, _read(cls, marked)
    return [spec.bind(toolbox) for spec in known[1]]


def _read(cls: type, marked: _Marked) -> Sequence[ToolSpec]:
    check_methods(cls)
    if not marked:
        raise ConfigError(f"tools: class {cls.__name__} has no @tool method")
    return [
        tool_spec(cls, attribute, function, getattr(function, TOOL_MARK), place_of(function, cls, attribute))
        for attribute, function in marked.items()
    ]


_Marked: TypeAlias = Mapping[str, Callable[..., object]]
_READ: WeakKeyDictionary[type, tuple[_Marked, Sequence[ToolSpec]]] = WeakKeyDictionary()
"""The tools of each class: reading them takes milliseconds, and every episode makes a toolbox."""


async def begin(toolboxes: Sequence[Any], timeout_s: float) -> None:
    """Run `setup` of each toolbox."""
    for toolbox in toolboxes:
        if setup := getattr(toolbox, "setup", None):
            await call_function(setup, {}, timeout_s)


async def end(toolboxes: Sequence[Any], timeout_s: float) -> list[str]:
    """Run `teardown` of each toolbox; returns error messages."""
    failures: list[str] = []
    for toolbox in toolboxes:
        if teardown := getattr(toolbox, "teardown", None):
            try:
                await call_function(teardown, {}, timeout_s)
            except Exception as e:
                cause = e.cause if isinstance(e, ToolRaised) else e
                failures.append(f"{type(toolbox).__name__}.teardown: {error_text(cause)}")
    return failures
