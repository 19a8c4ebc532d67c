"""The fallback where namespaces are forbidden: Landlock, seccomp, limits, and a supervisor that ends orphans."""

from __future__ import annotations

from agentrl.sandbox.local import LocalBackend


class Backend(LocalBackend):
    """A host directory, confined by Landlock (Linux 6.12 and later).

    Weaker than namespaces: total disk usage is not limited, host processes are hidden only because /proc is, and
    kernel tables are shared with the host.
    """

    name = "landlock"
    binds_before_it_drops = False
    always = frozenset({
        "files", "environment", "network", "processes", "privileges", "syscalls", "memory", "pids", "clean_end",
        "own_quotas",
    })  # fmt: skip
