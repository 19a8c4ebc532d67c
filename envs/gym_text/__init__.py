"""Gymnasium's toy-text games, played through a tool."""

from agentrl.envs.gym_text.env import CliffWalking, FrozenLake, Taxi

__all__ = ["CliffWalking", "FrozenLake", "Taxi"]
