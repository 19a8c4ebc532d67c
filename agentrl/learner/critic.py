"""The critic: predicts the remaining return of an episode before each sampled token.

It is a Hugging Face token classifier with one label: the body of the policy (or of another model directory) with a
head that initially outputs 0. It has a separate optimizer and a separate model directory in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
from transformers.utils import logging

from agentrl.algo.aggregate import Totals, aggregation_weights
from agentrl.algo.metrics import Metrics, max_of, merge_metrics, to_host
from agentrl.algo.value import value_loss
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.learner.apart import models_apart, padded_rows, rows_apart, settle_rows
from agentrl.learner.attention.packed import PACKED_ATTENTION, register_attention
from agentrl.learner.micro_batch import annotated, lr_factor, packed_rows, saving, working_dtype
from agentrl.learner.optimizer import make_optimizer
from agentrl.learner.pack import Packed
from agentrl.learner.picked import picked
from agentrl.learner.policy_model import checkpoint_activations
from agentrl.learner.rank import LearnerSpec, Note
from agentrl.learner.sequence_check import check_sequence
from agentrl.learner.shard import World, all_finite, whole
from agentrl.learner.split import Columns, MicroBatches, Rows
from agentrl.learner.state import TrainingState, copy_state, restore_optimizer, whole_weights
from agentrl.models.device import pick_device
from agentrl.models.folder import refuse_adapter
from agentrl.models.loading import LOADING
from agentrl.models.model_config import NO_WEIGHTS, any_config, one_line

CRITIC_FOLDER = "critic"
"""In a checkpoint: the critic."""


def load_critic(directory: Path) -> PreTrainedModel:
    """A value model from a directory; for a policy, the body is used and the head starts at 0.

    Raises:
        ConfigError: the directory is missing or holds no model, or its architecture has no token classifier.
    """
    refuse_adapter(directory, f"critic: {directory}")
    config = _config(directory)
    register_attention()
    said = logging.get_verbosity()
    logging.set_verbosity(ERROR)  # it would advise to train the head that is missing: that follows
    try:
        with LOADING:
            loaded: Any = AutoModelForTokenClassification.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                attn_implementation=PACKED_ATTENTION if _takes_attention(config) else None,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except NO_WEIGHTS as e:
        raise ConfigError(f"critic: {directory} cannot be loaded as a value model: {one_line(e)}") from e
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
    settle_rows(model, f"critic: {directory}")
    return model


def empty_critic(directory: Path) -> PreTrainedModel:
    """The same model without its values; call it where tensors have no storage (`torch.device("meta")`)."""
    register_attention()
    config = _config(directory)
    auto: Any = AutoModelForTokenClassification
    model: PreTrainedModel = auto.from_config(
        config,
        dtype=torch.float32,
        attn_implementation=PACKED_ATTENTION if _takes_attention(config) else None,
        trust_remote_code=False,
    ).eval()
    return model


def _config(directory: Path) -> PretrainedConfig:
    """The config of a value model: one number for each token."""
    config = any_config(directory, f"critic: {directory}")
    config.num_labels = 1
    return config


def _takes_attention(config: PretrainedConfig) -> bool:
    """Whether the token classifier of a config takes its attention from transformers' AttentionInterface."""
    model: Any = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    return bool(getattr(model, "_supports_attention_backend", False))


