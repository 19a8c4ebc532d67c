"""`agentrl plan`: estimate the cost and the placement of a run before anything is loaded.

Memory is what tensors need; allocators and the driver of a GPU take some more on top.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.config.datafiles import data_files
from agentrl.config.run import RunConfig
from agentrl.engine.servers.kinds import KINDS
from agentrl.preflight.estimate import Arithmetic, Phase, Plan, machine_memory, on_gpu
from agentrl.preflight.machines import Machine
from agentrl.preflight.placement import attention_there, placement
from agentrl.preflight.predict import predict
from agentrl.preflight.rules import findings
from agentrl.preflight.shape import BFLOAT16, FLOAT32, ModelShape, classifier_parameters
from agentrl.trainer.room import longest_episode

GIB = 2**30


def make_plan(
    config: RunConfig, *, memory_bytes: int | None = None, gpu: bool | None = None, machine: Machine | None = None
) -> Plan:
    """Estimate the resources of a run.

    Args:
        config: the run.
        machine: the GPUs that it will run on; with them, the seconds of a step are predicted.
        memory_bytes: of one GPU (or of the machine, without GPUs); this machine's if nothing is given.
        gpu: whether it will run on GPUs; as here if nothing is given.

    Raises:
        ConfigError: the model directory has no usable config.json.
    """
    if machine is not None:
        config, gpu, memory_bytes = on_gpus(config), True, machine.memory_bytes
    here = memory_bytes is None and gpu is None
    gpu = on_gpu(config) if gpu is None else gpu
    memory = memory_bytes or machine_memory(gpu)
    shape = (
        ModelShape.of_tiny(config.model.tiny)
        if config.model.tiny
        else ModelShape.of_directory(Path(config.model.path or ""))
    )
    batch = arithmetic(config)
    each = BFLOAT16 if config.engine.resolved_dtype == "bfloat16" else FLOAT32
    per_token = shape.kv_bytes_per_token(each)
    kv = per_token * kv_tokens(config, shape)
    if gpu and config.engine.on_servers and not config.engine.server.urls and memory is not None:
        kv = min(kv, _server_cache(config, shape, each, memory))
    phases = [_rollout(config, shape, kv, gpu), _update(config, shape)]
    if not config.learner_on_ray and not config.engine.on_servers:
        phases.append(_together(*phases))
    phases += _apart(config, shape)
    checkpoint = checkpoint_bytes(config, shape)
    kept = config.checkpoint.keep + int(config.checkpoint.best) + 1  # the one that is being written
    where, attention = placement(config, gpu), attention_there(config, shape, gpu)
    plan = Plan(
        *(shape, batch, where, attention, phases, per_token, kv, checkpoint, kept * checkpoint, memory, here, []),
        machine=machine,
        prediction=None
        if machine is None
        else predict(config, shape, batch, machine, _critic_shape(config, shape)),
    )
    plan.findings.extend(findings(config, plan, gpu))
    return plan


def on_gpus(config: RunConfig) -> RunConfig:
    """The run with what `auto` means on a machine with GPUs."""
    learner = (
        config.learner if config.learner.device != "auto" else config.learner.model_copy(update={"device": "cuda"})
    )
    engine = (
        config.engine if config.engine.device != "auto" else config.engine.model_copy(update={"device": "cuda"})
    )
    return config.model_copy(update={"learner": learner, "engine": engine})


def arithmetic(config: RunConfig) -> Arithmetic:
    """The numbers of a step."""
    rollout, learner = config.rollout, config.learner
    views = config.by_env.values()
    episodes = config.episodes_per_step
    tokens = episodes * max(view.rollout.token_budget for view in views)
    updates = min(config.algorithm.updates_per_step, episodes)
    per_rank = tokens / updates / learner.ranks
    sampled = max(
        min(view.rollout.max_turns * view.rollout.max_tokens, view.rollout.token_budget) for view in views
    )
    rows = None
    files = [view.data.train for view in views if view.data.train is not None]
    if len(files) == len(views):
        from agentrl.env.rows import count_rows  # with all of env: needed for files only

        rows = sum(count_rows(path) for each in files for path in data_files(each))
    return Arithmetic(
        tasks=rollout.groups_per_step,
        episodes=episodes,
        updates=updates,
        episodes_per_update=episodes / updates,
        sampled_tokens=episodes * sampled,
        tokens=tokens,
        micro_batches_per_rank=max(1, -int(-per_rank // learner.tokens_per_micro_batch)),
        steps=config.steps,
        episodes_in_all=config.steps * episodes,
        rows=rows,
    )


def kv_tokens(config: RunConfig, shape: ModelShape) -> int:
    """Tokens in the KV cache of all engines when every slot is full."""
    slots = config.engine.max_slots * _replicas(config)
    playing = config.episodes_per_step * (1 + config.rollout.max_staleness)
    return min(slots, playing) * min(longest_episode(config), shape.max_context)


def _server_cache(config: RunConfig, shape: ModelShape, each: int, memory: int) -> int:
    """What all servers have for their caches: they take a share of each device, and what weights leave of it."""
    server = config.engine.server
    share = server.gpu_memory_utilization or KINDS[config.engine.kind].memory_share
    split = server.tensor_parallel
    return max(0, int(share * memory) - shape.parameters * each // split) * split * _replicas(config)


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """One checkpoint on disk: weights in float32, and both moments of AdamW as `optim.state` keeps them."""
    size = FLOAT32 * shape.parameters
    adapter = 0 if config.learner.lora is None else FLOAT32 * _trained(config, shape)
    critic = 0
    if config.critic is not None:
        value = _critic_shape(config, shape)
        critic = FLOAT32 * value.parameters + value.moment_bytes(config.optim.state)
    return size + adapter + _moments(config, shape) + critic


def _replicas(config: RunConfig) -> int:
    server = config.engine.server
    return 1 if not config.engine.on_servers else len(server.urls) or server.replicas


def _trained(config: RunConfig, shape: ModelShape) -> int:
    lora = config.learner.lora
    return shape.parameters if lora is None else shape.lora_parameters(lora.rank, lora.targets)


def _moments(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the policy's optimizer state."""
    lora = config.learner.lora
    if lora is None:
        return shape.moment_bytes(config.optim.state)
    return shape.lora_moment_bytes(lora.rank, lora.targets, config.optim.state)


