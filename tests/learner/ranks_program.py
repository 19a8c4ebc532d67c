"""The program that the Ray rank tests run: `python ranks_program.py FOLDER SCENARIO...`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from direct import DirectLearner
from train_models import VOCABULARY, make_batch, observed, scored, write_model
from transformers import Lfm2Config, Lfm2ForCausalLM

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig, RunConfig
from agentrl.errors import ConfigError, WorkerLost
from agentrl.learner import rank_pool as pools
from agentrl.learner.rank_pool import RankPool, RankWorker
from agentrl.learner.ray_learner import join_cluster
from agentrl.ray_cluster import connect, import_ray

STEPS = 4
ALGORITHM = AlgorithmConfig(kl={"coef": 0.05}, updates_per_step=2, epochs=2, observation_coef=0.1)


def learner(
    folder: Path, ranks: int, *, policy: str | Path = "policy", start: str = "reference",
    algorithm: AlgorithmConfig = ALGORITHM, critic: CriticConfig | None = None, critic_dir: Path | None = None,
    on_ray: bool = False, ray: str | None = None, **config,
):  # fmt: skip
    """A learner of the models in the folder, with so little room that micro-batches are many and uneven."""
    return DirectLearner(
        folder / policy,
        on_ray=ranks > 1 or on_ray,
        ray=ray,
        algorithm=algorithm,
        optim=OptimConfig(lr=1e-3, warmup_steps=2, schedule="linear"),
        config=LearnerConfig(**{"device": "cpu", "ranks": ranks, "tokens_per_micro_batch": 150} | config),
        temperature=0.7,
        total_steps=2 * STEPS,
        reference_dir=folder / start,
        critic=critic,
        critic_dir=critic_dir,
    )


def steps(driver: DirectLearner, first: int, last: int) -> list[dict[str, float]]:
    return [dict(driver.step(observed(make_batch(seed, groups=2))).metrics) for seed in range(first, last)]


def process_of(pool: RankPool) -> int:
    """The process of its last rank."""
    return int(pool._workers[-1].place.split()[1])


def gap(one: DirectLearner, other: DirectLearner) -> float:
    """The largest difference between two parameters."""
    ours, theirs = one.weights(), other.weights()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs.keys() & ours.keys())


def same_curve(folder: Path) -> dict[str, object]:
    """One process and many ranks, side by side; then each goes on from the other's checkpoint."""
    ranks = 3
    one, many = learner(folder, 1), learner(folder, ranks, checkpoint_activations=True)
    losses = [one.imitate(make_batch(99), 1e-3), many.imitate(make_batch(99), 1e-3)]
    curves = [steps(one, 0, STEPS), steps(many, 0, STEPS)]
    probes = [driver.probe(make_batch(50)) for driver in (one, many)]
    apart = gap(one, many)
    for name, driver in (("by-one", one), ("by-many", many)):
        (folder / name).mkdir()
        driver.save(folder / name)
    many.close()
    wanted = steps(one, STEPS, 2 * STEPS)
    resumed = learner(folder, 1, policy="by-many")
    resumed.load_optimizer(folder / "by-many")
    after = [wanted, steps(resumed, STEPS, 2 * STEPS)]
    spread = learner(folder, ranks, policy="by-one")
    spread.load_optimizer(folder / "by-one")
    after.append(steps(spread, STEPS, 2 * STEPS))
    found = {
        "losses": losses,
        "curves": curves,
        "probes": probes,
        "gap": apart,
        "after": after,
        "gaps_after": [gap(one, resumed), gap(one, spread)],
    }
    found |= bad_gradient(spread) | killed(spread)
    spread.close()
    return found | {"answered": died_after_its_answer(), "closed": closed_while_writing()}


