"""Customer service of a shop: policy, tools on a database, a simulated user; the end state decides."""

from agentrl.envs.retail.env import Retail

__all__ = ["Retail"]
