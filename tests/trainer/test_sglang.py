"""A real SGLang server on the CPU, driven and trained through.

`scripts/ci-sglang` installs one; AGENTRL_SGLANG_PYTHON names its Python. Measured here: log-probabilities of
SGLang 0.5.23 and of the learner, both in float32, agree to 2e-6 per token; the tests allow 1e-4.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.engine import EngineConfig, ServerConfig
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.open import open_engine
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.launch.hosts import GivenHost
from agentrl.engine.servers.opening import launch_recipe
from agentrl.engine.servers.server_engine import ServedEngine, load_folder
from agentrl.engine.servers.sglang import SGLangServer
from agentrl.engine.servers.weight_sync import BroadcastSync, DiskSync, TensorSync, WeightSync
from agentrl.types import Sampling
from tests.trainer.real_servers import (
    AGREE,
    PROMPT,
    Killer,
    calculator,
    gap,
    logprobs_of,
    random_adapter,
    serving,
    train,
    two_policies,
)

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning"),  # of PyTorch's process groups
    pytest.mark.skipif(
        not PYTHON,
        reason=os.environ.get("AGENTRL_SGLANG_MISSING")
        or "AGENTRL_SGLANG_PYTHON is not set: see scripts/ci-sglang",
    ),
]


# -- one server for the tests of the engine -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_policies(tmp_path_factory.mktemp("policies"), hidden=64)


@pytest.fixture(scope="module")
def url(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the first policy."""
    config = EngineConfig(
        kind="sglang", device="cpu", max_slots=32, sync="delta", server=ServerConfig(python=PYTHON)
    )
    recipe = launch_recipe(config, folders[0], PYTHON, 0)
    with serving(recipe, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def _engine(url: str, model: Path, sync: WeightSync) -> ServedEngine:
    return ServedEngine(
        [GivenHost(url, SGLangServer, start_timeout_s=300.0)],
        sync,
        model=model,
        given=True,
        tell=lambda text: None,
    )


async def test_tokens_are_told_while_the_server_draws_them(url: str, folders: list[Path], tmp_path: Path) -> None:
    engine = _engine(url, folders[0], DiskSync(folders[0], tmp_path))
    await engine.start()
    try:
        told: list[TokenLogprob] = []
        task = asyncio.create_task(
            engine.generate_streaming(
                PROMPT, Sampling(temperature=0.7, max_tokens=100), GenerateOptions(told.append, top=3)
            )
        )
        while not told:  # noqa: ASYNC110 - tokens are told between two turns of the loop
            await asyncio.sleep(0.001)
        assert not task.done()
        assert len(told) < 100
        completion = await task
        assert [(one.id, one.logprob) for one in told] == list(
            zip(completion.ids, completion.logprobs, strict=True)
        )
        model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 : -1]
        best = torch.log_softmax(logits / 0.7, -1).topk(3)
        assert torch.tensor([[value for _, value in one.top] for one in told]) == pytest.approx(
            best.values, abs=AGREE
        )
        cut = asyncio.create_task(
            engine.generate_streaming(PROMPT, Sampling(max_tokens=200), GenerateOptions(told.append))
        )
        while len(told) < 104:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        await engine.update_weights(load_folder(folders[0], torch.float32), version=1)  # nothing is left in flight
        assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).versions == (1, 1, 1)
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", ["disk", "tensor", "broadcast"])
async def test_weights_arrive_and_requests_in_flight_go_on_with_them(
    url: str, folders: list[Path], tmp_path: Path, kind: str
) -> None:
    syncs: dict[str, WeightSync] = {
        "disk": DiskSync(folders[0], tmp_path),
        "tensor": TensorSync(bucket_bytes=100_000),
        "broadcast": BroadcastSync(backend="gloo", bucket_bytes=100_000, timeout_s=120.0),
    }
    engine = _engine(url, folders[0], syncs[kind])
    await engine.start()
    try:
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), session=str(n)))
            for n in range(6)
        ]
        await engine.generate(PROMPT, Sampling(max_tokens=12))
        await engine.update_weights(load_folder(folders[1], torch.float32), version=1)
        done = [await task for task in tasks]
        assert all(list(c.versions) == sorted(c.versions) for c in done)
        assert any(set(c.versions) == {0, 1} for c in done), "no completion crossed the update"
        assert max(gap(c, {0: folders[0], 1: folders[1]}) for c in done) < AGREE
        given = [*PROMPT, 1, 2, 3]
        (scored,) = await engine.logprobs_by_server([given])
        wanted = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
        assert (torch.tensor(scored[0]) - logprobs_of(wanted, given)).abs().max() < AGREE
        with torch.no_grad():
            likeliest = torch.log_softmax(wanted(torch.tensor([given])).logits[0, :-1], -1).topk(2)
        for one, values in zip(await engine.prompt_logprobs(given, top=2), likeliest.values, strict=True):
            assert (torch.tensor([value for _, value in one.top]) - values).abs().max() < AGREE
    finally:
        await engine.close()


