"""The sandboxes that the tests run against."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket

import pytest

from agentrl.sandbox import Sandbox
from agentrl.sandbox.inside.kernel import landlock_abi

ORDINARY_USER = 23456
SYSTEM_PYTHON = "/usr/bin/python3"

SPECS = {
    "namespace": Sandbox(),
    "namespace_user": Sandbox(run_as=ORDINARY_USER, python=SYSTEM_PYTHON),
    "landlock_user": Sandbox(backend="landlock", run_as=ORDINARY_USER, python=SYSTEM_PYTHON),
    "landlock": Sandbox(backend="landlock"),
    "process": Sandbox(backend="process", trusted=True),
    "docker": Sandbox(backend="docker"),
}


def docker_answers() -> bool:
    """Whether there is an engine. Where AGENTRL_DOCKER is "required" (CI), its absence is a failure."""
    try:
        import docker  # noqa: F401
    except ImportError:
        pass
    else:
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as s:
            s.connect(host.removeprefix("unix://"))
            return True
    if os.environ.get("AGENTRL_DOCKER") == "required":
        raise AssertionError("AGENTRL_DOCKER=required, but no Docker engine answers: see scripts/ci-docker")
    return False


def spec_for(name: str) -> Sandbox:
    """The spec of that name; skips where this machine cannot have it."""
    if name in ("namespace_user", "landlock_user"):
        if os.getuid() != 0:
            pytest.skip("the tests run as an ordinary user already")
        if shutil.which(SYSTEM_PYTHON) is None:
            pytest.skip(f"no {SYSTEM_PYTHON} that an ordinary user could read")
    if name.startswith("landlock") and landlock_abi() < 6:
        pytest.skip(f"Landlock ABI {landlock_abi()} of this kernel: at least 6 is needed (Linux 6.12)")
    if name == "docker" and not docker_answers():
        pytest.skip("no Docker engine answers (scripts/ci-docker starts one)")
    return SPECS[name]
