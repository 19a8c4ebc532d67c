"""Control groups, versions 1 and 2: memory, process and CPU limits for a sandbox as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import signal

from .leftovers import is_stale, run_name
from .tree import event_count

CONTROLLERS = ("memory", "pids", "cpu")
ASIDE = "agentrl-others"
"""Where version 2 moves the members of a group that has groups with controllers below it."""
HOST_EVENTS = "/proc/vmstat"
"""Counts the OOM kills of the whole host since it started."""


def _mounts() -> tuple[dict[str, str], str | None]:
    """Return ({v1 controller: mount point}, mount point of v2 or None)."""
    first: dict[str, str] = {}
    second = None
    with open("/proc/self/mounts") as f:
        for line in f:
            _, place, kind, options, *_ = line.split()
            if kind == "cgroup":
                for name in set(options.split(",")) & set(CONTROLLERS):
                    first.setdefault(name, place)
            elif kind == "cgroup2" and second is None:
                second = place
    return first, second


def _delegated(mount: str) -> str:
    """Return where version 2 groups can be created: at the top, or below the caller's own group if delegated."""
    if os.access(f"{mount}/cgroup.subtree_control", os.W_OK):
        return mount
    with open("/proc/self/cgroup") as f:
        own = next((line.rstrip("\n")[3:] for line in f if line.startswith("0::")), "/")
    while os.path.basename(own) == ASIDE:  # an earlier keeper has moved this program there
        own = os.path.dirname(own)
    place = f"{mount}{own}".rstrip("/")
    return place if os.access(f"{place}/cgroup.subtree_control", os.W_OK) else mount


def _hand_down(place: str, enable: str) -> None:
    """Enable the controllers for the groups below; members of the group itself move into a child group."""
    try:
        _write(f"{place}/cgroup.subtree_control", enable)
        return
    except OSError as error:
        if error.errno != errno.EBUSY:  # only the root group may have both members and controllers
            raise
    os.makedirs(f"{place}/{ASIDE}", exist_ok=True)
    for _ in range(100):  # members may fork meanwhile
        with open(f"{place}/cgroup.procs") as f:
            members = f.read().split()
        if not members:
            break
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                _write(f"{place}/{ASIDE}/cgroup.procs", pid)
    _write(f"{place}/cgroup.subtree_control", enable)


class ControlGroup:
    """The group of one sandbox."""

    def __init__(self, places: dict[str, str], version: int) -> None:
        self.places, self.version = places, version
        memory = places["memory"]
        self.oom_fd = os.open(f"{memory}/{'memory.oom_control' if version == 1 else 'memory.events'}", os.O_RDONLY)
        usage = "memory.usage_in_bytes" if version == 1 else "memory.current"
        self.usage_fd = os.open(f"{memory}/{usage}", os.O_RDONLY)

    def oom_kills(self) -> tuple[int, bool]:
        """Return (processes of the group killed by the OOM killer, whether the group has reached its limit)."""
        events = os.pread(self.oom_fd, 4096, 0)
        if self.version == 2:
            return event_count(events, b"oom_kill"), event_count(events, b"oom") > 0
        with open(f"{self.places['memory']}/memory.failcnt", "rb") as f:
            return event_count(events, b"oom_kill"), int(f.read()) > 0

    def add(self, pid: int) -> None:
        """Move a process into the group."""
        for place in sorted(set(self.places.values())):
            _write(f"{place}/cgroup.procs", str(pid))

    def close(self) -> None:
        """Close the descriptors; the group stays until `remove`."""
        for fd in (self.oom_fd, self.usage_fd):
            os.close(fd)

    def remove(self) -> bool:
        """Delete the group; return False if it is still busy."""
        left = [place for place in set(self.places.values()) if not _rmdir(place)]
        return not left


