"""Multi-hop questions over a local corpus, with a search tool."""

from agentrl.envs.search.env import Search

__all__ = ["Search"]
