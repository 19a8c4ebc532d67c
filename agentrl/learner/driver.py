"""Who drives the ranks of a learner: splits each step over them and puts together what they did.

The ranks are this process itself (`Learner`) or Ray workers (`RankedLearner`); the step is the same. Reference and
critic are beside the policy, on its ranks, or apart, on ranks of their own that work at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig
from agentrl.errors import CheckpointError
from agentrl.learner.pack import in_pack_order
from agentrl.learner.split import Columns, Passes, Portion, Rows, Update, merge_outcomes, split_rows, split_step
from agentrl.train.advantages import Scores
from agentrl.train.prepare import Preparation, Prepared
from agentrl.types import Sample

if TYPE_CHECKING:
    from torch import Tensor


SAID_APART = {"reference": frozenset({"ref_logprobs"}), "critic": frozenset({"values"})}
"""What a model says of every token, by its name, where it has ranks of its own."""


class Ranks(Protocol):
    """Ranks that hold one model between them."""

    @property
    def ranks(self) -> int:
        """How many."""
        ...

    def ask(self, method: str, parts: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Call a method on every rank at the same time, with the arguments of each.

        Returns:
            What waits for the results. Raises what the ranks raise, or WorkerLost where one died.
        """
        ...


class Driver(ABC):
    """What a run trains with, on one rank or many.

    Attributes:
        apart: the models (`reference`, `critic`) that have ranks of their own.

    Raises:
        ConfigError: the algorithm names a function that cannot be used.
    """

    ranks: int

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        ranks: int,
        *,
        critic: CriticConfig | None = None,
        seed: int = 0,
        reference_apart: bool = False,
    ) -> None:
        self.algorithm, self.config, self.ranks = algorithm, config, ranks
        passes = Passes(algorithm.updates_per_step, algorithm.epochs, seed)
        self.passes = {"policy": passes, "critic": passes if critic is None else critic_passes(critic, passes)}
        """How the episodes of a step are dealt out, by the model that learns from them."""
        self._critic_beside = critic is not None
        self.apart: dict[str, Ranks] = {}
        self.preparation = Preparation(algorithm, reference_apart=reference_apart)

    @abstractmethod
    def ask(self, method: str, parts: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Call a method of `Learner` on every rank; see `Ranks.ask`."""

    @abstractmethod
    def close(self) -> None:
        """End the ranks; idempotent."""

    def step(self, samples: Sequence[Sample], scores: Scores | None = None) -> Update:
        """One batch of samples: `epochs` times `updates_per_step` optimizer updates with global normalisation.

        Args:
            scores: what advantages are estimated from; None where the samples have theirs.

        Raises:
            AgentRLError: the gradient is not finite.
            WorkerLost: a rank died.
        """
        prepared = self.preparation.prepare(samples, scores, self._evaluate)
        parts = [self._portions(prepared, "policy", self.ranks)]
        if self._critic_beside and "critic" not in self.apart:
            parts.append(self._portions(prepared, "critic", self.ranks))
        work: dict[str, list[tuple[Any, ...]]] = {"policy": list(zip(*parts, strict=True))}
        if (critic := self.apart.get("critic")) is not None:
            work["critic"] = [(part,) for part in self._portions(prepared, "critic", critic.ranks)]
        found = self._together("work", work)
        update = merge_outcomes(
            found["policy"], prepared, found.get("critic", ()), epochs=self.passes["policy"].epochs
        )
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
        found = _by_row(samples, shares, self._each("probe_part", [(rows,) for rows in shares]))
        return [list(columns["logprobs"]) for columns in found]

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
        self._save_with("snapshot_part", self.preparation.state_dict())
        return self._write

    def save(self, directory: Path) -> None:
        """Write a checkpoint: the policy as a Hugging Face model, and what training needs beside it."""
        self.snapshot()(directory)

    def load_optimizer(self, directory: Path) -> None:
        """Take up what a checkpoint holds beside the weights, whatever number of ranks wrote it.

        Raises:
            CheckpointError: the files are missing or damaged, or belong to another model.
        """
        note = self._save_with("load_part", directory.absolute())["policy"][0]
        try:
            self.preparation.load_state_dict(note)
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model, and nothing else."""
        self._each("export_part", [(directory.absolute(),)] * self.ranks)

    def _write(self, directory: Path) -> None:
        self._save_with("write_part", directory.absolute())

    def _evaluate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The rows with the columns that the algorithm asks for, in their order; models work side by side."""
        elsewhere = {name: SAID_APART[name] for name in self.apart}
        here = self.preparation.evaluates.difference(*elsewhere.values())
        wanted = {name: said & self.preparation.evaluates for name, said in ({"policy": here} | elsewhere).items()}
        holders = {name: ranks for name, ranks in self._all().items() if wanted[name]}
        shares = {name: self._split(samples, ranks.ranks) for name, ranks in holders.items()}
        found = self._together("evaluate", {name: [(s, wanted[name]) for s in shares[name]] for name in holders})
        rows = list(samples)
        for name in holders:
            said = _by_row(samples, shares[name], found[name])
            rows = [
                replace(row, columns={**row.columns, **columns}) for row, columns in zip(rows, said, strict=True)
            ]
        return rows

    def _all(self) -> dict[str, Ranks]:
        """Everything that is driven, by the model that it holds."""
        return {"policy": self, **self.apart}

    def _each(self, method: str, parts: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `Learner` on every rank at the same time, with the arguments of each; the results."""
        return self.ask(method, parts)()

    def _together(self, method: str, parts: Mapping[str, Sequence[tuple[Any, ...]]]) -> dict[str, list[Any]]:
        """Call a method on the ranks of several models at the same time."""
        holders = self._all()
        waits = {name: holders[name].ask(method, each) for name, each in parts.items()}
        return {name: wait() for name, wait in waits.items()}

    def _save_with(self, method: str, argument: Any) -> dict[str, list[Any]]:
        """Call a method with one argument on all ranks that have a part in a checkpoint."""
        kept = {name: ranks.ranks for name, ranks in self._all().items() if name != "reference"}
        return self._together(method, {name: [(argument,)] * number for name, number in kept.items()})

    def _portions(self, prepared: Prepared, model: str, ranks: int) -> list[list[Portion]]:
        return split_step(
            prepared,
            self.passes[model],
            ranks=ranks,
            max_tokens=self.config.tokens_per_micro_batch,
            kl_coef=self.preparation.kl.coef,
        )

    def _split(self, samples: Sequence[Sample], ranks: int | None = None) -> list[tuple[Rows, ...]]:
        return split_rows(samples, ranks=ranks or self.ranks, max_tokens=self.config.tokens_per_micro_batch)


def critic_passes(critic: CriticConfig, policy: Passes) -> Passes:
    """Those of the critic: what it does not say is as for the policy."""
    return Passes(critic.updates_per_step or policy.updates, critic.epochs or policy.epochs, policy.seed)


def _by_row(
    samples: Sequence[Sample], shares: Sequence[Sequence[Rows]], found: Sequence[Sequence[Columns]]
) -> list[Columns]:
    """What ranks said of rows, in the order of `samples`."""
    place = {id(sample): index for index, sample in enumerate(samples)}
    out: list[Columns] = [{} for _ in samples]
    for share, said in zip(shares, found, strict=True):
        laid = [row for batch in share for row in in_pack_order(batch)]
        for row, columns in zip(laid, said, strict=True):
            out[place[id(row)]] = columns
    return out
