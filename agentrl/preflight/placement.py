"""Which part of a run will be where: processes, devices and Ray workers."""

from __future__ import annotations

from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.gpu import gpus_here
from agentrl.learner.attention.kind import choose_attention
from agentrl.preflight.estimate import colocated, own_devices
from agentrl.preflight.shape import ModelShape


def placement(config: RunConfig, gpu: bool) -> list[str]:
    """What will run where, a line for each."""
    device = "GPU" if gpu else "CPU"
    workers = config.rollout.workers
    return [
        _engine(config, device),
        *_learner(config, device),
        *_models(config, device),
        *_scorers(config, device),
        f"episodes: {workers} Ray workers" if workers else "episodes: in the process of the run",
        *_conclusions(config, gpu),
    ]


def _engine(config: RunConfig, device: str) -> str:
    engine, server = config.engine, config.engine.server
    if engine.own:
        return f"engine: {engine.kind}, created in the process of the run"
    if not engine.on_servers:
        return f"engine: in the process of the run, on {_own(engine.device, device)}"
    if server.urls:
        return f"engine: {len(server.urls)} running {engine.kind} server{'s' * (len(server.urls) > 1)}"
    each = f"{server.tensor_parallel} GPUs" if server.tensor_parallel > 1 else f"one {device}"
    if server.replicas == 1:
        return f"engine: 1 {engine.kind} server started by the run, on {each}"
    return f"engine: {server.replicas} {engine.kind} servers started by the run, each on {each}"


def _learner(config: RunConfig, device: str) -> list[str]:
    learner = config.learner
    if not config.learner_on_ray:
        return [f"learner: in the process of the run, on {_own(learner.device, device)}"]
    cluster = f"the Ray cluster {config.ray}" if config.ray else "a Ray cluster on this machine"
    lines = [f"learner: {_ranks(learner.ranks, device)}, on {cluster}"]
    if learner.sequence_ranks > 1:
        lines.append(
            f"rows: {learner.sequence_ranks} ranks compute each together, at most "
            f"{learner.micro_batch_tokens:,} tokens at once"
        )
    return lines


def _models(config: RunConfig, device: str) -> list[str]:
    """The reference and the critic, if the run has them."""
    lines = _frozen(config, device)
    if config.critic is not None:
        own = config.critic.ranks
        how = f"{_ranks(own, device)}, its own" if own else "on the policy's ranks, sharded the same way"
        lines.append(f"critic: {how}")
    return lines


def _frozen(config: RunConfig, device: str) -> list[str]:
    """The models that the KL penalty compares with."""
    if servers := config.teachers_on_servers:
        return list(dict.fromkeys(f"teacher: {each.model} at {each.address}" for each in servers.values()))
    if config.algorithm.kl.coef == 0:
        return []
    teacher, learner = config.teacher, config.learner
    initial = teacher is None or teacher.policy == "initial"
    what = "a frozen copy" if initial or teacher is None else teacher.path or "the average of the policy"
    how = f"{what} on the policy's ranks, sharded the same way"
    if teacher is not None and teacher.policy == "current":
        how = "the policy"
    elif initial and learner.lora:
        how = "the policy without its adapters"
    elif learner.reference_ranks:
        how = f"{_ranks(learner.reference_ranks, device)}, its own"
    return [f"{'reference' if teacher is None else 'teacher'}: {how}"]


def _scorers(config: RunConfig, device: str) -> list[str]:
    """Where the reward model is, if there is one."""
    scorer = config.reward_model
    if scorer is None:
        return []
    where = f"a {scorer.kind} at {scorer.address}"
    if scorer.kind == "classifier":
        device = "CPU" if scorer.device == "cpu" else device
        where = f"in the process of the run, on its {device}"
        if scorer.workers:
            each = "each with one GPU" if device == "GPU" else "on CPUs that are free,"
            where = f"{scorer.workers} Ray workers, {each} and the whole model"
    return [f"reward model: {where}"]


def _conclusions(config: RunConfig, gpu: bool) -> list[str]:
    """What follows for devices."""
    lines = []
    if colocated(config) or not (gpu or config.learner_on_ray or config.engine.on_servers):
        lines.append(
            "so engine and learner are colocated: they share the memory, and take turns"
            if config.rollout.max_staleness == 0
            else "so engine and learner are colocated: they share the memory, and slow each other down"
        )
    elif config.engine.server.sleep:
        lines.append("so they are colocated: servers free their memory while the learner works")
    else:
        lines.append("so they are split: each has its own devices")
    devices, server = own_devices(config, gpu), config.engine.server
    if gpu and config.engine.on_servers and server.launch == "ray" and not server.sleep and not server.urls:
        devices["servers"] = server.replicas * server.tensor_parallel
    if devices:
        asked = " + ".join(f"{number} for the {name}" for name, number in devices.items())
        lines.append(f"so the Ray cluster needs {sum(devices.values())} {'GPU' if gpu else 'CPU'}s: {asked}")
    return lines


def _own(asked: str, device: str) -> str:
    return asked if ":" in asked else f"its {device}"


def _ranks(number: int, device: str) -> str:
    return (
        f"{number} ranks, one {device} and 1/{number} of the model each" if number > 1 else f"1 rank, one {device}"
    )


def attention_there(config: RunConfig, shape: ModelShape, gpu: bool) -> str:
    """How the learner will compute its attention; the requested one if it cannot be determined here."""
    asked = config.learner.attention
    if gpu and not gpus_here():
        return asked
    try:
        return choose_attention(config.learner, "cuda" if gpu else "cpu", {shape.head_dim})
    except ConfigError:  # a rule says it
        return asked
