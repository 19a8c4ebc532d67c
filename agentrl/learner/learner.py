"""The learner: splits each step over its ranks and merges their results.

The ranks are in this process or in Ray workers; the step is the same. Reference and critic share the policy's
ranks, or have ranks to themselves that work at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from agentrl.config.algorithm import CriticConfig
from agentrl.learner.pack import as_taught, in_pack_order
from agentrl.learner.rank import Annotator, Checkpointed, CriticRank, LearnerSpec, Note, PolicyRank, Ranks
from agentrl.learner.split import (
    Columns,
    MicroBatches,
    Passes,
    RankResult,
    Rows,
    StepResult,
    StepRows,
    TokenValues,
    merge_results,
    rank_timing,
    split_rows,
    split_step,
)
from agentrl.learner.teacher_server import TeacherRanks
from agentrl.models.device import release_gpu_memory
from agentrl.types import Sample, has_teacher

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=StepRows)
THREAD = "agentrl-learner"


def in_thread(
    method: Callable[Concatenate[Learner, P], T],
) -> Callable[Concatenate[Learner, P], Coroutine[Any, Any, T]]:
    """Run a method in the learner's thread; awaiting it never blocks the event loop."""

    @wraps(method)
    async def call(self: Learner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(method, self, *args, **kwargs))

    return call