def _rollout(config: RunConfig, shape: ModelShape, kv: int, gpu: bool) -> Phase:
    """Memory of one engine."""
    each = BFLOAT16 if config.engine.resolved_dtype == "bfloat16" else FLOAT32
    split = config.engine.server.tensor_parallel
    # A GPU has whole heads of keys and values, so more GPUs than heads have copies.
    parts = {
        "weights": shape.parameters * each // split,
        "KV cache": kv // _replicas(config) // min(split, shape.kv_heads),
    }
    if config.engine.server.sleep and config.learner_on_ray and not config.learner.cpu_offload:
        held = FLOAT32 * (shape.parameters + (_trained(config, shape) if config.learner.lora else 0))
        parts["learner's shard"] = (held + _moments(config, shape)) // config.learner.ranks
    where = (
        "the process of the run" if not config.engine.on_servers else f"each {'GPU of a ' if gpu else ''}server"
    )
    return Phase("rollout", where, parts)


def _update(config: RunConfig, shape: ModelShape) -> Phase:
    """Memory of one rank at the peak of the backward pass; what is offloaded is not counted."""
    learner, ranks, on_ray = config.learner, config.learner.ranks, config.learner_on_ray
    trained = _trained(config, shape)
    parts = {
        "parameters": FLOAT32 * (shape.parameters + (trained if learner.lora else 0)) // ranks,
        "gradients": FLOAT32 * trained // ranks,
        "optimizer": _moments(config, shape) // ranks,
    }
    if learner.cpu_offload:
        parts = {}
    beside = config.algorithm.kl.coef > 0 and learner.lora is None and not learner.reference_ranks
    if beside and not learner.cpu_offload:
        parts["reference"] = FLOAT32 * shape.parameters // ranks
    if config.critic is not None and not config.critic.ranks:
        critic = _critic_shape(config, shape)
        parts["critic"] = (2 * FLOAT32 * critic.parameters + critic.moment_bytes(config.optim.state)) // ranks
    parts |= _computing(config, shape) | _logits(config, shape)
    return Phase("update", "each rank" if on_ray else "the process of the run", parts)


