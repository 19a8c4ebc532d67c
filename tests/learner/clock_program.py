"""Two ranks of a learner, one with slow layers: `python -m tests.learner.clock_program FOLDER`.

Prints the metrics of each step as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn

from agentrl.learner.shard import World
from tests.learner.sequence_program import forked, learner, spec_of
from tests.learner.train_models import make_batch, write_model

STEPS = 6
SLEEP_S = 0.2


def slow_down(model: nn.Module) -> None:
    """Its first block waits at least SLEEP_S, and on a busy machine much longer than a forward takes there."""
    began, slept, longest = 0.0, 0.0, 0.0

    def begin(module: nn.Module, args: object) -> None:
        nonlocal began, slept
        began, slept = time.monotonic(), 0.0

    def wait(module: nn.Module, args: object) -> None:
        nonlocal slept
        slept = max(SLEEP_S, 5 * longest)
        time.sleep(slept)

    def end(module: nn.Module, args: object, output: object) -> None:
        nonlocal longest
        longest = max(longest, time.monotonic() - began - slept)

    model.register_forward_pre_hook(begin)
    model.layers[0].register_forward_pre_hook(wait)
    model.register_forward_hook(end)


def train(folder: Path, world: World, sequence: int) -> list[dict[str, Any]]:
    """A few steps; the blocks of rank 1 take longer."""
    driver = learner(spec_of(folder, "qwen3", world.size, sequence), world)
    if world.rank == 1:
        slow_down(driver.policy.model)
    found = []
    for seed in range(STEPS):
        began = time.monotonic()
        result = driver.step(make_batch(seed, groups=2))
        found.append({**result.metrics, **result.timing, "update_seconds": time.monotonic() - began})
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1])
    write_model(where / "qwen3", seed=0)
    sys.stdout.write(json.dumps(forked(train, where, (2, 1))) + "\n")
