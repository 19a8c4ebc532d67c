"""`mcp:COMMAND` or `mcp:URL`: the tools of an MCP server, with tasks from a file and a reward of yours."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.adapter import Adapter
from agentrl.env.compose import ComposedEnv


@dataclass(frozen=True)
class McpOptions:
    """Options of `mcp:COMMAND|URL`."""

    reward: str | tuple[Any, ...] | Mapping[str, Any] = ()
    """`module:function` of f(episode), or several, as in `env.options.reward` of an env without a class."""
    system: str = ""
    """System prompt."""
    server: Mapping[str, Any] = field(default_factory=dict)
    """More about the server: env, cwd, include, prefix, connect_timeout_s, call_timeout_s."""


class McpEnv(ComposedEnv, Adapter):
    """The tools of one MCP server; rows have a `prompt`."""

    Options = McpOptions
    options: McpOptions

    def __init__(self) -> None:
        where = {"url": self.rest} if "://" in self.rest else {"command": shlex.split(self.rest)}
        reward: Any = self.options.reward
        super().__init__(
            tools=[{"mcp": {**where, **self.options.server}}], reward=reward, system=self.options.system
        )
