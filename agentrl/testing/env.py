"""The checker every env passes, and the replay of a recorded episode; see `agentrl.env.checker`."""

from agentrl.env.checker import EnvCheckError, ReplayDifference, check_env, replay

__all__ = ["EnvCheckError", "ReplayDifference", "check_env", "replay"]
