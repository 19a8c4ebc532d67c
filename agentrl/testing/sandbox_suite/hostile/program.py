"""What a hostile program is: its text, what it attacks, and what is looked at afterwards."""

from __future__ import annotations

import textwrap
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.sandbox import Box, ExecResult
from agentrl.testing.sandbox_suite.stage import Stage

PRELUDE = """
import contextlib, ctypes, errno, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time
order = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine == "aarch64"
def escaped(what=""):
    print("ESCAPED", what, flush=True)
def syscall(x86, arm, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(arm if ARM else x86), *[ctypes.c_long(a) for a in args])
    return result, ctypes.get_errno()
def attempt(action, what=""):
    try:
        result = action()
    except (OSError, ValueError, MemoryError) as error:
        print("stopped:", type(error).__name__, error, flush=True)
        return None
    escaped(what or result)
def contains_secret(path):
    with open(path, "rb") as f:
        data = f.read(1 << 16)
    if order["secret"].encode() not in data:
        raise ValueError("not there")
    return path
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
    return address
print("STARTED", flush=True)
"""

After = Callable[[Stage, Box, ExecResult, str], Awaitable[None]]


@dataclass(frozen=True)
class Hostile:
    """One program: its text, the promise it attacks, and what to look at afterwards."""

    name: str
    promise: str | None
    code: str
    after: After | None = None
    wall_s: float = 10.0
    escapes_outside: bool = False
    """Run without a sandbox (as an ordinary program of this user) it succeeds, and harms nothing."""


def program(name: str, promise: str | None, code: str, after: After | None = None, **more: object) -> Hostile:
    return Hostile(name, promise, textwrap.dedent(code).strip() + "\n", after, **more)  # type: ignore[arg-type]
