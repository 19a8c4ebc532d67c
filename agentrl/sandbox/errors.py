"""Failures of a sandbox itself; failures of the programs inside are never among them."""

from __future__ import annotations

from agentrl.errors import ConfigError, SandboxError


class SandboxUnavailable(SandboxError):
    """The back-end cannot start sandboxes now (daemon unavailable, kernel refuses, host out of resources)."""


class SandboxCreateTimeout(SandboxUnavailable):
    """A sandbox did not become ready in time."""


class SandboxDied(SandboxError):
    """The sandbox is gone, or stopped responding and has been destroyed."""


class SandboxBroken(SandboxError):
    """The sandbox died after a program had run in it, and nothing outside explains why.

    Unlike its base classes, this is not an infrastructure failure: the episode ends with
    `StopReason.SANDBOX_BROKEN`.

    Attributes:
        reward: total reward of the episode.
    """

    def __init__(self, text: str, reward: float = 0.0) -> None:
        super().__init__(text, reward)
        self.reward = reward

    def __str__(self) -> str:
        return str(self.args[0])


class PoolExhausted(SandboxError):
    """No sandbox became free in time."""


class PromiseNotEnforceable(ConfigError):
    """The back-end cannot keep a promise that the spec requires on this machine."""
