"""Write a Python function; hidden tests decide."""

from agentrl.envs.python_code.env import PythonCode

__all__ = ["PythonCode"]
