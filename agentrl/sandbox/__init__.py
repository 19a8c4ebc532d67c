"""Sandboxes for the programs that a policy writes: the contract, the pool, the limits."""

from agentrl.errors import SandboxError
from agentrl.sandbox.box import Box, met_inside
from agentrl.sandbox.contract import (
    PROMISES,
    Capabilities,
    ExecResult,
    FileInfo,
    Limits,
    Sandbox,
    Snapshot,
    Usage,
)
from agentrl.sandbox.doctor import doctor
from agentrl.sandbox.errors import (
    PoolExhausted,
    PromiseNotEnforceable,
    SandboxBroken,
    SandboxCreateTimeout,
    SandboxDied,
    SandboxUnavailable,
)
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.session import QueryResult, Session
from agentrl.sandbox.shared_pools import close_pools, pool_for

__all__ = [
    "PROMISES",
    "Box",
    "Capabilities",
    "ExecResult",
    "FileInfo",
    "Limits",
    "PoolExhausted",
    "PromiseNotEnforceable",
    "QueryResult",
    "Sandbox",
    "SandboxBroken",
    "SandboxCreateTimeout",
    "SandboxDied",
    "SandboxError",
    "SandboxPool",
    "SandboxUnavailable",
    "Session",
    "Snapshot",
    "Usage",
    "close_pools",
    "doctor",
    "met_inside",
    "pool_for",
]  # fmt: skip
