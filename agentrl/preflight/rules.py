"""Rules that detect problems before a run: one function per rule, with a code and a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.gpu import gpus_here
from agentrl.learner.attention.kind import choose_attention
from agentrl.preflight.estimate import Phase, Plan, PlanFinding, colocated, disk_free, own_devices, size
from agentrl.preflight.machines import Machine
from agentrl.trainer.room import longest_episode, room_for

Rule = Callable[[RunConfig, Plan, bool], Iterator[PlanFinding]]
BILLION = 1_000_000_000
TOO_FULL = 0.9
"""Share of a device's memory beyond which a plan does not count as fitting: allocators need the rest."""


def findings(config: RunConfig, plan: Plan, gpu: bool) -> list[PlanFinding]:
    """The findings of all rules, errors first."""
    found = [finding for rule in RULES for finding in rule(config, plan, gpu)]
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.level))


def memory(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL01: a phase does not fit."""
    if plan.memory_bytes is None:
        return
    for phase in plan.phases:
        if phase.name == "rollout" and (config.engine.server.urls or _only_its_share(config, phase, gpu)):
            continue
        if phase.total > TOO_FULL * plan.memory_bytes:
            name, most = max(phase.parts.items(), key=lambda part: part[1])
            text = f"{phase.name} needs {size(phase.total)} in {phase.where}, which has {size(plan.memory_bytes)}"
            yield PlanFinding(
                "PL01", "error", f"{text}; most of it is {name} ({size(most)})", _relief(phase, name, config)
            )


def _only_its_share(config: RunConfig, phase: Phase, gpu: bool) -> bool:
    """Whether a GPU has nothing but a server, which leaves the rest of it alone."""
    alone = phase.parts.keys() == {"weights", "KV cache"}
    return gpu and config.engine.on_servers and alone and phase.parts["KV cache"] > 0


OWN_RANKS = {"reference": "raise learner.reference_ranks", "critic": "raise critic.ranks"}


def _relief(phase: Phase, name: str, config: RunConfig) -> str:
    learner = config.learner
    if "reward model" in name:
        return "take a smaller reward model, or ask a server for the scores (reward_model.kind: http)"
    if "KV" in name and config.engine.server.sleep:
        return "lower engine.server.gpu_memory_utilization: the learner stays in memory while servers sample"
    if "KV" in name:
        return "lower engine.max_slots, rollout.token_budget or rollout.group_size"
    if "activations" in name:
        more = "" if learner.checkpoint_activations else "set learner.checkpoint_activations, or "
        long = config.rollout.token_budget > learner.micro_batch_tokens // 2
        room = ", and raise learner.sequence_ranks so that episodes still fit" if long else ""
        return f"{more}lower learner.tokens_per_micro_batch{room}"
    if "distributions" in name:
        return "set algorithm.kl.top (128, say), or lower learner.tokens_per_micro_batch"
    if "logits" in name:
        return "set learner.logits_at_once (1024, say)"
    if "gathered" in name:
        return "set learner.precision to bfloat16"
    if "weights" in name:
        return "set engine.dtype to bfloat16, or split the model with engine.server.tensor_parallel"
    if phase.name in OWN_RANKS:
        return OWN_RANKS[phase.name]
    return "raise learner.ranks, or use learner.lora or learner.cpu_offload"


def one_episode(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL02: an episode is larger than a micro-batch, which is never cut."""
    budget, room = longest_episode(config), config.learner.micro_batch_tokens
    longest = longest_episode(config, plan.model.max_context)
    if longest > room:
        text = f"an episode may have {budget:,} tokens, a micro-batch takes {room:,}"
        yield PlanFinding("PL02", "error", text, room_for(config, longest))


def context(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL03: episodes that the model's context cuts."""
    budget, limit = longest_episode(config), plan.model.max_context
    if budget > longest_episode(config, limit):
        text = f"rollout.token_budget is {budget:,}, the model's context {limit:,}: episodes end there"
        yield PlanFinding("PL03", "warning", text, f"lower rollout.token_budget to {limit}, or take another model")


def turns(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL04: the budget of the episode leaves less than a turn, prompt and observations not counted."""
    for name, view in config.by_env.items():
        rollout, where = view.rollout, f"{name}: " if name else ""
        wanted = rollout.max_turns * rollout.max_tokens
        if wanted <= rollout.token_budget:
            continue
        level = "warning" if rollout.max_tokens >= rollout.token_budget else "note"
        text = (
            f"{where}{rollout.max_turns} turns of {rollout.max_tokens} tokens are {wanted:,}, more than "
            f"rollout.token_budget = {rollout.token_budget:,} with prompt and observations: long episodes are cut"
        )
        yield PlanFinding("PL04", level, text, "raise rollout.token_budget, or see the limits in `agentrl show`")


def division(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL05: ranks without work, or updates of unlike size."""
    batch, ranks = plan.batch, config.learner.ranks // config.learner.sequence_ranks
    if batch.episodes_per_update < ranks:
        kind = "ranks" if config.learner.sequence_ranks == 1 else "groups of ranks"
        text = f"an update has {batch.episodes_per_update:g} episodes for {ranks} {kind}: some have nothing to do"
        yield PlanFinding(
            "PL05", "warning", text, "lower algorithm.updates_per_step or learner.ranks, or play more groups"
        )
    if config.algorithm.updates_per_step > batch.episodes:
        text = f"{config.algorithm.updates_per_step} updates a step, but only {batch.episodes} episodes"
        yield PlanFinding("PL05", "warning", text, "lower algorithm.updates_per_step")


def double_kl(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL06: the reference pulls twice."""
    if config.algorithm.kl.coef > 0 and config.algorithm.kl.where == "both":
        text = "the KL penalty is in the loss and in the reward"
        yield PlanFinding(
            "PL06", "warning", text, "set algorithm.kl.where to loss or reward unless both are meant"
        )


def reference(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL07: what the reference costs, and which one it is."""
    if config.algorithm.kl.coef == 0:
        return
    teacher, servers = config.teacher, config.teachers_on_servers
    if servers:
        distinct = len({each.model_dump_json() for each in servers.values()})
        what = (
            "the teacher is on a server, which scores" if distinct == 1 else "teachers are on servers, which score"
        )
        text = f"{what} every episode while the policy waits"
    elif teacher is not None and (teacher.policy == "current" or (teacher.policy and config.learner.lora)):
        text = "the teacher is the policy with a hint: no second copy, one more forward pass"
    elif teacher is not None and teacher.policy == "average":
        text = (
            "the teacher is an average of the policy: a second copy, in checkpoints too, and one more forward pass"
        )
    elif teacher is not None:
        where = (
            "on dedicated ranks, which the policy waits for"
            if config.learner.reference_ranks
            else "by the policy's ranks"
        )
        text = f"the teacher is a frozen model: one more forward pass of its size, {where}"
    elif config.learner.lora is not None:
        text = "the reference is the policy without its adapters: no second copy, one more forward pass"
    elif config.learner.reference_ranks:
        text = (
            "the reference is a frozen copy on dedicated ranks: one more forward pass, which the policy waits for"
        )
    else:
        text = "the reference is a frozen copy: one more forward pass, about a quarter of an update"
    keys = list(dict.fromkeys(each.place for each in servers.values())) or ["teacher"] * (teacher is not None)
    advice = f"remove {' and '.join(keys)}" if keys else "set algorithm.kl.coef to 0"
    yield PlanFinding("PL07", "note", text, f"{advice} to do without")


def waves(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL08: larger steps stress the engine before the learner."""
    slots = plan.kv_bytes // max(1, plan.kv_bytes_per_token * min(longest_episode(config), plan.model.max_context))
    if slots and plan.batch.played > 4 * slots:
        times = plan.batch.played / slots
        text = (
            f"{plan.batch.played:,} episodes, if all are as long as they may be, share {slots} slots: they are "
            f"played in {times:.0f} waves"
        )
        fix = "raise engine.max_slots"
        if plan.kv_limited:
            fix = "memory limits them: lower rollout.token_budget"
            if config.engine.on_servers:
                fix += ", or raise engine.server.gpu_memory_utilization, tensor_parallel or replicas"
        yield PlanFinding("PL08", "warning", text, fix)


def bypass(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL09: ratios against another program's numbers."""
    algorithm = config.algorithm
    if algorithm.decided(config.rollout.max_staleness).old_logprobs == "sampler":
        text = "the ratios are against the sampler's own log-probabilities, which differ from the learner's"
        fix = "set algorithm.old_logprobs to learner"
        if algorithm.old_logprobs == "auto":
            text += f", because episodes may be {_steps(config.rollout.max_staleness)} old"
            fix = "nothing, unless you want them corrected otherwise: then set algorithm.correction.importance"
        yield PlanFinding("PL09", "note", text, f"watch drift/mean_abs; {fix}")
    if (
        config.rollout.max_staleness > 0
        and algorithm.correction.importance == "none"
        and algorithm.old_logprobs == "learner"
    ):
        text = f"episodes may be {_steps(config.rollout.max_staleness)} old and nothing corrects for it"
        yield PlanFinding("PL09", "warning", text, "leave algorithm.old_logprobs to auto")


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number > 1)}"


def learning_rate(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL10: learning rates of another size than usual."""
    lr, large = config.optim.lr, plan.model.parameters >= BILLION // 2
    if config.learner.lora is not None and lr < 5e-6 and large:
        text = f"optim.lr is {lr:g}: adapters usually need ten times what the whole model takes"
        yield PlanFinding("PL10", "warning", text, "try 1e-5 to 1e-4")
    if config.learner.lora is None and lr > 1e-5 and large:
        text = (
            f"optim.lr is {lr:g} for all {plan.model.parameters:,} parameters: policies this large usually break"
        )
        yield PlanFinding("PL10", "warning", text, "try 1e-6")
    if not large and lr == type(config.optim).model_fields["lr"].default:
        text = f"optim.lr is {lr:g}, the default for large models; small ones hardly move"
        yield PlanFinding("PL10", "warning", text, "try 1e-4 to 1e-3 for a model of a few million parameters")


def precision(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL11: float32 on GPUs."""
    if gpu and config.learner.precision == "float32" and plan.model.parameters >= BILLION // 2:
        yield PlanFinding(
            "PL11",
            "warning",
            "the learner computes in float32 on a GPU: several times slower",
            "set learner.precision to bfloat16",
        )


def disk(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL12: checkpoints do not fit on the disk."""
    if plan.machine is not None:
        return  # whose disk is not this one
    free = disk_free(Path("runs").absolute() / config.name)
    if plan.checkpoints_bytes > free:
        text = f"checkpoints take up to {size(plan.checkpoints_bytes)}, the disk has {size(free)} left"
        yield PlanFinding("PL12", "error", text, "lower checkpoint.keep, or put the run elsewhere with --run-dir")


def critic(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL13: a critic that follows too fast."""
    if config.critic is not None and config.critic.lr > 100 * config.optim.lr and config.critic.warmup_steps == 0:
        text = f"critic.lr is {config.critic.lr:g}, over a hundred times optim.lr, without warm-up: it may spike"
        yield PlanFinding("PL13", "warning", text, "lower critic.lr first, or set critic.warmup_steps")


def signal(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL14: groups too small to tell chance from skill."""
    if 1 < config.rollout.group_size < 4 and config.algorithm.advantage.name in ("grpo", "rloo", "dr_grpo"):
        text = f"groups of {config.rollout.group_size}: most score all the same and teach nothing"
        yield PlanFinding("PL14", "warning", text, "set rollout.group_size to 8, with fewer groups if need be")


def attention(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL15: an attention that cannot work here."""
    heads, sequence = plan.model.heads, config.learner.sequence_ranks
    if sequence > heads:
        text = f"learner.sequence_ranks is {sequence}, and the model has {heads} attention heads to split"
        yield PlanFinding("PL15", "error", text, f"set learner.sequence_ranks to {heads} or less")
    elif heads % sequence:
        idle = 1 - heads / (sequence * -(-heads // sequence))
        text = f"{heads} attention heads cannot be divided evenly by learner.sequence_ranks = {sequence}"
        fix = f"choose a divisor of {heads}: otherwise {idle:.0%} of the attention is computed for nothing"
        yield PlanFinding("PL15", "note", text, fix)
    if gpu and not gpus_here():
        return
    try:
        choose_attention(config.learner, "cuda" if gpu else "cpu", {plan.model.head_dim})
    except ConfigError as e:
        yield PlanFinding("PL15", "error", str(e), "set learner.attention to auto")


def devices(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL16: devices that this machine lacks."""
    if not plan.here:
        return
    learner, engine = config.learner, config.engine
    there = gpus_here()
    used = {"learner.device": learner.device}
    servers_elsewhere = bool(engine.server.urls or (engine.server.launch == "ray" and config.ray))
    if not engine.on_servers or not servers_elsewhere:
        used["engine.device"] = engine.device
    for key, device in used.items():
        if not device.startswith("cuda") or (key == "learner.device" and config.ray is not None):
            continue
        if int(device.partition(":")[2] or 0) >= there:
            text = f"{key} is {device}, and this machine has {there} GPUs"
            yield PlanFinding(
                "PL16", "error", text, f"set {key} to auto, or plan for another machine with --memory"
            )
    ranks = sum(own_devices(config, gpu).values())
    if config.ray is None and ranks:
        has, kind = (there, "GPUs") if gpu else (os.cpu_count() or 1, "CPU cores")
        if ranks > has:
            text = f"the ranks need {ranks:,} {kind}, and this machine has {has}"
            fix = (
                "lower learner.ranks (and the ranks of reference, critic and reward model), or name a cluster in "
            )
            yield PlanFinding("PL16", "error", text, fix + "`ray`")
    if engine.on_servers and gpu and not servers_elsewhere:
        needed = engine.server.replicas * engine.server.tensor_parallel
        both = needed + ranks if config.ray is None and not engine.server.sleep else needed
        if both > there:
            text = f"the {engine.kind} servers need {needed:,} GPUs"
            if both > needed:
                text = f"the {engine.kind} servers and the ranks need {both:,} GPUs ({needed:,} and {ranks:,})"
            text += f", and this machine has {there}"
            yield PlanFinding(
                "PL16",
                "error",
                text,
                "lower engine.server.replicas or tensor_parallel, or use engine.server.launch: ray with a cluster",
            )


def named_machine(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL17: more GPUs than the machine has, GPUs without work, two models on one, or a server across nodes."""
    if plan.machine is None:
        return
    engine, server, total = config.engine, config.engine.server, plan.machine.total
    learner = sum(own_devices(config, gpu).values()) + (0 if config.learner_on_ray else 1)
    started = engine.on_servers and not server.urls
    serving = server.replicas * server.tensor_parallel if started else 0
    if not engine.on_servers and not engine.own and not colocated(config):
        serving = 1  # the embedded engine has a GPU to itself
    yield from _shared_gpus(config, plan.machine)
    needed = max(learner, serving) if server.sleep else learner + serving
    if needed > total:
        text = (
            f"the run needs {needed} GPUs ({learner} to learn, {serving} to sample), and there are {plan.machine}"
        )
        fix = "lower learner.ranks or engine.server.replicas, or share the GPUs with engine.server.sleep"
        yield PlanFinding("PL17", "error", text, fix)
    elif needed < total:
        has = "has" if total - needed == 1 else "have"
        text = f"{total - needed} of the {total} GPUs of {plan.machine} {has} no work"
        yield PlanFinding("PL17", "warning", text, "raise learner.ranks or engine.server.replicas")
    per_node = plan.machine.gpus // server.tensor_parallel
    if started and not per_node:
        text = f"a server of {server.tensor_parallel} GPUs runs on one node, and a node has {plan.machine.gpus}"
        yield PlanFinding("PL17", "error", text, "lower engine.server.tensor_parallel to what a node has")
    elif started and server.launch == "ray" and server.replicas > per_node * plan.machine.nodes:
        text = (
            f"{server.replicas} servers of {server.tensor_parallel} GPUs, each on one node, do not fit on "
            f"{plan.machine}, which have room for {per_node * plan.machine.nodes}"
        )
        fix = "lower engine.server.replicas, or set engine.server.tensor_parallel to a divisor of a node's GPUs"
        yield PlanFinding("PL17", "error", text, fix)


def _shared_gpus(config: RunConfig, machine: Machine) -> Iterator[PlanFinding]:
    """GPUs by number that are not there, and servers on the learner's."""
    learner, engine, server = config.learner, config.engine, config.engine.server
    numbered = {"learner.device": learner.device, "engine.device": engine.device}
    for key, device in numbered.items():
        if int(device.partition(":")[2] or 0) >= machine.gpus:
            text = f"{key} is {device}, and a node has {machine.gpus} GPUs"
            yield PlanFinding("PL17", "error", text, f"set {key} to one of cuda:0 to cuda:{machine.gpus - 1}")
    ranks = sum(own_devices(config, True).values())
    if config.ray is None and ranks > machine.gpus:
        text = f"the ranks need {ranks} GPUs, and without `ray` they are on one node, which has {machine.gpus}"
        yield PlanFinding("PL17", "error", text, "name the cluster in `ray`, or lower learner.ranks")
    if engine.on_servers and not server.urls:
        yield from _servers_on_the_learners(config, machine)


def _servers_on_the_learners(config: RunConfig, machine: Machine) -> Iterator[PlanFinding]:
    """Servers that the run starts on GPUs that the learner has, or that are not there."""
    learner, engine, server = config.learner, config.engine, config.engine.server
    own, number = int(learner.device.partition(":")[2] or 0), server.replicas * server.tensor_parallel
    if server.launch == "ray":
        if not (config.learner_on_ray or server.sleep) and own < number:  # Ray gives the first ones first
            text = f"the learner is on cuda:{own} of the run's node, which Ray may also give to a server"
            fix = (
                f"set engine.server.launch to process and engine.device to cuda:{own + 1}, or raise learner.ranks"
            )
            yield PlanFinding("PL17", "error", text, fix)
        return
    first = int(engine.device.partition(":")[2] or 0)
    served = range(first, first + number)
    if served[-1] >= machine.gpus:
        text = f"servers start on GPUs {served[0]} to {served[-1]} of the run's node, which has {machine.gpus}"
        fix = "set engine.server.launch to ray, or lower engine.server.replicas"
        yield PlanFinding("PL17", "error", text, fix)
    elif server.sleep:
        return
    elif config.learner_on_ray:
        text = f"servers start on GPUs {served[0]} to {served[-1]}, which Ray may also give to the learner's ranks"
        yield PlanFinding("PL17", "error", text, "set engine.server.launch to ray")
    elif own in served:
        text = f"the learner and a server are both on cuda:{own}"
        fix = f"set engine.device to cuda:{own + 1}, or engine.server.sleep so that they take turns"
        yield PlanFinding("PL17", "error", text, fix)


def server_fits(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL19: a server that cannot start."""
    engine, server = config.engine, config.engine.server
    if not engine.on_servers or server.urls:
        return
    model, split = plan.model, server.tensor_parallel
    if model.heads % split or (model.kv_heads % split and split % model.kv_heads):
        text = (
            f"engine.server.tensor_parallel is {split}, and the model has {model.heads} heads for queries and "
            f"{model.kv_heads} for keys and values, which cannot be divided evenly"
        )
        yield PlanFinding("PL19", "error", text, f"choose a divisor of {model.heads}")
    episode = plan.kv_bytes_per_token * min(longest_episode(config), model.max_context)
    if gpu and plan.memory_bytes is not None and plan.kv_bytes < episode:
        text = (
            f"the weights leave {size(plan.kv_bytes)} of the servers' memory to their caches, and one episode may "
            f"need {size(episode)}"
        )
        fix = "raise engine.server.gpu_memory_utilization or tensor_parallel, or lower rollout.token_budget"
        yield PlanFinding("PL19", "error", text, fix)


def rows_apart(config: RunConfig, plan: Plan, gpu: bool) -> Iterator[PlanFinding]:
    """PL18: rows that the learner cannot pack, judging by the config."""
    if not plan.model.apart:
        return
    why, ranks = f"{plan.model.kind} has {plan.model.apart}", config.learner.sequence_ranks
    if ranks > 1:
        text = f"learner.sequence_ranks is {ranks}, and {why}: rows of such a model are computed whole"
        yield PlanFinding("PL18", "error", text, "remove it, or use a model with plain attention, such as Qwen3")
        return
    text = f"{why}: rows are not packed but padded, and what they share is computed for each"
    fix = "nothing to do; rows of like length waste least"
    if not (config.engine.on_servers or config.engine.own):
        text += "; in the local engine, sequences take turns"
        fix = "set engine.kind to sglang or vllm for real runs"
    yield PlanFinding("PL18", "note", text, fix)


RULES: tuple[Rule, ...] = (
    memory, one_episode, context, turns, division, double_kl, reference, waves, bypass, learning_rate, precision,
    disk, critic, signal, attention, devices, named_machine, server_fits, rows_apart,
)  # fmt: skip
