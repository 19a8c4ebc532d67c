"""Memory of each phase of a run: what one process holds, by what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.config.run import RunConfig
from agentrl.engine.servers.kinds import KINDS
from agentrl.preflight.estimate import Phase, colocated
from agentrl.preflight.shape import BFLOAT16, FLOAT32, ModelShape, classifier_parameters
from agentrl.trainer.room import longest_episode

HERE = "the process of the run"
POLICY_LOGITS = 5
"""Copies of a chunk of logits: as they are, as log-probabilities, and three for the entropy."""
COMPARED = 3 * 8 + 5 * 4
"""Bytes for each token that `kl.kind: full` compares: three int64 copies of its id, and five float32 values (its
log-probabilities under both models, the divergence, and their gradients)."""
CPU_CACHE = 0.25
"""Share of the machine's memory that the local engine's cache may take; on a GPU it is half of what is free."""


@dataclass(frozen=True, slots=True)
class Models:
    """The sizes of a run's models, read from their folders.

    Attributes:
        reference: the frozen model of the KL penalty (the teacher, if the run has one), where the learner holds it
            in addition; None if it is on a server, or the policy without its adapters.
        critic: what the critic begins with, if there is one.
        scorer: parameters of a classifier that the run itself asks; 0 without one.
    """

    policy: ModelShape
    reference: ModelShape | None
    critic: ModelShape | None
    scorer: int

    @classmethod
    def of(cls, config: RunConfig) -> Models:
        """Read them.

        Raises:
            ConfigError: a directory has no usable config.json, or the policy no layer of `learner.lora.targets`.
        """
        tiny, critic, scorer = config.model.tiny, config.critic, config.reward_model
        policy = ModelShape.of_tiny(tiny) if tiny else ModelShape.of_directory(Path(config.model.path or ""))
        _refuse_unknown_targets(config, policy)
        value = None
        if critic is not None:
            body = policy if critic.path is None else ModelShape.of_directory(Path(critic.path))
            value = body.as_critic()
        asked = scorer is not None and scorer.kind == "classifier"
        return cls(
            policy,
            _reference(config, policy),
            value,
            classifier_parameters(Path(scorer.path or "")) if scorer and asked else 0,
        )


def _refuse_unknown_targets(config: RunConfig, policy: ModelShape) -> None:
    lora = config.learner.lora
    for target in () if lora is None or isinstance(lora.targets, str) else lora.targets:
        if not policy.lora_parameters(1, [target]):
            from agentrl.models.linear import unknown_target

            raise unknown_target(target, [name for name, *_ in (*policy.linear, *policy.named)])


def _reference(config: RunConfig, policy: ModelShape) -> ModelShape | None:
    if config.algorithm.kl.coef == 0 or config.teachers_on_servers:
        return None
    teacher = config.teacher
    if teacher is None or teacher.policy == "initial":
        return policy if config.learner.lora is None else None
    if teacher.policy == "average":
        return policy
    return None if teacher.path is None else ModelShape.of_directory(Path(teacher.path))


@dataclass(frozen=True, slots=True)
class Cache:
    """The key-value cache of all engines together, in bytes.

    Attributes:
        per_token: of one token, over all layers.
        wanted: with every slot full.
        room: what there is for it; None if that is not known.
    """

    per_token: int
    wanted: int
    room: int | None

    @property
    def used(self) -> int:
        """The most that it will hold."""
        return self.wanted if self.room is None else min(self.wanted, self.room)


def engine_bytes(config: RunConfig) -> int:
    """Bytes of a number in the engine."""
    return BFLOAT16 if config.engine.resolved_dtype == "bfloat16" else FLOAT32


def engines(config: RunConfig) -> int:
    """Number of engines that sample."""
    server = config.engine.server
    return 1 if not config.engine.on_servers else len(server.urls) or server.replicas


def engine_cache(config: RunConfig, models: Models, memory: int | None, gpu: bool) -> Cache:
    """The cache of a run's engines.

    Args:
        memory: of one GPU (or of the machine, without GPUs), if it is known.
    """
    shape, engine = models.policy, config.engine
    per_token = shape.kv_bytes_per_token(engine_bytes(config), latent=engine.on_servers)
    playing = config.episodes_per_step * (1 + config.rollout.max_staleness)
    slots = min(engine.max_slots * engines(config), playing)
    wanted = per_token * slots * min(longest_episode(config), shape.max_context)
    room = None
    if memory is not None and not engine.server.urls and not engine.own:
        if not engine.on_servers:
            room = _local_room(config, models, memory, gpu)
        elif gpu:
            room = _server_room(config, shape, memory) * cache_parts(config, shape) * engines(config)
    return Cache(per_token, wanted, room)


def cache_parts(config: RunConfig, shape: ModelShape) -> int:
    """Over how many GPUs of a server its cache is split; the others hold copies.

    A GPU holds at least one head of keys and values, and compressed ones are not split at all.
    """
    heads = 1 if shape.latent and config.engine.on_servers else shape.kv_heads
    return min(config.engine.server.tensor_parallel, heads)


def _server_room(config: RunConfig, shape: ModelShape, memory: int) -> int:
    """A server's cache on each GPU: it takes a share of the memory, and the cache is what weights leave of it."""
    share = config.engine.server.gpu_memory_utilization or KINDS[config.engine.kind].memory_share
    return max(0, int(share * memory) - _server_weights(config, shape))


