"""How far training with a compact optimizer state is from training with float32, and what it saves.

    python -m bench.optimizer [--steps 200] [--quick] [--json bench/results/optimizer.json]

Trains the tiny model of bench/learner.py on the same rows with `optim.state` float32, bfloat16 and int8: the
loss is supervised, so that it falls and can be compared. `drift` is how far the parameters end from those of
float32, relative to how far float32 moved them; `loss` is the mean of the last tenth of the steps. The
baseline is the drift between two float32 runs whose rows are packed into other micro-batches, which differ in
the order of sums only. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.learner import Learner
from agentrl.learner.moments import moment_bytes
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import InProcess, LearnerSpec
from agentrl.types import Sample
from bench.learner import Shape, make_model, make_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

STATES: tuple[Any, ...] = ("float32", "bfloat16", "int8")
GOAL_DRIFT, GOAL_LOSS = 0.1, 0.01
LR = 1e-3


def trained(
    directory: Path, shape: Shape, state: Any, steps: int, tokens: int
) -> tuple[list[float], Tensor, LocalPolicyRank]:
    """The losses, the parameters at the end, and the rank that trained them."""
    spec = LearnerSpec(
        directory,
        algorithm=AlgorithmConfig.model_validate({"kl": {"coef": 0.0}}),
        optim=OptimConfig(lr=LR, warmup_steps=0, state=state),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=tokens),
        temperature=1.0,
        total_steps=steps,
    )
    rank = LocalPolicyRank(spec)
    learner = Learner(spec, InProcess(rank, rank))
    batches = [make_batch(shape, seed) for seed in range(8)]

    async def run() -> list[float]:
        return [await learner.imitate(batches[step % len(batches)], LR) for step in range(steps)]

    losses = asyncio.run(run())
    return losses, flat(rank.policy), rank


def make_batch(shape: Shape, seed: int) -> list[Sample]:
    return make_rows(replace(shape, groups=2, group_size=4, prompt=(30, 60), answer=(10, 40)), seed=seed)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def state_bytes(rank: LocalPolicyRank) -> float:
    """Bytes of the moments per trained parameter."""
    held = sum(
        value.numel() * value.element_size()
        for entries in rank.optimizer.state.values()
        for name, value in entries.items()
        if name != "step"
    )
    return held / sum(p.numel() for p in rank.policy.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="20 steps of a smaller model: under a minute")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    arguments = parser.parse_args()
    steps = 20 if arguments.quick else arguments.steps
    shape = Shape(layers=2, hidden=64, vocab=512) if arguments.quick else Shape(layers=2)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(shape, directory)
        reference, order = None, None
        for state in STATES:
            began = time.perf_counter()
            losses, end, rank = trained(directory, shape, state, steps, 4096)
            seconds = time.perf_counter() - began
            if reference is None:
                start = torch.cat([p.flatten() for p in _start(directory)])
                reference, moved = end, float((end - start).norm())
                order = float((trained(directory, shape, state, steps, 300)[1] - end).norm()) / moved
            found[state] = {
                "drift": round(float((end - reference).norm()) / moved, 5),
                "loss": round(statistics.mean(losses[-max(1, steps // 10) :]), 5),
                "bytes_per_parameter": round(state_bytes(rank), 3),
                "seconds": round(seconds, 1),
            }
            print(f"{state:9} {found[state]}", flush=True)
    base = found["float32"]["loss"]
    worst = max(abs(one["loss"] / base - 1) for one in found.values())
    drift = max(one["drift"] for one in found.values())
    line = {
        "bench": "optimizer",
        "ours": drift,
        "baseline": round(order or 0.0, 7),
        "unit": "parameter difference from float32, relative to how far float32 moved",
        "goal": GOAL_DRIFT,
        "loss_difference": round(worst, 5),
        "goal_loss": GOAL_LOSS,
        "met": drift <= GOAL_DRIFT and worst <= GOAL_LOSS,
        "states": found,
        "saved_8b_gib": {s: round(moment_bytes(4096, 2_000_000, s) / 2**30, 1) for s in STATES},
        "steps": steps,
        "lr": LR,
        "quick": arguments.quick,
        "cores": len(os.sched_getaffinity(0)),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(line, indent=1) + "\n")
    finish(line)


def _start(directory: Path) -> list[Tensor]:
    from agentrl.learner.policy_model import load_policy

    return [p.detach() for p in load_policy(directory, torch.device("cpu")).parameters()]


if __name__ == "__main__":
    main()
