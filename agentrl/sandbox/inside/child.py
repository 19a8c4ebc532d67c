"""A program in the sandbox, from fork to exit: the spare child waits, then becomes whatever is ordered."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`: they cost a fresh child many pages
import _sitebuiltins
import builtins
import contextlib
import errno
import gc
import mmap
import os
import resource
import select
import signal
import struct
import sys
import types
from typing import Any, NoReturn

from . import files, frames, kernel, tree

WARM = b"""
import sys
class A:
    def f(self, n=1, *rest, **more):
        return [str(i) for i in range(n)]
def g():
    try:
        raise ValueError("x")
    except ValueError as error:
        return f"{error}"
a = {"k": A().f(3), **{str(i): (i, 1.5) for i in range(5)}}
g()
print("", end="", flush=True)
"""
PACKAGE = __name__.rpartition(".")[0]
CONTROL = 3
"""Descriptor on which the order arrives; closed before any untrusted code runs."""

WORD = struct.Struct("=?BI")
"""What a child writes to the page it shares with the supervisor: that it has finished, its exit status and its
peak memory in KiB. A program can write there as well, so nothing else in it is trusted."""

ACCEPTED = b"\1"
"""Sent on the control descriptor once the order has been read: what happens from then on is the program's doing.
The descriptor is closed before the program starts, so a program can neither send nor retract it."""

SITE: list[str] = []
"""Where our own code finds modules: never in a folder that programs can write to."""

SESSIONS: Any = None
"""The `sessions` module, set there because it needs this one."""


class Confinement:
    """What every child sets up in addition to what it inherits from the supervisor."""

    def __init__(
        self,
        *,
        home: str,
        env: dict[str, str],
        limits: dict[str, int],
        oom_fd: int = -1,
        landlock: tuple[list[str], list[str], bool] | None = None,
        seccomp: bytes = b"",
        foreign_seccomp: bytes = b"",
        user_limit: tree.UserLimit | None = None,
        site: list[str],
    ) -> None:
        self.home, self.env, self.limits = home, env, limits
        self.foreign_seccomp = foreign_seccomp
        """An additional filter for untrusted programs; file operations run without it."""
        self.user_limit = user_limit
        """Limits processes where `limits` cannot, because the user has others."""
        self.oom_fd, self.landlock, self.seccomp, self.site = oom_fd, landlock, seccomp, site
        self.own_oom_score = os.pread(oom_fd, 16, 0).strip() if oom_fd >= 0 else b""
        self.supervisor = 0
        """Its process id; set by `prepare`."""
        self.signalled_ends = False
        """Whether the supervisor learns about exited children by signal; a child must not inherit that."""
        abi = kernel.landlock_abi()
        self.fences = abi >= kernel.SIGNAL_SCOPE_ABI
        """Whether sessions are isolated from every process outside them."""
        self.fences_fresh = abi >= kernel.REFER_ABI and not landlock
        """Whether a fresh program needs a fence, and can have one, so that it cannot open a session."""

    def fork(self) -> int:
        """Fork from the supervisor; the child is killed first when memory runs out, and cannot change that."""
        if self.oom_fd < 0:
            return os.fork()
        os.pwrite(self.oom_fd, b"1000", 0)
        try:
            return os.fork()
        finally:
            if os.getpid() == self.supervisor:
                os.pwrite(self.oom_fd, self.own_oom_score, 0)

    def apply(self) -> None:
        """Apply limits and, outside namespaces, filters in the child.

        It stays as undumpable as the supervisor until the order arrives, so that nobody can open its memory or
        descriptors.
        """
        limit_resources(self.limits)
        if self.user_limit is not None:
            self.user_limit.take()
        if self.landlock:
            readable, writable, network = self.landlock
            kernel.landlock(readable, writable, network=network)
        if self.seccomp:
            kernel.install_seccomp(self.seccomp)


def limit_resources(limits: dict[str, int]) -> None:
    """Lower resource limits by name (CPU, NOFILE, ...); never raises one above what the process has."""
    for name, value in limits.items():
        which = getattr(resource, "RLIMIT_" + name)
        soft, hard = resource.getrlimit(which)
        most = value + 1 if name == "CPU" else value  # a second between SIGXCPU, which tells why, and SIGKILL
        if hard != resource.RLIM_INFINITY:
            value, most = min(value, hard), min(most, hard)
        if (value, most) != (soft, hard):  # gVisor refuses to set some, even to what they are
            resource.setrlimit(which, (value, most))


def prepare(confinement: Confinement) -> None:
    """Do once in the supervisor what every child would otherwise repeat. Pages that a fresh child does not write
    to need not be copied."""
    confinement.supervisor = os.getpid()
    os.environ.clear()
    os.environ.update(confinement.env)
    for name in ("exit", "quit"):  # the part of `site` that affects programs
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    fresh_main()


def spare(
    confinement: Confinement, page: mmap.mmap, control: int, stdin: int, stdout: int, stderr: int
) -> NoReturn:
    """Run a pre-forked child from start to finish. Never returns to the supervisor's code."""
    status = 1
    try:
        _settle(confinement, control, stdin, stdout, stderr)
        # Touch the pages that running a program touches, unless somebody is already waiting for it.
        if not select.select([CONTROL], [], [], 0)[0]:
            exec(compile(WARM, "program.py", "exec", dont_inherit=True), {"__name__": "__main__"})
        status = _serve(confinement, page, sys.modules["__main__"].__dict__)
    except EOFError:
        status = 0
    except BaseException as error:
        frames.write_all(2, f"sandbox: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(status)


def _settle(confinement: Confinement, control: int, stdin: int, stdout: int, stderr: int) -> None:
    """Start a session and keep only the four descriptors."""
    # The supervisor keeps 0 to 3 busy, so none of the four is overwritten before its turn.
    for target, fd in enumerate((stdin, stdout, stderr, control)):
        os.dup2(fd, target, inheritable=target != CONTROL)
    os.setsid()
    confinement.apply()
    os.closerange(CONTROL + 1, 1 << 20)
    with contextlib.suppress(OSError):  # a locked folder is no obstacle to the supervisor
        os.chdir(confinement.home)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    if confinement.signalled_ends:
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    sys.path[:] = SITE[:] = confinement.site  # the programs' folder comes first where untrusted code begins
    gc.enable()


def _serve(confinement: Confinement, page: mmap.mmap, scope: dict[str, Any]) -> int:
    """Wait for the order and execute it."""
    head, payload = frames.read_frame(CONTROL)
    order = frames.decode(head)
    limit_resources(order["rlimits"])
    kind = order["kind"]
    if kind != "file" and confinement.foreign_seccomp:
        kernel.install_seccomp(confinement.foreign_seccomp)
    if kind in ("bash", "python_session", "sqlite"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        if confinement.fences:
            kernel.fence()
        return int(SESSIONS.serve(kind, CONTROL, scope))
    os.write(CONTROL, ACCEPTED)
    os.close(CONTROL)
    own = os.getpid()
    if kind == "file":
        status = files.perform(order["file"])
    else:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # its own /proc entries must be its own
        if order["beside"] and confinement.fences_fresh:
            kernel.fence(signals=False)
        os.environ.update(order["env"])
        try:
            if order["cwd"] != confinement.home:
                os.chdir(order["cwd"])
        except OSError as error:
            frames.write_all(2, f"sandbox: cannot enter {order['cwd']!r}: {error.strerror}\n".encode())
            return 126
        if kind == "exec":
            return execute(order["argv"])
        status = run_python(payload, order["argv"], scope)
    if os.getpid() == own:  # not a copy that the program has made
        _say_the_end(page, status)
    return status


def _say_the_end(page: mmap.mmap, status: int) -> None:
    """Notify the supervisor, so that it need not wait while the kernel tears this process down.

    A program that fakes this message gains no more than by calling `os._exit`. Processes that had children report
    nothing, because only the kernel knows the CPU time of those children.
    """
    if not resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss:
        WORD.pack_into(page, 0, True, status & 0xFF, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        os.closerange(1, 3)  # the supervisor sees both streams end


def execute(argv: list[str]) -> int:
    """Replace this process with a program; exits with 127 or 126 and a line on stderr on failure, as a shell
    does."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        text = "command not found" if missing else os.strerror(error.errno or 0)
        frames.write_all(2, f"sandbox: {argv[0]}: {text}\n".encode("utf-8", "replace"))
        return 127 if missing else 126
    except ValueError as error:
        frames.write_all(2, f"sandbox: {argv[0]!r}: {error}\n".encode("utf-8", "replace"))
        return 126


def fresh_main() -> None:
    """Create a new, empty `__main__` and remove all traces of the supervisor's modules."""
    package = PACKAGE
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")]:
        del sys.modules[name]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main


def show_exception(error: BaseException, sources: dict[str, bytes]) -> None:
    """Print the traceback as Python would, using the lines of `sources` (by file name) and omitting our own
    frames."""
    if sys.stderr is None:
        return
    theirs, sys.path = sys.path, [*SITE]
    try:
        import linecache
        import traceback

        for name, data in sources.items():
            text = data.decode("utf-8", "replace")
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        trace = error.__traceback__
        ours = f"<{PACKAGE}."
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    finally:
        sys.path = theirs


def exit_status(error: SystemExit) -> int:
    """Return the exit status a shell would see for this SystemExit; text goes to stderr, as in Python."""
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 255
    if sys.stderr is not None:
        sys.stderr.write(f"{code}\n")
    return 1


def run_python(program: bytes, argv: list[str], scope: dict[str, Any]) -> int:
    """Run a complete program as `__main__` and return the exit status that `python program.py` would have."""
    name = "program.py"
    sys.argv = [name, *argv]
    status = 0
    try:
        # Bytes, not text, so that coding lines and byte-order marks take effect.
        code = compile(program, name, "exec", dont_inherit=True)
        sys.path.insert(0, "")
        exec(code, scope)
    except SystemExit as error:
        status = exit_status(error)
    except BaseException as error:
        show_exception(error, {name: program})
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return finish(status)


def finish(status: int) -> int:
    """Do what the interpreter does at exit and `os._exit` does not: threads, atexit, flush."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
    except SystemExit as error:
        status = exit_status(error)
    except BaseException as error:
        show_exception(error, {})
        status = status or 1
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or 120
    return status
