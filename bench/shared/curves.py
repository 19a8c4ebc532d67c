"""The curves of a run, from its metrics."""

from __future__ import annotations

import json
from pathlib import Path


def curve(folder: Path) -> dict[str, list[float]]:
    """Held-out results, the first before training, and the KL to the reference or teacher at each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "held_out": [line["held_out"] for line in lines if "held_out" in line],
        "kl": [round(line["kl"], 4) for line in lines if line["step"] > 0],
    }
