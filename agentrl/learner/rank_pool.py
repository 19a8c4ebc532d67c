"""Ray workers that hold one model together: one rank each, with a GPU (or a CPU core) to itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from torch import Tensor

from agentrl.errors import AgentRLError, ConfigError, WorkerLost
from agentrl.garbage import collect_rarely
from agentrl.learner.memory import keep_freed_memory
from agentrl.learner.rank import LearnerSpec, Part, Rank, Result
from agentrl.ports import reserved_port

if TYPE_CHECKING:
    from agentrl.learner.shard import World

Made_co = TypeVar("Made_co", covariant=True)

START_S, NEAR_S, GRACE_S, EXCHANGE_S = 300.0, 10.0, 15.0, 1800.0
"""Wait for the cluster to have room; for the node of this process to have some; for the other ranks once one has
failed; for the slowest rank to meet."""


class MakeRank(Protocol[Made_co]):
    """Makes one rank of a model."""

    def __call__(self, spec: LearnerSpec, world: World) -> Made_co: ...


class RankPool(Generic[Rank]):
    """The Ray workers of one model, in one placement group: its `Ranks`.

    Args:
        ray: the module, connected.
        model: `learner`, `reference` or `critic`, for messages.
        make: makes the rank inside its worker.
        size: how many ranks.
        gpus: whether each has a GPU.
        near: take the GPUs of this process's node first, if they are free. Rank 0 sends this process whole
            weights. It broadcasts them to servers from the node's first GPU, and NCCL refuses to form a group in
            which a server has this GPU, too: Ray gives the first ones to whoever asks first.
    """

    def __init__(
        self, ray: Any, model: str, make: MakeRank[Rank], size: int, *, gpus: bool, near: bool = False
    ) -> None:
        self._ray, self.model, self._make, self.size, self._gpus = ray, model, make, size, gpus
        self._workers: list[_Worker] = []
        self._failing = Lock()  # a checkpoint is written in another thread, which finds the ranks lost, too
        self._lost = ""  # which rank failed, and in what
        each = {"GPU": 1, "CPU": 1} if gpus else {"CPU": 1}
        here = self._here() if near and gpus else []
        self.group: Any = self._reserve([each | one for one in here] + [each] * (size - len(here)))
        if here and not self.group.wait(NEAR_S):  # others hold what is here
            import_module("ray.util").remove_placement_group(self.group)
            self.group = self._reserve([each] * size)

    @staticmethod
    def _reserve(bundles: Sequence[Mapping[str, float]]) -> Any:
        return import_module("ray.util").placement_group([dict(one) for one in bundles], strategy="PACK")

    def _here(self) -> list[dict[str, float]]:
        """What puts ranks on this process's node, one of them on each GPU that it has."""
        own = self._ray.get_runtime_context().get_node_id()
        node = next(node for node in self._ray.nodes() if node["NodeID"] == own)
        count = min(self.size, int(node["Resources"].get("GPU", 0)))
        return [{f"node:{node['NodeManagerAddress']}": 0.001} for _ in range(count)]

    def launch(self) -> None:
        """Start the workers once the cluster has room for them, on as few nodes as possible.

        Raises:
            ConfigError: it has no room.
            WorkerLost: a worker died.
        """
        if not self.group.wait(START_S):
            raise ConfigError(
                f"the Ray cluster had no room for {self.size} ranks of the {self.model}, each with one "
                f"{'GPU' if self._gpus else 'CPU'}, within {START_S:g} s: others hold it"
            )
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = self._ray.remote(concurrency_groups={"disk": 1})(RankWorker)
        for rank in range(self.size):
            place = strategy(self.group, placement_group_bundle_index=rank)
            options = actor.options(num_cpus=1, num_gpus=int(self._gpus), scheduling_strategy=place)
            self._workers.append(_Worker(rank, options.remote(self.model, rank, self.size)))
        places = self._gather([w.actor.where.remote() for w in self._workers], "start")
        for worker, (host, pid) in zip(self._workers, places, strict=True):
            worker.place = f"process {pid} on {host}"

    def load(self, spec: LearnerSpec) -> Callable[[], None]:
        """Start loading a shard on every rank; what is returned waits."""
        self._gather([worker.actor.look_for.remote(list(spec.folders)) for worker in self._workers], "start")
        address = self._gather([self._workers[0].actor.address.remote()], "start")[0]
        refs = [worker.actor.join.remote(address, self._make, spec) for worker in self._workers]

        def wait() -> None:
            self._gather(refs, "start")

        return wait

    def start(
        self, call: Callable[[Rank, Part], Result], parts: Sequence[Part], *, doing: str, writes: bool = False
    ) -> Callable[[], list[Result]]:
        """Call every rank, each with its own part; see `agentrl.learner.rank.Ranks`."""
        workers = self._workers
        if not workers:  # nobody may have waited for the call that found them lost
            raise self._ended()
        refs = []
        for worker, part in zip(workers, parts, strict=True):
            remote = worker.actor.call.options(concurrency_group="disk") if writes else worker.actor.call
            refs.append(remote.remote(call, part))
        return lambda: self._gather(refs, doing)

    def close(self) -> None:
        """End the workers; idempotent."""
        workers, self._workers = self._workers, []
        if workers and self._ray.is_initialized():
            leaving = [worker.actor.leave.remote() for worker in workers]
            self._ray.wait(leaving, num_returns=len(leaving), timeout=GRACE_S)
            self._kill(workers)
        group, self.group = self.group, None
        if group is not None and self._ray.is_initialized():
            import_module("ray.util").remove_placement_group(group)

    def _gather(self, refs: Sequence[Any], what: str) -> list[Any]:
        """The results of all ranks; a failure of one does not wait for the others.

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
        """The error to raise after a rank has failed; stops the ranks unless all raised the same agentrl error."""
        with self._failing:
            workers = self._workers
            if not workers:  # lost before, or closed while another thread waits
                return self._ended()
            errors = self._errors(refs, GRACE_S)
            task_error = self._ray.exceptions.RayTaskError
            causes = {rank: e.cause if isinstance(e, task_error) else e for rank, e in errors.items()}
            if len(errors) == len(refs) and all(isinstance(cause, AgentRLError) for cause in causes.values()):
                return causes[0]
            dead = {rank: e for rank, e in errors.items() if not isinstance(e, task_error)}
            if not dead:  # one may have died after it had answered
                dead = self._errors([worker.actor.where.remote() for worker in workers], GRACE_S)
            rank, error = next(iter((dead or causes).items()))
            self._lost = (
                f"{self.model} rank {rank} of {self.size} ({workers[rank].place}) "
                f"{'died' if dead else 'failed'} in {what}: {' '.join(str(error).split())[:400]}. "
                "No finished checkpoint is lost: run the same command again to resume"
            )
            self._workers = []
            self._kill(workers)
            if dead:
                return WorkerLost(self._lost)
            return next((cause for cause in causes.values() if isinstance(cause, AgentRLError)), error)

    def _ended(self) -> WorkerLost:
        ended = f"the ranks of the {self.model} have ended; run the same command again to resume"
        return WorkerLost(self._lost or ended)

    def _errors(self, refs: Sequence[Any], timeout_s: float) -> dict[int, Exception]:
        """Which of the calls have failed, once all have ended or the time is up."""
        done, _ = self._ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        errors: dict[int, Exception] = {}
        for rank, ref in enumerate(refs):
            if ref in done:
                try:
                    self._ray.get(ref)
                except self._ray.exceptions.RayError as e:
                    errors[rank] = e
        return errors

    def _kill(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            self._ray.kill(worker.actor)


@dataclass(slots=True)
class _Worker:
    rank: int
    actor: Any
    place: str = "not yet placed"


class RankWorker:
    """The Ray actor: one rank. The arguments of `join` import PyTorch."""

    def __init__(self, model: str, rank: int, size: int) -> None:
        collect_rarely()
        self.model, self.rank, self.size = model, rank, size
        self._world: World | None = None
        self._held: object = None
        self._port = ExitStack()

    def where(self) -> tuple[str, int]:
        """(address of the node, process)."""
        return _node_address(), os.getpid()

    def look_for(self, folders: Sequence[Path]) -> None:
        """Raise ConfigError if a model directory does not exist on this node."""
        for folder in folders:
            if not (folder / "config.json").is_file():
                raise ConfigError(
                    f"{self.model} rank {self.rank} on {_node_address()} sees no model in {folder}: models and "
                    "run folder must be visible to all nodes of the cluster under the same path"
                )

    def address(self) -> str:
        """Where the ranks meet if this is rank 0."""
        port = self._port.enter_context(reserved_port(""))  # torch listens on all addresses
        return f"tcp://{_node_address()}:{port}"

    def join(self, address: str, make: MakeRank[object], spec: LearnerSpec) -> None:
        """Meet the other ranks and load this one's shard. Raises ConfigError for a model that cannot be used."""
        from agentrl.learner.shard import World
        from agentrl.models.device import pick_device, use_device

        keep_freed_memory()
        device, sequence = pick_device(spec.config.device), spec.config.sequence_ranks
        use_device(device)
        with self._port:
            self._world = World.join(self.rank, self.size, device, address, EXCHANGE_S, sequence)
        self._held = make(spec, self._world)

    def call(self, function: Callable[[Any, Part], Result], part: Part) -> Result:
        """Call a function with this rank, which it was written for (`Ranks.start` checks that), and its part."""
        found = function(self._held, part)
        if isinstance(found, dict):  # unpickled elsewhere, a tensor on a GPU takes memory of the first one there
            found = cast(Result, {k: v.cpu() if isinstance(v, Tensor) else v for k, v in found.items()})
        return found

    def leave(self) -> None:
        """Leave the other ranks; idempotent."""
        if self._world is not None:
            self._world.leave()


def _node_address() -> str:
    address: str = import_module("ray.util").get_node_ip_address()
    return address
