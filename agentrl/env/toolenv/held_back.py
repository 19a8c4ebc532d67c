"""Placeholders for tools that act outside of an episode, such as those of MCP servers, in `agentrl check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env.toolenv.dispatch import BoundTool

ANSWER = "(not called by agentrl check)"


def acts_outside(tool: BoundTool) -> bool:
    """Whether a tool, or its toolbox, has `outside = True`."""
    owner = getattr(getattr(tool, "function", None), "__self__", None)
    return bool(getattr(tool, "outside", False) or getattr(owner, "outside", False))


@dataclass(frozen=True)
class HeldBack:
    """A tool whose arguments are checked but which is not called."""

    tool: BoundTool

    @property
    def name(self) -> str:
        """See the wrapped tool."""
        return self.tool.name

    @property
    def schema(self) -> Mapping[str, Any]:
        """See the wrapped tool."""
        return self.tool.schema

    @property
    def parallel(self) -> bool:
        """See the wrapped tool."""
        return self.tool.parallel

    @property
    def timeout_s(self) -> float | None:
        """See the wrapped tool."""
        return self.tool.timeout_s

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the arguments. Raises InvalidArguments."""
        return self.tool.validate(arguments)

    async def call(self, arguments: dict[str, Any], timeout_s: float | None) -> Any:
        """Return a placeholder without calling the tool."""
        return ANSWER
