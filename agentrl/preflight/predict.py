"""Predict the seconds of a step on GPUs: rollout by memory bandwidth, update by operations, weights by link."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config.engine import SERVERS
from agentrl.config.run import RunConfig
from agentrl.preflight.estimate import Arithmetic
from agentrl.preflight.machines import Machine
from agentrl.preflight.shape import BFLOAT16, FLOAT32, ModelShape
from agentrl.trainer.room import longest_episode

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
HOST = 3e9
"""Bytes per second of weights through host memory: from a rank to the run, and in requests to servers."""
CHANGED = 0.03
"""Share of the bytes of an update that `engine.sync: delta` sends."""


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


def predict(
    config: RunConfig, shape: ModelShape, batch: Arithmetic, machine: Machine, critic: ModelShape | None = None
) -> Prediction:
    """Predict a step; the shares above are assumptions, stated with the result.

    Args:
        critic: its size, if the run has one.
    """
    rollout = _rollout(config, shape, batch, machine)
    update = _update(config, shape, critic, batch, machine)
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
    card, views = machine.card, [view.rollout for view in config.by_env.values()]
    at_once = min(math.ceil(batch.episodes / engines), config.engine.max_slots)
    waves = math.ceil(batch.episodes / engines / at_once)
    context = FILLED * min(longest_episode(config), shape.max_context)
    read = shape.touched(at_once) * BFLOAT16 + at_once * context / 2 * shape.kv_bytes_per_token(BFLOAT16)
    by_memory = read / (card.bandwidth * DECODE_SHARE * split)
    by_operations = 2 * shape.active * at_once / (card.flops * PREFILL_SHARE * split)
    longest = FILLED * max(min(view.max_turns * view.max_tokens, view.token_budget) for view in views)
    decoding = waves * longest * max(by_memory, by_operations)
    prompts = FILLED * max(batch.tokens - batch.sampled_tokens, 0) / engines
    return decoding + 2 * shape.active * prompts / (card.flops * PREFILL_SHARE * split)


def _update(
    config: RunConfig, shape: ModelShape, critic: ModelShape | None, batch: Arithmetic, machine: Machine
) -> float:
    """All passes of an update; models on dedicated ranks run first, while the policy waits."""
    algorithm, learner = config.algorithm, config.learner
    again = 1.0 if learner.checkpoint_activations else 0.0
    passes = algorithm.epochs * ((3.0 if learner.lora is None else 2.0) + again)  # forward; backward of both kinds
    passes += 1.0 if algorithm.updates_per_step * algorithm.epochs > 1 else 0.0
    found = _passes(config, shape, batch, machine, passes, learner.ranks)
    if algorithm.kl.coef > 0:
        found += _passes(config, shape, batch, machine, 1.0, learner.reference_ranks or learner.ranks)
    if config.critic is not None and critic is not None:
        passes = 1.0 + algorithm.epochs * (3.0 + again)  # its values first
        found += _passes(config, critic, batch, machine, passes, config.critic.ranks or learner.ranks)
    return found


def _passes(
    config: RunConfig, shape: ModelShape, batch: Arithmetic, machine: Machine, passes: float, ranks: int
) -> float:
    """Seconds of so many passes over the tokens of a step."""
    forward = 2 * shape.active + 2 * shape.layers * FILLED * longest_episode(config) * shape.heads * shape.head_dim
    mfu = SMALL_MFU if shape.parameters < SMALL else MFU
    speed = machine.card.flops * mfu / (1 if config.learner.precision == "bfloat16" else 8)
    return passes * forward * FILLED * batch.tokens / (speed * min(ranks, machine.total))


def _publish(config: RunConfig, shape: ModelShape, machine: Machine) -> float:
    engines, split = _engine_gpus(config)
    lora = config.learner.lora
    adapter = config.engine.sync == "lora" and lora is not None
    sent = BFLOAT16 * (shape.lora_parameters(lora.rank, lora.targets) if adapter and lora else shape.parameters)
    if not config.engine.on_servers:
        return sent / (machine.card.bandwidth / 4)
    gathered = FLOAT32 * shape.parameters / HOST if config.learner_on_ray and not adapter else 0.0
    sync = config.engine.resolved_sync
    if sync in ("disk", "lora"):
        return gathered + sent * (1 + engines) / DISK
    by_value = config.learner_on_ray or config.engine.server.launch == "ray" or bool(config.engine.server.urls)
    if sync in ("tensor", "delta") and by_value:
        changed = CHANGED + (1 - CHANGED) / config.engine.server.full_every if sync == "delta" else 1.0
        return gathered + changed * sent * engines / HOST
    return gathered + sent * engines / (machine.link * 0.5 * split)


def _knob(config: RunConfig, rollout: float, update: float, publish: float) -> str:
    most = max((rollout, "rollout"), (update, "update"), (publish, "publish"))[1]
    if config.rollout.max_staleness == 0 and min(rollout, update) > 0.3 * max(rollout, update):
        return "rollout.max_staleness: 1 (sample the next step during the update)"
    if most == "update":
        slow = config.learner.precision == "float32"
        return "learner.precision: bfloat16" if slow else "learner.ranks (more GPUs for the update)"
    if most == "publish":
        if not config.engine.on_servers:
            return "engine.kind: sglang"
        engine = config.engine
        faster = {
            "disk": ("broadcast", "tensor", "delta"),
            "tensor": ("broadcast", "delta"),
            "broadcast": ("delta",),
        }
        ways = [way for way in faster.get(engine.resolved_sync, ()) if way in SERVERS[engine.kind]]
        ways = [way for way in ways if way != "delta" or not engine.server.sleep]
        return f"engine.sync: {' or '.join(ways)}" if ways else "engine.server.replicas (fewer)"
    return "engine.server.replicas (more GPUs for sampling)" if config.engine.on_servers else "engine.kind: sglang"
