"""What a kernel of its own (gVisor) asks for: ends of children without pidfds, a PID 1 that can be killed."""

from __future__ import annotations

import subprocess
import sys

ENDS = """
import errno, os, select

def refuse(pid):
    raise OSError(errno.ENOSYS, "not here")

os.pidfd_open = refuse
from agentrl.sandbox.inside import tree
assert tree.pidfd(os.getpid()) == -1
ends, wakeup = tree.signalled_ends()
assert select.select([ends], [], [], 0)[0] == []
go_r, go_w = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(go_r, 1)
    os._exit(7)
assert not tree.is_over(pid)
os.write(go_w, b".")
assert select.select([ends], [], [], 30)[0] == [ends]
os.read(ends, 100)
assert tree.is_over(pid) and tree.is_over(pid)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""

SIGNALS = """
import errno, os
from agentrl.sandbox.inside import kernel

def tried(call):
    try:
        call()
    except OSError as error:
        return error.errno
    return "done"

mine = os.getpid()
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.install_seccomp(kernel.seccomp_filter(network=True, shared_memory=False, mortal_init=True))
assert tried(lambda: kernel.syscall("tgkill", 1, 1, 0)) == errno.EPERM
assert tried(lambda: kernel.syscall("tkill", 1, 0)) == errno.EPERM
assert tried(lambda: os.kill(1, 0)) == errno.EPERM
assert tried(lambda: os.kill(mine, 0)) == "done"
assert tried(lambda: kernel.syscall("tgkill", mine, mine, 0)) == "done"
"""


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ends_of_children_are_told_by_signal_where_there_are_no_pidfds() -> None:
    run(ENDS)


def test_signals_to_a_mortal_init_are_refused() -> None:
    run(SIGNALS)
