"""Questions to SQL over generated databases; execution decides."""

from agentrl.envs.sqlite.env import Sqlite

__all__ = ["Sqlite"]
