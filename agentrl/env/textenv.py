"""TextEnv: a message in, a message out, no tools."""

from __future__ import annotations

from typing import Any

from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.observe import plain_text
from agentrl.env.toolenv.spec import ClassSpec
from agentrl.errors import ConfigError
from agentrl.types import Message


class TextEnv(ToolEnv):
    """Base of environments without tools: `setup` returns the first message, `reply` answers the policy's."""

    def reply(self, text: str) -> Any:
        """Answer the policy's text; may be async.

        Returns:
            The next user message. `None` ends the episode, `Stop(text, reward)` ends it with a last message, and
            `ToolResult(text, reward=...)` adds a reward to the turn.
        """
        raise NotImplementedError

    def respond(self, message: Message) -> Any:
        """Pass the text of the policy's message to `reply`."""
        return self.reply(plain_text(message.content))

    @classmethod
    def spec(cls) -> ClassSpec:
        """The declared rewards. Raises ConfigError if the class has a tool, or no `reply`."""
        found = super().spec()
        if found.tools:
            raise ConfigError(
                f"{cls.__name__}: a TextEnv has no tools, and {found.tools[0].name!r} is one; derive from ToolEnv"
            )
        if cls.reply is TextEnv.reply and cls.respond is TextEnv.respond:
            raise ConfigError(f"{cls.__name__}: write `def reply(self, text: str) -> str`")
        return found
