"""The doctor as a program, for a run that is training: `python -m agentrl.doctor.look RUN STEP` prints JSON."""

import json
import os
import sys
from pathlib import Path

from agentrl.doctor.examine import findings

NICENESS = 19
"""Rollout and update go first."""

if __name__ == "__main__":
    os.nice(NICENESS)
    json.dump([finding.data() for finding in findings(Path(sys.argv[1]), int(sys.argv[2]))], sys.stdout)