class Learner:
    """The learner of a run. Every method runs in a dedicated thread, so the event loop never waits for it.

    Attributes:
        reference_apart: whether the reference has ranks to itself, so its log-probabilities must be annotated.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        policy: Ranks[PolicyRank],
        *,
        reference: Ranks[Annotator] | None = None,
        critic: Ranks[CriticRank] | None = None,
        begin: Callable[[], None] | None = None,
        disconnect: Callable[[], None] | None = None,
    ) -> None:
        """Train with these ranks, which the learner owns from now on.

        Args:
            reference: ranks of the reference, if it does not share the policy's.
            critic: ranks of the critic, if it does not share the policy's.
            begin: called first in the learner's thread.
            disconnect: called after the ranks have stopped.
        """
        passes = Passes(spec.algorithm.updates_per_step, spec.algorithm.epochs, spec.seed)
        self._max_tokens, self._sequence_ranks = spec.config.micro_batch_tokens, spec.config.sequence_ranks
        self._passes = passes
        self._critic_passes = passes if spec.critic is None else critic_passes(spec.critic, passes)
        self._policy, self._reference, self._critic = policy, reference, critic
        self._shares_critic = spec.critic_dir is not None and spec.critic is not None and critic is None
        self._disconnect = disconnect
        self._thread, self._closed = ThreadPoolExecutor(1, THREAD, begin), False
        self._apart: dict[int, tuple[str, ...]] = {}
        self.reference_apart = reference is not None

    @in_thread
    def rows_apart(self) -> tuple[str, ...]:
        """The classes of models that compute each row apart (see `agentrl.learner.apart`)."""
        held = [ranks for ranks in (self._policy, self._reference, self._critic) if ranks is not None]
        return tuple(dict.fromkeys(name for ranks in held for name in self._apart_in(ranks)))

    @in_thread
    def annotate(self, step: S, names: frozenset[str]) -> S:
        """The same rows with the named columns, except those of idle episodes; models evaluate side by side.

        Args:
            names: `learner_logprobs`, `ref_logprobs`, `values`, `entropy`, `sum_pi_squared`.
        """
        rows = [row for row in step.samples if row.episode_id not in step.idle]
        if not rows or not names:
            return step
        columns: list[dict[str, tuple[float, ...]]] = [{} for _ in rows]
        for found in [wait() for wait in self._evaluating(rows, names)]:
            for known, new in zip(columns, found, strict=True):
                known |= new
        annotated = iter(
            [replace(row, columns={**row.columns, **new}) for row, new in zip(rows, columns, strict=True)]
        )
        samples = [row if row.episode_id in step.idle else next(annotated) for row in step.samples]
        return replace(step, samples=samples)

    @in_thread
    def step(self, rows: StepRows) -> StepResult:
        """One step on a batch: `epochs` times `updates_per_step` optimizer updates with global normalization.

        Raises:
            AgentRLError: the gradient is not finite.
            WorkerLost: a rank died.
        """
        nothing: list[list[MicroBatches]] = [[] for _ in range(self._policy.size)]
        critic_work = self._split(rows, self._critic_passes, self._policy) if self._shares_critic else nothing
        work = self._split(rows, self._passes, self._policy)
        policy = self._policy.start(
            lambda rank, work: rank.update(*work), list(zip(work, critic_work, strict=True)), doing="the update"
        )
        values = None
        if self._critic is not None:
            shares = self._split(rows, self._critic_passes, self._critic)
            values = self._critic.start(lambda rank, work: rank.update(work), shares, doing="the update")
        results = policy()
        merged = merge_results(rows, results, [] if values is None else values(), epochs=self._passes.epochs)
        merged = replace(merged, timing=rank_timing(work, results, times=self._sequence_ranks))
        return replace(merged, values=_values(rows, work, results)) if rows.record else merged

    @in_thread
    def imitate(self, samples: Sequence[Sample], lr: float) -> float:
        """One supervised step: returns the mean negative log-likelihood of the tokens under the mask.

        Raises:
            AgentRLError: the gradient is not finite.
            WorkerLost: a rank died.
        """
        total = sum(sum(s.loss_mask) for s in samples)
        shares = self._share(samples, self._policy)
        wait = self._policy.start(
            lambda rank, share: rank.imitate(share, total, lr), shares, doing="a supervised step"
        )
        return sum(wait())

    @in_thread
    def probe(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The log-probabilities (temperature 1) of the trained tokens of each row under the current policy."""
        shares = self._share(samples, self._policy)
        wait = self._policy.start(lambda rank, share: rank.probe(share), shares, doing="evaluating rows")
        return [list(columns["logprobs"]) for columns in _by_row(samples, shares, wait())]

    @in_thread
    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by their Hugging Face names; tied parameters have one of their names."""
        return self._each_policy(lambda rank, _: rank.weights(), "gathering weights")[0]

    @in_thread
    def adapter(self) -> dict[str, Tensor]:
        """The adapter's matrices in host memory, named as peft names them in a file."""
        return self._each_policy(lambda rank, _: rank.adapter(), "gathering the adapter")[0]

    @in_thread
    def snapshot(self, note: Note) -> Callable[[Path], None]:
        """Copy everything that a checkpoint holds.

        Args:
            note: saved with it, for `load` to return.

        Returns:
            A function that writes the copy into a directory; training may continue meanwhile. It blocks.
        """
        self._kept(lambda rank, _: rank.snapshot(note), "taking a snapshot")
        return self._write

    async def save(self, directory: Path, note: Note) -> None:
        """Write a checkpoint: the policy as a Hugging Face model, and what training needs to resume."""
        write = await self.snapshot(note)
        await asyncio.get_running_loop().run_in_executor(self._thread, write, directory)

    @in_thread
    def load(self, directory: Path) -> Note:
        """Restore the checkpoint's state other than the weights, however many ranks wrote it; returns its note.

        Raises:
            CheckpointError: the files are missing or damaged, or belong to another model.
        """
        folder = directory.absolute()
        return self._kept(lambda rank, _: rank.load(folder), "loading a checkpoint")

    @in_thread
    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model, and nothing else."""
        folder = directory.absolute()
        self._each_policy(lambda rank, _: rank.export(folder), "exporting the policy")

    @in_thread
    def release(self) -> None:
        """Have all ranks return the GPU memory that they keep for later tensors, to the servers that share it."""
        held: list[Ranks[Any]] = [
            ranks for ranks in (self._policy, self._reference, self._critic) if ranks is not None
        ]
        waits = [
            ranks.start(lambda rank, _: release_gpu_memory(), [None] * ranks.size, doing="releasing memory")
            for ranks in held
        ]
        for wait in waits:
            wait()

    async def close(self) -> None:
        """End the ranks once the current call is done; idempotent."""
        if not self._closed:
            self._closed = True
            if isinstance(self._reference, TeacherRanks):
                self._reference.close()  # the current call may be waiting for it
            await self._close()
            self._thread.shutdown(wait=False)

    # --- in the learner's thread ---------------------------------------------------------------------------------

    def _split(self, step: StepRows, passes: Passes, ranks: Ranks[Any]) -> list[list[MicroBatches]]:
        apart = bool(self._apart_in(ranks))
        return split_step(step, passes, ranks=ranks.size, max_tokens=self._max_tokens, apart=apart)

    def _share(self, rows: Sequence[Sample], ranks: Ranks[Any]) -> list[tuple[Rows, ...]]:
        apart = bool(self._apart_in(ranks))
        return split_rows(rows, ranks=ranks.size, max_tokens=self._max_tokens, apart=apart)

    def _apart_in(self, ranks: Ranks[Any]) -> tuple[str, ...]:
        """The classes of models of these ranks that compute each row apart."""
        if id(ranks) not in self._apart:
            wait = ranks.start(lambda rank, _: rank.rows_apart, [None] * ranks.size, doing="start")
            self._apart[id(ranks)] = wait()[0]
        return self._apart[id(ranks)]

    def _evaluating(self, rows: Sequence[Sample], names: frozenset[str]) -> list[Callable[[], list[Columns]]]:
        """Start every model that knows one of the columns; what is returned waits for the columns of each row."""
        taught = [as_taught(row) for row in rows]
        hinted = any(row.hinted is not None for row in rows)
        reference = self._policy if self._reference is None and hinted else self._reference
        models: list[tuple[Ranks[Annotator], frozenset[str], Sequence[Sample]]] = []
        for apart, own, read in ((reference, {"ref_logprobs"}, taught), (self._critic, {"values"}, rows)):
            if apart is not None:
                models.append((apart, names & own, read))
                names -= own
        return [self._evaluate(*each) for each in [(self._policy, names, rows), *models] if each[1]]

    def _evaluate(
        self, ranks: Ranks[Annotator], names: frozenset[str], rows: Sequence[Sample]
    ) -> Callable[[], list[Columns]]:
        shares = self._share(rows, ranks)
        wait = ranks.start(lambda rank, share: rank.annotate(share, names), shares, doing="evaluating rows")
        return lambda: _by_row(rows, shares, wait())

    def _write(self, directory: Path) -> None:
        folder = directory.absolute()
        self._kept(lambda rank, _: rank.write(folder), "writing a checkpoint", writes=True)

    def _kept(self, call: Callable[[Checkpointed, None], T], doing: str, *, writes: bool = False) -> T:
        """Call all ranks that are part of a checkpoint; returns the answer of the policy's first rank."""
        kept: list[Ranks[Checkpointed]] = [self._policy, *([] if self._critic is None else [self._critic])]
        waits = [ranks.start(call, [None] * ranks.size, doing=doing, writes=writes) for ranks in kept]
        answers = [wait() for wait in waits]
        return answers[0][0]

    def _each_policy(self, call: Callable[[PolicyRank, None], T], doing: str) -> list[T]:
        return self._policy.start(call, [None] * self._policy.size, doing=doing)()

    @in_thread
    def _close(self) -> None:
        for ranks in (self._policy, self._reference, self._critic):
            if ranks is not None:
                ranks.close()
        disconnect, self._disconnect = self._disconnect, None
        if disconnect is not None:
            disconnect()


