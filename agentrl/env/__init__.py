"""Environments: the contract, and ToolEnv, which implements it from typed methods."""

from agentrl.env.env import Env, StepInfo
from agentrl.env.textenv import TextEnv
from agentrl.env.toolenv.declare import Stop, ToolResult, reward, tool
from agentrl.env.toolenv.env import ToolEnv
from agentrl.env.toolenv.rewards import TurnView
from agentrl.env.toolenv.settings import ToolSettings

__all__ = [
    "Env",
    "StepInfo",
    "Stop",
    "TextEnv",
    "ToolEnv",
    "ToolResult",
    "ToolSettings",
    "TurnView",
    "reward",
    "tool",
]
