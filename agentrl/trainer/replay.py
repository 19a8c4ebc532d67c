"""Replay the updates of a run from its files, and compare the weights with those that the run saved."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.learner.learner import Learner
from agentrl.run_folder.checkpoints import steps_saved, verify
from agentrl.run_folder.earlier_configs import config_at, ends
from agentrl.run_folder.records import EpisodeRecord, read_metrics, read_records
from agentrl.scratch import ScratchFolder
from agentrl.trainer.algorithm import Algorithm, algorithm_of
from agentrl.trainer.save import resume
from agentrl.trainer.start import make_learner, start_directory
from agentrl.types import Group

FORWARD = ("kl", "entropy", "loss")
"""Metrics of the forward pass, compared before `grad_norm`, which is the backward pass's."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        step: the last step that was replayed.
        from_step: the checkpoint that it began with; 0 is the start policy.
        digest: sha256 of the weights after `step`, as replayed.
        saved_digest: of the run's own checkpoint of that step; None if it is not kept.
        tensor: the first tensor that differs, in the order of the model; empty if none does, or nothing is kept.
        max_difference: the largest difference of its numbers.
        metrics: by step, each compared metric as the run logged it and as replayed, where they differ.
    """

    step: int
    from_step: int
    digest: str
    saved_digest: str | None = None
    tensor: str = ""
    max_difference: float = 0.0
    metrics: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, as far as the run kept what to compare with."""
        return self.saved_digest in (None, self.digest) and not self.metrics

    @property
    def first_in(self) -> str:
        """Where the first difference is: `forward` or `backward`, with its step; empty if there is none."""
        for step, found in sorted(self.metrics.items()):
            return f"{'forward' if found.keys() & set(FORWARD) else 'backward'} pass of step {step}"
        return "" if self.equal else f"optimizer, or a step between {self.from_step} and {self.step}"


def replay(run: Path, step: int) -> Replay:
    """Recompute the updates up to `step` from the newest checkpoint before it and the recorded episodes.

    Raises:
        CheckpointError: the run does not have that step, or its episodes or checkpoint are damaged.
    """
    last = max((int(line["step"]) for line in read_metrics(run)), default=0)
    if not 1 <= step <= last:
        raise CheckpointError(f"{run}: step {step} cannot be replayed; the run has the steps 1 to {last}")
    return asyncio.run(_replay(run, step))


async def _replay(run: Path, step: int) -> Replay:
    kept = steps_saved(run / "checkpoints")
    first = max((each for each in kept if each < step), default=0)
    start = start_directory(config_at(run, step), run)
    policy = run / "checkpoints" / f"step-{first}" if first else start
    if first:
        verify(policy)
    logged = {int(line["step"]): line for line in read_metrics(run)}
    differing: dict[int, Mapping[str, tuple[float, float]]] = {}
    with ScratchFolder("replay") as scratch:
        bounds = [first, *(end for end in ends(run) if first < end < step), step]
        for begin, end in pairwise(bounds):
            config = config_at(run, end)
            learner = await make_learner(config, policy, start)
            try:
                algorithm = algorithm_of(config, reference_apart=learner.reference_apart, record=False)
                if begin:
                    await resume(learner, algorithm, policy)
                for number in range(begin + 1, end + 1):
                    found = await _update(learner, algorithm, groups_of(read_records(run, number)))
                    if changed := _changed(logged.get(number, {}), found):
                        differing[number] = changed
                if end == step:
                    weights = await learner.weights()
                else:  # the run was resumed here with other settings
                    policy = scratch.path / f"step-{end}"
                    policy.mkdir()
                    await learner.save(policy, algorithm.state_dict())
            finally:
                await learner.close()
    result = Replay(step, first, digest(weights), metrics=differing)
    saved = run / "checkpoints" / f"step-{step}"
    return _compared(result, weights, saved) if step in kept else result


async def _update(learner: Learner, algorithm: Algorithm, groups: Sequence[Group]) -> Mapping[str, float]:
    """One step of `agentrl.trainer.loop`, without sampling; returns its metrics."""
    rows = algorithm.rows(groups)
    rows = await learner.annotate(rows, algorithm.advantage_needs)
    rows = algorithm.advantages(rows)
    rows = await learner.annotate(rows, algorithm.loss_needs)
    rows = algorithm.corrections(rows)
    update = await learner.step(rows)
    algorithm.observe(update.metrics, rows.num_episodes)
    return update.metrics


def groups_of(records: Sequence[EpisodeRecord]) -> list[Group]:
    """The groups of a step as they were trained, without those that were set aside."""
    by_number: dict[int, list[EpisodeRecord]] = {}
    for record in records:
        if not record.set_aside:
            by_number.setdefault(record.group, []).append(record)
    found = []
    for _, each in sorted(by_number.items()):
        played = [record for record in each if not record.baseline]
        episodes = tuple(record.episode for record in played if record.episode.error is None)
        failed = tuple(record.episode for record in played if record.episode.error is not None)
        greedy = next((record.episode for record in each if record.baseline), None)
        found.append(Group(each[0].episode.task, episodes, failed, greedy))
    return found


def digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 of the names, shapes and bytes of all tensors, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()


def _changed(logged: Mapping[str, float], found: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    names = [*FORWARD, "grad_norm"]
    both = [name for name in names if logged.get(name) is not None and name in found]
    return {name: (logged[name], found[name]) for name in both if logged[name] != found[name]}


def _compared(result: Replay, weights: Mapping[str, Tensor], saved: Path) -> Replay:
    """Add the comparison with a checkpoint of the run."""
    own: dict[str, Tensor] = {}
    for file in sorted(saved.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            own |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in weights}  # noqa: SIM118
    mine = {name: weights[name].detach().cpu() for name in own}
    differs = next((name for name in weights if name in own and not torch.equal(mine[name], own[name])), "")
    gap = float((mine[differs].double() - own[differs].double()).abs().max()) if differs else 0.0
    return Replay(result.step, result.from_step, digest(mine), digest(own), differs, gap, metrics=result.metrics)
