"""The built-in default on Linux: namespaces, a private root, seccomp, limits. Needs no root, package or daemon."""

from __future__ import annotations

from agentrl.sandbox.local import LocalBackend


class Backend(LocalBackend):
    """PID 1 of new user, pid, mount, network, ipc and uts namespaces, forked by the keeper."""

    name = "namespace"
    always = frozenset({
        "files", "environment", "network", "processes", "privileges", "syscalls", "memory", "pids", "disk",
        "clean_end", "own_quotas",
    })  # fmt: skip
