"""A learner of many ranks: Ray workers, one per rank, each with a shard of the model.

The workers are started on the cluster that `learner.ray` names, or on one started for the run on this machine. One
that dies ends the run with `WorkerLost`: the others cannot go on without its shard, and the run folder is whole.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.cluster import connect, import_ray
from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import AgentRLError, ConfigError, WorkerLost
from agentrl.train.driver import Driver
from agentrl.train.shard import check_offload

START_S, GRACE_S, EXCHANGE_S = 300.0, 15.0, 1800.0
"""Wait for the cluster to have room; for the other ranks once one has failed; for the slowest rank to meet."""


class RankedLearner(Driver):
    """The learner on `config.ranks` Ray workers; the arguments are those of `Learner`.

    Raises:
        ConfigError: Ray is not installed, or the cluster has too little room.
        WorkerLost: a worker died while it started.
    """

    def __init__(
        self, policy_dir: Path, *, algorithm: AlgorithmConfig, optim: OptimConfig, config: LearnerConfig,
        temperature: float, total_steps: int, reference_dir: Path | None = None,
        critic: CriticConfig | None = None, critic_dir: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(algorithm, config, config.ranks)
        self._ray = import_ray("learner.ranks above 1")
        self._workers: list[_Worker] = []
        self._group: Any = None
        self._started = connect(self._ray, config.ray, cpus=config.ranks, key="learner.ray")
        arguments = {
            "policy_dir": policy_dir.absolute(),
            "algorithm": algorithm,
            "optim": optim,
            "temperature": temperature,
            "total_steps": total_steps,
            "reference_dir": None if reference_dir is None else reference_dir.absolute(),
            "critic": critic,
            "critic_dir": None if critic_dir is None else critic_dir.absolute(),
        }
        try:
            self._start(config, arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers, and the cluster if it was started for them; idempotent."""
        workers, self._workers = self._workers, []
        if workers and self._ray.is_initialized():
            leaving = [worker.actor.call.remote("close") for worker in workers]
            self._ray.wait(leaving, num_returns=len(leaving), timeout=GRACE_S)
            self._kill(workers)
        if self._group is not None:
            import_module("ray.util").remove_placement_group(self._group)
            self._group = None
        if self._started:
            self._ray.shutdown()
            self._started = False

    def _start(self, config: LearnerConfig, arguments: Mapping[str, Any]) -> None:
        ray, size = self._ray, config.ranks
        gpus = _gpus(ray, config)
        device = "cuda" if gpus else "cpu"
        check_offload(config, device)
        self._group = _reserve(ray, size, {"GPU": 1, "CPU": 1} if gpus else {"CPU": 1})
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = ray.remote(concurrency_groups={"disk": 1})(RankWorker)
        for rank in range(size):
            place = strategy(self._group, placement_group_bundle_index=rank)
            handle = actor.options(num_cpus=1, num_gpus=int(gpus), scheduling_strategy=place).remote(rank, size)
            self._workers.append(_Worker(rank, handle))
        places = self._gather([w.actor.where.remote() for w in self._workers], "start")
        for worker, (host, pid) in zip(self._workers, places, strict=True):
            worker.place = f"process {pid} on {host}"
        address = ray.get(self._workers[0].actor.address.remote())
        shape = config.model_copy(update={"device": device})
        refs = [w.actor.join.remote(address, {**arguments, "config": shape}) for w in self._workers]
        self._gather(refs, "start")

    def _each(self, method: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        if not self._workers:
            raise WorkerLost("the ranks of the learner have ended; run the same command again to resume")
        refs = []
        for worker, part in zip(self._workers, parts, strict=True):
            call = worker.actor.call
            group = "disk" if method == "write_part" else None
            refs.append((call.options(concurrency_group=group) if group else call).remote(method, *part))
        return self._gather(refs, method)

    def _gather(self, refs: Sequence[Any], what: str) -> list[Any]:
        """The results of all ranks; trouble of one is not waited out in the others.

        Raises:
            WorkerLost: a worker died; the others have been ended.
            AgentRLError: what the ranks themselves raised.
        """
        waiting = list(refs)
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1)
            try:
                self._ray.get(done)
            except self._ray.exceptions.RayError:
                raise self._trouble(refs, what) from None
        found: list[Any] = self._ray.get(list(refs))
        return found

    def _trouble(self, refs: Sequence[Any], what: str) -> Exception:
        """What to raise once a rank has failed; ends the ranks unless all have raised the same on purpose."""
        exceptions = self._ray.exceptions
        done, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_S)
        errors: dict[int, Exception] = {}
        for rank, ref in enumerate(refs):
            if ref in done:
                try:
                    self._ray.get(ref)
                except exceptions.RayError as e:
                    errors[rank] = e
        causes = [e.cause if isinstance(e, exceptions.RayTaskError) else e for e in errors.values()]
        if len(errors) == len(refs) and all(isinstance(cause, AgentRLError) for cause in causes):
            return causes[0]
        workers, self._workers = self._workers, []
        self._kill(workers)
        for rank, error in errors.items():
            if not isinstance(error, exceptions.RayTaskError):
                reason = " ".join(str(error).split())
                return WorkerLost(
                    f"learner rank {rank} of {len(refs)} ({workers[rank].place}) died in {what}: {reason[:400]}. "
                    "No finished checkpoint is lost: run the same command again to resume"
                )
        ours = [cause for cause in causes if isinstance(cause, AgentRLError)]
        return (ours or causes)[0]

    def _kill(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._ray.kill(worker.actor)


@dataclass(slots=True)
class _Worker:
    rank: int
    actor: Any
    place: str = "not yet placed"


class RankWorker:
    """The Ray actor: one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._learner: Any = None

    def where(self) -> tuple[str, int]:
        """(address of the node, process)."""
        return _node_address(), os.getpid()

    def address(self) -> str:
        """Where the ranks meet if this is rank 0."""
        host = _node_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, address: str, arguments: Mapping[str, Any]) -> None:
        """Meet the other ranks and load this one's shard.

        Raises:
            ConfigError: the model directory cannot be used, or is not seen from here.
        """
        from agentrl.engine.device import pick_device
        from agentrl.train.learner import Learner
        from agentrl.train.memory import keep_freed_memory
        from agentrl.train.shard import World

        keep_freed_memory()
        for name in ("policy_dir", "reference_dir", "critic_dir"):
            folder = arguments[name]
            if folder is not None and not (folder / "config.json").is_file():
                raise ConfigError(
                    f"learner rank {self.rank} on {_node_address()} sees no model in {folder}: models and run "
                    "folder must lie where all nodes of the cluster see them under the same path"
                )
        device = pick_device(arguments["config"].device)
        world = World.join(self.rank, self.size, device, address, EXCHANGE_S)
        self._learner = Learner(**arguments, world=world)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the learner."""
        return None if self._learner is None else getattr(self._learner, method)(*arguments)


def _gpus(ray: Any, config: LearnerConfig) -> bool:
    """Whether the ranks compute on GPUs."""
    has = int(ray.cluster_resources().get("GPU", 0))
    if config.device == "cpu" or (config.device == "auto" and not has):
        return False
    if config.device not in ("auto", "cuda"):
        raise ConfigError(
            f"learner.device {config.device!r}: with learner.ranks > 1 it is `cpu`, `cuda` or `auto`"
        )
    if has < config.ranks:
        raise ConfigError(
            f"learner.ranks is {config.ranks}, but the Ray cluster has {has} GPUs: use fewer ranks, or more nodes"
        )
    return True


def _reserve(ray: Any, size: int, each: Mapping[str, float]) -> Any:
    """Room for every rank, on as few nodes as possible.

    Raises:
        ConfigError: the cluster will not have it.
    """
    total = ray.cluster_resources()
    for name, number in each.items():
        if total.get(name, 0) < number * size:
            raise ConfigError(
                f"learner.ranks is {size}, but the Ray cluster has {total.get(name, 0):g} {name}s in all: start "
                "more nodes, or use fewer ranks"
            )
    group = import_module("ray.util").placement_group([dict(each)] * size, strategy="PACK")
    if not group.wait(START_S):
        import_module("ray.util").remove_placement_group(group)
        raise ConfigError(
            f"the Ray cluster had no room for {size} ranks of {dict(each)} within {START_S:g} s: others hold it"
        )
    return group


def _node_address() -> str:
    address: str = import_module("ray.util").get_node_ip_address()
    return address
