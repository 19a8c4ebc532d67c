"""Compact optimizer state on two ranks, beside one: `python -m tests.learner.optimizer_program FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.rank import LearnerSpec
from agentrl.learner.shard import World
from tests.learner.sequence_program import forked, learner
from tests.learner.train_models import make_batch, write_model


def spec_of(policy: Path, state: Any, ranks: int) -> LearnerSpec:
    return LearnerSpec(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.0}),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, state=state),
        config=LearnerConfig(device="cpu", ranks=ranks, tokens_per_micro_batch=600),
        temperature=1.0,
        total_steps=10,
    )


def train(folder: Path, world: World, _: int) -> None:
    """Two steps, a checkpoint, two more."""
    for state in ("bfloat16", "int8"):
        driver = learner(spec_of(folder / "policy", state, world.size), world)
        saved = folder / f"{state}-{world.size}"
        saved.mkdir(exist_ok=True)
        for seed in range(2):
            driver.step(make_batch(seed))
        driver.save(saved)
        for seed in range(2, 4):
            driver.step(make_batch(seed))
        write(driver, saved / "weights.pt", world)


def resume(folder: Path, world: World, _: int) -> None:
    """The checkpoint of two ranks saved again, and two more steps from it."""
    for state in ("bfloat16", "int8"):
        saved = folder / f"{state}-2"
        driver = learner(spec_of(saved, state, world.size), world)
        driver.load_optimizer(saved)
        (saved / "again").mkdir()
        driver.save(saved / "again")
        for seed in range(2, 4):
            driver.step(make_batch(seed))
        write(driver, saved / "resumed.pt", world)


def write(driver: Any, file: Path, world: World) -> None:
    weights = driver.weights()
    if world.rank == 0:
        torch.save(weights, file)


def gap(one: Path, other: Path) -> float:
    ours, theirs = torch.load(one), torch.load(other)
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def moments(folder: Path) -> dict[str, torch.Tensor]:
    """The state of the optimizer in a checkpoint, whole: the rows that each rank wrote, in their order."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in folder.glob("optimizer*.safetensors"):
        with safe_open(file, "pt") as tensors:
            first = tensors.metadata() or {}
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                if not name.startswith("rng/"):
                    pieces.setdefault(name, []).append((int(first.get(name, 0)), tensors.get_tensor(name)))
    ordered = {
        name: [rows for _, rows in sorted(found, key=lambda pair: pair[0])] for name, found in pieces.items()
    }
    return {name: torch.cat(rows) if rows[0].dim() else rows[0] for name, rows in ordered.items()}


def same(one: Path, other: Path) -> bool:
    ours, theirs = moments(one), moments(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def main(folder: Path) -> dict[str, Any]:
    write_model(folder / "policy", seed=0, hidden=64)
    for size in (1, 2):
        forked(train, folder, (size, 1))
    forked(resume, folder, (1, 1))
    return {
        state: {
            "gap": gap(folder / f"{state}-1/weights.pt", folder / f"{state}-2/weights.pt"),
            "same": same(folder / f"{state}-2", folder / f"{state}-2" / "again"),
            "resumed": gap(folder / f"{state}-2/resumed.pt", folder / f"{state}-2/weights.pt"),
        }
        for state in ("bfloat16", "int8")
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
