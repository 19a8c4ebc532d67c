"""Processes and memory of one sandbox: listing, ending and measuring them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable

PAGE = os.sysconf("SC_PAGE_SIZE")
THREADS = 17
"""Where /proc/PID/stat has the number of threads, counted from the state that follows the name."""
GROWTH = 4
"""How many processes every other sandbox may add during a call without taking those of the sandbox that counts."""
LINGER_S = 0.00015
"""How long to poll for an answer or order that is expected immediately. Waking up a virtual CPU takes a quarter of
this time."""


def linger(
    poll: select.poll,
    now: Callable[[], float] = time.monotonic,  # saved before a session's program could replace it
    give_way: Callable[[], None] = os.sched_yield,
) -> None:
    """Return when there are events, or soon in any case; yields the CPU to other processes meanwhile."""
    until = now() + LINGER_S
    while not poll.poll(0) and now() < until:
        give_way()


def pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process exits; -1 if the kernel lacks it (gVisor)."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return -1


def signalled_ends() -> tuple[int, int]:
    """Return (descriptor readable after any child has exited, its other end), for kernels without `pidfd`."""
    ends, wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    return ends, wakeup


def is_over(child: int) -> bool:
    """Return whether a child has exited, without reaping it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill(pid: int) -> None:
    """Send SIGKILL, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def parents() -> dict[int, int]:
    """Return {pid: parent} for every process in /proc, except dead ones.

    A process whose first thread has exited looks dead (Z) while its other threads run: it is included.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as f:
                    fields = f.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] not in (b"Z", b"X") or int(fields[THREADS]) > 1:
                found[int(name)] = int(fields[1])
    return found


def everybody() -> set[int]:
    """Return the ids of all processes in /proc, including zombies."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


class Cost:
    """Return what a process has used so far; the names are those of `resource.getrusage`."""

    def __init__(self, pid: int, max_rss_kb: int) -> None:
        # The number of another process's clock: see clock_getcpuclockid(3) and the kernel's CPUCLOCK_SCHED.
        self.ru_utime, self.ru_stime = time.clock_gettime((~pid << 3) | 2), 0.0
        self.ru_maxrss = max_rss_kb


def below(root: int, among: dict[int, int] | None = None) -> list[int]:
    """Return all descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid, parent in (among if among is not None else parents()).items():
        children.setdefault(parent, []).append(pid)
    found, open_ends = [], [root]
    while open_ends:
        for pid in children.get(open_ends.pop(), ()):
            found.append(pid)
            open_ends.append(pid)
    return found


def descendants(root: int) -> list[int]:
    """Return all descendants of a process, without looking at any other process.

    The kernel's lists may lack some of a process that starts and ends children meanwhile: see proc(5).
    """
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):  # a kernel without such lists
        return below(root)
    found, open_ends = [], [root]
    while open_ends:
        pid = open_ends.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                    children = [int(child) for child in f.read().split()]
                found += children
                open_ends += children
        except OSError:
            continue
    return found


def reap(known: list[int]) -> int:
    """Reap zombies that nobody waits for, up to the first in `known`; return how many."""
    reaped = 0
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None or dead.si_pid in known:
                return reaped
            os.waitpid(dead.si_pid, 0)
        except ChildProcessError:
            return reaped
        reaped += 1


def kill_at_once() -> bool:
    """Send SIGKILL to every process but the caller, as PID 1 of a namespace; does not wait. False: none exist."""
    if os.getpid() != 1:
        raise RuntimeError("kill_at_once outside a pid namespace")
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_all(owns_all: bool) -> int:
    """End every process but the caller; return how many had to be killed.

    Args:
        owns_all: the caller is PID 1 of a namespace, so that "everybody" is exactly the sandbox.
    """
    if not owns_all:
        return kill_except([], [])
    killed = 0
    while kill_at_once():
        try:
            while True:
                _, status = os.waitpid(-1, 0)
                killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        except ChildProcessError:
            continue
    reap([])
    return killed


def kill_except(keep: list[int], known: list[int]) -> int:
    """End all descendants of the caller except `keep` and their descendants; return how many had to be killed.

    Args:
        keep: processes to leave running.
        known: children that other code in this process will wait for.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + 5
    while True:
        now = parents()
        kept = set(keep)
        for pid in keep:
            kept.update(below(pid, now))
        strays = [pid for pid in below(os.getpid(), now) if pid not in kept]
        for pid in strays:
            kill(pid)
        killed.update(strays)
        ended = reap(known)  # maybe after it had started another that this look has missed
        if not (strays or ended) or time.monotonic() > deadline:
            return len(killed)
        time.sleep(0.0005)


def _share(pid: int) -> int:
    """Return a process's memory in bytes, dividing shared pages among their users (undivided if that is
    unknown)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as f:
            for line in f:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return _resident(pid)


