"""What one rank of a model does for the learner, and how the learner reaches all ranks of a model at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.config.teacher import TeacherConfig

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.algo.metrics import Metrics
    from agentrl.learner.split import Columns, MicroBatches, RankResult, Rows

Rank = TypeVar("Rank")
Rank_co = TypeVar("Rank_co", covariant=True)
Part = TypeVar("Part")
Result = TypeVar("Result")
Note = Mapping[str, Any]
"""Counters and other small things in a checkpoint, as JSON."""


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """The inputs of a learner.

    Attributes:
        policy_dir: a Hugging Face model directory.
        temperature: the sampling temperature.
        total_steps: of the run, for the learning-rate schedule.
        reference_dir: the model that training began with: what adapters are added to, and the frozen model of the
            KL penalty unless there is a teacher; None if neither is needed.
        teacher: the model of the KL penalty instead, unless it is on a server.
        servers: the teachers on servers, by env.
        average_dir: a checkpoint's average of the policy, if that is the teacher.
        reference_elsewhere: whether the frozen model has ranks to itself.
        critic_dir: what the critic starts from; None if there is no critic.
        seed: of the order in which episodes are dealt out over updates.
        ray: address of the Ray cluster; without it one is started on this machine.
    """

    policy_dir: Path
    algorithm: AlgorithmConfig
    optim: OptimConfig
    config: LearnerConfig
    temperature: float
    total_steps: int
    reference_dir: Path | None = None
    teacher: TeacherConfig | None = None
    servers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    average_dir: Path | None = None
    reference_elsewhere: bool = False
    critic: CriticConfig | None = None
    critic_dir: Path | None = None
    seed: int = 0
    ray: str | None = None

    @property
    def frozen_dir(self) -> Path | None:
        """What the model of the KL penalty starts from, if these ranks evaluate it and it is not the policy's."""
        if self.algorithm.kl.coef == 0 or self.reference_elsewhere or self.servers:
            return None
        teacher = self.teacher
        if teacher is None or teacher.policy == "initial":
            return self.reference_dir
        if teacher.policy == "average":
            return self.average_dir or self.reference_dir
        return None if teacher.path is None else Path(teacher.path)

    @property
    def adapters_off(self) -> bool:
        """Whether the frozen model is the policy without its adapters."""
        initial = self.teacher is None or self.teacher.policy == "initial"
        return self.config.lora is not None and initial and self.frozen_dir is not None

    @property
    def teaches_itself(self) -> bool:
        """Whether the teacher is the policy as it is."""
        return self.teacher is not None and self.teacher.policy == "current" and self.algorithm.kl.coef > 0

    @property
    def average_rate(self) -> float:
        """How far the teacher follows the policy in each step; 0 if it is frozen."""
        return self.teacher.rate if self.teacher is not None and self.teacher.policy == "average" else 0.0

    @property
    def folders(self) -> tuple[Path, ...]:
        """The model directories."""
        found = (self.policy_dir, self.reference_dir, self.frozen_dir, self.critic_dir)
        return tuple(dict.fromkeys(d for d in found if d is not None))


class Annotator(Protocol):
    """One rank of a model that evaluates rows."""

    @property
    def rows_apart(self) -> tuple[str, ...]:
        """The classes of its models that compute each row apart (see `agentrl.learner.apart`)."""
        ...

    def annotate(self, batches: Sequence[Rows], names: frozenset[str]) -> list[Columns]:
        """The named columns of this rank's rows, in the order of `in_pack_order`."""
        ...


class Checkpointed(Protocol):
    """One rank of a model that is part of a checkpoint."""

    def snapshot(self, note: Note) -> None:
        """Copy this rank's part of a checkpoint, for `write`."""
        ...

    def write(self, directory: Path) -> None:
        """Write what `snapshot` copied, and forget it."""
        ...

    def load(self, directory: Path) -> Note:
        """Restore this rank's part of a checkpoint; returns its note.

        Raises:
            CheckpointError: the files are missing or belong to another model.
        """
        ...


class PolicyRank(Annotator, Checkpointed, Protocol):
    """One rank of the policy that is trained; all ranks must be called alike."""

    def update(self, work: Sequence[MicroBatches], critic_work: Sequence[MicroBatches] = ()) -> RankResult:
        """This rank's part of a step.

        Args:
            critic_work: for the critic, if it shares the policy's ranks.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        ...

    def imitate(self, batches: Sequence[Rows], total: int, lr: float) -> float:
        """This rank's part of a supervised step on `total` trained tokens; returns its part of the loss.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        ...

    def probe(self, batches: Sequence[Rows]) -> list[Columns]:
        """`logprobs` (temperature 1) of this rank's rows."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Parameters by their Hugging Face names; {} except on rank 0."""
        ...

    def adapter(self) -> dict[str, Tensor]:
        """The adapter's matrices; {} except on rank 0."""
        ...

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model; rank 0 writes."""
        ...


class CriticRank(Annotator, Checkpointed, Protocol):
    """One rank of a critic that has ranks to itself."""

    def update(self, work: Sequence[MicroBatches]) -> Metrics:
        """This rank's part of a step.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        ...


class Ranks(Protocol[Rank_co]):
    """All ranks of one model."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def start(
        self, call: Callable[[Rank_co, Part], Result], parts: Sequence[Part], *, doing: str, writes: bool = False
    ) -> Callable[[], list[Result]]:
        """Call all ranks concurrently, each with its part.

        Args:
            call: applied to each rank; it must not capture anything that cannot be pickled.
            doing: what is being done, for error messages.
            writes: whether this only writes files, so that it may run while the ranks compute.

        Returns:
            A function that waits for the results. It raises what the ranks raise, or WorkerLost if one died.
        """
        ...

    def close(self) -> None:
        """End the ranks; idempotent."""
        ...


class GroupedRanks(Generic[Rank]):
    """Ranks in groups of `times` neighbors that do the same work, presented as one rank per group."""

    def __init__(self, ranks: Ranks[Rank], times: int) -> None:
        self._ranks, self._times, self.size = ranks, times, ranks.size // times

    def start(
        self, call: Callable[[Rank, Part], Result], parts: Sequence[Part], *, doing: str, writes: bool = False
    ) -> Callable[[], list[Result]]:
        """Give each part to all ranks that share it; their results are the same, and the first one's counts."""
        each = [part for part in parts for _ in range(self._times)]
        wait = self._ranks.start(call, each, doing=doing, writes=writes)
        return lambda: wait()[:: self._times]

    def close(self) -> None:
        """End the ranks; idempotent."""
        self._ranks.close()


class Closing(Protocol):
    """Something that can be closed."""

    def close(self) -> None:
        """Release its resources; idempotent."""
        ...


class InProcess(Generic[Rank]):
    """One rank, in this process."""

    size = 1

    def __init__(self, rank: Rank, closing: Closing) -> None:
        self.rank, self._closing = rank, closing

    def start(
        self, call: Callable[[Rank, Part], Result], parts: Sequence[Part], *, doing: str, writes: bool = False
    ) -> Callable[[], list[Result]]:
        """Nothing is computed until the results are waited for, so ranks in other processes work meanwhile."""
        return lambda: [call(self.rank, part) for part in parts]

    def close(self) -> None:
        """Leave the process group; idempotent."""
        self._closing.close()
