"""The reference on ranks of its own: the frozen model that the KL penalty is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config.run import LearnerConfig
from agentrl.learner.logprobs import know_head, token_stats
from agentrl.learner.model import empty_policy, load_policy
from agentrl.learner.pack import Packed
from agentrl.learner.rank import said_of, working_dtype
from agentrl.learner.shard import World
from agentrl.learner.split import Columns, Rows
from agentrl.models.device import pick_device


class Reference:
    """One rank's part of the reference; all ranks must be called alike."""

    def __init__(self, directory: Path, *, config: LearnerConfig, temperature: float, world: World) -> None:
        def make(values: bool) -> PreTrainedModel:
            return load_policy(directory, torch.device("cpu")) if values else empty_policy(directory)

        self.config, self.temperature, self.world = config, temperature, world
        self.device = pick_device(config.device)
        self.model = world.place(make, config, self.device).requires_grad_(False)
        self._dtype = working_dtype(self.model)
        if config.logits_at_once:
            know_head(self.model, self.device, self._dtype)

    def evaluate(self, batches: Sequence[Rows], wanted: frozenset[str]) -> list[Columns]:
        """`ref_logprobs` of the rows of this rank, at the sampling temperature."""
        return said_of(batches, self.device, self._dtype, self._say)

    def close(self) -> None:
        """Leave the other ranks; idempotent."""
        self.world.leave()

    def _say(self, packed: Packed) -> dict[str, Tensor]:
        chunk = self.config.logits_at_once
        stats = token_stats(self.model, packed, temperature=self.temperature, chunk=chunk)
        return {"ref_logprobs": stats.logprobs_N}
