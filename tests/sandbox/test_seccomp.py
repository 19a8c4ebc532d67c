"""The profile that our containers run under: the file is what the filter says, and an engine enforces it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from agentrl.sandbox import Sandbox, SandboxPool
from agentrl.sandbox.inside import kernel
from agentrl.sandboxes.docker import PROFILE, USER, Container, seccomp_option
from agentrl.sandboxes.docker.seccomp import HEADERS, known_calls, profile
from tests.sandbox.sandbox_specs import docker_answers

FOUND: dict[str, Any] = json.loads(PROFILE.read_text())


def names(action: str, errno: int | None = None) -> set[str]:
    """Of all calls with this answer and no condition."""
    return {
        name
        for rule in FOUND["syscalls"]
        if rule["action"] == action and rule.get("errnoRet") == errno and "args" not in rule
        for name in rule["names"]
    }


def test_the_profile_refuses_what_the_filter_refuses_on_both_machines() -> None:
    refused = names("SCMP_ACT_ERRNO", 1)
    assert refused == set(kernel.DENIED_X86_64) | set(kernel.DENIED_AARCH64)
    assert not refused & names("SCMP_ACT_ALLOW")
    assert names("SCMP_ACT_ERRNO", 38) == {"clone3"}
    assert (FOUND["defaultAction"], FOUND["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 38)
    assert [a["architecture"] for a in FOUND["archMap"]] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]


def test_what_the_supervisor_itself_calls_is_allowed() -> None:
    needed = {"fork", "vfork", "execve", "prctl", "seccomp", "capset", "setresuid", "wait4", "kill", "prlimit64"}
    assert needed | {"pidfd_open", "openat2", "memfd_create", "epoll_wait"} <= names("SCMP_ACT_ALLOW")


@pytest.mark.skipif(
    not all(path.is_file() for path, _ in HEADERS.values()), reason="the kernel headers are not installed"
)
def test_the_file_is_what_the_headers_and_the_filter_make() -> None:
    known = {name for machine in HEADERS for name in known_calls(machine)}
    assert profile(known) == FOUND, "python -m agentrl.sandboxes.docker.seccomp writes it anew"


ASK = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = {}
for name, number, args in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
    answers[name] = 0 if done >= 0 else ctypes.get_errno()
print(json.dumps(answers))
"""


def ask(option: str, calls: list[tuple[str, int, list[int]]]) -> dict[str, int]:
    """What a program in a plain container, without our supervisor and its filter, hears: errno by call."""
    import docker

    client = docker.APIClient(version="auto", **docker.utils.kwargs_from_env())
    try:
        config = client.create_host_config(
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=[option],
            log_config={"Type": "json-file", "Config": {}},
        )
        image = Sandbox(backend="docker").image
        made = client.create_container(
            image, ["python3", "-c", ASK, json.dumps(calls)], user=str(USER), host_config=config
        )
        try:
            client.start(made)
            client.wait(made, timeout=60)
            return dict(json.loads(client.logs(made, stderr=False)))
        finally:
            client.remove_container(made, force=True)
    finally:
        client.close()


X86_PROBES: list[tuple[str, int, list[int]]] = [
    ("getpid", 39, []),
    ("io_uring_setup", 425, [1, 0]),
    ("personality", 135, [0xFFFFFFFF]),
    ("process_vm_readv", 310, [1, 0, 0, 0, 0, 0]),
    ("clone of a user namespace", 56, [kernel.CLONE_NEWUSER | 17, 0, 0, 0, 0]),
    ("clone3", 435, [0, 0]),
    ("socket of packets", 41, [17, 2, 0]),
    ("socket of the kernel's audit", 41, [16, 3, 9]),
    ("socket of a path", 41, [1, 1, 0]),
    ("socket of the internet", 41, [2, 1, 0]),
    ("newer than the table", 900, []),
]


@pytest.mark.docker
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_an_engine_enforces_it_on_everything_in_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    if not docker_answers():
        pytest.skip("no Docker engine answers (scripts/ci-docker starts one)")
    ours = ask(seccomp_option(), X86_PROBES)
    assert {name for name, errno in ours.items() if errno == 0} == {
        "getpid",
        "socket of a path",
        "socket of the internet",
    }
    assert (ours["io_uring_setup"], ours["personality"], ours["process_vm_readv"], ours["clone3"]) == (1, 1, 1, 38)
    assert set(ours.values()) == {
        0,
        1,
        38,
    }  # engines before 23 answer EPERM where the profile's default says ENOSYS
    harmless = [probe for probe in X86_PROBES if not probe[0].startswith("clone")]
    control = ask("seccomp=unconfined", harmless)
    assert control["personality"] == 0
    assert control["io_uring_setup"] == 14  # EFAULT: it runs
    assert control["process_vm_readv"] == 0
    everything = ask(seccomp_option(), [(name, number, []) for name, number in kernel.DENIED_X86_64.items()])
    assert {name for name, errno in everything.items() if errno != 1} == set()


@pytest.mark.docker
async def test_the_back_end_gives_it_to_its_containers() -> None:
    if not docker_answers():
        pytest.skip("no Docker engine answers (scripts/ci-docker starts one)")
    import docker

    async with SandboxPool(Sandbox(backend="docker"), min_idle=0) as pool, pool.lease() as box:
        assert isinstance(box._process, Container)
        client = docker.APIClient(version="auto", **docker.utils.kwargs_from_env())
        options = client.inspect_container(box._process.identity)["HostConfig"]["SecurityOpt"]
        client.close()
    assert options == ["no-new-privileges:true", seccomp_option()]