def _apart(config: RunConfig, shape: ModelShape) -> list[Phase]:
    """Memory of one rank of each model with separate ranks, and of one worker of the reward model."""
    learner, found = config.learner, []
    if ranks := learner.reference_ranks:
        held = {} if learner.cpu_offload else {"parameters": FLOAT32 * shape.parameters // ranks}
        parts = held | _computing(config, shape, backward=False) | _logits(config, shape)
        found.append(Phase("reference", "each of its ranks", parts))
    if config.critic is not None and (ranks := config.critic.ranks):
        critic = _critic_shape(config, shape)
        shard = FLOAT32 * critic.parameters // ranks
        moments = critic.moment_bytes(config.optim.state) // ranks
        held = {"parameters": shard, "gradients": shard, "optimizer": moments}
        found.append(
            Phase(
                "critic", "each of its ranks", ({} if learner.cpu_offload else held) | _computing(config, critic)
            )
        )
    scorer = config.reward_model
    if scorer is not None and scorer.kind == "classifier":
        weights = FLOAT32 * classifier_parameters(Path(scorer.path or ""))
        where = "each of its workers" if scorer.workers else "the process of the run"
        found.append(Phase("scoring", where, {"reward model": weights}))
    return found


def _computing(config: RunConfig, shape: ModelShape, *, backward: bool = True) -> dict[str, int]:
    """What a pass over a micro-batch needs in addition to the shards that a rank holds."""
    learner, parts = config.learner, {}
    low = learner.precision == "bfloat16"
    each = BFLOAT16 if low else FLOAT32
    if config.learner_on_ray or low or learner.cpu_offload:
        # The outer part stays gathered, and two blocks: one computing, one on its way.
        parts["gathered"] = each * (shape.outer + 2 * shape.block) + FLOAT32 * shape.block
    heads, shared = shape.heads_split(learner.sequence_ranks)
    more = (2 * (heads - shape.heads) + 2 * (shared - shape.kv_heads)) * shape.head_dim * each
    block = shape.activation_bytes_per_token(each) + more
    kept = shape.layers * shape.hidden * each + block if learner.checkpoint_activations else shape.layers * block
    if not backward:
        kept = block
    if not (backward and learner.offload_activations):
        parts["activations"] = learner.tokens_per_micro_batch * kept
    if learner.sequence_ranks > 1:  # queries, keys and values of a block, as they are sent and as they arrive
        parts["exchange"] = learner.tokens_per_micro_batch * 2 * (heads + 2 * shared) * shape.head_dim * each
    return parts


def _logits(config: RunConfig, shape: ModelShape) -> dict[str, int]:
    tokens = config.learner.tokens_per_micro_batch
    return {"logits": 3 * FLOAT32 * min(config.learner.logits_at_once or tokens, tokens) * shape.vocab}


def _critic_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    """The sizes of what the critic begins with."""
    path = None if config.critic is None else config.critic.path
    return shape if path is None else ModelShape.of_directory(Path(path))


def _together(rollout: Phase, update: Phase) -> Phase:
    parts = {f"rollout: {k}": v for k, v in rollout.parts.items()} | {
        f"update: {k}": v for k, v in update.parts.items()
    }
    return Phase("both", "the process of the run", parts)