def _server_weights(config: RunConfig, shape: ModelShape) -> int:
    return shape.parameters * engine_bytes(config) // config.engine.server.tensor_parallel


def _local_room(config: RunConfig, models: Models, memory: int, gpu: bool) -> int:
    if not gpu:
        return int(CPU_CACHE * memory)
    held = sum(_held(config, models, moments=False).values()) if colocated(config) else 0
    return max(0, memory - held - models.policy.parameters * engine_bytes(config)) // 2


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Parameters of the policy that are trained."""
    lora = config.learner.lora
    return shape.trained if lora is None else shape.lora_parameters(lora.rank, lora.targets)


def policy_moments(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the policy's optimizer state."""
    lora = config.learner.lora
    if lora is None:
        return shape.moment_bytes(config.optim.state)
    return shape.lora_moment_bytes(lora.rank, lora.targets, config.optim.state)


def memory_phases(
    config: RunConfig, models: Models, cache: Cache, *, memory: int | None, gpu: bool
) -> list[Phase]:
    """Memory of every phase; what shares a process is in the same phase."""
    rollout, update = _rollout(config, models, cache, memory, gpu), _update(config, models)
    phases = [rollout, update]
    if not config.engine.on_servers and (not gpu or colocated(config)) and not config.learner_on_ray:
        phases.append(_together(rollout, update))
    phases += _apart(config, models)
    scorer = config.reward_model
    if scorer is None or not models.scorer:
        return phases
    weights = {"reward model": FLOAT32 * models.scorer}
    if scorer.workers:
        return [*phases, Phase("scoring", "each of its workers", weights)]
    sharing = [phase for phase in phases if phase.where == HERE]
    if not sharing or (gpu and scorer.device == "cpu"):
        return [*phases, Phase("scoring", HERE, weights)]
    return [Phase(p.name, p.where, p.parts | weights) if p in sharing else p for p in phases]


def _rollout(config: RunConfig, models: Models, cache: Cache, memory: int | None, gpu: bool) -> Phase:
    """Memory of one engine; where servers take turns with the learner, what it holds is counted too."""
    shape, engine = models.policy, config.engine
    parts = {"weights": _server_weights(config, shape)}
    if gpu and engine.on_servers and not engine.server.urls and memory is not None:
        parts["KV cache"] = _server_room(config, shape, memory)  # it is taken, used or not
    else:
        parts["KV cache"] = cache.used // engines(config) // cache_parts(config, shape)
    if engine.server.sleep:
        parts |= {f"learner's {name}": number for name, number in _held(config, models).items()}
    where = HERE if not engine.on_servers else f"each {'GPU of a ' if gpu else ''}server"
    return Phase("rollout", where, parts)


