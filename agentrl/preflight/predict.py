"""Predict the seconds of a step on GPUs: rollout by memory bandwidth, update by operations, transfers by link."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.config.run import RunConfig
from agentrl.preflight.estimate import Arithmetic, colocated
from agentrl.preflight.machines import Machine
from agentrl.preflight.phases import Cache, Models, cache_parts, engine_bytes, engines, trained_parameters
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
PCIE = 25e9
"""Bytes per second between a GPU and pinned memory of its host."""
LINK_SHARE = 0.7
"""Share of the links between GPUs that ranks reach when they gather weights and sum gradients."""
HOST_OPTIMIZER = 20e9
"""Bytes per second at which a rank updates weights in host memory; a weight and its moments are 28 bytes."""
CHANGED = 0.03
"""Share of the bytes of an update that `engine.sync: delta` sends."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step takes, in seconds, and what it costs.

    Attributes:
        rollout: sampling, without tools.
        update: forward and backward passes, with reference and old log-probabilities, or the transfers between
            ranks and with host memory if these take longer.
        publish: weights to the engine.
        together: the step; rollout and update overlap in asynchronous runs, unless they share a GPU.
        dollars: per step.
    """

    rollout: float
    update: float
    publish: float
    together: float
    dollars: float


def predict(config: RunConfig, models: Models, batch: Arithmetic, cache: Cache, machine: Machine) -> Prediction:
    """Predict a step; the shares above are assumptions, stated with the result."""
    rollout = _rollout(config, models.policy, batch, cache, machine)
    update = _update(config, models, batch, machine)
    publish = _publish(config, models.policy, machine)
    overlap = config.rollout.max_staleness > 0 and not colocated(config)
    together = (max(rollout, update) if overlap else rollout + update) + publish
    return Prediction(rollout, update, publish, together, together * machine.price / 3600)


def _rollout(config: RunConfig, shape: ModelShape, batch: Arithmetic, cache: Cache, machine: Machine) -> float:
    """Completions are decoded token by token, all slots at once; prompts and observations are read in parallel."""
    number, split = engines(config), config.engine.server.tensor_parallel
    card, each = machine.card, engine_bytes(config)
    views = [view.rollout for view in config.by_env.values()]
    context = FILLED * min(longest_episode(config), shape.max_context)
    per_episode = cache.per_token * context / 2  # over its time in the cache
    at_once = min(math.ceil(batch.played / number), config.engine.max_slots)
    if cache.room is not None:
        at_once = max(1, min(at_once, int(cache.room / number / per_episode)))
    waves = math.ceil(batch.played / number / at_once)
    copies = split / cache_parts(config, shape)
    read = shape.touched(at_once) * each + at_once * per_episode * copies
    by_memory = read / (card.bandwidth * DECODE_SHARE * split)
    by_operations = 2 * shape.active * at_once / (card.flops * PREFILL_SHARE * split)
    longest = FILLED * max(min(view.max_turns * view.max_tokens, view.token_budget) for view in views)
    decoding = waves * longest * max(by_memory, by_operations)
    prompts = FILLED * max(batch.tokens - batch.sampled_tokens, 0) * batch.played / batch.episodes / number
    return decoding + 2 * shape.active * prompts / (card.flops * PREFILL_SHARE * split)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a model does with the tokens of a step.

    Attributes:
        passes: how often, in forward passes.
        rounds: how often all micro-batches are computed with a backward pass.
        looks: how often without.
        trained: parameters with gradients.
    """

    shape: ModelShape
    ranks: int
    passes: float
    rounds: int
    looks: int
    trained: int


