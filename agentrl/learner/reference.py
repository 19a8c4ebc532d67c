"""The reference or teacher on separate ranks: the frozen model that the KL penalty is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.learner.apart import models_apart
from agentrl.learner.logprobs import know_head, token_stats
from agentrl.learner.micro_batch import annotated, working_dtype
from agentrl.learner.pack import Packed
from agentrl.learner.policy_model import empty_policy, load_policy
from agentrl.learner.rank import LearnerSpec
from agentrl.learner.sequence_check import check_sequence
from agentrl.learner.shard import World
from agentrl.learner.split import Columns, Rows
from agentrl.models.device import pick_device


class Reference:
    """One rank of a reference that has ranks to itself: an `Annotator`; all ranks must be called alike."""

    def __init__(self, spec: LearnerSpec, world: World) -> None:
        directory = spec.frozen_dir
        assert directory is not None

        def make(values: bool) -> PreTrainedModel:
            return load_policy(directory, torch.device("cpu")) if values else empty_policy(directory)

        self.config, self.temperature, self.world = spec.config, spec.temperature, world
        self.device = pick_device(spec.config.device)
        self.model = world.place(make, spec.config, self.device).requires_grad_(False)
        check_sequence(self.model, world.sequence, f"model directory {directory}")
        self.rows_apart = models_apart([self.model])
        self._dtype = working_dtype(self.model)
        if spec.config.logits_at_once:
            know_head(self.model, self.device, self._dtype)

    def annotate(self, batches: Sequence[Rows], names: frozenset[str]) -> list[Columns]:
        """`ref_logprobs` of this rank's rows, at the sampling temperature."""
        return annotated(batches, self.device, self._dtype, self._evaluate, self.world.sequence)

    def close(self) -> None:
        """Leave the other ranks; idempotent."""
        self.world.leave()

    def _evaluate(self, packed: Packed) -> dict[str, Tensor]:
        chunk = self.config.logits_at_once
        stats = token_stats(self.model, packed, temperature=self.temperature, chunk=chunk)
        return {"ref_logprobs": stats.logprobs_N}
