"""The command line: one small module for each command, heavy imports inside the functions."""

try:
    from agentrl.cli.app import main
except KeyboardInterrupt:  # the imports take a moment
    raise SystemExit(130) from None

__all__ = ["main"]
