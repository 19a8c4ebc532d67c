"""The parts of a plan: memory by phase, findings, and the devices and disk of this machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.run import RunConfig
from agentrl.gpu import gpu_memory, gpus_here
from agentrl.preflight.machines import Machine
from agentrl.preflight.shape import ModelShape

if TYPE_CHECKING:
    from agentrl.preflight.knobs import Knob
    from agentrl.preflight.predict import Prediction


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One step in numbers; tokens are the most that there can be."""

    tasks: int
    episodes: int
    updates: int
    episodes_per_update: float
    sampled_tokens: int
    tokens: int
    micro_batches_per_rank: int
    steps: int
    episodes_in_all: int
    rows: int | None
    """Training rows in data.train, None if the env makes its own tasks."""
    greedy: int = 0
    """Greedy episodes of `advantage: remax`, which are played in addition and not trained."""
    averaged: bool = False
    """Whether `episodes` and `greedy` are averages, because envs differ in them."""

    @property
    def played(self) -> int:
        """Episodes that are sampled, the greedy ones included."""
        return self.episodes + self.greedy


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of one process in one phase, in bytes by what it is for."""

    name: str
    where: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """The total in bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class PlanFinding:
    """The finding of a rule. `level`: error (it will fail), warning (it will hurt), note."""

    code: str
    level: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of `agentrl plan`."""

    model: ModelShape
    batch: Arithmetic
    placement: list[str]
    attention: str
    phases: list[Phase]
    kv_bytes_per_token: int
    kv_bytes: int
    kv_limited: bool
    """Whether memory limits the cache to less than all slots may need."""
    checkpoint_bytes: int
    checkpoints_bytes: int
    memory_bytes: int | None
    here: bool
    """Whether the run is planned for this machine."""
    findings: list[PlanFinding]
    machine: Machine | None = None
    """The GPUs that it is planned for, if they were named."""
    prediction: Prediction | None = None
    saves_most: Knob | None = None
    """The change of a setting that saves most."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        data = asdict(self)
        data["phases"] = [asdict(phase) | {"total": phase.total} for phase in self.phases]
        data["model"].pop("linear")
        return data


def colocated(config: RunConfig) -> bool:
    """Whether engine and learner are in the process of the run, on one device."""
    if config.learner_on_ray or config.engine.on_servers:
        return False
    devices = {_numbered(config.learner.device), _numbered(config.engine.device)}
    return config.engine.own or len(devices) == 1


def _numbered(device: str) -> str:
    return {"cuda": "cuda:0"}.get(device, device)


def own_devices(config: RunConfig, gpu: bool) -> dict[str, int]:
    """Devices of the Ray cluster that each model has to itself."""
    scorer, found = config.reward_model, {"policy": config.learner.ranks}
    if config.learner.reference_ranks:
        found["reference"] = config.learner.reference_ranks
    if config.critic is not None and config.critic.ranks:
        found["critic"] = config.critic.ranks
    if not config.learner_on_ray:
        found = {}
    if gpu and scorer is not None and scorer.workers and scorer.device != "cpu":
        found["reward model"] = scorer.workers
    return found


def on_gpu(config: RunConfig) -> bool:
    """Whether the learner will compute on a GPU of this machine."""
    if config.learner.device != "auto":
        return config.learner.device.startswith("cuda")
    return gpus_here() > 0


def machine_memory(gpu: bool) -> int | None:
    """Memory of this machine's first GPU, or of the machine; None if GPUs are planned that are not here."""
    if not gpu:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return gpu_memory()


def disk_free(folder: Path) -> int:
    """Bytes that can be written there."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size(number: int) -> str:
    """Bytes in readable units."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return (
                f"{number} B"
                if unit == "B"
                else f"{value:.3g} {unit}"
                if value < 999.5
                else f"{value:,.0f} {unit}"
            )
        value /= 1024
    return f"{value:.3g} TiB" if value >= 1 else f"{number} B"
