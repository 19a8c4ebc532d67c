"""The canary: a program that tries to break each promise in a fresh sandbox; unbroken promises count as kept."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from typing import Any, cast

from agentrl.sandbox.box import Box
from agentrl.sandbox.contract import PROMISES, SHARED_USER, WATCHED, Backend, Capabilities, Sandbox
from agentrl.sandbox.errors import PromiseNotEnforceable, SandboxUnavailable

PROGRAM = r"""
import ctypes, errno, json, os, resource, socket, sys
order = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
found = {}

def refused(action):
    try:
        action()
    except (OSError, ValueError) as error:
        return True
    return False

def call(name, *args):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*args)
    return result < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EACCES)

def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(1)
        s.connect(address)

def reach_udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("192.0.2.1", 53))

found["files"] = refused(lambda: open(order["marker"]).read()) and refused(lambda: open("/etc/shadow").read())
# Neither is what only its owner may do, where the owner runs this.
found["files"] = found["files"] and all([
    refused(lambda: os.chmod(order["marker"], 0o644)), refused(lambda: os.utime(order["marker"])),
    refused(lambda: os.chown(order["marker"], -1, os.getgid())),
    refused(lambda: os.setxattr(order["marker"], "user.x", b"x")),
    refused(lambda: os.removexattr(order["marker"], "user.x")),
])
found["environment"] = order["variable"] not in os.environ
found["network"] = refused(lambda: connect(socket.AF_INET, ("127.0.0.1", order["port"]))) and refused(reach_udp)
try:
    with open("/proc/%d/cmdline" % order["pid"]) as f:
        found["processes"] = f.read() != order["cmdline"]
except OSError:
    found["processes"] = True
if found["processes"] and os.getpid() > 1:
    # The harness's own number means nobody in here, or cannot be signalled.
    found["processes"] = refused(lambda: os.kill(order["pid"], 0)) or order["pid"] in (os.getpid(), os.getppid())
if os.getpid() > 1:
    found["processes"] = found["processes"] and refused(lambda: open("/proc/1/maps").close())
if order["pid"] not in (os.getpid(), os.getppid()):
    other = order["pid"]  # what it has is what it is given: where this succeeds, nothing changes
    found["processes"] = found["processes"] and all([
        refused(lambda: os.sched_setaffinity(other, os.sched_getaffinity(other))),
        refused(lambda: os.setpriority(os.PRIO_PROCESS, other, os.getpriority(os.PRIO_PROCESS, other))),
    ])
try:
    with open("/proc/self/status") as f:
        status = {line.partition(":")[0]: line.partition(":")[2].strip() for line in f}
except OSError:
    status = {}
powerless = int(status.get("CapEff", "0"), 16) == 0 and status.get("NoNewPrivs", "1") == "1"
found["privileges"] = 0 not in (os.getuid(), os.geteuid()) and powerless and refused(lambda: os.setuid(0))
found["syscalls"] = (
    call("unshare", 0x10000000) and call("ptrace", 0, 0, 0, 0) and call("mount", b"x", b"/tmp", b"tmpfs", 0, None)
)
disk = os.statvfs(".")
bounded = disk.f_blocks * disk.f_frsize <= order["workspace_mb"] << 20
found["disk"] = bounded and 0 < disk.f_files <= order["inodes"] + 10  # 0: nobody counts (gVisor)
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
found["pids"] = 0 < soft < 60000 and (
    soft == hard or refused(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard)))
)
for path in ("/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/pids.max"):
    try:
        with open(path) as f:
            found["pids"] = found["pids"] or f.read().strip().isdigit()
    except OSError:
        pass
json.dump(found, sys.stdout)
"""


async def probe(spec: Sandbox, backend: Backend, box: Box) -> Capabilities:
    """Run the canary in a started box.

    Raises:
        SandboxUnavailable: it could not run at all.
    """
    server = socket.create_server(("127.0.0.1", 0))
    variable = "AGENTRL_CANARY"
    before = os.environ.get(variable)
    os.environ[variable] = "seen"
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".canary") as marker:
            os.chmod(marker.name, 0o644)
            order = {
                "marker": marker.name, "variable": variable, "port": server.getsockname()[1], "pid": os.getpid(),
                "cmdline": await asyncio.to_thread(_own_command), "workspace_mb": spec.workspace_mb,
                "inodes": spec.inodes,
            }  # fmt: skip
            result = await box.python(PROGRAM, stdin=json.dumps(order).encode())
    finally:
        server.close()
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    if not result.ok:
        raise SandboxUnavailable(
            f"the canary of sandbox backend {backend.name!r} ended with {result.outcome} {result.exit_code}: "
            f"{result.error_text()[-500:]}"
        )
    found = cast(dict[str, Any], json.loads(result.stdout))
    always, possible = backend.promises()
    seen = {name for name in PROMISES if found.get(name, True)}
    notes = {}
    why = getattr(backend, "why_no_cgroup", "")
    no_group = f"no control group{f' ({why})' if why else ''}"
    if why:
        notes["cpu_share"] = no_group
    if not box.facts.get("counted", True):
        notes["memory"] = f"{no_group}: {WATCHED}"
    if "own_quotas" not in always:
        notes["own_quotas"] = SHARED_USER
    kept = frozenset((always | possible) & seen)
    for name in always - seen - ({"network"} if spec.network else set()):
        notes[name] = "the canary broke it"
    return Capabilities(backend.name, kept, notes)


def require(spec: Sandbox, capabilities: Capabilities, always: frozenset[str]) -> None:
    """Check that this machine keeps the promises that the spec requires.

    Raises:
        PromiseNotEnforceable: a required promise does not hold here.
    """
    asked = set(spec.require) if spec.require is not None else set(always)
    if spec.network:
        asked -= {"network"}
    if spec.cpus is not None:
        asked |= {"cpu_share"}
    missing = capabilities.missing(frozenset(asked))
    if missing:
        name = missing[0]
        why = capabilities.notes.get(name, "this back-end does not make that promise on this machine")
        raise PromiseNotEnforceable(
            f"sandbox backend {spec.backend!r} cannot promise {name!r} ({PROMISES[name]}): {why}; "
            f"missing in all: {', '.join(missing)}. Choose another backend, or name in `require` what you need"
        )


def _own_command() -> str:
    try:
        with open(f"/proc/{os.getpid()}/cmdline") as f:
            return f.read()
    except OSError:
        return ""
