"""Sandboxes for policy-written programs: contract, pool and limits."""

from agentrl.errors import SandboxError
from agentrl.sandbox.box import Box, met_inside
from agentrl.sandbox.box_session import BoxSession, QueryResult
from agentrl.sandbox.contract import (
    PROMISES,
    BoxSnapshot,
    Capabilities,
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxLimits,
    Usage,
)
from agentrl.sandbox.errors import (
    PoolExhausted,
    PromiseNotEnforceable,
    SandboxBroken,
    SandboxCreateTimeout,
    SandboxDied,
    SandboxUnavailable,
)
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.shared_pools import close_pools, pool_for, using_pools
from agentrl.sandbox.survey import doctor

Limits, Session, Snapshot = SandboxLimits, BoxSession, BoxSnapshot  # former names

__all__ = [
    "PROMISES",
    "Box",
    "BoxSession",
    "BoxSnapshot",
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
    "SandboxLimits",
    "SandboxPool",
    "SandboxUnavailable",
    "Session",
    "Snapshot",
    "Usage",
    "close_pools",
    "doctor",
    "met_inside",
    "pool_for",
    "using_pools",
]  # fmt: skip
