"""Find, edit and refactor in a folder; its final state decides."""

from agentrl.envs.files.env import Files

__all__ = ["Files"]
