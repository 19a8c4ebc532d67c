"""vf-eval again and again, in forks of a process that has imported it; run by the Python of verifiers.

Reads a JSON object with `arguments`, `env` and `log` from each line of standard input, and writes the exit status.
"""

import gc
import json
import os
import sys
from pathlib import Path

import verifiers.v1.tasksets  # noqa: F401  # which main imports later
from verifiers.v1.cli.eval.main import main

gc.freeze()
for line in sys.stdin:
    asked = json.loads(line)
    if child := os.fork():
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
        continue
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:0] = asked["env"]["PYTHONPATH"].split(os.pathsep)
    sys.argv = ["vf-eval", *asked["arguments"]]
    with Path(os.devnull).open("r+b") as nothing, Path(asked["log"]).open("wb") as log:
        for to, fd in enumerate((nothing, nothing, log)):
            os.dup2(fd.fileno(), to)
    sys.exit(main())