class Critic:
    """One rank of the critic with its optimizer; all ranks must be called alike.

    If it shares the policy's ranks, the policy's rank calls it; on ranks to itself it is a `CriticRank`.
    """

    def __init__(self, spec: LearnerSpec, world: World) -> None:
        directory, critic, optim, config = spec.critic_dir, spec.critic, spec.optim, spec.config
        assert directory is not None
        assert critic is not None

        def make(values: bool) -> PreTrainedModel:
            return load_critic(directory) if values else empty_critic(directory)

        self.critic, self.algorithm, self.optim, self.config = critic, spec.algorithm, optim, config
        self.world, self.total_steps = world, spec.total_steps
        self.device = pick_device(config.device)
        self.model = world.place(make, config, self.device)
        check_sequence(self.model, world.sequence, f"critic: {directory}")
        if config.checkpoint_activations:
            checkpoint_activations(self.model)
        self.optimizer = make_optimizer(self.model.parameters(), optim, critic.lr)
        self.steps_done = 0
        self.rows_apart = models_apart([self.model])
        self._state: TrainingState | None = None

    def annotate(self, batches: Sequence[Rows], names: frozenset[str]) -> list[Columns]:
        """`values` of this rank's rows."""
        dtype, sequence = working_dtype(self.model), self.world.sequence
        return annotated(batches, self.device, dtype, lambda packed: {"values": self.values(packed)}, sequence)

    def update(self, work: Sequence[MicroBatches]) -> Metrics:
        """This rank's part of a step; every rank is at work at the same time.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        factor, dtype = lr_factor(self.optim, self.steps_done, self.total_steps), working_dtype(self.model)
        metrics: list[Metrics] = []
        for micro_batches in work:
            for rows in micro_batches.rows:
                packed = packed_rows(rows, micro_batches.columns, self.device, dtype, self.world.sequence)
                metrics.append(self.backward(packed, micro_batches.totals))
            metrics.append(self.optimizer_step(f"step {self.steps_done + 1}", factor))
        self.steps_done += 1
        return to_host(merge_metrics(metrics))

    def backward(self, packed: Packed, totals: Totals) -> Metrics:
        """The value loss of a micro-batch; its gradient is added to what is there."""
        with saving(self.config):
            value, found = self.loss(packed, totals)
        value.backward()  # type: ignore[no-untyped-call]
        return found

    def values(self, packed: Packed) -> Tensor:
        """[N] the value before each trained token: if it is predicted from."""
        part = packed.part()
        if rows_apart(self.model):
            rows = part.spans.plan(padded_rows, None)
            out = self.model(input_ids=part.ids_T[rows.flat_BL], use_cache=False)
            values_T: Tensor = picked(out.logits.flatten(), rows.place_T)
        else:
            out = self.model(
                input_ids=part.ids_T[None], position_ids=part.positions_T[None], use_cache=False, spans=part.spans
            )
            values_T = out.logits[0, :, 0]
        return part.whole(picked(values_T, part.source_N).to(torch.promote_types(torch.float32, values_T.dtype)))

    def loss(self, packed: Packed, totals: Totals) -> tuple[Tensor, Metrics]:
        """This micro-batch's part of the value loss; its columns are the old values and the returns."""
        mask_N = torch.ones_like(packed.ids_N, dtype=torch.bool)
        values_N = self.values(packed)
        weights_N = aggregation_weights(
            self.critic.aggregation or self.algorithm.aggregation,
            mask_N,
            packed.sequence_N,
            totals,
            scale=self.critic.aggregation_scale or self.algorithm.aggregation_scale,
            dtype=values_N.dtype,
        )
        loss, metrics = value_loss(
            values_N,
            packed.columns["values"],
            packed.columns["returns"],
            weights_N,
            mask_N,
            self.critic.value_clip,
        )
        return loss, {f"critic/{name}": metric for name, metric in metrics.items()}

    def optimizer_step(self, when: str, factor: float) -> Metrics:
        """One optimizer update with the clipped gradient, at `factor` times the learning rate.

        Raises:
            AgentRLError: the gradient is not finite, and the critic unchanged; or the update is not finite.
        """
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.critic.max_grad_norm))
        if not math.isfinite(float(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise AgentRLError(
                f"{when}: the critic's gradient is {float(norm)}; lower critic.lr ({self.critic.lr:g})"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.critic.lr * factor
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not all_finite(self.model.parameters()):
            raise AgentRLError(
                f"{when}: the update made weights of the critic that are not finite; lower critic.lr "
                f"({self.critic.lr:g})"
            )
        return {"critic/grad_norm": max_of(norm[None])}

    def state(self, note: Note) -> TrainingState:
        """A copy of this rank's part for a checkpoint."""
        return copy_state(self.model, whole_weights(self.model, self.world), self.optimizer, self.world, note)

    def restore(self, directory: Path) -> Note:
        """Restore the optimizer's state from the critic's folder in a checkpoint; returns its note.

        Raises:
            CheckpointError: the files are missing or belong to another model.
        """
        note = restore_optimizer(self.model, self.optimizer, directory, self.world)
        try:
            self.steps_done = int(note["steps_done"])
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e
        return note

    def snapshot(self, note: Note) -> None:
        """Copy this rank's part of a checkpoint, for `write`."""
        self._state = self.state({**note, "steps_done": self.steps_done})

    def write(self, directory: Path) -> None:
        """Write what `snapshot` copied, and forget it."""
        assert self._state is not None
        (directory / CRITIC_FOLDER).mkdir(exist_ok=True)
        self._state.write(directory / CRITIC_FOLDER)
        self._state = None

    def load(self, directory: Path) -> Note:
        """Restore this rank's part of a checkpoint of the run; see `restore`."""
        return self.restore(directory / CRITIC_FOLDER)

    def close(self) -> None:
        """Leave the other ranks; idempotent."""
        self.world.leave()