def critic_passes(critic: CriticConfig, policy: Passes) -> Passes:
    """Those of the critic; what it leaves out is as for the policy."""
    return Passes(critic.updates_per_step or policy.updates, critic.epochs or policy.epochs, policy.seed)


def _values(
    step: StepRows, work: Sequence[Sequence[MicroBatches]], results: Sequence[RankResult]
) -> Sequence[TokenValues]:
    """What the ranks recorded, in the order of the step's rows; the first update that saw a row counts."""
    found: dict[int, TokenValues] = {}
    for updates, result in zip(work, results, strict=True):
        for update, values in zip(updates, result.values, strict=False):  # only the first pass is recorded
            rows = [row for batch in update.rows for row in in_pack_order(batch)]
            for row, one in zip(rows, values, strict=True):
                found.setdefault(id(row), one)
    return [_without_reference(found.get(id(row), {}), row) for row in step.samples]


def _without_reference(values: TokenValues, row: Sample) -> TokenValues:
    return values if has_teacher(row) else {k: v for k, v in values.items() if k != "ref_logprobs"}


def _by_row(
    samples: Sequence[Sample], shares: Sequence[Sequence[Rows]], found: Sequence[Sequence[Columns]]
) -> list[Columns]:
    """The columns that ranks returned, in the order of `samples`."""
    place = {id(sample): index for index, sample in enumerate(samples)}
    out: list[Columns] = [{} for _ in samples]
    for share, columns in zip(shares, found, strict=True):
        laid = [row for batch in share for row in in_pack_order(batch)]
        for row, values in zip(laid, columns, strict=True):
            out[place[id(row)]] = values
    return out
