"""The command line: one small module for each command, heavy imports inside the functions."""

from agentrl.cli.app import main

__all__ = ["main"]
