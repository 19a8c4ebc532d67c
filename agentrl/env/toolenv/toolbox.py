"""Toolboxes: plain classes with `@tool` methods, created for each episode and shared by many envs.

A toolbox with a `sandbox` attribute gets its sandbox as `self.box`; optional `setup()` and `teardown()` methods,
plain or async, run at the start and the end of the episode.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from agentrl.env.toolenv.declare import TOOL_MARK
from agentrl.env.toolenv.dispatch import BoundTool, call_function
from agentrl.env.toolenv.observe import error_text
from agentrl.env.toolenv.spec import ToolSpec, check_methods, place_of, tool_spec
from agentrl.errors import ConfigError


def toolbox_tools(toolbox: object) -> list[BoundTool]:
    """The marked methods of one instance, in the order of definition, base classes first.

    Raises:
        ConfigError: there are no tools, or one has no valid schema.
    """
    cls: type = type(toolbox)
    return [spec.bind(toolbox) for spec in _toolbox_spec(cls)]


@functools.cache
def _toolbox_spec(cls: type) -> tuple[ToolSpec, ...]:
    check_methods(cls)
    tools: list[ToolSpec] = []
    for attribute in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
        function = getattr(cls, attribute, None)
        mark = getattr(function, TOOL_MARK, None)
        if function is not None and mark is not None:
            tools.append(tool_spec(attribute, function, mark, place_of(function, cls, attribute)))
    if not tools:
        raise ConfigError(f"tools: class {cls.__name__} has no @tool method")
    return tuple(tools)


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
                failures.append(f"{type(toolbox).__name__}.teardown: {error_text(e)}")
    return failures
