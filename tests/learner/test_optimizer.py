"""AdamW whose moments take fewer bits: near AdamW, exact in checkpoints, on any number of ranks, and refused where
it saves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.learner.moments import moment_bytes, scales_per_row
from agentrl.learner.optimizer import MOMENTS, CompactAdamW, _fractions, loaded, make_optimizer, stored
from agentrl.learner.shard import World
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch, scored, write_model

State = Literal["float32", "bfloat16", "int8"]
COMPACT: tuple[State, ...] = ("bfloat16", "int8")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are large enough to be kept in fewer bits."""
    return write_model(tmp_path_factory.mktemp("policy"), seed=0, hidden=64)


@contextmanager
def learner(policy: Path, state: State, world: World | None = None, **config: Any) -> Iterator[DirectLearner]:
    critic = config.pop("critic", None)
    algorithm = {"advantage": "gae"} if critic else {}
    made = DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.0}, **algorithm),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, weight_decay=0.1, state=state),
        config=LearnerConfig(**{"device": "cpu", "tokens_per_micro_batch": 300} | config),
        temperature=1.0,
        total_steps=10,
        world=world,
        critic=critic,
        critic_dir=policy / "critic" if (policy / "critic").is_dir() else policy if critic else None,
    )
    try:
        yield made
    finally:
        made.close()


def weights_of(made: DirectLearner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in made.weights().items()}


def moved(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(one[n] - other[n]).flatten() for n in one]).norm())


