"""The end of a process that looks for garbage rarely."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import os, signal
from agentrl.garbage import collect_rarely

class Left:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

collect_rarely()
left = Left()
left.itself = left
del left
"""


def test_ctrl_c_at_the_very_end_shows_no_traceback():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode == -signal.SIGINT
