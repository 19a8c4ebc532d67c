"""`mcp:COMMAND` or `mcp:URL`: the tools of an MCP server, with tasks from a file and a reward of yours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.address import address_problem, hide_credentials, without_credentials
from agentrl.env.adapter import Adapter
from agentrl.env.compose import ComposedEnv
from agentrl.env.mcp import McpServer
from agentrl.errors import ConfigError


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
        reward: Any = self.options.reward
        super().__init__(tools=[{"mcp": self.server()}], reward=reward, system=self.options.system)

    @classmethod
    def check_name(cls) -> None:
        """Read the server's settings; it is not started."""
        McpServer.from_mapping(cls.server())

    @classmethod
    def server(cls) -> dict[str, Any]:
        """The server as an entry of `tools`."""
        for key in ("url", "command"):
            if key in cls.options.server:
                raise ConfigError(
                    f"env.options.server.{key}: the server is {hide_credentials(cls.rest)!r}, after `mcp:`; "
                    "remove it"
                )
        if re.match(r"\w+://", cls.rest):
            if problem := address_problem(cls.rest):
                raise ConfigError(f"env mcp:{without_credentials(cls.rest)}: {problem}")
            return {"url": cls.rest, **cls.options.server}
        try:
            return {"command": shlex.split(cls.rest), **cls.options.server}
        except ValueError as e:
            raise ConfigError(f"env mcp:{cls.rest}: this is no command line: {e}") from e