def _resident(pid: int) -> int:
    """Return a process's memory in bytes, shared pages included."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as f:
            return int(f.read().split()[1]) * PAGE
    except OSError:
        return 0


class Meter:
    """Memory of the process tree: counted by a cgroup if there is one, otherwise by frequent sampling.

    Args:
        limit_mb: maximum memory for all processes together.
        oom_fd: memory.oom_control (v1) or memory.events (v2) of the sandbox's cgroup, -1 without one.
        usage_fd: its memory.usage_in_bytes or memory.current.
        place: a directory whose file system counts as the sandbox's disk.
    """

    def __init__(self, limit_mb: int, oom_fd: int, usage_fd: int, place: str) -> None:
        self.limit = limit_mb << 20
        self.oom_fd, self.usage_fd, self.place = oom_fd, usage_fd, place
        self.must_watch = oom_fd < 0
        self._before = b""
        self._seen_over = 0

    def begin(self) -> None:
        """Prepare for a call."""
        self._before, self._seen_over = self._events(), 0

    def end(self) -> int:
        """After a call: return how many processes were killed for lack of memory."""
        now = self._events()
        if now == self._before:  # usually there is nothing to count
            return self._seen_over
        killed = event_count(now, b"oom_kill") - event_count(self._before, b"oom_kill")
        return max(0, killed) + self._seen_over

    def over(self) -> bool:
        """Return whether the tree currently exceeds its limit."""
        # The quick sum counts pages once per process sharing them, so an excess is only a reason to look closer.
        if self.resident() <= self.limit or self.proportional() <= self.limit:
            return False
        self._seen_over = 1
        return True

    def resident(self) -> int:
        """Return the bytes held by the caller's descendants, counting shared pages several times."""
        return sum(map(_resident, descendants(os.getpid())))

    def proportional(self) -> int:
        """Return the bytes held by the caller's descendants, dividing shared pages among their users."""
        return sum(map(_share, descendants(os.getpid())))

    def usage(self) -> dict[str, int]:
        """Return current usage: bytes of memory, processes, bytes and files on its disk."""
        disk = os.statvfs(self.place)
        memory = int(os.pread(self.usage_fd, 64, 0)) if self.usage_fd >= 0 else self.proportional()
        return {
            "memory_bytes": memory,
            "processes": len(below(os.getpid())),
            "disk_bytes": (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            "files": disk.f_files - disk.f_ffree,
        }

    def _events(self) -> bytes:
        return os.pread(self.oom_fd, 4096, 0) if self.oom_fd >= 0 else b""


class UserLimit:
    """The limit on processes where the kernel can only count all of a user's together: it leaves room for those
    outside the sandbox, as many as there are when it is set and some more.

    Args:
        each: how many processes and threads the sandbox may have.
        folder: a directory with one entry for each sandbox of the keeper.
    """

    def __init__(self, each: int, folder: str) -> None:
        self.each, self.folder = each, folder
        self.outside, self.count_at = 0, 0.0
        self.count()

    def count(self) -> None:
        """Look at what runs outside the sandbox, unless that has just been done."""
        began = time.monotonic()
        if began >= self.count_at:
            self.outside = threads_outside(os.getpid(), os.getuid())
            now = time.monotonic()
            self.count_at = now + max(1.0, 100 * (now - began))

    def take(self) -> None:
        """Set the limit of the caller."""
        self._set([0])

    def give(self, pid: int) -> None:
        """Set the limit of a program and of everything below it. Programs cannot do that themselves."""
        self._set([pid, *descendants(pid)])

    def _set(self, pids: list[int]) -> None:
        limit = self.outside + self.each + GROWTH * (len(os.listdir(self.folder)) - 1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # where it is refused, they keep theirs
                _, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
                soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                resource.prlimit(pid, resource.RLIMIT_NPROC, (soft, hard))


def threads_outside(root: int, uid: int) -> int:
    """Return how many threads run as the user, apart from those of a process and its descendants.

    Programs can start and end processes all the time so that some of theirs escape a look at their tree. So every
    process is looked up in one pass, and what is below one that ended meanwhile is not counted.
    """
    found: dict[int, int] = {}
    threads: dict[int, int] = {}
    for pid in everybody() - {root}:
        try:
            with open(f"/proc/{pid}/status", "rb") as f:
                status = dict(line.split(b":", 1) for line in f)
        except PermissionError:  # of another user, where those are hidden
            continue
        except OSError:
            found[pid] = root
            continue
        ended = int(status[b"Threads"]) == 0  # then its parent is not known any more
        found[pid] = root if ended else int(status[b"PPid"])
        if int(status[b"Uid"].split()[0]) == uid:
            threads[pid] = int(status[b"Threads"])
    own = set(below(root, found))
    return sum(count for pid, count in threads.items() if pid not in own)


def event_count(events: bytes, wanted: bytes) -> int:
    """Return a number from a kernel file with lines of `name number`; 0 if the name is missing."""
    for line in events.split(b"\n"):
        name, _, value = line.partition(b" ")
        if name == wanted:
            return int(value)
    return 0
