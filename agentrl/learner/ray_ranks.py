"""A learner of many ranks: Ray workers, one per rank, each with a shard of the model.

The workers are started on the cluster that `ray` names, or on one started for the run on this machine.
Reference and critic may have ranks of their own. A worker that dies ends the run with `WorkerLost`: the others
cannot go on without its shard, and the run folder is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.learner.driver import Driver
from agentrl.learner.rank_pool import RankPool
from agentrl.learner.shard import check_offload
from agentrl.ray_cluster import connect, import_ray

KEYS = {"learner": "learner.ranks", "reference": "learner.reference_ranks", "critic": "critic.ranks"}
"""The setting that says how many ranks a model has."""


class RankedLearner(Driver):
    """The learner on `config.ranks` Ray workers, and models with ranks of their own; arguments as of `Learner`.

    `ray` is the address of the cluster; without it one is started on this machine.

    Raises:
        ConfigError: Ray is not installed, or the cluster has too little room.
        WorkerLost: a worker died while it started.
    """

    def __init__(
        self, policy_dir: Path, *, algorithm: AlgorithmConfig, optim: OptimConfig, config: LearnerConfig,
        temperature: float, total_steps: int, reference_dir: Path | None = None,
        critic: CriticConfig | None = None, critic_dir: Path | None = None, seed: int = 0, ray: str | None = None,
    ) -> None:  # fmt: skip
        sizes = {"learner": config.ranks}
        if reference_dir is not None and config.reference_ranks:
            sizes["reference"] = config.reference_ranks
        if critic is not None and critic_dir is not None and critic.ranks:
            sizes["critic"] = critic.ranks
        here = None if critic_dir is None else critic
        super().__init__(
            algorithm, config, config.ranks, critic=here, seed=seed, reference_apart="reference" in sizes
        )
        self._ray = import_ray(_all_of([f"{KEYS[name]}: {n}" for name, n in sizes.items()]))
        self.pools: dict[str, RankPool] = {}
        self._started = connect(self._ray, ray, cpus=sum(sizes.values()))
        try:
            gpus = _has_room(self._ray, config.device, sizes)
            shape = config.model_copy(update={"device": "cuda" if gpus else "cpu"})
            check_offload(shape, shape.device)
            for name, ranks in sizes.items():
                self.pools[name] = RankPool(self._ray, name, ranks, gpus=gpus)
            folders = {"policy_dir": policy_dir, "reference_dir": reference_dir, "critic_dir": critic_dir}
            policy, reference, values = (None if f is None else f.absolute() for f in folders.values())
            common = {"config": shape, "temperature": temperature}
            trained = {"algorithm": algorithm, "optim": optim, "total_steps": total_steps, "critic": critic}
            beside = {
                "reference_dir": None if "reference" in sizes else reference,
                "critic_dir": None if "critic" in sizes else values,
            }
            self._load(
                {
                    "learner": common | trained | beside | {"policy_dir": policy},
                    "reference": common | {"directory": reference},
                    "critic": {"config": shape, "directory": values} | trained,
                }
            )
        except BaseException:
            self.close()
            raise
        self.apart |= {name: pool for name, pool in self.pools.items() if name != "learner"}

    def ask(self, method: str, parts: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Call a method on every rank of the policy."""
        return self.pools["learner"].ask(method, parts)

    def close(self) -> None:
        """End the workers, and the cluster if it was started for them; idempotent."""
        for pool in self.pools.values():
            pool.close()
        if self._started:
            self._ray.shutdown()
            self._started = False

    def _load(self, arguments: Mapping[str, Mapping[str, Any]]) -> None:
        """Start all ranks, and have them load their models at the same time."""
        for pool in self.pools.values():
            pool.start()
        waits = [pool.load(arguments[name]) for name, pool in self.pools.items()]
        for wait in waits:
            wait()


def _has_room(ray: Any, device: str, sizes: Mapping[str, int]) -> bool:
    """Whether the ranks compute on GPUs.

    Raises:
        ConfigError: the cluster has too few of what each rank needs.
    """
    total = ray.cluster_resources()
    gpus = device != "cpu" and (device != "auto" or int(total.get("GPU", 0)) > 0)
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"learner.device {device!r}: for ranks on Ray it is `cpu`, `cuda` or `auto`")
    ranks = sum(sizes.values())
    asked = _all_of([f"{KEYS[name]} is {n}" for name, n in sizes.items()])
    for kind in ("GPU", "CPU") if gpus else ("CPU",):
        if total.get(kind, 0) < ranks:
            raise ConfigError(
                f"{asked}, but the Ray cluster has {total.get(kind, 0):g} {kind}s: use fewer ranks, or more nodes"
            )
    return gpus


def _all_of(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
