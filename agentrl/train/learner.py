"""The learner: one rank, in process. Packs samples, computes the loss, steps the optimiser."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.algo.aggregate import aggregate, aggregation_weights, totals_of_lengths
from agentrl.algo.correction import Drift, drift, merge_drift
from agentrl.algo.kl import kl_per_token
from agentrl.algo.loss import PPOClip, ppo_clip
from agentrl.algo.metrics import Metrics, mean_of, merge_metrics, metric_values
from agentrl.config.run import AlgorithmConfig, LearnerConfig, OptimConfig
from agentrl.engine.device import pick_device
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.train.pack import PACKED_ATTENTION, Packed, micro_batches, pack, register_attention
from agentrl.types import Sample


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did: `metrics` to log; `tokens` that went through the model, `trained` under the loss."""

    metrics: Mapping[str, float]
    tokens: int
    trained: int


def load_policy(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load a Hugging Face causal language model in float32 with packed attention.

    Raises:
        ConfigError: the directory is missing or holds no model.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model directory {directory} has no config.json: give the folder of a Hugging Face model"
        )
    register_attention()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, in one line
        )
    except (OSError, ValueError, SafetensorError) as e:
        raise ConfigError(f"model directory {directory} cannot be loaded: {str(e)[:300]}") from e
    model: PreTrainedModel
    model, report = loaded
    if absent := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model directory {directory} holds no weights for {absent[0]}"
            + (f" and {len(absent) - 1} others" if absent[1:] else "")
            + ": config.json and weights are not of the same model, or a file is missing"
        )
    if other := sorted(report["mismatched_keys"]):
        name, found, wanted = other[0]
        raise ConfigError(
            f"model directory {directory} does not fit itself: {name} has shape {list(found)} where config.json "
            f"asks for {list(wanted)}"
        )
    model.to(device)  # type: ignore[arg-type]
    return model


