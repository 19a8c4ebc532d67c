"""Who drives the ranks of a learner: splits each step over them and puts together what they did.

The ranks are this process itself (`Learner`) or Ray workers (`RankedLearner`); the step is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig
from agentrl.errors import CheckpointError
from agentrl.train.estimate import Scores
from agentrl.train.pack import in_pack_order
from agentrl.train.prepare import Preparation
from agentrl.train.work import Update, in_order, merge_outcomes, split_rows, split_step
from agentrl.types import Sample

if TYPE_CHECKING:
    from torch import Tensor


class Driver(ABC):
    """What a run trains with, on one rank or many.

    Raises:
        ConfigError: the algorithm names a function that cannot be used.
    """

    def __init__(self, algorithm: AlgorithmConfig, config: LearnerConfig, ranks: int) -> None:
        self.algorithm, self.config, self.ranks = algorithm, config, ranks
        self.preparation = Preparation(algorithm)

    @abstractmethod
    def _each(self, method: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `Learner` on every rank at the same time, with the arguments of each; the results."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks; idempotent."""

    def step(self, samples: Sequence[Sample], scores: Scores | None = None) -> Update:
        """One batch of samples: `updates_per_step` optimizer updates with global normalisation.

        Args:
            scores: what advantages are estimated from; None where the samples have theirs.

        Raises:
            AgentRLError: the gradient is not finite.
            WorkerLost: a rank died.
        """
        prepared = self.preparation.prepare(samples, scores, self._evaluate)
        portions = split_step(
            prepared.samples,
            updates=self.algorithm.updates_per_step,
            ranks=self.ranks,
            max_tokens=self.config.tokens_per_micro_batch,
            kl_coef=self.preparation.kl.coef,
        )
        update = merge_outcomes(self._each("work", [(part,) for part in portions]), prepared)
        more = self.preparation.after(update.metrics, len({s.episode_id for s in samples}))
        return replace(update, metrics={**update.metrics, **more})

    def imitate(self, samples: Sequence[Sample], lr: float) -> float:
        """One supervised step: mean negative log-likelihood of the tokens under the mask, which is returned.

        Raises:
            AgentRLError: the gradient is not finite.
            WorkerLost: a rank died.
        """
        total = sum(sum(s.loss_mask) for s in samples)
        return float(sum(self._each("imitate_part", [(rows, total, lr) for rows in self._split(samples)])))

    def probe(self, samples: Sequence[Sample]) -> list[list[float]]:
        """The log-probabilities (temperature 1) of the trained tokens of each row, under the policy as it is."""
        shares = self._split(samples)
        found = self._each("probe_part", [(rows,) for rows in shares])
        batches = [
            (rows, numbers)
            for share, part in zip(shares, found, strict=True)
            for rows, numbers in zip(share, part, strict=True)
            if rows
        ]
        return in_order(samples, [rows for rows, _ in batches], [numbers for _, numbers in batches])

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by their Hugging Face names; of tied ones any of the names."""
        found: dict[str, Tensor] = self._each("weights_part", [()] * self.ranks)[0]
        return found

    def adapter(self) -> dict[str, Tensor]:
        """The adapter's matrices alone, in host memory, named as peft names them in a file."""
        found: dict[str, Tensor] = self._each("adapter_part", [()] * self.ranks)[0]
        return found

    def snapshot(self) -> Callable[[Path], None]:
        """Copy all that a checkpoint holds; what is returned writes it, while training goes on if need be."""
        self._each("snapshot_part", [(self.preparation.state_dict(),)] * self.ranks)
        return self._write

    def save(self, directory: Path) -> None:
        """Write a checkpoint: the policy as a Hugging Face model, and what training needs beside it."""
        self.snapshot()(directory)

    def load_optimizer(self, directory: Path) -> None:
        """Take up what a checkpoint holds beside the weights, whatever number of ranks wrote it.

        Raises:
            CheckpointError: the files are missing or damaged, or belong to another model.
        """
        note = self._each("load_part", [(directory.absolute(),)] * self.ranks)[0]
        try:
            self.preparation.load_state_dict(note)
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model, and nothing else."""
        self._each("export_part", [(directory.absolute(),)] * self.ranks)

    def _write(self, directory: Path) -> None:
        self._each("write_part", [(directory.absolute(),)] * self.ranks)

    def _evaluate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The rows with the columns that the algorithm asks for, in the order given."""
        shares = self._split(samples)
        place = {id(sample): index for index, sample in enumerate(samples)}
        found: dict[int, Sample] = {}
        for share, rows in zip(shares, self._each("evaluate", [(share,) for share in shares]), strict=True):
            laid = [row for batch in share for row in in_pack_order(batch)]
            found |= {place[id(asked)]: row for asked, row in zip(laid, rows, strict=True)}
        return [found[index] for index in range(len(samples))]

    def _split(self, samples: Sequence[Sample]) -> list[Any]:
        return split_rows(samples, ranks=self.ranks, max_tokens=self.config.tokens_per_micro_batch)