def test_an_update_in_float32_is_that_of_pytorch():
    """What is computed between reading and rounding the moments, with parameters that are kept in float32."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(size)) for size in ((30, 40), (7,), ())]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    both = (
        CompactAdamW(ours, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, state="int8"),
        torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1),
    )
    for _ in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in both:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [1, 16, 255, 256, 257, 1000])
@pytest.mark.parametrize("entry", MOMENTS)
def test_eight_bits_are_near_and_read_back_as_they_are(entry: str, width: int):
    torch.manual_seed(0)
    rows = torch.randn(40, width) * torch.logspace(-5, 0, 40)[:, None] * torch.logspace(-3, 0, width)
    rows[3] = 0
    rows = rows if entry == "exp_avg" else rows.square()
    state = stored(entry, rows, "int8")
    found = loaded(state, entry)
    assert torch.equal(found.sign(), rows.sign()), "nothing but 0 becomes 0, and signs are kept"
    assert float((found - rows).norm() / rows.norm()) < 0.03
    again = stored(entry, found, "int8")
    assert all(torch.equal(state[name], again[name]) for name in state)
    for row in (0, 17):  # a row means the same without the others
        alone = stored(entry, rows[row : row + 1], "int8")
        assert all(torch.equal(alone[name][0], state[name][row]) for name in state)


@pytest.mark.parametrize("entry", MOMENTS)
def test_blocks_of_256_numbers_have_a_scale_each_and_255_fractions(entry: str):
    """Numbers of the first block are a billionth of those of the second, and as exact."""
    rows = torch.rand(3, 512, generator=torch.Generator().manual_seed(0)) + 0.5
    rows[:, :256] *= 1e-9
    found = loaded(stored(entry, rows, "int8"), entry)
    assert float((found / rows - 1).abs().max()) < 0.02
    assert [scales_per_row(width) for width in (1, 255, 256, 257, 512, 513)] == [1, 1, 1, 2, 2, 3]
    fractions, _ = _fractions(entry == "exp_avg", torch.device("cpu"))
    assert len(fractions.unique()) == 255


@pytest.mark.parametrize("at_once", [1, 90, 10_000])
def test_large_matrices_are_updated_piece_by_piece(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.learner.optimizer.AT_ONCE", at_once)  # no row, two rows and all rows of 40
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(31, 40)) for _ in range(2))
    adamw = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.3)
    compact = CompactAdamW([ours], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.3, state="int8")
    for _ in range(3):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        compact.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    large = torch.nn.Parameter(torch.zeros(64, 64))
    for state in ("float32", *COMPACT):
        made = make_optimizer([large], OptimConfig(betas=(0.8, 0.9), weight_decay=0.3, state=state), 1e-2)
        group = made.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"], group["eps"]) == (1e-2, (0.8, 0.9), 0.3, 1e-8)


def test_bfloat16_keeps_small_changes_on_average():
    """0.1% at a time, less than half a unit: rounded to the nearest, the number would stay 1."""
    random = torch.Generator().manual_seed(0)
    value = torch.ones(100, 100)
    for _ in range(100):
        value = loaded(stored("exp_avg_sq", value * 0.999, "bfloat16", random), "exp_avg_sq")
    assert float(value.mean()) == pytest.approx(0.999**100, rel=2e-3)


def test_each_update_and_each_parameter_rounds_with_random_numbers_of_its_own():
    """With the same numbers in every update, most entries of a moment that shrinks by 0.1% would never shrink."""
    pair = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    optimizer = CompactAdamW(pair, lr=0.0, betas=(0.9, 0.999), weight_decay=0.0, state="bfloat16")
    for number in range(300):
        for parameter in pair:
            parameter.grad = torch.full_like(parameter, float(number == 0))
        optimizer.step()
    first, second = (optimizer.state[parameter]["exp_avg_sq"].float() for parameter in pair)
    decayed = 0.001 * 0.999**299
    assert float(first.mean()) == pytest.approx(decayed, rel=0.01)
    assert 0.6 * decayed < float(first.min()) < float(first.max()) < 1.3 * decayed
    assert not torch.equal(first, second)


@pytest.mark.parametrize("state", COMPACT)
@pytest.mark.parametrize("lora", [None, {"rank": 128, "alpha": 128}])
def test_training_stays_near_and_resumes_exactly(policy: Path, tmp_path: Path, state: State, lora: Any):
    with learner(policy, "float32", lora=lora) as plain:
        begin = weights_of(plain)
        for seed in range(4):
            plain.step(make_batch(seed))
        wanted = weights_of(plain)
    with learner(policy, state, lora=lora) as whole:
        for seed in range(2):
            whole.step(make_batch(seed))
        whole.save(tmp_path)
        for seed in range(2, 4):
            whole.step(make_batch(seed))
        found = weights_of(whole)
    assert 0 < moved(found, wanted) < 0.1 * moved(wanted, begin)
    with learner(tmp_path if lora is None else policy, state, lora=lora) as resumed:
        if lora is None:
            resumed.load_optimizer(tmp_path)
            for seed in range(2, 4):
                resumed.step(make_batch(seed))
            assert moved(weights_of(resumed), found) == 0.0
    held = load_file(tmp_path / "optimizer.safetensors")
    kinds = {str(value.dtype) for name, value in held.items() if name.endswith("exp_avg")}
    assert kinds >= {{"bfloat16": "torch.bfloat16", "int8": "torch.uint8"}[state]}


def test_a_checkpoint_loads_with_another_state(policy: Path, tmp_path: Path):
    with learner(policy, "int8") as first:
        first.step(make_batch(0))
        first.save(tmp_path)
        kept = {n: loaded(first.optimizer.state[p], "exp_avg") for n, p in first.policy.named_parameters()}
    for state in ("float32", "bfloat16"):
        with learner(tmp_path, state) as then:
            then.load_optimizer(tmp_path)
            for name, parameter in then.policy.named_parameters():
                torch.testing.assert_close(
                    then.optimizer.state[parameter]["exp_avg"].float(), kept[name], rtol=5e-3, atol=1e-9
                )
            then.step(make_batch(1))


@pytest.mark.parametrize("state", COMPACT)
def test_offloading_changes_nothing(policy: Path, state: State, monkeypatch: pytest.MonkeyPatch):
    """It is refused where there is no GPU; here it is let through, to memory that is not pinned."""
    monkeypatch.setattr("agentrl.learner.shard.CPUOffloadPolicy", partial(CPUOffloadPolicy, pin_memory=False))
    found = []
    for chosen in ({}, {"world": World.alone(torch.device("cpu")), "device": "auto", "cpu_offload": True}):
        with learner(policy, state, **chosen) as made:
            for seed in range(2):
                made.step(make_batch(seed))
            found.append(weights_of(made))
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in found[1]) < 1e-4


def test_the_critic_keeps_its_state_the_same_way(policy: Path, tmp_path: Path):
    with learner(policy, "int8", critic=CriticConfig(lr=1e-3)) as made:
        made.step(*scored(make_batch(0)))
        assert made.critic is not None
        assert isinstance(made.critic.optimizer, CompactAdamW)
        made.save(tmp_path)
        wanted = dict(made.step(*scored(make_batch(1))).metrics)
    with learner(tmp_path, "int8", critic=CriticConfig(lr=1e-3)) as then:
        then.load_optimizer(tmp_path)
        found = dict(then.step(*scored(make_batch(1))).metrics)
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_memory_is_as_planned(policy: Path):
    for state in COMPACT:
        with learner(policy, state) as made:
            made.step(make_batch(0))
            for parameter in (p for p in made.policy.parameters() if p.dim() == 2):
                held = sum(
                    v.numel() * v.element_size() for v in made.optimizer.state[parameter].values() if v.dim()
                )
                assert held == moment_bytes(*parameter.shape, state)


def test_a_state_that_saves_nothing_is_refused():
    small = [torch.nn.Parameter(torch.zeros(63, 65)), torch.nn.Parameter(torch.zeros(5000))]
    with pytest.raises(ConfigError, match=r"optim\.state int8 has no effect: only matrices of 4,096 numbers"):
        make_optimizer(small, OptimConfig(state="int8"), 1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_with_shards_train_what_one_rank_trains(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.learner.optimizer_program", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    for state in COMPACT:
        assert found[state]["gap"] < 1e-4, "an update moves a parameter by 1e-3"
        assert found[state]["same"], "two ranks wrote what one rank has read"
        assert found[state]["resumed"] < 1e-4
