"""Ray workers that hold one model between them: a rank each, on a GPU (or CPU) of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, WorkerLost

START_S, GRACE_S, EXCHANGE_S = 300.0, 15.0, 1800.0
"""Wait for the cluster to have room; for the other ranks once one has failed; for the slowest rank to meet."""


class RankPool:
    """The ranks of one model, in a placement group of their own.

    Args:
        ray: the module, connected.
        model: `learner`, `reference` or `critic`, as messages call it and `RankWorker` makes it.
        ranks: how many.
        gpus: whether each has a GPU.
    """

    def __init__(self, ray: Any, model: str, ranks: int, *, gpus: bool) -> None:
        self._ray, self.model, self.ranks, self._gpus = ray, model, ranks, gpus
        self._workers: list[_Worker] = []
        each = {"GPU": 1, "CPU": 1} if gpus else {"CPU": 1}
        self.group: Any = import_module("ray.util").placement_group([each] * ranks, strategy="PACK")

    def start(self) -> None:
        """Start the workers once the cluster has room for them, on as few nodes as possible.

        Raises:
            ConfigError: it has no room.
            WorkerLost: a worker died.
        """
        if not self.group.wait(START_S):
            raise ConfigError(
                f"the Ray cluster had no room for {self.ranks} ranks of the {self.model}, each with one "
                f"{'GPU' if self._gpus else 'CPU'}, within {START_S:g} s: others hold it"
            )
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = self._ray.remote(concurrency_groups={"disk": 1})(RankWorker)
        for rank in range(self.ranks):
            place = strategy(self.group, placement_group_bundle_index=rank)
            options = actor.options(num_cpus=1, num_gpus=int(self._gpus), scheduling_strategy=place)
            self._workers.append(_Worker(rank, options.remote(self.model, rank, self.ranks)))
        places = self._gather([w.actor.where.remote() for w in self._workers], "start")
        for worker, (host, pid) in zip(self._workers, places, strict=True):
            worker.place = f"process {pid} on {host}"

    def load(self, arguments: Mapping[str, Any]) -> Callable[[], list[Any]]:
        """Have every rank load its shard; what is returned waits.

        Args:
            arguments: of the class that holds the model, but its `world`.
        """
        address = self._gather([self._workers[0].actor.address.remote()], "start")[0]
        refs = [worker.actor.join.remote(address, arguments) for worker in self._workers]
        return lambda: self._gather(refs, "start")

    def ask(self, method: str, parts: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Call a method on every rank; see `agentrl.learner.driver.Ranks`."""
        if not self._workers:
            raise WorkerLost(f"the ranks of the {self.model} have ended; run the same command again to resume")
        refs = []
        for worker, part in zip(self._workers, parts, strict=True):
            call = worker.actor.call
            group = "disk" if method == "write_part" else None
            refs.append((call.options(concurrency_group=group) if group else call).remote(method, *part))
        return lambda: self._gather(refs, method)

    def close(self) -> None:
        """End the workers; idempotent."""
        workers, self._workers = self._workers, []
        if workers and self._ray.is_initialized():
            leaving = [worker.actor.call.remote("close") for worker in workers]
            self._ray.wait(leaving, num_returns=len(leaving), timeout=GRACE_S)
            self._kill(workers)
        group, self.group = self.group, None
        if group is not None and self._ray.is_initialized():
            import_module("ray.util").remove_placement_group(group)

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
                    f"{self.model} rank {rank} of {self.ranks} ({workers[rank].place}) died in {what}: "
                    f"{reason[:400]}. No finished checkpoint is lost: run the same command again to resume"
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

    def __init__(self, model: str, rank: int, size: int) -> None:
        self.model, self.rank, self.size = model, rank, size
        self._held: Any = None

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
        from agentrl.learner.critic import Critic
        from agentrl.learner.learner import Learner
        from agentrl.learner.memory import keep_freed_memory
        from agentrl.learner.reference import Reference
        from agentrl.learner.shard import World
        from agentrl.models.device import pick_device

        keep_freed_memory()
        for folder in arguments.values():
            if isinstance(folder, Path) and not (folder / "config.json").is_file():
                raise ConfigError(
                    f"{self.model} rank {self.rank} on {_node_address()} sees no model in {folder}: models and "
                    "run folder must lie where all nodes of the cluster see them under the same path"
                )
        make: Callable[..., Any] = {"learner": Learner, "reference": Reference, "critic": Critic}[self.model]
        device = pick_device(arguments["config"].device)
        world = World.join(self.rank, self.size, device, address, EXCHANGE_S)
        self._held = make(**arguments, world=world)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of what holds the model."""
        return None if self._held is None else getattr(self._held, method)(*arguments)


def _node_address() -> str:
    address: str = import_module("ray.util").get_node_ip_address()
    return address
