"""The fall-back where namespaces are forbidden: Landlock, seccomp, limits, a supervisor that ends orphans."""

from __future__ import annotations

from agentrl.sandbox.local import LocalBackend


class Backend(LocalBackend):
    """A directory of the host, confined by Landlock (Linux 6.12 and later).

    Weaker than namespaces: the disk is not limited in total, host processes are hidden only because /proc is,
    and the kernel's own tables are the host's.
    """

    name = "landlock"
    binds_before_it_drops = False
    always = frozenset({
        "files", "environment", "network", "processes", "privileges", "syscalls", "memory", "pids", "clean_end",
        "own_quotas",
    })  # fmt: skip
