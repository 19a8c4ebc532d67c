"""Predict the seconds of a step on GPUs: rollout by memory bandwidth, update by operations, weights by link."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config.run import RunConfig
from agentrl.preflight.estimate import Arithmetic
from agentrl.preflight.machines import Machine
from agentrl.preflight.shape import BFLOAT16, ModelShape

DECODE_SHARE = 0.6
"""Share of the memory bandwidth that decoding reaches."""
PREFILL_SHARE = 0.5
"""Share of the operations per second that reading prompts reaches."""
MFU = 0.4
"""Share of the operations per second that the update reaches; small models reach less."""
SMALL_MFU, SMALL = 0.25, 2_000_000_000
FILLED = 0.5
"""Share of the token limits that episodes fill on average."""
DISK = 2e9
"""Bytes per second of a folder that run and servers share."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes, in seconds, and what it costs.

    Attributes:
        rollout: sampling, without tools.
        update: forward and backward passes, with reference and old log-probabilities.
        publish: weights to the engine.
        together: the step; rollout and update overlap in asynchronous runs.
        dollars: per step.
        knob: the setting that would save most.
    """

    rollout: float
    update: float
    publish: float
    together: float
    dollars: float
    knob: str


def predict(config: RunConfig, shape: ModelShape, batch: Arithmetic, machine: Machine) -> Prediction:
    """Predict a step; the shares above are assumptions, stated with the result."""
    rollout = _rollout(config, shape, batch, machine)
    update = _update(config, shape, batch, machine)
    publish = _publish(config, shape, machine)
    overlap = config.rollout.max_staleness > 0
    together = (max(rollout, update) if overlap else rollout + update) + publish
    dollars = together * machine.price / 3600
    return Prediction(rollout, update, publish, together, dollars, _knob(config, rollout, update, publish))


def _engine_gpus(config: RunConfig) -> tuple[int, int]:
    """Engines, and GPUs of each."""
    server = config.engine.server
    if not config.engine.on_servers:
        return 1, 1
    return len(server.urls) or server.replicas, server.tensor_parallel


def _rollout(config: RunConfig, shape: ModelShape, batch: Arithmetic, machine: Machine) -> float:
    """Completions are decoded token by token, all slots at once; prompts and observations are read in parallel."""
    engines, split = _engine_gpus(config)
    card, rollout = machine.card, config.rollout
    at_once = min(math.ceil(batch.episodes / engines), config.engine.max_slots)
    waves = math.ceil(batch.episodes / engines / at_once)
    context = FILLED * min(rollout.token_budget, shape.max_context)
    weights = _active(shape) * BFLOAT16
    read = weights + at_once * context / 2 * shape.kv_bytes_per_token(BFLOAT16)
    by_memory = read / (card.bandwidth * DECODE_SHARE * split)
    by_operations = 2 * _active(shape) * at_once / (card.flops * PREFILL_SHARE * split)
    longest = FILLED * min(rollout.max_turns * rollout.max_tokens, rollout.token_budget)
    decoding = waves * longest * max(by_memory, by_operations)
    prompts = FILLED * max(batch.tokens - batch.sampled_tokens, 0) / engines
    return decoding + 2 * _active(shape) * prompts / (card.flops * PREFILL_SHARE * split)


def _update(config: RunConfig, shape: ModelShape, batch: Arithmetic, machine: Machine) -> float:
    algorithm, learner = config.algorithm, config.learner
    tokens = FILLED * batch.tokens
    forward = (
        2 * _active(shape) + 2 * shape.layers * FILLED * config.rollout.token_budget * shape.heads * shape.head_dim
    )
    passes = 3.0 if learner.lora is None else 2.0  # forward, and backward for inputs and weights
    passes += 1.0 if learner.checkpoint_activations else 0.0
    passes *= algorithm.epochs
    passes += 1.0 if algorithm.kl.coef > 0 and not learner.reference_ranks else 0.0
    passes += 1.0 if algorithm.updates_per_step * algorithm.epochs > 1 else 0.0
    passes += 3.0 if config.critic is not None and not config.critic.ranks else 0.0
    mfu = SMALL_MFU if shape.parameters < SMALL else MFU
    ranks = min(learner.ranks, machine.total)
    speed = machine.card.flops * mfu / (1 if learner.precision == "bfloat16" else 8)
    return passes * forward * tokens / (speed * ranks)


def _publish(config: RunConfig, shape: ModelShape, machine: Machine) -> float:
    engines, split = _engine_gpus(config)
    lora = config.learner.lora
    adapter = config.engine.sync == "lora" and lora is not None
    sent = BFLOAT16 * (shape.lora_parameters(lora.rank, lora.targets) if adapter and lora else shape.parameters)
    if not config.engine.on_servers:
        return sent / (machine.card.bandwidth / 4)
    if config.engine.resolved_sync in ("disk", "lora"):
        return sent * (1 + engines) / DISK
    return sent * engines / (machine.link * 0.5 * split)


def _active(shape: ModelShape) -> int:
    """Parameters that a token passes through."""
    return shape.active or shape.parameters


def _knob(config: RunConfig, rollout: float, update: float, publish: float) -> str:
    most = max((rollout, "rollout"), (update, "update"), (publish, "publish"))[1]
    if config.rollout.max_staleness == 0 and min(rollout, update) > 0.3 * max(rollout, update):
        return "rollout.max_staleness: 1 (sample the next step during the update)"
    if most == "update":
        slow = config.learner.precision == "float32"
        return "learner.precision: bfloat16" if slow else "learner.ranks (more GPUs for the update)"
    if most == "publish":
        return (
            "engine.sync: broadcast or tensor"
            if config.engine.resolved_sync == "disk"
            else "engine.server.replicas"
        )
    return "engine.server.replicas (more GPUs for sampling)" if config.engine.on_servers else "engine.kind: sglang"