def two_nodes(folder: Path) -> dict[str, object]:
    """On a cluster with room for one rank a node: adapters with a critic, and bfloat16."""
    ray, ranks = import_ray("the test"), 2
    ray.shutdown()
    cluster = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(1, ranks):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        connect(ray, cluster.address, cpus=ranks)
        adapters = {"critic": CriticConfig(lr=1e-2, warmup_steps=1), "lora": {"rank": 4, "alpha": 8}}
        return {
            "adapters and critic": handed_over(folder / "a", folder, ranks, **adapters),
            "bfloat16": handed_over(folder / "b", folder, ranks, precision="bfloat16"),
            "rows apart": handed_over(folder / "c", not_packed(folder / "convolutions"), ranks),
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


def near(folder: Path) -> dict[str, object]:
    """Where ranks with GPUs are placed on two nodes with room for them all."""
    ray, said = import_ray("the test"), []
    ray.shutdown()
    node = {"num_cpus": 4, "num_gpus": 4}
    cluster = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(node_ip_address="127.0.0.2", **node)
        cluster.wait_for_nodes()
        connect(ray, cluster.address, cpus=1)
        pools.NEAR_S = 3.0
        for _ in range(6):
            pool = RankPool(ray, "learner", RankWorker, 3, gpus=True, near=True)
            said.append(nodes_of(pool))
            pool.close()
            while ray.available_resources().get("GPU", 0) < 8:
                time.sleep(0.2)
        head = ray.get_runtime_context().get_node_id()
        here = [RankPool(ray, "learner", RankWorker, size, gpus=True, near=True) for size in (3, 3)]
        return {"head": head, "free": said, "taken": [nodes_of(pool) for pool in here]}
    finally:
        ray.shutdown()
        cluster.shutdown()


def nodes_of(pool: RankPool) -> list[str]:
    """The nodes on which it has a place."""
    assert pool.group.wait(30)
    return sorted(set(import_module("ray.util").placement_group_table(pool.group)["bundles_to_node_id"].values()))


def not_packed(folder: Path) -> Path:
    """The folder, with a policy whose rows are computed apart."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    Lfm2ForCausalLM(Lfm2Config(vocab_size=VOCABULARY, **shape, **kinds)).save_pretrained(folder / "policy")
    return folder


def handed_over(saved: Path, folder: Path, ranks: int, critic: CriticConfig | None = None, **config):
    """Two steps in one process, two on ranks, one in one process again, beside one that is never handed over."""
    algorithm = AlgorithmConfig(**{"kl": {"coef": 0.05}} | ({"advantage": "gae"} if critic else {}))

    def make(ranks: int, policy: Path) -> DirectLearner:
        trained = policy / "critic"
        where = trained if trained.is_dir() else policy
        return learner(
            folder,
            ranks,
            policy=policy,
            algorithm=algorithm,
            critic=critic,
            critic_dir=where,
            start="policy",
            **config,
        )

    def take(driver: DirectLearner, first: int, last: int) -> list[dict[str, float]]:
        rows = [make_batch(seed, groups=2) for seed in range(first, last)]
        given = [scored(batch) if critic else (batch, None) for batch in rows]
        return [dict(driver.step(*step).metrics) for step in given]

    one = make(1, folder / "policy")
    whole = take(one, 0, 2)
    for name in ("one", "many"):
        (saved / name).mkdir(parents=True)
    one.save(saved / "one")
    whole += take(one, 2, 5)
    weights = {name: value.clone() for name, value in one.weights().items()}
    one.close()
    many = make(ranks, saved / "one")
    many.load_optimizer(saved / "one")
    nodes = nodes_of(many.learner._policy)
    handed = take(many, 2, 4)
    many.save(saved / "many")
    many.close()
    again = make(1, saved / "many")
    again.load_optimizer(saved / "many")
    handed += take(again, 4, 5)
    apart = max(float((again.weights()[name] - value).abs().max()) for name, value in weights.items())
    again.close()
    return {"wanted": whole[2:], "found": handed, "gap": apart, "nodes": len(nodes)}


def apart(folder: Path) -> dict[str, object]:
    """PPO with reference and critic on ranks of their own, beside one process that has them all."""
    ranks = 2
    nowhere = no_cluster(folder)
    connect(import_ray("the test"), None, cpus=ranks + 2)
    one, many = ppo(folder, 1), ppo(folder, ranks, reference=1, critic=1)
    curves, gaps = [take(one, 0, 3), take(many, 0, 3)], [gap(one, many)]
    held = {
        pool.model: pool.size for pool in (many.learner._policy, many.learner._reference, many.learner._critic)
    }
    for name, driver in (("by-one", one), ("by-many", many)):
        (folder / name).mkdir()
        driver.save(folder / name)
    wanted = take(one, 3, 5)
    victim = process_of(many.learner._critic)
    os.kill(victim, signal.SIGKILL)
    said = ""
    try:
        take(many, 3, 4)
    except WorkerLost as e:
        said = str(e)
    many.close()
    resumed = ppo(folder, 1, saved=folder / "by-many")
    after = take(resumed, 3, 5)
    gaps.append(gap(one, resumed))
    with in_double():
        plain = ppo(folder, 1, saved=folder / "by-one")
        placed = ppo(folder, 1, critic=2, saved=folder / "by-one")
    double = [take(plain, 3, 6), take(placed, 3, 6)]
    found = {"curves": curves, "gaps": gaps, "held": held, "wanted": wanted, "after": after, "double": double}
    found |= {"double_gap": gap(plain, placed), "said": said, "victim": victim}
    placed.close()
    return found | {"refused": [nowhere, *bad_input(folder, ranks)]}


def ppo(
    folder: Path, ranks: int, *, reference: int = 0, critic: int = 0, saved: Path | None = None
) -> DirectLearner:
    """PPO with two updates a step, from the start or from a checkpoint."""
    made = learner(
        folder,
        ranks,
        on_ray=reference + critic > 0,
        policy=saved or "policy",
        algorithm=AlgorithmConfig(advantage="gae", kl={"coef": 0.05}, updates_per_step=2),
        critic=CriticConfig(lr=1e-3, warmup_steps=1, ranks=critic),
        critic_dir=saved / "critic" if saved else folder / "policy",
        reference_ranks=reference,
    )
    if saved:
        made.load_optimizer(saved)
    return made


def take(driver: DirectLearner, first: int, last: int) -> list[dict[str, float]]:
    """Steps on rows with scores."""
    rows = [scored(make_batch(seed, groups=2)) for seed in range(first, last)]
    return [dict(driver.step(*step).metrics) for step in rows]


@contextmanager
def in_double() -> Iterator[None]:
    """Learners made within the block compute in float64, in this process and in ranks."""
    kept = pools.RankWorker
    pools.RankWorker = DoubleRank
    with doubled():
        yield
    pools.RankWorker = kept


class DoubleRank(RankWorker):
    """A rank that computes in float64."""

    def join(self, *arguments: Any) -> None:
        with doubled():
            super().join(*arguments)


@contextmanager
def doubled() -> Iterator[None]:
    """Models are loaded in float64; their norms too, which transformers computes in float32."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from agentrl.learner import critic, policy_rank, reference

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)

    kept = []
    for module in (critic, policy_rank, reference):
        for name in ("load_policy", "empty_policy", "load_critic", "empty_critic"):
            if (load := getattr(module, name, None)) is not None:
                kept.append((module, name, load))
                setattr(module, name, lambda *given, load=load: load(*given).double())
    Qwen3RMSNorm.forward = norm
    yield
    for module, name, load in kept:
        setattr(module, name, load)


