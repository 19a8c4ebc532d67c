"""The critic: what an episode will still earn, said at every token before it is sampled.

It is a Hugging Face token classifier with one label: the body of the policy (or of another model directory) with a
head that says 0 everywhere at first. It has its own optimiser, and its checkpoint is a model directory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging

from agentrl.algo.aggregate import Totals, aggregation_weights
from agentrl.algo.metrics import Metrics, max_of
from agentrl.algo.value import ValueLoss, value_loss
from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.train.attention import PACKED_ATTENTION, check_attention, register_attention
from agentrl.train.model import checkpoint_activations
from agentrl.train.pack import Packed
from agentrl.train.shard import World, whole
from agentrl.train.state import Snapshot, restore_optimizer, snapshot, whole_weights

CRITIC_FOLDER = "critic"
"""In a checkpoint: the critic."""


def load_critic(directory: Path) -> PreTrainedModel:
    """A value model from a directory; of a policy's the body is taken and the head begins at 0.

    Raises:
        ConfigError: the directory is missing or holds no model, or its architecture has no token classifier.
    """
    register_attention()
    said = logging.get_verbosity()
    logging.set_verbosity(ERROR)  # it would advise to train the head that is missing: that follows
    try:
        loaded: Any = AutoModelForTokenClassification.from_pretrained(
            directory,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as e:
        raise ConfigError(f"critic: {directory} cannot be loaded as a value model: {str(e)[:300]}") from e
    finally:
        logging.set_verbosity(said)
    model: PreTrainedModel
    model, report = loaded
    head = {name for name, _ in model.named_parameters() if not name.startswith(model.base_model_prefix)}
    missing = set(report["missing_keys"])
    if absent := sorted(missing - head):
        raise ConfigError(
            f"critic: {directory} holds no weights for {absent[0]}: a file is missing or of another model"
        )
    for name in missing:
        torch.nn.init.zeros_(model.get_parameter(name))
    check_attention(model, f"critic: {directory}")
    return model


def empty_critic(directory: Path) -> PreTrainedModel:
    """The same model without its values; call it where tensors have no storage (`torch.device("meta")`)."""
    register_attention()
    config = AutoConfig.from_pretrained(directory, num_labels=1, local_files_only=True)
    auto: Any = AutoModelForTokenClassification
    model: PreTrainedModel = auto.from_config(
        config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
    ).eval()
    return model


class Critic:
    """One rank's part of the critic; all ranks must be called alike."""

    def __init__(
        self,
        directory: Path,
        *,
        config: CriticConfig,
        algorithm: AlgorithmConfig,
        optim: OptimConfig,
        learner: LearnerConfig,
        world: World,
        device: torch.device,
    ) -> None:
        def make(values: bool) -> PreTrainedModel:
            return load_critic(directory) if values else empty_critic(directory)

        self.config, self.algorithm, self.world = config, algorithm, world
        self.model = world.place(make, learner, device)
        if learner.checkpoint_activations:
            checkpoint_activations(self.model)
        self.loss_config = ValueLoss(clip=config.value_clip)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )

    def values(self, packed: Packed) -> Tensor:
        """[N] the value before each trained token: where it is predicted from."""
        out = self.model(
            input_ids=packed.ids_T[None],
            position_ids=packed.positions_T[None],
            use_cache=False,
            spans=packed.spans,
        )
        values_T: Tensor = out.logits[0, :, 0]
        return values_T[packed.source_N].to(torch.promote_types(torch.float32, values_T.dtype))

    def loss(self, packed: Packed, totals: Totals) -> tuple[Tensor, Metrics]:
        """This micro-batch's part of the value loss; its columns are the old values and the returns."""
        mask_N = torch.ones_like(packed.ids_N, dtype=torch.bool)
        values_N = self.values(packed)
        weights_N = aggregation_weights(
            self.algorithm.aggregation,
            mask_N,
            packed.sequence_N,
            totals,
            scale=self.algorithm.aggregation_scale,
            dtype=values_N.dtype,
        )
        loss, metrics = value_loss(
            values_N, packed.columns["values"], packed.columns["returns"], weights_N, mask_N, self.loss_config
        )
        return loss, {f"critic/{name}": metric for name, metric in metrics.items()}

    def update(self, when: str, factor: float) -> Metrics:
        """One optimizer update with the clipped gradient, at `factor` times the learning rate.

        Raises:
            AgentRLError: the gradient is not finite; the critic is left as it was.
        """
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if not math.isfinite(float(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise AgentRLError(
                f"{when}: the critic's gradient is {float(norm)}; lower critic.lr ({self.config.lr:g})"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"critic/grad_norm": max_of(norm[None])}

    def snapshot(self, note: Mapping[str, Any]) -> Snapshot:
        """Copy this rank's part for a checkpoint."""
        return snapshot(self.model, whole_weights(self.model, self.world), self.optimizer, self.world, note)

    def restore(self, directory: Path) -> None:
        """Take up the optimiser's state of a checkpoint.

        Raises:
            CheckpointError: the files are missing or belong to another model.
        """
        restore_optimizer(self.model, self.optimizer, directory, self.world)