class Learner:
    """Holds the policy that is trained and, for the KL term, its frozen reference."""

    def __init__(
        self,
        policy_dir: Path,
        *,
        algorithm: AlgorithmConfig,
        optim: OptimConfig,
        config: LearnerConfig,
        temperature: float,
        total_steps: int,
        reference_dir: Path | None = None,
    ) -> None:
        self.algorithm, self.optim_config, self.config = algorithm, optim, config
        self.temperature, self.total_steps = temperature, total_steps
        self.device = pick_device(config.device)
        self.policy = load_policy(policy_dir, self.device)
        self.reference: PreTrainedModel | None = None
        if algorithm.kl_coef > 0 and reference_dir is not None:
            self.reference = load_policy(reference_dir, self.device).requires_grad_(False)
        self.clip = PPOClip(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.steps_done = 0

    def step(self, samples: Sequence[Sample]) -> Update:
        """One batch of samples: `updates_per_step` optimizer updates with global normalisation.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        parts = _split_by_episode(samples, self.algorithm.updates_per_step)
        batches = [[pack(rows, self.device) for rows in self._micro_batches(part)] for part in parts]
        old: list[list[Tensor] | None] = [None] * len(batches)
        if len(batches) > 1:  # old logprobs are those before the first update
            with torch.no_grad():
                old = [[self.logprobs(self.policy, m) for m in batch] for batch in batches]
        metrics: list[Metrics] = []
        drifts: list[Drift] = []
        self._set_lr()
        norms = []
        for number, (batch, part) in enumerate(zip(batches, parts, strict=True)):
            totals = totals_of_lengths(_trained_by_episode(part).values())
            for index, packed in enumerate(batch):
                before = old[number]
                loss, parts_metrics, first = self._loss(packed, None if before is None else before[index], totals)
                loss.backward()  # type: ignore[no-untyped-call]
                metrics.append(parts_metrics)
                drifts.append(first)
            norms.append(self._update(f"step {self.steps_done + 1}", f"lower optim.lr ({self.optim_config.lr:g})"))
        self.steps_done += 1
        values = metric_values(merge_metrics(metrics))
        values |= {f"drift/{k}": v for k, v in merge_drift(drifts).metrics().items()}
        values |= {"grad_norm": max(norms, default=0.0), "lr": self.optimizer.param_groups[0]["lr"]}
        return Update(values, sum(len(s.ids) for s in samples), sum(sum(s.loss_mask) for s in samples))

    def _loss(
        self, packed: Packed, old_N: Tensor | None, totals: tuple[int, int]
    ) -> tuple[Tensor, Metrics, Drift]:
        logprobs_N = self.logprobs(self.policy, packed)
        before_N = logprobs_N.detach() if old_N is None else old_N
        mask_N = torch.ones_like(packed.ids_N, dtype=torch.bool)
        weights_N = aggregation_weights(self.algorithm.aggregation, mask_N, packed.sequence_N, totals)  # type: ignore[arg-type]
        loss, metrics = ppo_clip(
            logprobs_N, before_N, packed.advantages_N, weights_N, packed.sequence_N, mask_N, self.clip
        )
        if self.reference is not None:
            with torch.no_grad():
                ref_N = self.logprobs(self.reference, packed)
            kl_N = kl_per_token(self.algorithm.kl, logprobs_N, ref_N, mask_N)
            loss = loss + self.algorithm.kl_coef * aggregate(kl_N, weights_N, mask_N)
            metrics = metrics | {"kl": mean_of(kl_N)}
        return loss, metrics, drift(before_N, packed.sampler_logprobs_N, packed.sequence_N, mask_N)

    def logprobs(self, model: PreTrainedModel, packed: Packed) -> Tensor:
        """[N] log-probabilities of the trained tokens, at the sampling temperature."""
        logits_NV = forward_logits(model, packed)
        return -torch.nn.functional.cross_entropy(
            logits_NV.float() / self.temperature, packed.ids_N, reduction="none"
        )

    def imitate(self, samples: Sequence[Sample], lr: float) -> float:
        """One supervised step: mean negative log-likelihood of the tokens under the mask, which is returned.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        total = sum(sum(s.loss_mask) for s in samples)
        value = 0.0
        for rows in self._micro_batches(samples):
            packed = pack(rows, self.device)
            logits_NV = forward_logits(self.policy, packed)
            loss = torch.nn.functional.cross_entropy(logits_NV.float(), packed.ids_N, reduction="sum") / total
            loss.backward()  # type: ignore[no-untyped-call]
            value += float(loss.detach())
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._update("warm-up", "lower warmup.lr")
        return value

    def _update(self, when: str, advice: str) -> float:
        """One optimizer update with the clipped gradient; returns its norm before clipping.

        Raises:
            AgentRLError: the gradient is not finite; the policy is left as it was.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.optim_config.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise AgentRLError(f"{when}: the gradient is {norm}; {advice}")
        return norm

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by their Hugging Face names (views, not copies)."""
        return {name: value.detach() for name, value in self.policy.state_dict().items()}

    def save(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model, and the optimiser's state beside it."""
        self.policy.save_pretrained(directory)
        names = {id(p): n for n, p in self.policy.named_parameters()}
        state = {
            f"{names[id(p)]}/{key}": value.contiguous()
            for p, entries in self.optimizer.state.items()
            for key, value in entries.items()
        }
        if state:
            save_file(state, directory / "optimizer.safetensors")
        (directory / "learner.json").write_text(json.dumps({"steps_done": self.steps_done}))

    def load_optimizer(self, directory: Path) -> None:
        """Take up the optimiser's state and the step counter of a checkpoint.

        Raises:
            CheckpointError: the files are missing or belong to another model.
        """
        try:
            self.steps_done = int(json.loads((directory / "learner.json").read_text())["steps_done"])
            file = directory / "optimizer.safetensors"
            state = load_file(file, device=str(self.device)) if file.is_file() else {}
        except (OSError, ValueError, KeyError, SafetensorError) as e:
            raise CheckpointError(f"checkpoint {directory} cannot be resumed: {e}") from e
        params = dict(self.policy.named_parameters())
        for key, value in state.items():
            name, _, entry = key.rpartition("/")
            if name not in params:
                raise CheckpointError(f"checkpoint {directory}: {name} is not a parameter of this model")
            if entry != "step" and value.shape != params[name].shape:
                raise CheckpointError(f"checkpoint {directory}: {key} does not fit this model's {name}")
            self.optimizer.state[params[name]][entry] = value

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        return micro_batches(samples, self.config.tokens_per_micro_batch)

    def _set_lr(self) -> None:
        c, step = self.optim_config, self.steps_done
        factor = min(1.0, (step + 1) / max(1, c.warmup_steps))
        if c.schedule != "constant" and step >= c.warmup_steps:
            done = (step - c.warmup_steps) / max(1, self.total_steps - 1 - c.warmup_steps)
            fall = done if c.schedule == "linear" else (1 - math.cos(math.pi * done)) / 2
            factor = 1 - 0.9 * fall
        for group in self.optimizer.param_groups:
            group["lr"] = c.lr * factor


def forward_logits(model: PreTrainedModel, packed: Packed) -> Tensor:
    """[N, V] logits at the positions that predict the trained tokens; no others are computed."""
    out = model(
        input_ids=packed.ids_T[None],
        position_ids=packed.positions_T[None],
        logits_to_keep=packed.source_N,
        use_cache=False,
        buckets=packed.buckets,
    )
    logits: Tensor = out.logits[0]
    return logits


def _trained_by_episode(samples: Sequence[Sample]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.episode_id] = counts.get(sample.episode_id, 0) + sum(sample.loss_mask)
    return counts


def _split_by_episode(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """Deal the episodes out into `parts` mini-batches, the rows of one episode together."""
    if parts == 1:
        return [list(samples)]
    place: dict[str, int] = {}
    out: list[list[Sample]] = [[] for _ in range(parts)]
    for sample in samples:
        out[place.setdefault(sample.episode_id, len(place) % parts)].append(sample)
    return [part for part in out if part]
