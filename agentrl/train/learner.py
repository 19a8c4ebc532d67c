"""The learner: one rank, in process. Packs samples, computes the loss, steps the optimiser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.algo.aggregate import Totals, aggregate, aggregation_weights
from agentrl.algo.correction import Drift, drift, merge_drift
from agentrl.algo.kl import kl_per_token
from agentrl.algo.loss import PPOClip, ppo_clip
from agentrl.algo.metrics import Metrics, mean_of, merge_metrics, to_host
from agentrl.config.run import AlgorithmConfig, LearnerConfig, OptimConfig
from agentrl.engine.device import pick_device
from agentrl.errors import AgentRLError, CheckpointError
from agentrl.train.model import load_policy
from agentrl.train.pack import Packed, pack
from agentrl.train.work import Outcome, Portion, Rows, Update, merge_outcomes, split_rows, split_step
from agentrl.types import Sample


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
        if algorithm.kl.coef > 0 and reference_dir is not None:
            self.reference = load_policy(reference_dir, self.device).requires_grad_(False)
        self.clip = PPOClip(**(algorithm.ppo_clip.model_dump() if algorithm.ppo_clip else {}))
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
        )
        self.steps_done = 0

    def step(self, samples: Sequence[Sample]) -> Update:
        """One batch of samples: `updates_per_step` optimizer updates with global normalisation.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        (portions,) = split_step(
            samples,
            updates=self.algorithm.updates_per_step,
            ranks=1,
            max_tokens=self.config.tokens_per_micro_batch,
        )
        return merge_outcomes([self.work(portions)], samples)

    def work(self, portions: Sequence[Portion]) -> Outcome:
        """This rank's part of a step; every rank is at work at the same time.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        batches = [[pack(rows, self.device) for rows in portion.micro_batches] for portion in portions]
        old: list[list[Tensor] | None] = [None] * len(batches)
        if len(batches) > 1:  # old logprobs are those before the first update
            with torch.no_grad():
                old = [[self.logprobs(self.policy, m) for m in batch] for batch in batches]
        metrics: list[Metrics] = []
        drifts: list[Drift] = []
        self._set_lr()
        norms = []
        for number, (batch, portion) in enumerate(zip(batches, portions, strict=True)):
            for index, packed in enumerate(batch):
                before = old[number]
                loss, found, first = self._loss(packed, None if before is None else before[index], portion.totals)
                loss.backward()  # type: ignore[no-untyped-call]
                metrics.append(found)
                drifts.append(first)
            norms.append(self._update(f"step {self.steps_done + 1}", f"lower optim.lr ({self.optim_config.lr:g})"))
        self.steps_done += 1
        return Outcome(
            to_host(merge_metrics(metrics)),
            merge_drift(drifts),
            max(norms, default=0.0),
            self.optimizer.param_groups[0]["lr"],
        )

    def _loss(self, packed: Packed, old_N: Tensor | None, totals: Totals) -> tuple[Tensor, Metrics, Drift]:
        logprobs_N = self.logprobs(self.policy, packed)
        before_N = logprobs_N.detach() if old_N is None else old_N
        mask_N = torch.ones_like(packed.ids_N, dtype=torch.bool)
        weights_N = aggregation_weights(self.algorithm.aggregation, mask_N, packed.sequence_N, totals)
        loss, metrics = ppo_clip(
            logprobs_N, before_N, packed.advantages_N, weights_N, packed.sequence_N, mask_N, self.clip
        )
        if self.reference is not None:
            with torch.no_grad():
                ref_N = self.logprobs(self.reference, packed)
            kl_N = kl_per_token(self.algorithm.kl.loss_kind, logprobs_N, ref_N, mask_N)
            loss = loss + self.algorithm.kl.coef * aggregate(kl_N, weights_N, mask_N)
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
        (rows,) = split_rows(samples, ranks=1, max_tokens=self.config.tokens_per_micro_batch)
        return self.imitate_part(rows, sum(sum(s.loss_mask) for s in samples), lr)

    def imitate_part(self, batches: Sequence[Rows], total: int, lr: float) -> float:
        """This rank's part of a supervised step on `total` trained tokens; returns its part of the loss.

        Raises:
            AgentRLError: the gradient is not finite.
        """
        value = 0.0
        for rows in batches:
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
