"""One rank sharded by itself: what mixed precision and offloading change of a step, on the CPU."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.learner import rank_pool
from agentrl.learner.logprobs import token_stats
from agentrl.learner.micro_batch import saving
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import load_policy
from agentrl.learner.shard import ALIGNED, World, collected
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch


@contextmanager
def learner(policy: Path, start: Path, world: World | None = None, **config: Any) -> Iterator[DirectLearner]:
    made = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.05}),
        optim=OptimConfig(lr=1e-3, warmup_steps=0),
        config=LearnerConfig(**{"device": "cpu", "tokens_per_micro_batch": 150} | config),
        temperature=1.0,
        total_steps=10,
        reference_dir=start,
        world=world,
    )
    try:
        yield made
    finally:
        made.close()


def after_three_steps(made: DirectLearner, saved: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Its parameters and metrics; it is saved and takes up what it saved on the way."""
    metrics = [dict(made.step(make_batch(seed)).metrics) for seed in range(2)]
    made.save(saved)
    made.load_optimizer(saved)
    metrics.append(dict(made.step(make_batch(2)).metrics))
    return {name: value.detach().clone() for name, value in made.weights().items()}, metrics


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one.keys() & other.keys())


@pytest.fixture(scope="module")
def plain(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    with learner(policy_dir, policy_dir) as made:
        return after_three_steps(made, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("keys", [("offload_activations",), ("cpu_offload", "offload_activations")])
def test_offloading_changes_nothing(
    plain: Any, policy_dir: Path, tmp_path: Path, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """It is refused where there is no GPU; here it is let through, to memory that is not pinned."""
    monkeypatch.setattr("agentrl.learner.shard.CPUOffloadPolicy", partial(CPUOffloadPolicy, pin_memory=False))
    chosen = dict.fromkeys(keys, True)
    with learner(policy_dir, policy_dir, World.alone(torch.device("cpu")), device="auto", **chosen) as made:
        weights, metrics = after_three_steps(made, tmp_path)
    assert gap(weights, plain[0]) < 1e-6
    assert metrics[-1] == pytest.approx(plain[1][-1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offloading_activations_leaves_parameters_where_they_are(
    policy_dir: Path, precision: str, monkeypatch: pytest.MonkeyPatch
):
    """As a stand-in for a move to host memory, what is moved is noted; gathered parameters are none of it."""
    moved: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        moved.append(tensor)
        return (tensor,)

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept[0])
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda pin_memory: hooks)
    with learner(
        policy_dir, policy_dir, World.alone(torch.device("cpu")), device="auto", precision=precision
    ) as made:
        with saving(made.config.model_copy(update={"offload_activations": True})):
            stats = token_stats(made.policy, pack(make_batch(0)))
        stats.logprobs_N.sum().backward()
        owners = [tensor if tensor._base is None else tensor._base for tensor in moved]
        assert moved
        assert not any(isinstance(owner, torch.nn.Parameter) for owner in owners)
        assert all(parameter.grad is not None for parameter in made.policy.parameters())


def test_offloading_without_a_gpu_is_refused(policy_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.learner.policy_rank.pick_device", lambda name: torch.device("cpu"))
    for key in ("cpu_offload", "offload_activations"):
        with (
            pytest.raises(ConfigError, match=rf"learner\.{key} has no effect on the CPU"),
            learner(policy_dir, policy_dir, device="auto", **{key: True}),
        ):
            pass


@pytest.mark.parametrize("checkpointed", [False, True])
def test_bfloat16_is_near_and_keeps_float32(plain: Any, policy_dir: Path, tmp_path: Path, checkpointed: bool):
    chosen = {"precision": "bfloat16", "checkpoint_activations": checkpointed}
    with learner(policy_dir, policy_dir, **chosen) as made:
        weights, metrics = after_three_steps(made, tmp_path)
        assert {p.dtype for p in made.policy.parameters()} == {torch.float32}
    assert 0 < gap(weights, plain[0]) < 6.1e-3, (
        "three steps of AdamW move a parameter by three learning rates at most"
    )
    for low, full in zip(metrics, plain[1], strict=True):
        assert low["entropy"] == pytest.approx(full["entropy"], rel=1e-2)
        assert low["grad_norm"] == pytest.approx(full["grad_norm"], rel=0.1)
    assert metrics[0] != plain[1][0], "it was computed in another precision"


def test_the_weights_of_a_single_rank_are_handed_out_without_a_copy(policy_dir: Path, tmp_path: Path):
    with learner(policy_dir, policy_dir, precision="bfloat16") as made:
        made.step(make_batch(0))
        own = {name: cast(DTensor, value.detach()).to_local() for name, value in made.policy.named_parameters()}
        found = made.weights()
        assert {name: found[name].data_ptr() for name in own} == {n: v.data_ptr() for n, v in own.items()}
        assert not any(value.requires_grad for value in found.values())
        elsewhere = torch.empty(2, device="meta")
        assert collected(elsewhere, made.world) is elsewhere, "they stay on their device"
        before = {name: value.clone() for name, value in found.items()}
        write = asyncio.run(made.learner.snapshot({}))
        made.step(make_batch(1))
        write(tmp_path)
        assert gap(found, before) > 0, "an update changes them"
    saved = load_file(tmp_path / "model.safetensors")
    assert gap(saved, before) == 0, "a checkpoint has a copy"


def test_a_model_that_cannot_be_loaded_leaves_the_process_free_for_another(policy_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="has no config"), learner(tmp_path, policy_dir, precision="bfloat16"):
        pass
    with learner(policy_dir, policy_dir, precision="bfloat16") as made:
        assert made.step(make_batch(0)).trained > 0


def test_the_port_where_ranks_meet_is_free_on_every_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_pool, "_node_address", lambda: "127.0.0.2")
    worker = rank_pool.RankWorker("the policy", 0, 2)
    host, port = worker.address().removeprefix("tcp://").split(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(port)))  # torch could not listen on all addresses then
    store = torch.distributed.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
    store.set("rank", "0")
    assert store.get("rank") == b"0"
    worker._port.close()


def test_where_a_file_has_its_tensors_does_not_change_the_numbers(policy_dir: Path, tmp_path: Path):
    """Kernels round by where a tensor begins in memory. Those of a file that is mapped begin behind its header,
    which is longer in one checkpoint than in another."""
    for length in range(0, 64, 8):
        folder = tmp_path / str(length)
        shutil.copytree(policy_dir, folder)
        file = folder / "model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt", "more": "x" * length})
        model = World().place(
            lambda values, folder=folder: load_policy(folder, torch.device("cpu")),  # type: ignore[misc]
            LearnerConfig(device="cpu"),
            torch.device("cpu"),
        )
        assert {parameter.data_ptr() % ALIGNED for parameter in model.parameters()} == {0}
        kept = load_file(file)
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items() if name in kept)
