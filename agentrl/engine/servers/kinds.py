"""The kinds of servers. To add one, write its file and add a line here and in `agentrl.config.engine.SERVERS`."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.engine.servers.client import ServerKind
from agentrl.engine.servers.sglang import SGLANG
from agentrl.engine.servers.vllm import VLLM

KINDS: Mapping[str, ServerKind] = {"sglang": SGLANG, "vllm": VLLM}
