"""Print what is wrong with a run up to a step, as JSON: `python -m agentrl.doctor RUN STEP`.

The trainer starts this during a run; `agentrl doctor` is the command for users.
"""

import json
import os
import sys
from pathlib import Path

LOWEST_PRIORITY = 19


def main() -> None:
    os.nice(LOWEST_PRIORITY)  # sampling and training need the cores more, also while this imports
    from agentrl.doctor.examine import findings

    json.dump([finding.data() for finding in findings(Path(sys.argv[1]), int(sys.argv[2]))], sys.stdout)


if __name__ == "__main__":
    main()