async def test_changed_weights_alone_arrive(url: str, folders: list[Path], tmp_path: Path) -> None:
    sync = DeltaSync(bucket_bytes=20_000, full_every=3)
    engine = _engine(url, folders[0], sync)
    await engine.start()
    weights = load_folder(folders[0], torch.float32)
    size = sum(tensor.nbytes for tensor in weights.values())
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    given, sent = [*PROMPT, 1, 2, 3], []
    try:
        for version in (1, 2, 3, 4):
            generator = torch.Generator().manual_seed(version)
            for tensor in weights.values():
                chosen = torch.rand(tensor.shape, generator=generator) < 0.03
                tensor[chosen] *= 1.5
            await engine.update_weights(weights, version=version)
            sent.append(sync.bytes_sent)
            assert set(model.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}
            (scored,) = await engine.logprobs_by_server([given])
            assert (torch.tensor(scored[0]) - logprobs_of(model, given)).abs().max() < AGREE
        assert sent[2] == size, "every third update brings all weights"
        assert max(sent[0], sent[1], sent[3]) < size / 10
    finally:
        await engine.close()


async def test_an_adapter_alone_says_the_same_as_merged_weights(folders: list[Path], tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, alpha=4, targets=["q_proj", "v_proj", "down_proj"])
    adapter = random_adapter(folders[0], lora, tmp_path / "merged")
    server = ServerConfig(python=PYTHON)
    config = EngineConfig(kind="sglang", device="cpu", max_slots=32, sync="lora", server=server)
    engine = await open_engine(config, folders[0], lora)
    assert isinstance(engine, ServedEngine)
    try:
        tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200))) for _ in range(6)]
        await engine.generate(PROMPT, Sampling(max_tokens=12))
        await engine.update_weights(adapter, version=1)
        done = [*[await task for task in tasks], await engine.generate(PROMPT, Sampling(max_tokens=12))]
        assert all(list(c.versions) == sorted(c.versions) for c in done)
        assert any(set(c.versions) == {0, 1} for c in done), "no completion crossed the update"
        assert set(done[-1].versions) == {1}
        assert max(gap(c, {0: folders[0], 1: tmp_path / "merged"}) for c in done) < AGREE
        assert max(gap(c, {1: folders[0]}) for c in done) > 100 * AGREE, "the adapter changes nothing"
    finally:
        await engine.close()


async def test_stop_ids_limits_and_cancellation(url: str, folders: list[Path], tmp_path: Path) -> None:
    engine = _engine(url, folders[0], TensorSync(bucket_bytes=1 << 20))
    await engine.start()
    try:
        greedy = await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=20))
        assert (len(greedy.ids), greedy.finish) == (20, "length")
        stop = greedy.ids[6]
        again = await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=20, stop_ids=frozenset([stop])))
        assert again.ids == greedy.ids[: greedy.ids.index(stop) + 1]
        assert again.finish == "stop"
        long = await engine.generate([7] * (engine.max_context - 3), Sampling(max_tokens=50))
        assert (len(long.ids), long.finish) == (3, "length")
        began = asyncio.Event()
        options = GenerateOptions(lambda token: began.set())
        lost = asyncio.create_task(engine.generate_streaming(PROMPT, Sampling(max_tokens=200), options))
        await began.wait()
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        await engine.generate(PROMPT, Sampling(max_tokens=2))
    finally:
        await engine.close()


# -- training -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*is lost")
@pytest.mark.filterwarnings("ignore:.*answers again")
@pytest.mark.filterwarnings("ignore:.*ignore seeds")
def test_training_through_sglang_survives_the_death_of_its_server(tmp_path: Path) -> None:
    cold = {
        "model": {"tiny": {"hidden": 96, "layers": 2, "vocab": 400, "max_context": 512}},
        "warmup": {
            "num": 300,
            "max_epochs": 14,
            "until_pass": 0.6,
            "anneal_epochs": 2,
            "at_least": 0.0,
            "probe_every": 60,
            "probe_tasks": 16,
            "probe_samples": 4,
            "lr": 2e-3,
            "options": {"quality": 0.9, "max_operations": 1},
        },
    }
    train(calculator(steps=1, **cold), tmp_path / "cold")
    served = calculator(
        steps=6,
        optim={"lr": 4e-4, "warmup_steps": 0, "schedule": "linear"},  # the servers' draws are not seeded
        eval={"tasks": 200},
        model={"path": str(tmp_path / "cold" / "start")},
        engine={"kind": "sglang", "device": "cpu", "max_slots": 64, "server": {"python": PYTHON}},
    )
    killer = Killer()
    summary, lines = train(served, tmp_path / "served", killer)
    killer.timer.join()
    steps = [line for line in lines if line["step"] > 0]
    assert killer.killed, "no server was found"
    assert summary.steps == 6
    assert summary.infra_failures == 0
    assert all(line["sync_gap"] < AGREE for line in steps)
    assert all(line["drift/mean_abs"] < AGREE for line in steps)
    assert summary.held_out_before is not None
    assert summary.held_out_after is not None
    assert summary.held_out_after >= summary.held_out_before - 0.1