def _held(config: RunConfig, models: Models, *, moments: bool = True) -> dict[str, int]:
    """What a rank of the policy holds at all times; nothing if it is offloaded."""
    learner, ranks, shape = config.learner, config.learner.ranks, models.policy
    if learner.cpu_offload:
        return {}
    adapters = trained_parameters(config, shape) if learner.lora else 0
    parts = {"parameters": FLOAT32 * (shape.parameters + adapters) // ranks}
    if moments:
        parts["optimizer"] = policy_moments(config, shape) // ranks
    if models.reference is not None and not learner.reference_ranks:
        parts["reference"] = FLOAT32 * models.reference.parameters // ranks
    if config.critic is not None and models.critic is not None and not config.critic.ranks:
        critic = FLOAT32 * models.critic.parameters
        critic += models.critic.moment_bytes(config.optim.state) if moments else 0
        parts["critic"] = critic // ranks
    return parts


def _update(config: RunConfig, models: Models) -> Phase:
    """Memory of one rank at the peak of the backward pass; what is offloaded is not counted."""
    learner, ranks, shape = config.learner, config.learner.ranks, models.policy
    parts = _held(config, models)
    if not learner.cpu_offload:
        parts["gradients"] = FLOAT32 * trained_parameters(config, shape) // ranks
    if "critic" in parts and models.critic is not None:
        parts["critic"] += FLOAT32 * models.critic.parameters // ranks  # its gradients
    largest = max(_passes(config, models), key=lambda one: sum(one.values()))
    parts |= largest
    return Phase("update", "each rank" if config.learner_on_ray else HERE, parts)


def _passes(config: RunConfig, models: Models) -> list[dict[str, int]]:
    """What each pass of a rank of the policy needs in addition: its own, and those of the models it shares."""
    learner, shape = config.learner, models.policy
    own = _computing(config, shape) | _logits(config, shape, POLICY_LOGITS) | _distributions(config, models)
    found = [own]
    if models.reference is not None and not learner.reference_ranks:
        reference = models.reference
        found.append(_computing(config, reference, backward=False) | _logits(config, reference))
        if "gathered" in own:  # a pass without gradients leaves the reference's outer part gathered
            own["gathered"] += _each(config) * reference.outer
    if config.critic is not None and models.critic is not None and not config.critic.ranks:
        found.append(_computing(config, models.critic))
    return found


def _apart(config: RunConfig, models: Models) -> list[Phase]:
    """Memory of one rank of each model with separate ranks."""
    learner, found = config.learner, []
    if models.reference is not None and (ranks := learner.reference_ranks):
        reference = models.reference
        held = {} if learner.cpu_offload else {"parameters": FLOAT32 * reference.parameters // ranks}
        parts = held | _computing(config, reference, backward=False) | _logits(config, reference)
        found.append(Phase("reference", "each of its ranks", parts))
    if config.critic is not None and models.critic is not None and (ranks := config.critic.ranks):
        critic = models.critic
        shard = FLOAT32 * critic.parameters // ranks
        moments = critic.moment_bytes(config.optim.state) // ranks
        held = {"parameters": shard, "gradients": shard, "optimizer": moments}
        parts = ({} if learner.cpu_offload else held) | _computing(config, critic)
        found.append(Phase("critic", "each of its ranks", parts))
    return found


def _computing(config: RunConfig, shape: ModelShape, *, backward: bool = True) -> dict[str, int]:
    """What a pass over a micro-batch needs in addition to the shards that a rank holds."""
    learner, parts, each = config.learner, {}, _each(config)
    if config.learner_on_ray or each == BFLOAT16 or learner.cpu_offload:
        # The outer part stays gathered, and two blocks: one computing, one on its way.
        parts["gathered"] = each * (shape.outer + 2 * shape.block) + FLOAT32 * shape.block
    heads, shared = shape.heads_split(learner.sequence_ranks)
    more = (2 * (heads - shape.heads) + 2 * (shared - shape.kv_heads)) * shape.head_dim * each
    block = shape.activation_bytes_per_token(each) + more
    inputs, again = (shape.hidden * each, block) if learner.checkpoint_activations else (block, 0)
    if not backward:
        inputs, again = 0, block
    if learner.offload_activations:  # but not what the backward pass computes again
        inputs = 0
    if kept := shape.layers * inputs + again:
        parts["activations"] = learner.tokens_per_micro_batch * kept
    if learner.sequence_ranks > 1:  # queries, keys and values of a block, as they are sent and as they arrive
        parts["exchange"] = learner.tokens_per_micro_batch * 2 * (heads + 2 * shared) * shape.head_dim * each
    return parts


def _each(config: RunConfig) -> int:
    """Bytes of a number in the learner's passes."""
    return BFLOAT16 if config.learner.precision == "bfloat16" else FLOAT32


def _logits(config: RunConfig, shape: ModelShape, copies: int = 3) -> dict[str, int]:
    tokens = config.learner.tokens_per_micro_batch
    return {"logits": copies * FLOAT32 * min(config.learner.logits_at_once or tokens, tokens) * shape.vocab}


def _distributions(config: RunConfig, models: Models) -> dict[str, int]:
    """What `kl.kind: full` keeps of each trained token, whatever `logits_at_once` is."""
    kl = config.decided_algorithm.kl
    if not kl.in_loss or kl.loss_kind != "full":
        return {}
    vocab = max(models.policy.vocab, models.reference.vocab if models.reference else 0)
    compared = min(kl.top or vocab, vocab)
    return {"distributions": COMPARED * config.learner.tokens_per_micro_batch * compared}


def _together(rollout: Phase, update: Phase) -> Phase:
    parts = {f"rollout: {k}": v for k, v in rollout.parts.items()} | {
        f"update: {k}": v for k, v in update.parts.items()
    }
    return Phase("both", HERE, parts)
