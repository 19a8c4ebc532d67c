"""A bash tool: one lasting shell for the episode."""

from __future__ import annotations

from agentrl.env.toolenv.declare import tool
from agentrl.sandbox import Box, BoxSession, Sandbox
from agentrl.tools.observation import observation


class Shell:
    """The working directory, variables and background jobs stay between calls."""

    sandbox = Sandbox()
    box: Box
    _session: BoxSession | None = None

    async def setup(self) -> None:
        """A new episode has no shell yet."""
        self._session = None

    @tool
    async def shell(self, command: str) -> str:
        """Run a bash command line; the working directory and variables stay."""
        if self._session is None:
            self._session = await self.box.session("bash")
        return observation(await self._session.run(command))
