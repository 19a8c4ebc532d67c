"""Environments: the contract, and ToolEnv, which implements it from typed methods."""

from agentrl.env.declare import Stop, ToolResult, reward, tool
from agentrl.env.env import Env, StepInfo
from agentrl.env.rewards import TurnView
from agentrl.env.settings import ToolSettings
from agentrl.env.toolenv import ToolEnv

__all__ = ["Env", "StepInfo", "Stop", "ToolEnv", "ToolResult", "ToolSettings", "TurnView", "reward", "tool"]
