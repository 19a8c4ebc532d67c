"""Control groups of version 2, on folders that stand for the file system: what is written where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.sandbox.inside import cgroups, leftovers


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "_mounts", lambda: ({}, str(tmp_path)))
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids\n")
    return tmp_path


def test_all_three_controllers_are_found_and_handed_down(tree: Path) -> None:
    groups = cgroups.Groups()
    assert (groups.why_not, groups.version, groups.controllers) == ("", 2, ["cpu", "memory", "pids"])
    run = tree / "agentrl" / leftovers.run_name()
    for folder in (tree, tree / "agentrl", run):
        assert (folder / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert set(groups.bases.values()) == {str(run)}


def test_the_last_run_of_another_process_may_end_while_one_begins(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tree / "agentrl" / leftovers.run_name()
    made, removed = cgroups.os.mkdir, []

    def mkdir(path: str, mode: int = 0o777) -> None:
        if str(path) == str(run) and not removed:
            removed.append(path)
            run.parent.rmdir()  # as `close` does where nobody has a run any more
        made(path, mode)

    monkeypatch.setattr(cgroups.os, "mkdir", mkdir)
    groups = cgroups.Groups()
    assert (groups.why_not, len(removed)) == ("", 1)
    assert run.is_dir()


def test_a_group_has_its_limits_and_its_members(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = cgroups.Groups()
    place = tree / "agentrl" / leftovers.run_name() / "box"
    made = cgroups.os.mkdir

    def with_files(path: str) -> None:  # the kernel fills a new folder
        made(path)
        for name, text in {
            "memory.swap.max": "max",
            "memory.events": "oom 0\noom_kill 2\n",
            "memory.current": "4096",
        }.items():
            Path(path, name).write_text(text)

    monkeypatch.setattr(cgroups.os, "mkdir", with_files)
    group = groups.create("box", memory_mb=64, pids=20, cpus=0.5)
    written = {file.name: file.read_text() for file in place.iterdir()}
    assert written["memory.max"] == str(64 << 20)
    assert (written["memory.swap.max"], written["pids.max"], written["cpu.max"]) == ("0", "20", "50000 100000")
    group.add(123)
    assert (place / "cgroup.procs").read_text() == "123"
    assert b"oom_kill 2" in cgroups.os.pread(group.oom_fd, 100, 0)
    assert cgroups.os.pread(group.usage_fd, 100, 0) == b"4096"
    group.close()


def test_without_the_memory_controller_it_says_so(tree: Path) -> None:
    (tree / "cgroup.controllers").write_text("cpu pids\n")
    groups = cgroups.Groups()
    assert groups.controllers == []
    assert groups.why_not == f"{tree}: the memory controller is not available"


def test_below_the_top_members_step_aside_before_controllers_are_handed_down(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = ["11", "12"]
    written = []

    def write(path: str, text: str) -> None:
        written.append((path.removeprefix(str(tree)), text))
        if path.endswith("agentrl-others/cgroup.procs"):
            members.remove(text)
            (tree / "cgroup.procs").write_text("\n".join(members))
        elif path == f"{tree}/cgroup.subtree_control" and members:
            raise OSError(cgroups.errno.EBUSY, "busy", path)

    (tree / "cgroup.procs").write_text("11\n12\n")
    monkeypatch.setattr(cgroups, "_write", write)
    groups = cgroups.Groups()
    assert groups.why_not == ""
    assert written[:4] == [
        ("/cgroup.subtree_control", "+memory +pids +cpu"),
        ("/agentrl-others/cgroup.procs", "11"),
        ("/agentrl-others/cgroup.procs", "12"),
        ("/cgroup.subtree_control", "+memory +pids +cpu"),
    ]


def test_an_ordinary_user_takes_the_group_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = next(
        (line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/"
    )
    given = tmp_path / own.strip("/")
    given.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(cgroups.os, "access", lambda path, mode: path == f"{given}/cgroup.subtree_control")
    assert cgroups._delegated(str(tmp_path)) == str(given)
    monkeypatch.setattr(cgroups.os, "access", lambda path, mode: False)
    assert cgroups._delegated(str(tmp_path)) == str(tmp_path)


def test_the_next_keeper_of_a_program_that_stepped_aside_takes_the_same_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/user/agentrl-others/agentrl-others\n")
    monkeypatch.setattr("builtins.open", lambda path, *args, real=open: real(own, *args))
    given = f"{tmp_path}/user"
    monkeypatch.setattr(cgroups.os, "access", lambda path, mode: path.startswith(given))
    assert cgroups._delegated(str(tmp_path)) == given


def test_nothing_is_left_where_only_some_controllers_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {name: tmp_path / name for name in cgroups.CONTROLLERS}
    monkeypatch.setattr(cgroups, "_mounts", lambda: ({name: str(place) for name, place in places.items()}, None))
    for name in ("memory", "cpu"):
        places[name].mkdir()
    places["pids"].touch()  # no folder: no group can be made in it, whoever tries
    groups = cgroups.Groups()
    assert groups.controllers == []
    assert groups.why_not == f"{tmp_path}/pids/agentrl: Not a directory"
    assert list(places["memory"].iterdir()) == []


def test_kills_are_counted_in_the_group_of_this_process_alone(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, host = tree / "memory.events.local", tree / "vmstat"
    own.write_text("oom 1\noom_kill 3\n")
    host.write_text("oom_kill 50\n")
    (tree / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
    monkeypatch.setattr(cgroups, "HOST_EVENTS", str(host))
    kills = cgroups.KillCount()
    host.write_text("oom_kill 60\n")
    assert kills.now() == 0
    own.write_text("oom 3\noom_kill 5\n")
    assert kills.now() == 2
    (tree / "cgroup.procs").write_text("1\n")  # it has been moved to another group
    assert kills.now() == 10


def test_kills_are_those_of_the_host_where_no_group_counts_them(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tree / "vmstat"
    monkeypatch.setattr(cgroups, "HOST_EVENTS", str(host))
    kills = cgroups.KillCount()
    assert kills.now() == 0
    host.write_text("oom_kill 1\n")
    assert kills.now() == 1
