"""Servers on a Ray cluster, in a process of their own: one that loses its actor is started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("ray")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_loses_its_actor_is_started_again_with_the_current_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 97}))
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "servers_program.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == [40] * 6
    assert found["versions"] == [3]
    assert "server 0 is lost" in found["said"][0]
    assert "answers again" in found["said"][-1]
