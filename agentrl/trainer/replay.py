"""Replay the updates of a run from its files, and compare the weights with those that the run saved."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.config.changes import kind_of
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.learner import Learner
from agentrl.rollout.content import require_teachers
from agentrl.rollout.renderer import load_renderer
from agentrl.run_folder.checkpoints import steps_saved, verify
from agentrl.run_folder.earlier_configs import config_at, ends
from agentrl.run_folder.records import read_groups, read_metrics
from agentrl.scratch import ScratchFolder
from agentrl.trainer.algorithm import Algorithm, algorithm_of
from agentrl.trainer.hints import make_hints
from agentrl.trainer.save import resume
from agentrl.trainer.start import make_learner, start_directory
from agentrl.types import Group

FORWARD = ("kl", "entropy", "observation_loss", "loss", "critic/value", "critic/value_error")
"""Metrics of the forward passes."""
BACKWARD = ("grad_norm", "critic/grad_norm")
"""Metrics of the backward passes, compared after those of the forward passes."""
PARTS = {"": "model*.safetensors", "critic/": "critic/model*.safetensors", "optimizer/": "optimizer*.safetensors"}
"""The files of a checkpoint that are compared, in this order, and what comes before their tensors' names."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        step: the last step that was replayed.
        from_step: the checkpoint that it began with; 0 is the start policy.
        digest: sha256 of the policy's weights after `step`, as replayed.
        saved_digest: of the run's own checkpoint of that step; None if it is not kept.
        tensor: the first tensor that differs, in the order of the model: of the policy, or `critic/NAME`, or
            `optimizer/NAME`; empty if none does, or nothing is kept.
        max_difference: the largest difference of its numbers; None if one of the two has no such tensor.
        metrics: by step, each compared metric as the run logged it and as replayed, where they differ.
    """

    step: int
    from_step: int
    digest: str
    saved_digest: str | None = None
    tensor: str = ""
    max_difference: float | None = 0.0
    metrics: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, as far as the run kept what to compare with."""
        return self.saved_digest in (None, self.digest) and not self.tensor and not self.metrics

    @property
    def first_in(self) -> str:
        """Where the first difference is: `forward` or `backward`, with its step; empty if there is none."""
        for step, found in sorted(self.metrics.items()):
            return f"{'forward' if found.keys() & set(FORWARD) else 'backward'} pass of step {step}"
        return "" if self.equal else f"optimizer, or a step between {self.from_step} and {self.step}"


def replay(run: Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Recompute the updates up to `step` from the newest checkpoint before it and the recorded episodes.

    Args:
        run: the run folder.
        step: the last step.
        overrides: settings of teachers to use instead of the run's, as `KEY=VALUE`; only those that do not change
            what is learned.

    Raises:
        ConfigError: an override is refused, or the updates replayed routes, which are not recorded.
        CheckpointError: the run does not have that step, its episodes or checkpoints are damaged, or its model is
            gone.
        InfraError: nothing accepts connections at the URL of a teacher.
    """
    last = max((int(line["step"]) for line in read_metrics(run)), default=0)
    if not 1 <= step <= last:
        there = f"the run has the steps 1 to {last}" if last else "its metrics.jsonl has no steps"
        raise CheckpointError(f"{run}: step {step} cannot be replayed; {there}")
    for text in overrides:
        loc = text.partition("=")[0].strip().split(".")
        if "teacher" not in loc or kind_of(loc) != "free":
            raise ConfigError(
                f"--set {text}: a replay repeats the run; only `url`, `key_env`, `max_concurrent`, `timeout_s` "
                "and `retry_s` of a teacher can be set"
            )
    return asyncio.run(_replay(run, step, overrides))


async def _replay(run: Path, step: int, overrides: Sequence[str]) -> Replay:
    kept = steps_saved(run / "checkpoints")
    first = max((each for each in kept if each < step), default=0)
    start = start_directory(config_at(run, step, overrides), run)
    if not start.is_dir():
        raise CheckpointError(
            f"{run}: the model it started with is gone from {start}; put it back, or link it there"
        )
    policy = run / "checkpoints" / f"step-{first}" if first else start
    for each in {first, step}.intersection(kept):
        verify(run / "checkpoints" / f"step-{each}")
    logged = {int(line["step"]): line for line in read_metrics(run)}
    differing: dict[int, Mapping[str, tuple[float, float]]] = {}
    with ScratchFolder("replay") as scratch:
        bounds = [first, *(end for end in ends(run) if first < end < step), step]
        configs = [config_at(run, end, overrides) for end in bounds[1:]]
        if any(config.learner.replay_routes for config in configs):
            raise ConfigError(
                f"{run}: updates with learner.replay_routes cannot be replayed: a run folder does not hold the "
                "experts that the sampler chose"
            )
        for (begin, end), config in zip(pairwise(bounds), configs, strict=True):
            await require_teachers(config.teachers_on_servers.values())
            learner = await make_learner(config, policy, start)
            try:
                reads = config.teacher is not None and config.teacher.hint != "none"
                hints = await make_hints(config, load_renderer(config, start), policy) if reads else None
                algorithm = algorithm_of(config, learner.reference_apart, hints, record=False)
                if begin:
                    await resume(learner, algorithm, policy)
                for number in range(begin + 1, end + 1):
                    found = await _update(learner, algorithm, read_groups(run, number))
                    if changed := _changed(logged.get(number, {}), found):
                        differing[number] = changed
                policy = scratch.path / f"step-{end}"  # the run may have been resumed here with other settings
                policy.mkdir()
                await learner.save(policy, algorithm.state_dict())
                order = list(await learner.weights())
            finally:
                await learner.close()
        result = Replay(step, first, digest(_tensors(policy, PARTS[""])), metrics=differing)
        return _compared(result, policy, run / "checkpoints" / f"step-{step}", order) if step in kept else result


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


def digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 of the names, shapes and bytes of all tensors, in the order of their names."""
    found = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()


def _changed(logged: Mapping[str, float], found: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    names = [*FORWARD, *BACKWARD]
    both = [name for name in names if logged.get(name) is not None and name in found]
    return {name: (logged[name], found[name]) for name in both if logged[name] != found[name]}


def _compared(result: Replay, replayed: Path, saved: Path, order: Sequence[str]) -> Replay:
    """Add the comparison of two checkpoints: the replayed one and the run's.

    Args:
        order: the names of the policy's tensors, as in the model.
    """
    place = {name: number for number, name in enumerate(order)}
    result = replace(result, saved_digest=digest(_tensors(saved, PARTS[""])))
    for prefix, files in PARTS.items():
        mine, own = _tensors(replayed, files), _tensors(saved, files)
        for name in sorted({*mine, *own}, key=lambda name: (place.get(name.partition("/")[0], len(place)), name)):
            one, other = mine.get(name), own.get(name)
            if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
                return replace(result, tensor=prefix + name, max_difference=None)
            if not torch.equal(one, other):
                gap = float((one.double() - other.double()).abs().max())
                return replace(result, tensor=prefix + name, max_difference=gap)
    return result


def _tensors(checkpoint: Path, files: str) -> dict[str, Tensor]:
    """The tensors of some files of a checkpoint, without the states of random generators."""
    found: dict[str, Tensor] = {}
    for file in sorted(checkpoint.glob(files)):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return {name: value for name, value in found.items() if not name.startswith("rng/")}
