"""For authors' tests: the checker of envs, policies without a model, replay of a recorded episode.

In addition: `agentrl.testing.engine` (a scripted engine), `server` (a loopback server) and `sandbox` (the checker
of back-ends). Nothing that runs in production imports this package.
"""

from agentrl.env.checker import EnvCheckError, ReplayDifference, check_env, replay
from agentrl.env.play import Policy, RandomPolicy, ScriptedPolicy, call, calls, play, say

__all__ = [
    "EnvCheckError",
    "Policy",
    "RandomPolicy",
    "ReplayDifference",
    "ScriptedPolicy",
    "call",
    "calls",
    "check_env",
    "play",
    "replay",
    "say",
]
