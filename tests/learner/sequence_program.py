"""Ranks that split rows, beside one rank that does not: `python -m tests.learner.sequence_program FOLDER`.

All ranks are forks of this process, which has imported everything once. Prints JSON, by case and number of ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3MoeConfig

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.learner import Learner
from agentrl.learner.policy_rank import LocalPolicyRank
from agentrl.learner.rank import LearnerSpec, Together
from agentrl.learner.shard import World
from tests.learner.direct import DirectLearner
from tests.learner.train_models import VOCABULARY, make_batch, scored, write_model

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
    "qwen3": ("qwen3", {"kl": {"coef": 0.05}, "entropy_coef": 0.01, "updates_per_step": 2}, {}),
    "llama": ("llama", {"loss": "gspo"}, {"checkpoint_activations": True}),
    "gemma3": ("gemma3", {}, {"logits_at_once": 5}),
    "mistral": ("mistral", {"kl": {"coef": 0.05}}, {"lora": {"rank": 4, "alpha": 8}}),
    "critic": ("qwen3", {"advantage": "gae"}, {"checkpoint_activations": True, "logits_at_once": 0}),
    "moe": ("moe", {}, {}),
}
"""Model, algorithm and learner of each."""


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
        optim=OptimConfig(lr=1e-3, warmup_steps=2, schedule="linear"),
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
    return ranks if world.sequence is None else Together(ranks, world.sequence.size)


def steps(driver: DirectLearner, case: str, first: int, last: int) -> list[dict[str, float]]:
    rows = [make_batch(seed, groups=2) for seed in range(first, last)]
    given = [scored(batch) if case == "critic" else (batch, None) for batch in rows]
    return [dict(driver.step(*step).metrics) for step in given]


def run_case(folder: Path, case: str, world: World, sequence: int) -> dict[str, Any]:
    """Five steps; then a checkpoint."""
    driver = learner(spec_of(folder, case, world.size, sequence), world)
    curve = steps(driver, case, 0, STEPS)
    saved = folder / f"{case}-{world.size}-{sequence}"
    if world.rank == 0:
        saved.mkdir()
        torch.save(driver.weights(), saved / "weights.pt")
    else:
        driver.weights()
    driver.save(saved)
    return {"curve": curve, "probe": driver.probe(make_batch(50))}


def rank(folder: Path, number: int, size: int, sequence: int, port: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    world = World.join(number, size, device, f"tcp://127.0.0.1:{port}", 60, sequence) if size > 1 else World()
    found: dict[str, Any] = {case: run_case(folder, case, world, sequence) for case in CASES}
    if number == 0:
        answer.send(found)
    world.leave()


def forked(folder: Path, size: int, sequence: int) -> dict[str, Any]:
    """What rank 0 of so many found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    ranks = [context.Process(target=rank, args=(folder, n, size, sequence, port, send)) for n in range(size)]
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
    write_model(folder / "qwen3", seed=0)
    for name, make in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(make()).save_pretrained(folder / name)
    return {
        f"{size}/{sequence}": forked(folder, size, sequence) for size, sequence in ((1, 1), (2, 2), (4, 2), (4, 4))
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
