"""The tree of errors: each class names the boundary that broke.

What the policy causes (a bad call, a tool that raises, its own code timing out) is never an exception here:
it is an observation. Every class survives pickling, so that it can cross Ray.
"""

from __future__ import annotations


class AgentRLError(Exception):
    """Root of everything agentrl raises on purpose. Text: what, which value, where, what to do."""


class ConfigError(AgentRLError):
    """The user's input (YAML, env path, data row, model directory) cannot be used."""


class TemplateError(AgentRLError):
    """A chat template cannot be rendered, or does not do what the transcript relies on."""


class CheckpointError(AgentRLError):
    """A checkpoint or run folder is missing, damaged, or belongs to another configuration."""


class InfraError(AgentRLError):
    """Trouble the policy cannot cause: the episode does not train, does not vote, and is refilled alone."""


class SandboxError(InfraError):
    """The sandbox itself is gone or could not do its work."""


class EngineError(InfraError):
    """The engine is lost or answered with something that is not a completion."""


class JudgeError(InfraError):
    """A reward function, judge or reward model failed or timed out."""


class WorkerLost(InfraError):
    """A Ray worker (learner rank, engine replica, env worker) died."""
