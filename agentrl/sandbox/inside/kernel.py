"""Kernel calls that Python does not wrap: prctl, capabilities, mounts, seccomp, Landlock.

Linux only. Numbers are from the kernel's uapi headers; `tests/sandbox` compares them with the installed ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct

libc = ctypes.PyDLL(None, use_errno=True)
"""PyDLL keeps the interpreter lock: these calls are short, and `clone` must not release it halfway."""

_prctl = libc["prctl"]
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 24, 36, 38, 47

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

X86_64 = {
    "clone": 56, "pivot_root": 155, "mount_setattr": 442, "capset": 126, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446, "socket": 41, "socketpair": 53, "mknod": 133,
    "mknodat": 259, "prlimit64": 302, "setrlimit": 160, "setpriority": 141,
    "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314,
    "ioprio_set": 251, "ioctl": 16, "fcntl": 72, "clone3": 435, "memfd_create": 319, "shmget": 29, "msgget": 68,
    "semget": 64, "mq_open": 240, "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129,
    "rt_tgsigqueueinfo": 297,
}  # fmt: skip
AARCH64 = {
    "clone": 220, "pivot_root": 41, "mount_setattr": 442, "capset": 91, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446, "socket": 198, "socketpair": 199, "mknodat": 33,
    "prlimit64": 261, "setrlimit": 164, "setpriority": 140, "sched_setaffinity": 122, "sched_setscheduler": 119,
    "sched_setparam": 118, "sched_setattr": 274, "ioprio_set": 30, "ioctl": 29, "fcntl": 25, "clone3": 435,
    "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "kill": 129, "tkill": 130,
    "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
}  # fmt: skip
DENIED_X86_64 = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "setns": 308, "unshare": 272,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "open_tree": 428, "move_mount": 429,
    "mount_setattr": 442, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "process_madvise": 440, "kcmp": 312, "pidfd_getfd": 438, "bpf": 321, "perf_event_open": 298,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "userfaultfd": 323,
    "keyctl": 250, "add_key": 248, "request_key": 249, "kexec_load": 246, "kexec_file_load": 320,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "create_module": 174, "reboot": 169,
    "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "quotactl_fd": 443, "settimeofday": 164,
    "clock_settime": 227, "clock_adjtime": 305, "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
    "iopl": 172, "ioperm": 173, "open_by_handle_at": 304, "name_to_handle_at": 303, "fanotify_init": 300,
    "fanotify_mark": 301, "lookup_dcookie": 212, "nfsservctl": 180, "vhangup": 153, "syslog": 103,
    "modify_ldt": 154, "move_pages": 279, "mbind": 237, "set_mempolicy": 238, "set_mempolicy_home_node": 450,
    "migrate_pages": 256, "memfd_secret": 447, "uselib": 134, "ustat": 136, "sysfs": 139, "_sysctl": 156,
    "process_mrelease": 448, "personality": 135, "io_setup": 206,
}  # fmt: skip
DENIED_AARCH64 = {
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "setns": 268, "unshare": 97,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "open_tree": 428, "move_mount": 429,
    "mount_setattr": 442, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
    "process_madvise": 440, "kcmp": 272, "pidfd_getfd": 438, "bpf": 280, "perf_event_open": 241,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "userfaultfd": 282,
    "keyctl": 219, "add_key": 217, "request_key": 218, "kexec_load": 104, "kexec_file_load": 294,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "reboot": 142, "swapon": 224,
    "swapoff": 225, "acct": 89, "quotactl": 60, "quotactl_fd": 443, "settimeofday": 170,
    "clock_settime": 112, "clock_adjtime": 266, "adjtimex": 171, "sethostname": 161, "setdomainname": 162,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "fanotify_init": 262, "fanotify_mark": 263,
    "lookup_dcookie": 18, "nfsservctl": 42, "vhangup": 58, "syslog": 116, "move_pages": 239, "mbind": 235,
    "set_mempolicy": 237, "set_mempolicy_home_node": 450, "migrate_pages": 238, "memfd_secret": 447,
    "process_mrelease": 448, "personality": 92, "io_setup": 0,
}  # fmt: skip
NEWEST_SYSCALL = 451
"""Higher numbers return ENOSYS, as on a kernel that does not know them."""

NEW_NAMESPACES = 0x7E020000
"""All flags of `clone` that create new namespaces."""

OF_THE_USER_X86_64 = {
    "chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
    "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189,
    "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "inotify_init": 253,
    "inotify_init1": 294,
}  # fmt: skip
OF_THE_USER_AARCH64 = {
    "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "utimensat": 88, "setxattr": 5, "lsetxattr": 6,
    "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "inotify_init1": 26,
}  # fmt: skip
"""What a user may do to all its files and Landlock does not cover: refused where sandboxes share a user id."""

READ_ATTRIBUTES = {"x86_64": range(191, 197), "aarch64": range(8, 14)}
"""getxattr, lgetxattr, fgetxattr, listxattr, llistxattr, flistxattr: the same for reading. Programs expect file
systems that have no attributes."""

OF_FILE_SYSTEMS = (0x58, 0x66, 0x76, 0x94, 0xF5)
"""Types of ioctls that ext4, xfs, btrfs and f2fs have for files: a user may set flags, versions, encryption and
more of each of its files, and make snapshots of its directories, having opened them only for reading."""
LEASES = (1024, 1026)
"""F_SETLEASE, with which a user can delay whoever opens the same file, and F_NOTIFY, an inotify of old."""

MACHINES = {"x86_64": (0xC000003E, X86_64, DENIED_X86_64), "aarch64": (0xC00000B7, AARCH64, DENIED_AARCH64)}


def machine() -> tuple[int, dict[str, int], dict[str, int]]:
    """Return (audit architecture, syscalls by name, denied syscalls by name) of this machine."""
    name = os.uname().machine
    try:
        return MACHINES[name]
    except KeyError:
        raise OSError(f"no system call table for {name}; known: {', '.join(MACHINES)}") from None


def check(result: int, what: str) -> int:
    """Return `result`, or raise OSError with its errno if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def syscall(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call by name; integers and pointers only."""
    number = machine()[1][name]
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return check(libc.syscall(ctypes.c_long(number), *converted), name)


def prctl(option: int, value: int) -> None:
    """prctl(option, value, 0, 0, 0)."""
    if _prctl(option, value, 0, 0, 0) < 0:  # every spare child runs this: allocate nothing unnecessary
        check(-1, f"prctl {option}")


def clone(flags: int) -> int:
    """Fork into new namespaces: returns 0 in the child and its pid in the parent. The caller has only one
    thread."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = libc.syscall(ctypes.c_long(machine()[1]["clone"]), ctypes.c_long(flags | 17), None, None, None, None)
    code = ctypes.get_errno()
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        why = "a limit in /proc/sys/user is reached" if code == errno.ENOSPC else os.strerror(code)
        raise OSError(code, f"clone with flags {flags:#x}: {why}")
    return int(pid)


def unshare(flags: int) -> None:
    """Move the caller into new namespaces."""
    check(libc.unshare(flags), f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    check(
        libc.mount(
            source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode()
        ),
        f"mount {kind or 'bind'} {source} on {target} (flags {flags:#x}, {data!r})",
    )


def make_readonly(target: str) -> None:
    """Make a bind mount, and everything below it, read-only, nosuid, nodev."""
    # struct mount_attr {u64 attr_set, attr_clr, propagation, userns_fd}; RDONLY 1, NOSUID 2, NODEV 4.
    attr = struct.pack("QQQQ", 7, 0, 0, 0)
    at_fdcwd, at_recursive = -100, 0x8000
    syscall("mount_setattr", at_fdcwd, target.encode(), at_recursive, attr, len(attr))


def pivot_root(target: str) -> None:
    """Make `target` the root and detach the old one."""
    os.chdir(target)
    syscall("pivot_root", b".", b".")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def drop_privileges(uid: int, gid: int) -> None:
    """Drop every capability (also from the bounding set) and become `uid`, `gid`, permanently."""
    for cap in range(64):
        try:
            prctl(PR_CAPBSET_DROP, cap)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EINVAL):
                raise
            break  # no CAP_SETPCAP: unprivileged, nothing to drop; or past the last one of this kernel
    with contextlib.suppress(OSError):
        prctl(PR_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    if os.getuid() == 0 and uid != 0:
        os.setgroups([])
    if (os.getresgid(), os.getresuid()) != ((gid,) * 3, (uid,) * 3):
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    syscall("capset", header, ctypes.create_string_buffer(struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def seccomp_filter(*, network: bool, shared_memory: bool, unix: bool = True, mortal_init: bool = False) -> bytes:
    """Assemble the classic BPF program that every program of a sandbox runs under.

    Args:
        network: False refuses `socket` altogether (for back-ends without a network namespace).
        shared_memory: False refuses memfd and System V objects, for back-ends that cannot count their memory.
        unix: False refuses Unix sockets, for back-ends whose programs would reach those of the host.
        mortal_init: True refuses signals to PID 1, for kernels that do not protect it from its own namespace.
    """
    arch, calls, denied = machine()
    allow, eperm, enosys = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
    ld, jeq, jgt, jge, jset, and_, ret = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
    code: list[tuple[int, int, int, int]] = [
        (ld, 0, 0, 4), (jeq, 1, 0, arch), (ret, 0, 0, 0x80000000),
        (ld, 0, 0, 0),
        (jge, 0, 1, 0x40000000), (ret, 0, 0, enosys),  # the x32 twin of the table
        (jgt, 0, 1, NEWEST_SYSCALL), (ret, 0, 0, enosys),
    ]  # fmt: skip

    def arg(index: int) -> int:
        return 16 + 8 * index  # low half; both machines are little-endian

    def rule(name: str, *body: tuple[int, int, int, int]) -> None:
        if name in calls:
            code.append((jeq, 0, len(body), calls[name]))
            code.extend(body)

    rule("clone", (ld, 0, 0, arg(0)), (jset, 0, 1, NEW_NAMESPACES), (ret, 0, 0, eperm), (ret, 0, 0, allow))
    rule("clone3", (ret, 0, 0, enosys))  # its flags are in memory; C libraries fall back to clone
    if network:
        # AF_UNIX 1, AF_INET 2, AF_INET6 10, and AF_NETLINK 16 with NETLINK_ROUTE 0.
        rule(
            "socket", (ld, 0, 0, arg(0)), (jeq, 5 if unix else 6, 0, 1), (jeq, 4, 0, 2), (jeq, 3, 0, 10),
            (jeq, 0, 3, 16), (ld, 0, 0, arg(2)), (jeq, 0, 1, 0), (ret, 0, 0, allow), (ret, 0, 0, 0x00050000 | 97),
        )  # fmt: skip
    else:
        rule("socket", (ret, 0, 0, eperm))
    # Pairs of AF_UNIX 1: others would load kernel modules, and TIPC has pairs. Without `unix`, only those of type
    # SOCK_STREAM 1 and SOCK_SEQPACKET 5: one of datagrams could send them to any address.
    types = [(ld, 0, 0, arg(1)), (and_, 0, 0, 0xF), (jeq, 2, 0, 1), (jeq, 1, 0, 5), (ret, 0, 0, eperm)]
    rule(
        "socketpair", (ld, 0, 0, arg(0)), (jeq, 1, 0, 1), (ret, 0, 0, 0x00050000 | 97),
        *([] if unix else types), (ret, 0, 0, allow),
    )  # fmt: skip
    for name, index in (("mknod", 1), ("mknodat", 2)):
        rule(
            name, (ld, 0, 0, arg(index)), (and_, 0, 0, 0xF000), (jeq, 1, 0, 0x2000), (jeq, 0, 1, 0x6000),
            (ret, 0, 0, eperm), (ret, 0, 0, allow),
        )  # fmt: skip
    # Protect PID 1, which has the same user id.
    rule("prlimit64", (ld, 0, 0, arg(0)), (jeq, 1, 0, 0), (ret, 0, 0, eperm), (ret, 0, 0, allow))
    for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        rule(name, (ld, 0, 0, arg(0)), (jeq, 0, 1, 1), (ret, 0, 0, eperm), (ret, 0, 0, allow))
    for name, process in (("setpriority", 0), ("ioprio_set", 1)):
        rule(
            name, (ld, 0, 0, arg(0)), (jeq, 0, 2, process), (ld, 0, 0, arg(1)), (jeq, 0, 1, 1),
            (ret, 0, 0, eperm), (ret, 0, 0, allow),
        )  # fmt: skip
    for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo") if mortal_init else ():
        rule(name, (ld, 0, 0, arg(0)), (jeq, 0, 1, 1), (ret, 0, 0, eperm), (ret, 0, 0, allow))
    # TIOCSTI and TIOCLINUX inject input into other terminals.
    rule(
        "ioctl", (ld, 0, 0, arg(1)), (jeq, 1, 0, 0x5412), (jeq, 0, 1, 0x541C),
        (ret, 0, 0, eperm), (ret, 0, 0, allow),
    )  # fmt: skip
    refused = set(denied.values())
    if not shared_memory:
        refused |= {calls[name] for name in ("memfd_create", "shmget", "msgget", "semget", "mq_open")}
    for number in sorted(refused):
        code += [(jeq, 0, 1, number), (ret, 0, 0, eperm)]
    code.append((ret, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def shared_user_filter(*, own_user: bool) -> bytes:
    """Assemble an additional filter for the programs of a sandbox without a pid namespace, on top of
    `seccomp_filter`: they cannot change the scheduling of other processes, such as their supervisor.

    File operations run without it, because they only change files in the sandbox.

    Args:
        own_user: False if the user id is shared with others: then modes, owners and times of files cannot be
            changed either, there are no extended attributes, flags or leases, and programs cannot change their
            limit on processes.
    """
    calls = machine()[1]
    refused = OF_THE_USER_X86_64 if os.uname().machine == "x86_64" else OF_THE_USER_AARCH64
    allow, eperm, enotty = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 25
    code: list[tuple[int, int, int, int]] = [(0x20, 0, 0, 0)]

    def rule(name: str, *body: tuple[int, int, int, int]) -> None:
        code.append((0x15, 0, len(body), calls[name]))
        code.extend(body)

    for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        rule(name, (0x20, 0, 0, 16), (0x15, 1, 0, 0), (6, 0, 0, eperm), (6, 0, 0, allow))
    for name in ("setpriority", "ioprio_set"):
        rule(name, (0x20, 0, 0, 24), (0x15, 1, 0, 0), (6, 0, 0, eperm), (6, 0, 0, allow))
    if not own_user:
        nproc = 6  # RLIMIT_NPROC; reading it, without new values, is allowed
        rule("setrlimit", (0x20, 0, 0, 16), (0x15, 0, 1, nproc), (6, 0, 0, eperm), (6, 0, 0, allow))
        rule(
            "prlimit64", (0x20, 0, 0, 24), (0x15, 0, 5, nproc), (0x20, 0, 0, 32), (0x15, 0, 2, 0),
            (0x20, 0, 0, 36), (0x15, 1, 0, 0), (6, 0, 0, eperm), (6, 0, 0, allow),
        )  # fmt: skip
        kinds = [(0x15, len(OF_FILE_SYSTEMS) - at, 0, kind << 8) for at, kind in enumerate(OF_FILE_SYSTEMS)]
        rule("ioctl", (0x20, 0, 0, 24), (0x54, 0, 0, 0xFF00), *kinds, (6, 0, 0, allow), (6, 0, 0, enotty))
        lease, notify = LEASES
        rule(
            "fcntl", (0x20, 0, 0, 24), (0x15, 1, 0, lease), (0x15, 0, 1, notify),
            (6, 0, 0, eperm), (6, 0, 0, allow),
        )  # fmt: skip
        for number in sorted(refused.values()):
            code += [(0x15, 0, 1, number), (6, 0, 0, eperm)]
        for number in READ_ATTRIBUTES[os.uname().machine]:
            code += [(0x15, 0, 1, number), (6, 0, 0, 0x00050000 | errno.EOPNOTSUPP)]
    code.append((6, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install_seccomp(program: bytes) -> None:
    """Apply the filter to the caller and all its children; requires no_new_privs."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(fprog, len(fprog))
    zero = ctypes.c_ulong(0)
    check(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), holder, zero, zero), "seccomp filter")


def landlock_abi() -> int:
    """Return the Landlock version of this kernel, or 0 if it has none."""
    try:
        return syscall("landlock_create_ruleset", None, 0, 1)
    except (OSError, KeyError):
        return 0


SIGNAL_SCOPE_ABI = 6
"""The Landlock version that scopes signals (Linux 6.12)."""
REFER_ABI = 2
"""The Landlock version that need not prevent moving files between directories (Linux 5.19)."""

WRITE_FILE, REFER = 1 << 1, 1 << 13
"""Landlock rights: opening a file for writing; moving or linking it into another directory."""


def fence(*, signals: bool = True) -> None:
    """Keep the caller and its children from opening any outside process (memory, descriptors).

    Args:
        signals: also from signaling them.
    """
    prctl(PR_SET_NO_NEW_PRIVS, 1)  # without it, only root could
    _restrict(REFER, [("/", REFER)], scopes=2 if signals else 0)  # this must not prevent moving files


def fence_abstract_sockets() -> None:
    """Keep the caller and its children from the abstract Unix sockets of others in the same network namespace."""
    if landlock_abi() >= SIGNAL_SCOPE_ABI:
        _restrict(REFER, [("/", REFER)], scopes=1)


def write_only_below(places: list[str]) -> None:
    """Restrict opening files for writing to these places, for the caller and its children.

    Raises:
        OSError: this kernel has no Landlock, or one that prevents moving files between directories (ABI 1).
    """
    if landlock_abi() < REFER_ABI:
        raise OSError("Landlock ABI 2 is needed")
    _restrict(WRITE_FILE | REFER, [("/", REFER), *((place, WRITE_FILE) for place in places)])


def _restrict(handled: int, rules: list[tuple[str, int]], *, ports: int = 0, scopes: int = 0) -> None:
    """Remove the `handled` rights from the caller and its children, except for (place, rights) below these
    places."""
    attr = struct.pack("QQQ", handled, ports, scopes)[: 24 if scopes else 16 if ports else 8]
    ruleset = syscall("landlock_create_ruleset", attr, len(attr), 0)
    for place, allowed in rules:
        fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
        # Of these rights, execute, write_file, read_file, truncate and ioctl_dev apply to a plain file.
        rights = allowed if os.path.isdir(place) else allowed & 0b1100000000000111
        syscall("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, fd), 0)
        os.close(fd)
    syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def landlock(readable: list[str], writable: list[str], *, network: bool) -> None:
    """Confine the caller and its children to these paths; no TCP, no outside signals or abstract sockets.

    Raises:
        OSError: Landlock is missing or older than ABI 6 (Linux 6.12), which scopes signals.
    """
    abi = landlock_abi()
    if abi < SIGNAL_SCOPE_ABI:
        raise OSError(f"Landlock ABI {abi}: at least {SIGNAL_SCOPE_ABI} is needed")
    every = (1 << 16) - 1
    read = 0b1101  # execute, read_file, read_dir
    rules = [(path, read) for path in readable] + [(path, every) for path in writable]
    _restrict(every, rules, ports=0 if network else 3, scopes=3)
