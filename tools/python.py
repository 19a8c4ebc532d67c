"""A Python tool: a notebook-like session, or a fresh program for every call."""

from __future__ import annotations

from agentrl.env.toolenv.declare import tool
from agentrl.sandbox import Box, BoxSession, Sandbox
from agentrl.tools.observation import observation


class Python:
    """One lasting interpreter for the episode; a lost one is restarted, and the policy sees a note."""

    sandbox = Sandbox()
    box: Box
    _session: BoxSession | None = None

    async def setup(self) -> None:
        """A new episode has no interpreter yet."""
        self._session = None

    @tool
    async def python(self, code: str) -> str:
        """Run Python code in a notebook: names stay, and the value of a last expression is shown."""
        if self._session is None:
            self._session = await self.box.session("python")
        return observation(await self._session.run(code))


class PythonProgram:
    """A fresh interpreter for every call; only files stay."""

    sandbox = Sandbox()
    box: Box

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program and show what it prints. Nothing but files is kept between programs."""
        return observation(await self.box.python(code))
