"""A KL penalty with the wrong sign, and losses below zero that are none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.doctor.examine import findings

KL = [0.1, 3.0, 6.7, 2.0, 1.0, 0.5]
COEF = 0.1


def reversed_penalty(folder: Path, losses: Sequence[float]) -> bool:
    """Whether the doctor says so of a run with these losses."""
    steps = enumerate(zip(KL, losses, strict=True), 1)
    lines = [json.dumps({"step": number, "seconds": 1.0, "kl": kl, "loss": loss}) for number, (kl, loss) in steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "config.yaml").write_text(json.dumps({"algorithm": {"kl": {"coef": COEF}}}))
    return "kl-sign" in {finding.name for finding in findings(folder)}


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ([-COEF * kl for kl in KL], True),
        ([-0.3, -0.2, -0.5, -0.6, -0.1, -0.4], True),  # falls with KL, if only a little, and ends below it
        ([COEF * kl for kl in KL], False),
        ([0.1, 0.0, 0.1, -0.2, 0.2, -0.3], False),  # ends below zero, but does not fall as KL rises
    ],
)
def test_the_loss_must_fall_as_kl_rises(tmp_path: Path, losses: list[float], named: bool):
    assert reversed_penalty(tmp_path, losses) == named
