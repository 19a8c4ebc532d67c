"""The learner on random weights, which are made on its device: for benches of speed and memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, LoRAConfig, OptimConfig
from agentrl.learner.attention.packed import PACKED_ATTENTION, register_attention
from agentrl.learner.learner import Learner
from agentrl.learner.lora import add_adapter
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import InProcess, LearnerSpec
from agentrl.preflight.shape import ModelShape
from bench.shared.qwen3_shapes import qwen3_config

LORA = LoRAConfig(rank=16, alpha=32)


class RandomPolicyRank(LocalPolicyRank):
    """A rank of the policy, with weights that are made at random where they stay."""

    def _load(
        self, directory: Path, lora: LoRAConfig | None = None, adapter: Path | None = None
    ) -> PreTrainedModel:
        register_attention()

        def make(values: bool) -> PreTrainedModel:
            with self.device if values else contextlib.nullcontext():
                model = AutoModelForCausalLM.from_config(
                    Qwen3Config.from_pretrained(directory),
                    dtype=torch.float32,
                    attn_implementation=PACKED_ATTENTION,
                )
            return model if lora is None else add_adapter(model, lora, adapter, values=values)

        return self.world.place(make, self.config, self.device)


def write_config(shape: str, context: int, directory: Path) -> ModelShape:
    """Write the config.json of this shape into a directory, and return its sizes."""
    qwen3_config(shape, context).save_pretrained(directory)
    return ModelShape.of_directory(directory)


def open_learner(
    directory: Path,
    *,
    device: str,
    tokens: int,
    attention: str = "auto",
    lora: bool = False,
    checkpoint: bool = True,
) -> tuple[RandomPolicyRank, Learner]:
    """A learner as `agentrl train` has it: bfloat16 with float32 parameters, PPO's clipped loss, no reference.

    Args:
        directory: that of `write_config`.
        device: `cpu` or `cuda`.
        tokens: of a micro-batch.
        attention: `learner.attention`.
        lora: train adapters instead of the whole model.
        checkpoint: compute activations again in the backward pass.
    """
    spec = LearnerSpec(
        directory,
        algorithm=AlgorithmConfig.model_validate({"kl": {"coef": 0.0}}),
        optim=OptimConfig(lr=1e-6, warmup_steps=0),
        config=LearnerConfig.model_validate(
            {
                "device": device,
                "precision": "bfloat16",
                "attention": attention,
                "checkpoint_activations": checkpoint,
                "tokens_per_micro_batch": tokens,
                "lora": LORA if lora else None,
                **({} if device == "cuda" else {"logits_at_once": 16}),  # less than the default: rows are short
            }
        ),
        temperature=1.0,
        total_steps=100,
    )
    rank = RandomPolicyRank(spec)
    return rank, Learner(spec, InProcess(rank, rank))
