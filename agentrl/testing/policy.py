"""Policies that need no model, and the loop that plays an env with them; see `agentrl.env.play`."""

from agentrl.env.play import Policy, RandomPolicy, ScriptedPolicy, call, calls, play, random_arguments, say

__all__ = ["Policy", "RandomPolicy", "ScriptedPolicy", "call", "calls", "play", "random_arguments", "say"]
