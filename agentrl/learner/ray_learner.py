"""A learner of many ranks: Ray workers, one per rank, each with a shard of the model.

The workers are started on the cluster that `ray` names, or on one started for the run on this machine.
A worker that dies ends the run with `WorkerLost`, because the others cannot continue without its shard; the run
folder stays intact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from agentrl.config.run import LearnerConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.critic import Critic
from agentrl.learner.learner import Learner
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import GroupedRanks, LearnerSpec, Rank, Ranks
from agentrl.learner.rank_pool import MakeRank, RankPool
from agentrl.learner.reference import Reference
from agentrl.learner.shard import check_offload
from agentrl.learner.teacher_server import asked_teacher
from agentrl.ray_cluster import connect, disconnect, import_ray

KEYS = {"learner": "learner.ranks", "reference": "learner.reference_ranks", "critic": "critic.ranks"}
"""The setting that says how many ranks a model has."""


def join_cluster(config: RunConfig, stack: ExitStack) -> None:
    """Connect to the cluster of a run that uses Ray, and see whether its ranks fit there.

    Args:
        config: the run.
        stack: leaves the cluster, unless this process was connected before.

    Raises:
        ConfigError: Ray is not installed, no cluster is at the address, or it has too little room.
        WorkerLost: Ray did not start here.
    """
    sizes = {
        "learner": config.learner.ranks if config.learner_on_ray else 0,
        "reference": config.learner.reference_ranks,
        "critic": 0 if config.critic is None else config.critic.ranks,
    }
    sizes = {name: size for name, size in sizes.items() if size}
    server = config.engine.server
    cpus = sum(sizes.values()) + (server.replicas if server.launch == "ray" else 0)
    ray = import_ray("ray")
    if connect(ray, config.ray, cpus=cpus):
        stack.callback(disconnect, ray)
    if sizes:
        _has_room(ray, config.learner.device, sizes)


def ray_learner(spec: LearnerSpec) -> Learner:
    """A learner on `config.ranks` Ray workers; reference and critic may have workers to themselves.

    Raises:
        ConfigError: Ray is not installed, or the cluster has too little room.
        WorkerLost: a worker died while it started.
    """
    config = spec.config
    sizes = {"learner": config.ranks}
    if spec.frozen_dir is not None and config.reference_ranks:
        sizes["reference"] = config.reference_ranks
    if spec.critic is not None and spec.critic_dir is not None and spec.critic.ranks:
        sizes["critic"] = spec.critic.ranks
    ray = import_ray(_all_of([f"{KEYS[name]}: {n}" for name, n in sizes.items()]))
    with ExitStack() as stack:
        if connect(ray, spec.ray, cpus=sum(sizes.values())):
            stack.callback(disconnect, ray)
        gpus = _has_room(ray, config.device, sizes)
        shape = config.model_copy(update={"device": "cuda" if gpus else "cpu"})
        check_offload(shape, shape.device)

        def pool(name: str, make: MakeRank[Rank]) -> RankPool[Rank] | None:
            if name not in sizes:
                return None
            made = RankPool(ray, name, make, sizes[name], gpus=gpus, near=name == "learner")
            stack.callback(made.close)
            return made

        policy = pool("learner", LocalPolicyRank)
        reference, critic = pool("reference", Reference), pool("critic", Critic)
        assert policy is not None
        whole = replace(
            spec,
            policy_dir=spec.policy_dir.absolute(),
            reference_dir=None if spec.reference_dir is None else spec.reference_dir.absolute(),
            average_dir=None if spec.average_dir is None else spec.average_dir.absolute(),
            critic_dir=None if spec.critic_dir is None else spec.critic_dir.absolute(),
            config=shape,
        )
        shared = replace(
            whole, reference_elsewhere=reference is not None, critic_dir=None if critic else whole.critic_dir
        )
        pools = [(pool, whole) for pool in (reference, critic) if pool is not None]
        _load([(policy, shared), *pools])
        return Learner(
            spec,
            _shared(policy, config),
            reference=asked_teacher(spec) if reference is None else _shared(reference, config),
            critic=None if critic is None else _shared(critic, config),
            disconnect=stack.pop_all().close,
        )


def _shared(ranks: Ranks[Rank], config: LearnerConfig) -> Ranks[Rank]:
    """The ranks as the learner sees them: those that compute rows together are one."""
    return ranks if config.sequence_ranks == 1 else GroupedRanks(ranks, config.sequence_ranks)


def _load(pools: Sequence[tuple[RankPool[Any], LearnerSpec]]) -> None:
    """Start all ranks, and have them load their models at the same time."""
    for pool, _ in pools:
        pool.launch()
    for wait in [pool.load(spec) for pool, spec in pools]:
        wait()


def _has_room(ray: Any, device: str, sizes: Mapping[str, int]) -> bool:
    """Whether the ranks compute on GPUs.

    Raises:
        ConfigError: the cluster has too few of what each rank needs.
    """
    total = ray.cluster_resources()
    gpus = device != "cpu" and (device != "auto" or int(total.get("GPU", 0)) > 0)
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"learner.device {device!r}: for ranks on Ray it is `cpu`, `cuda` or `auto`")
    ranks = sum(sizes.values())
    asked = _all_of([f"{KEYS[name]} is {n}" for name, n in sizes.items()])
    for kind in ("GPU", "CPU") if gpus else ("CPU",):
        if total.get(kind, 0) < ranks:
            raise ConfigError(
                f"{asked}, but the Ray cluster has {total.get(kind, 0):g} {kind}s: use fewer ranks, or more nodes"
            )
    return gpus


def _all_of(parts: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
