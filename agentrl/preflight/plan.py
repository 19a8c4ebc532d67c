"""`agentrl plan`: estimate the cost and the placement of a run before anything is loaded.

Memory is what tensors need; allocators and the driver of a GPU take some more on top.
"""

from __future__ import annotations

from dataclasses import replace

from agentrl.config.datafiles import data_files
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.preflight.estimate import Arithmetic, Plan, machine_memory, on_gpu
from agentrl.preflight.knobs import Knob, changes
from agentrl.preflight.machines import Machine
from agentrl.preflight.phases import Models, engine_cache, memory_phases, policy_moments, trained_parameters
from agentrl.preflight.placement import attention_there, placement
from agentrl.preflight.predict import predict
from agentrl.preflight.rules import findings
from agentrl.preflight.shape import FLOAT32

GIB = 2**30
WORTH = 0.02
"""Share of a step below which a change is not worth naming: predictions are not that exact."""


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
        ConfigError: the model directory has no usable config.json, or a device is none of the machine's.
    """
    models, rows = Models.of(config), _count_rows(config)
    if machine is not None:
        plan = _planned_for(config, models, rows, machine)
        return replace(plan, saves_most=_best(config, models, rows, machine, plan))
    here = memory_bytes is None and gpu is None
    gpu = on_gpu(config) if gpu is None else gpu
    return _plan(config, models, rows, memory_bytes or machine_memory(gpu), gpu, here=here)


def _plan(
    config: RunConfig,
    models: Models,
    rows: int | None,
    memory: int | None,
    gpu: bool,
    *,
    here: bool = False,
    machine: Machine | None = None,
) -> Plan:
    batch = arithmetic(config, rows)
    cache = engine_cache(config, models, memory, gpu)
    checkpoint = checkpoint_bytes(config, models)
    kept = config.checkpoint.keep + int(config.checkpoint.best) + 1  # the one that is being written
    plan = Plan(
        model=models.policy,
        batch=batch,
        placement=placement(config, gpu),
        attention=attention_there(config, models.policy, gpu),
        phases=memory_phases(config, models, cache, memory=memory, gpu=gpu),
        kv_bytes_per_token=cache.per_token,
        kv_bytes=cache.used,
        kv_limited=cache.used < cache.wanted,
        checkpoint_bytes=checkpoint,
        checkpoints_bytes=kept * checkpoint,
        memory_bytes=memory,
        here=here,
        findings=[],
        machine=machine,
        prediction=None if machine is None else predict(config, models, batch, cache, machine),
    )
    plan.findings.extend(findings(config, plan, gpu))
    return plan


def _planned_for(config: RunConfig, models: Models, rows: int | None, machine: Machine) -> Plan:
    return _plan(on_gpus(config), models, rows, machine.memory_bytes, True, machine=machine)


def _best(config: RunConfig, models: Models, rows: int | None, machine: Machine, plan: Plan) -> Knob | None:
    """The change of a setting that saves most on this machine; the run must work with it."""
    assert plan.prediction is not None
    best, least = None, (1 - WORTH) * plan.prediction.together
    for change, changed in changes(config):
        other = _planned_for(changed, models, rows, machine)
        assert other.prediction is not None
        works = all(finding.level != "error" for finding in other.findings)
        if works and other.prediction.together < least:
            least = other.prediction.together
            best = replace(change, seconds=least)
    return best


def on_gpus(config: RunConfig) -> RunConfig:
    """The run with what `auto` means on a machine with GPUs.

    Raises:
        ConfigError: a device is the CPU.
    """
    for key, device in (("learner.device", config.learner.device), ("engine.device", config.engine.device)):
        if device == "cpu":
            raise ConfigError(f"{key} is cpu, so it uses no GPU of --gpus: set it to auto, or leave --gpus out")
    learner = (
        config.learner if config.learner.device != "auto" else config.learner.model_copy(update={"device": "cuda"})
    )
    engine = (
        config.engine if config.engine.device != "auto" else config.engine.model_copy(update={"device": "cuda"})
    )
    return config.model_copy(update={"learner": learner, "engine": engine})


def _count_rows(config: RunConfig) -> int | None:
    """Training rows in all files of `data.train`; None if an env makes its own tasks."""
    views = config.by_env.values()
    files = [view.data.train for view in views if view.data.train is not None]
    if len(files) < len(views):
        return None
    from agentrl.env.rows import count_rows  # with all of env: needed for files only

    return sum(count_rows(path) for each in files for path in data_files(each))


def arithmetic(config: RunConfig, rows: int | None) -> Arithmetic:
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
    greedy = {name: view.algorithm.advantage.name == "remax" for name, view in config.by_env.items()}
    shares = {name: env.share for name, env in config.envs.items()} or {"": 1.0}
    share = sum(share for name, share in shares.items() if greedy[name]) / sum(shares.values())
    kinds = {(view.rollout.group_size, greedy[name]) for name, view in config.by_env.items()}
    return Arithmetic(
        greedy=round(rollout.groups_per_step * share),
        averaged=len(kinds) > 1,
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


def checkpoint_bytes(config: RunConfig, models: Models) -> int:
    """One checkpoint on disk: weights in float32, their average if it teaches, and both moments of AdamW."""
    shape, critic = models.policy, 0
    adapter = 0 if config.learner.lora is None else FLOAT32 * trained_parameters(config, shape)
    if models.critic is not None:
        critic = FLOAT32 * models.critic.parameters + models.critic.moment_bytes(config.optim.state)
    averaged = config.teacher is not None and config.teacher.policy == "average" and config.algorithm.kl.coef > 0
    weights = FLOAT32 * shape.parameters * (1 + averaged)
    return weights + adapter + policy_moments(config, shape) + critic