def bad_gradient(many: DirectLearner) -> dict[str, object]:
    """A gradient that is not finite is one error, and changes no weights."""
    before = {name: value.clone() for name, value in many.weights().items()}
    batch = make_batch(0)
    said = ""
    try:
        many.step([replace(s, advantages=(float("nan"),) * len(s.ids)) for s in batch])
    except Exception as e:
        said = f"{type(e).__name__}: {e}"
    kept = all(torch.equal(value, before[name]) for name, value in many.weights().items())
    steps(many, 0, 1)
    return {"gradient": said, "kept": kept}


def killed(many: DirectLearner) -> dict[str, object]:
    """The last rank is killed between two steps, as the kernel would, while checkpoints are written."""
    pool = many.learner._policy
    victim, end = process_of(pool), pool._kill

    def slowly(workers: Any) -> None:
        time.sleep(2)  # long enough for the other thread to find the ranks lost
        end(workers)

    pool._kill = slowly
    os.kill(victim, signal.SIGKILL)
    said: dict[str, list[str]] = {"steps": [], "disk": []}

    def again(thread: str, call: Callable[[], object]) -> None:
        for _ in range(20):
            try:
                call()
            except Exception as e:
                said[thread].append(f"{type(e).__name__}: {e}")
            time.sleep(0.2)

    def write() -> None:
        pool.start(lambda rank, _: None, [None] * pool.size, doing="writing a checkpoint", writes=True)()

    disk = Thread(target=again, args=("disk", write))
    disk.start()
    again("steps", lambda: steps(many, 1, 2))
    disk.join()
    return {"after_kill": said, "victim": victim}


