"""The server that forks the local engine's processes."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import multiprocessing.forkserver
from pathlib import Path
from agentrl.engine.fork_server import fork_server

fork_server()
server = Path(f"/proc/{multiprocessing.forkserver._forkserver._forkserver_pid}/status")
print(next(line.split()[1] for line in server.read_text().splitlines() if line.startswith("SigBlk")))
"""


def test_signals_that_are_meant_for_the_run_do_not_reach_the_server():
    """In a new process, where nothing has started Python's resource tracker yet."""
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert int(said, 16) & 0x4003 == 0x4003, "SIGHUP (1), SIGINT (2) and SIGTERM (15) are not blocked"


FORKED = """
import os
from agentrl.engine.fork_server import fork_server

fork_server()
child = os.fork()
if not child:
    process = fork_server().Process(target=print, args=("forked",))
    process.start()
    process.join()
    os._exit(process.exitcode)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_was_forked_after_the_start_starts_another_server():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "forked\n"), done.stderr
