"""Tools that act outside of an episode, such as those of MCP servers: `agentrl check` answers in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env.toolenv.dispatch import BoundTool

ANSWER = "(not called by agentrl check)"


def acts_outside(tool: BoundTool) -> bool:
    """Whether a tool, or the toolbox that it is a method of, says `outside = True`."""
    owner = getattr(getattr(tool, "function", None), "__self__", None)
    return bool(getattr(tool, "outside", False) or getattr(owner, "outside", False))


@dataclass(frozen=True)
class HeldBack:
    """A tool whose arguments are checked and that is not called."""

    tool: BoundTool

    @property
    def name(self) -> str:
        """As of the tool."""
        return self.tool.name

    @property
    def schema(self) -> Mapping[str, Any]:
        """As of the tool."""
        return self.tool.schema

    @property
    def parallel(self) -> bool:
        """As of the tool."""
        return self.tool.parallel

    @property
    def timeout_s(self) -> float | None:
        """As of the tool."""
        return self.tool.timeout_s

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Raises InvalidArguments."""
        return self.tool.validate(arguments)

    async def call(self, arguments: dict[str, Any], timeout_s: float | None) -> Any:
        """Nothing happens."""
        return ANSWER