class Groups:
    """The groups of one keeper, in `.../agentrl/<run>/<sandbox>`; `why_not` explains why there are none."""

    def __init__(self) -> None:
        self.why_not = ""
        self.version = 0
        self.bases: dict[str, str] = {}
        try:
            self._find()
        except OSError as error:
            self.why_not = f"{error.filename}: {error.strerror}"
            self.close()
            self.bases = {}

    @property
    def controllers(self) -> list[str]:
        """Return which of memory, pids and cpu can be limited here."""
        return sorted(self.bases) if "memory" in self.bases else []

    def _find(self) -> None:
        first, second = _mounts()
        if "memory" in first:
            self.version = 1
            roots = {name: f"{place}/agentrl" for name, place in first.items()}
        elif second is not None:
            self.version = 2
            top = _delegated(second)
            with open(f"{top}/cgroup.controllers") as f:
                there = f.read().split()
            names = [name for name in CONTROLLERS if name in there]
            if "memory" not in names:
                self.why_not = f"{top}: the memory controller is not available"
                return
            enable = " ".join(f"+{name}" for name in names)
            _hand_down(top, enable)
            roots = dict.fromkeys(names, f"{top}/agentrl")
        else:
            self.why_not = "no cgroup file system is mounted"
            return
        self.bases = {name: f"{root}/{run_name()}" for name, root in roots.items()}
        for root in dict.fromkeys(roots.values()):
            run = f"{root}/{run_name()}"
            _make_run(run)
            if self.version == 2:
                for group in (root, run):
                    _write(f"{group}/cgroup.subtree_control", enable)
            _sweep(root)

    def create(self, name: str, *, memory_mb: int, pids: int, cpus: float | None) -> ControlGroup:
        """Create a group with its limits.

        Raises:
            OSError: the kernel rejects one of them.
        """
        places = {controller: f"{base}/{name}" for controller, base in self.bases.items()}
        try:
            for place in set(places.values()):
                os.mkdir(place)
            one = self.version == 1
            _write(f"{places['memory']}/memory.{'limit_in_bytes' if one else 'max'}", str(memory_mb << 20))
            if not one and os.path.exists(f"{places['memory']}/memory.swap.max"):
                _write(f"{places['memory']}/memory.swap.max", "0")
            if "pids" in places:
                _write(f"{places['pids']}/pids.max", str(pids))
            if "cpu" in places and cpus is not None:
                quota = str(max(1000, int(cpus * 100_000)))
                if one:
                    _write(f"{places['cpu']}/cpu.cfs_period_us", "100000")
                    _write(f"{places['cpu']}/cpu.cfs_quota_us", quota)
                else:
                    _write(f"{places['cpu']}/cpu.max", f"{quota} 100000")
            return ControlGroup(places, self.version)
        except OSError:
            for place in set(places.values()):
                _rmdir(place)
            raise

    def close(self) -> None:
        """Delete the groups of this run."""
        for base in set(self.bases.values()):
            _remove_run(base)
            _rmdir(os.path.dirname(base))  # kept while somebody else has a run there


class KillCount:
    """Count the processes that the OOM killer ends from now on: in this process's own memory group, as far as
    that group can be read, otherwise on the whole host."""

    def __init__(self) -> None:
        self.path = _own_events()
        self.before = _oom_kills(self.path)
        self.before_on_host = _oom_kills(HOST_EVENTS)

    def now(self) -> int:
        """Return how many there have been. If this process has changed groups meanwhile, count the host's."""
        if self.path == _own_events():
            return _oom_kills(self.path) - self.before
        return _oom_kills(HOST_EVENTS) - self.before_on_host


def _own_events() -> str:
    """Return the kernel's file that counts the OOM kills of the memory group this process belongs to, without
    the groups below. Where there is none, that is the host's."""
    first, second = _mounts()
    mount, name, kinds = second, "memory.events.local", ""
    if "memory" in first:
        mount, name, kinds = first["memory"], "memory.oom_control", "memory"
    if mount is None:
        return HOST_EVENTS
    try:
        with open("/proc/self/cgroup") as f:
            lines = [line.rstrip("\n").split(":", 2) for line in f]
        path = next(path for _, controllers, path in lines if kinds in controllers.split(","))
        for place in (f"{mount}{path}".rstrip("/"), mount):  # in a container, the path may be the host's
            with contextlib.suppress(OSError), open(f"{place}/cgroup.procs") as f:
                if f"{os.getpid()}\n" in f and os.access(f"{place}/{name}", os.R_OK):
                    return f"{place}/{name}"
    except (OSError, StopIteration):
        pass
    return HOST_EVENTS


def _oom_kills(path: str) -> int:
    try:
        with open(path, "rb") as f:
            return event_count(f.read(), b"oom_kill")
    except OSError:
        return 0


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as f:
            f.write(text)
    except OSError as error:
        error.filename = path  # what the kernel refuses when it is written has none
        raise


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _make_run(base: str) -> None:
    """Create the group of a run; the one above it may be removed meanwhile, by the last run that had used it."""
    for tries_left in reversed(range(100)):
        try:
            os.makedirs(base)
            return
        except (FileNotFoundError, FileExistsError):
            if not tries_left:
                raise


def _remove_run(base: str) -> None:
    try:
        inside = [entry.path for entry in os.scandir(base) if entry.is_dir()]
    except OSError:
        return
    for path in [*inside, base]:
        _rmdir(path)


def _kill_members(base: str) -> None:
    """Kill processes that outlived their keeper; only sandboxes without a pid namespace can leave any."""
    for folder, _, _ in os.walk(base):
        with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs") as f:
            for line in f:
                if int(line):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(line), signal.SIGKILL)


def _sweep(root: str) -> None:
    """Remove the groups of runs that are gone; their processes died with their keeper."""
    for name in os.listdir(root):
        if is_stale(name):
            _kill_members(f"{root}/{name}")
            _remove_run(f"{root}/{name}")