def _update(config: RunConfig, models: Models, batch: Arithmetic, machine: Machine) -> float:
    """All passes of an update; models on dedicated ranks run first, while the policy waits."""
    algorithm, learner = config.algorithm, config.learner
    again = 1.0 if learner.checkpoint_activations else 0.0
    epochs, looks = algorithm.epochs, int(algorithm.updates_per_step * algorithm.epochs > 1)
    backward = (3.0 if learner.lora is None else 2.0) + again  # forward; backward of both kinds
    trained = trained_parameters(config, models.policy)
    work = [_Work(models.policy, learner.ranks, epochs * backward + looks, epochs, looks, trained)]
    own = not config.teachers_on_servers and (config.teacher is None or config.teacher.policy is not None)
    frozen = models.policy if own else models.reference  # None: on a server
    if algorithm.kl.coef > 0 and frozen is not None:
        looks = epochs if config.decided_algorithm.kl.loss_kind == "full" and algorithm.kl.in_loss else 1
        work.append(_Work(frozen, learner.reference_ranks or learner.ranks, float(looks), 0, looks, 0))
    if config.critic is not None and models.critic is not None:
        passes = 1.0 + epochs * (3.0 + again)  # its values first
        ranks = config.critic.ranks or learner.ranks
        work.append(_Work(models.critic, ranks, passes, epochs, 1, models.critic.parameters))
    return sum(max(_computing(config, one, batch, machine), _moving(config, one, batch, machine)) for one in work)


def _computing(config: RunConfig, work: _Work, batch: Arithmetic, machine: Machine) -> float:
    """Seconds of the operations."""
    shape = work.shape
    forward = 2 * shape.active + 2 * shape.layers * FILLED * longest_episode(config) * shape.heads * shape.head_dim
    mfu = SMALL_MFU if shape.parameters < SMALL else MFU
    speed = machine.card.flops * mfu / (1 if config.learner.precision == "bfloat16" else 8)
    return work.passes * forward * FILLED * batch.tokens / (speed * min(work.ranks, machine.total))


def _moving(config: RunConfig, work: _Work, batch: Arithmetic, machine: Machine) -> float:
    """Seconds of what ranks send each other, and of what is kept in host memory.

    Ranks gather the weights for each pass over a micro-batch, forward and backward, and sum float32 gradients.
    """
    learner, shape = config.learner, work.shape
    each = BFLOAT16 if learner.precision == "bfloat16" else FLOAT32
    tokens = FILLED * batch.tokens / work.ranks
    micro_batches = max(1, math.ceil(tokens / batch.updates / learner.tokens_per_micro_batch)) * batch.updates
    gathers = micro_batches * (2 * work.rounds + work.looks) * shape.parameters
    gradients = micro_batches * work.rounds * work.trained
    others = (work.ranks - 1) / work.ranks
    found = others * (each * gathers + FLOAT32 * gradients) / (LINK_SHARE * machine.between(work.ranks))
    if learner.cpu_offload:
        found += FLOAT32 * (gathers + gradients) / work.ranks / PCIE
        found += 7 * FLOAT32 * work.trained * work.rounds * batch.updates / work.ranks / HOST_OPTIMIZER
    if learner.offload_activations:
        kept = shape.hidden * each if learner.checkpoint_activations else shape.activation_bytes_per_token(each)
        found += 2 * work.rounds * tokens * shape.layers * kept / PCIE
    return found


def _publish(config: RunConfig, shape: ModelShape, machine: Machine) -> float:
    number, split = engines(config), config.engine.server.tensor_parallel
    lora = config.learner.lora
    adapter = config.engine.sync == "lora" and lora is not None
    numbers = shape.lora_parameters(lora.rank, lora.targets) if adapter and lora else shape.parameters
    sent = engine_bytes(config) * numbers
    gathered = FLOAT32 * shape.parameters / HOST if config.learner_on_ray and not adapter else 0.0
    if not config.engine.on_servers:
        if config.learner_on_ray or lora is not None or config.learner.cpu_offload:  # by way of host memory
            return 2 * FLOAT32 * shape.parameters / HOST
        return sent / (machine.card.bandwidth / 4)
    sync = config.engine.resolved_sync
    if sync in ("disk", "lora"):
        return gathered + sent * (1 + number) / DISK
    changed = CHANGED + (1 - CHANGED) / config.engine.server.full_every if sync == "delta" else 1.0
    elsewhere = config.learner_on_ray or config.engine.server.launch == "ray" or bool(config.engine.server.urls)
    if sync != "broadcast" and (elsewhere or config.engine.kind == "vllm"):  # by value
        return gathered + changed * sent * number / HOST
    return gathered + changed * sent * number / (machine.link * 0.5 * split)