def died_after_its_answer() -> dict[str, str]:
    """A rank has answered when it dies, and the other finds its connection closed; and one that only fails."""
    ray, said = import_ray("the test"), {}
    connect(ray, None, cpus=2)
    for name, kills in (("died", True), ("failed", False)):
        pool = RankPool(ray, "learner", RankWorker, 2, gpus=False)
        pool.launch()
        victim = process_of(pool)

        def work(_: object, part: int, kills: bool = kills) -> None:
            if part:
                time.sleep(1)
                if kills:
                    os.kill(part, signal.SIGKILL)
                    time.sleep(1)
                raise RuntimeError("connection closed by peer")

        for _ in range(2):
            try:
                pool.start(work, [victim, 0], doing="the update")()
            except Exception as e:
                said[name] = f"{said.get(name, '')}{type(e).__name__}: {e}\n".replace(str(victim), "VICTIM")
        pool.close()
    return said


def closed_while_writing() -> str:
    """What a thread gets that waits for the ranks while another one ends them."""
    ray = import_ray("the test")
    connect(ray, None, cpus=2)
    pool = RankPool(ray, "learner", RankWorker, 2, gpus=False)
    pool.launch()
    wait = pool.start(lambda _rank, _part: time.sleep(60), [None] * 2, doing="writing a checkpoint", writes=True)
    said: list[str] = []

    def write() -> None:
        try:
            wait()
        except Exception as e:
            said.append(f"{type(e).__name__}: {e}")

    disk = Thread(target=write)
    disk.start()
    pool.close()
    disk.join()
    return said[0]


def bad_input(folder: Path, ranks: int) -> list[str]:
    """What the user can get wrong."""
    said = []
    offload = {"device": "auto", "cpu_offload": True}
    for config, policy in (({"device": "cuda"}, "policy"), (offload, "policy"), ({}, "nowhere")):
        try:
            learner(folder, ranks, policy=policy, **config)
        except Exception as e:
            said.append(f"{type(e).__name__}: {e}")
    run = {"env": "envs:Env", "model": {"path": "policy"}, "learner": {"device": "cpu", "reference_ranks": 5000}}
    try:
        with ExitStack() as stack:
            join_cluster(RunConfig.model_validate(run), stack)
    except ConfigError as e:
        said.append(f"{type(e).__name__}: {e}")
    return said


def no_cluster(folder: Path) -> str:
    """A Ray address where nothing is."""
    try:
        learner(folder, 2, ray="127.0.0.1:1")
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def main(folder: Path, scenarios: list[str]) -> dict[str, dict[str, object]]:
    """Run the scenarios in order, each with new models; `apart` starts the cluster that `same_curve` uses."""
    known = {"apart": apart, "same_curve": same_curve, "two_nodes": two_nodes, "near": near}
    found = {}
    for scenario in scenarios:
        own = folder / scenario
        write_model(own / "policy", seed=0)
        write_model(own / "reference", seed=1)
        found[scenario] = known[scenario](own)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])) + "\n")
