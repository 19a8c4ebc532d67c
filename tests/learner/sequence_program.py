"""Ranks that split rows, beside one rank that does not: `python -m tests.learner.sequence_program FOLDER`.

All ranks are forks of this process, which has imported everything once. Prints JSON, by case and number of ranks.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3MoeConfig

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.garbage import collect_rarely
from agentrl.learner.learner import Learner
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import GroupedRanks, LearnerSpec
from agentrl.learner.sequence_check import check_sequence
from agentrl.learner.shard import World
from agentrl.ports import reserved_port
from tests.learner.direct import DirectLearner
from tests.learner.train_models import VOCABULARY, make_batch, observed, routed, scored, write_model

STEPS = 5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE, num_attention_heads=6, num_key_value_heads=3),  # not divided by ranks
    "mistral": lambda: MistralConfig(**SHAPE, **HEADS, sliding_window=7),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE, **HEADS, sliding_window=7, layer_types=["sliding_attention", "full_attention"]
    ),
    "moe": lambda: Qwen3MoeConfig(
        **SHAPE, **HEADS, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (
        "qwen3",
        {"kl": {"coef": 0.05}, "entropy_coef": 0.01, "updates_per_step": 2, "observation_coef": 0.1},
        {},
    ),
    "llama": ("llama", {"loss": "gspo"}, {"checkpoint_activations": True}),
    "gemma3": ("gemma3", {"observation_coef": 0.3}, {"logits_at_once": 5}),
    "mistral": ("mistral", {"kl": {"coef": 0.05}}, {"lora": {"rank": 4, "alpha": 8}}),
    "critic": ("qwen3", {"advantage": "gae"}, {"checkpoint_activations": True, "logits_at_once": 0}),
    "moe": ("moe", {}, {}),
    "replay": ("moe", {"kl": {"coef": 0.05}}, {"replay_routes": True, "checkpoint_activations": True}),
}
"""Model, algorithm and learner of each."""
SHAPES: dict[tuple[int, int], Sequence[str]] = {
    (1, 1): tuple(CASES),
    (2, 2): ("qwen3", "llama", "gemma3"),
    (4, 4): ("qwen3", "llama", "gemma3", "moe"),
    (4, 2): ("mistral", "critic", "replay"),
}
"""Ranks, how many of them compute rows together, and the cases that they train."""


class Lockstep:
    """The ranks of a learner, each of which makes the same calls in a process of its own: their `Ranks`."""

    def __init__(self, rank: LocalPolicyRank, place: int, size: int) -> None:
        self.rank, self.place, self.size = rank, place, size

    def start(self, call: Callable[..., Any], parts: Sequence[Any], *, doing: str, writes: bool = False) -> Any:
        def wait() -> list[Any]:
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, call(self.rank, parts[self.place]))
            return found

        return wait

    def close(self) -> None:
        pass


def spec_of(folder: Path, case: str, ranks: int, sequence: int, policy: Path | None = None) -> LearnerSpec:
    model, algorithm, config = CASES[case]
    critic = CriticConfig(lr=1e-3) if case == "critic" else None
    where = policy or folder / model
    saved = where / "critic"
    return LearnerSpec(
        where,
        algorithm=AlgorithmConfig(**algorithm),
        optim=OptimConfig(lr=3e-4, warmup_steps=2, schedule="linear"),
        config=LearnerConfig(
            **{
                "device": "cpu",
                "ranks": ranks,
                "sequence_ranks": sequence,
                "tokens_per_micro_batch": 600 // sequence,
            }
            | config
        ),
        temperature=0.7,
        total_steps=2 * STEPS,
        reference_dir=folder / model,
        critic=critic,
        critic_dir=None if critic is None else saved if saved.is_dir() else where,
    )


def learner(spec: LearnerSpec, world: World) -> DirectLearner:
    """One of the processes of a learner; each has the whole result of every call."""
    made = DirectLearner(spec.policy_dir, world=world, **{f.name: getattr(spec, f.name) for f in fields(spec)[1:]})
    if world.size > 1:
        made.learner = Learner(spec, _together(made.rank, world))
    return made


def _together(rank: LocalPolicyRank, world: World) -> Any:
    ranks = Lockstep(rank, world.rank, world.size)
    return ranks if world.sequence is None else GroupedRanks(ranks, world.sequence.size)


def steps(driver: DirectLearner, case: str, first: int, last: int) -> list[dict[str, float]]:
    rows = [make_batch(seed, groups=2) for seed in range(first, last)]
    if case == "replay":
        rows = [routed(batch, layers=2, top_k=2, experts=4) for batch in rows]
    if "observation_coef" in CASES[case][1]:
        rows = [observed(batch) for batch in rows]
    given = [scored(batch) if case == "critic" else (batch, None) for batch in rows]
    return [dict(driver.step(*step).metrics) for step in given]


def train(folder: Path, world: World, sequence: int) -> dict[str, Any]:
    """Five steps of each case, and a checkpoint."""
    found: dict[str, Any] = {}
    for case in SHAPES[world.size, sequence]:
        driver = learner(spec_of(folder, case, world.size, sequence), world)
        curve = steps(driver, case, 0, STEPS)
        saved, weights = folder / f"{case}-{world.size}-{sequence}", driver.weights()
        saved.mkdir(exist_ok=True)
        if world.rank == 0:
            torch.save(weights, saved / "weights.pt")
        driver.save(saved)
        found[case] = {"curve": curve, "probe": driver.probe(make_batch(50))}
    if world.sequence is not None and world.sequence.size == 4:
        found["said"] = refusals(folder, driver, world)
    return found


def refusals(folder: Path, driver: DirectLearner, world: World) -> list[str]:
    """What is said of layers that mix tokens outside attention, and of fewer heads than ranks."""
    narrow = driver.rank.world.sequence.by_head
    hook = driver.policy.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.mean(1, True))
    x_1HtD = torch.zeros(1, 3, 2, 8)
    calls = (
        lambda: check_sequence(driver.policy, world.sequence, "model directory m"),
        lambda: narrow(x_1HtD, x_1HtD, x_1HtD, 8),
    )
    said = []
    for call in calls:
        try:
            call()
        except ConfigError as e:
            said.append(str(e))
    hook.remove()
    return said


def resume(folder: Path, world: World, sequence: int) -> dict[str, Any]:
    """Two more steps from checkpoints, of one rank and of ranks that split rows; then back on such ranks."""
    found = {}
    for name in ("critic-1-1", "critic-4-2"):
        driver = learner(spec_of(folder, "critic", world.size, sequence, folder / name), world)
        driver.load_optimizer(folder / name)
        found[name] = steps(driver, "critic", STEPS, STEPS + 2)
    return found


def rank(
    work: Callable[[Path, World, int], Any],
    folder: Path,
    number: int,
    shape: tuple[int, int],
    port: int,
    answer: Connection,
) -> None:
    """One process."""
    collect_rarely()
    torch.set_num_threads(1)
    size, sequence = shape
    device = torch.device("cpu")
    world = World.join(number, size, device, f"tcp://127.0.0.1:{port}", 60, sequence) if size > 1 else World()
    found = work(folder, world, sequence)
    if number == 0:
        answer.send(found)
    world.leave()


def forked(work: Callable[[Path, World, int], Any], folder: Path, shape: tuple[int, int]) -> Any:
    """What rank 0 of so many found."""
    gc.freeze()  # else each fork goes through all modules again and again
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with reserved_port() as port:
        ranks = [context.Process(target=rank, args=(work, folder, n, shape, port, send)) for n in range(shape[0])]
        for one in ranks:
            one.start()
        send.close()
        try:
            return receive.recv()
        finally:
            for one in ranks:
                one.join(30)
                one.kill()


def main(folder: Path) -> dict[str, Any]:
    """Everything, by shape; a shape of several ranks adds how far its weights are from those of one."""
    import_module("peft")
    write_model(folder / "qwen3", seed=0)
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(make()).save_pretrained(folder / name)
    found = {f"{size}-{sequence}": forked(train, folder, (size, sequence)) for size, sequence in SHAPES}
    for (size, sequence), cases in SHAPES.items():
        for case in cases:
            one, many = (torch.load(folder / f"{case}-{n}/weights.pt") for n in ("1-1", f"{size}-{sequence}"))
            assert one.keys() >= many.keys()
            found[f"{size}-{sequence}"][case]["gap"] = max(float((one[n] - many[n]).abs().max()) for n in many)
    return {**found, "resumed": forked(resume, folder, (1, 1)), "split": forked(resume, folder, (2, 2))}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
