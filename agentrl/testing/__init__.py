"""What authors test with: the checker of envs, policies without a model, replay of a recorded episode.

Beside these: `agentrl.testing.engine` (a scripted engine), `sandbox` (the checker of back-ends), `tiny_model`.
"""

from agentrl.testing.env import Difference, EnvCheckError, check_env, replay
from agentrl.testing.policy import Policy, RandomPolicy, ScriptedPolicy, call, calls, play, say

__all__ = [
    "Difference",
    "EnvCheckError",
    "Policy",
    "RandomPolicy",
    "ScriptedPolicy",
    "call",
    "calls",
    "check_env",
    "play",
    "replay",
    "say",
]
