"""The system call profile of the containers, replacing the engine's default: the same filter as all sandboxes.

    python -m agentrl.sandboxes.docker.seccomp         # regenerate seccomp.json from the installed kernel headers

Every call up to the newest one that the filter knows is allowed, except those that it refuses; any newer call
returns
ENOSYS. The container's supervisor runs under this profile, and the programs under both this profile and the
filter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.sandbox.inside import kernel
from agentrl.sandboxes.docker import PROFILE

EPERM, ENOSYS = 1, 38
RULED_APART = ("clone", "clone3", "socket")
"""Calls with specific rules."""
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
AF_NETLINK, NETLINK_ROUTE = 16, 0
HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}


def known_calls(machine: str) -> dict[str, int]:
    """Read call numbers by name from the kernel headers of this machine, up to the newest that the filter knows.

    Raises:
        OSError: the headers are not installed (linux-libc-dev).
    """
    path, pattern = HEADERS[machine]
    found = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
    return {name: number for name, number in found.items() if number <= kernel.NEWEST_SYSCALL}


def profile(known: Iterable[str]) -> dict[str, Any]:
    """Return the profile in the Docker and OCI format, for the calls in `known`."""
    denied = {name for _, _, table in kernel.MACHINES.values() for name in table}
    allowed = sorted(set(known) - denied - set(RULED_APART))

    def rule(names: Iterable[str], errno: int | None = None, *args: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"names": list(names), "action": "SCMP_ACT_ALLOW"}
        if errno is not None:
            found |= {"action": "SCMP_ACT_ERRNO", "errnoRet": errno}
        return found | ({"args": list(args)} if args else {})

    def equal(index: int, value: int) -> dict[str, Any]:
        return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}

    no_namespace = {
        "index": 0,
        "value": kernel.NEW_NAMESPACES,
        "valueTwo": 0,
        "op": "SCMP_CMP_MASKED_EQ",
    }
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "archMap": [
            {"architecture": f"SCMP_ARCH_{machine.upper()}", "subArchitectures": []} for machine in kernel.MACHINES
        ],
        "syscalls": [
            rule(allowed),
            rule(sorted(denied), EPERM),
            rule(["clone3"], ENOSYS),
            rule(["clone"], None, no_namespace),
            *[rule(["socket"], None, equal(0, family)) for family in FAMILIES.values()],
            rule(["socket"], None, equal(0, AF_NETLINK), equal(2, NETLINK_ROUTE)),
        ],
    }


def main() -> None:
    """Write the file."""
    names = {name for machine in HEADERS for name in known_calls(machine)}
    PROFILE.write_text(json.dumps(profile(names), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
