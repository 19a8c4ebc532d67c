"""A real vLLM server on the CPU, driven and trained through.

`scripts/ci-vllm` installs one; AGENTRL_VLLM_PYTHON names its Python.
"""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.engine import EngineConfig, ServerConfig, Sync
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.open import open_engine
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.launch.hosts import GivenHost
from agentrl.engine.servers.opening import launch_recipe
from agentrl.engine.servers.server_engine import ServedEngine, load_folder
from agentrl.engine.servers.vllm import VLLMServer
from agentrl.engine.servers.weight_sync import DiskSync, TensorSync, WeightSync
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

PYTHON = os.environ.get("AGENTRL_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON,
        reason=os.environ.get("AGENTRL_VLLM_MISSING") or "AGENTRL_VLLM_PYTHON is not set: see scripts/ci-vllm",
    ),
]
SERVER = ServerConfig(python=PYTHON or None, environment={"VLLM_CPU_KVCACHE_SPACE": "1"})


# -- one server for the tests of the engine -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_policies(tmp_path_factory.mktemp("policies"), hidden=128)


@pytest.fixture(scope="module")
def url(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the first policy."""
    config = EngineConfig(kind="vllm", device="cpu", max_slots=32, sync="delta", server=SERVER)
    recipe = launch_recipe(config, folders[0], PYTHON, 0)
    with serving(recipe, tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def _engine(url: str, model: Path, way: WeightSync, sync: Sync = "disk") -> ServedEngine:
    host = GivenHost(url, lambda url: VLLMServer(url, sync=sync), start_timeout_s=300.0)
    return ServedEngine([host], way, model=model, given=True, tell=lambda text: None)


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
        table = torch.log_softmax(logits / 0.7, -1)
        drawn = table.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.tensor(completion.logprobs) == pytest.approx(drawn, abs=AGREE)
        best = table.topk(3).values
        assert torch.tensor([[value for _, value in one.top] for one in told]) == pytest.approx(best, abs=AGREE)
    finally:
        await engine.close()


@pytest.mark.parametrize("sync", ["disk", "tensor", "delta"])
async def test_weights_arrive_and_requests_in_flight_go_on_with_them(
    url: str, folders: list[Path], tmp_path: Path, sync: Sync
) -> None:
    ways: dict[str, WeightSync] = {
        "disk": DiskSync(folders[0], tmp_path),
        "tensor": TensorSync(bucket_bytes=100_000),
        "delta": DeltaSync(bucket_bytes=100_000, full_every=50),
    }
    engine = _engine(url, folders[0], ways[sync], sync)
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


async def test_changed_weights_alone_arrive(url: str, folders: list[Path]) -> None:
    sync = DeltaSync(bucket_bytes=20_000, full_every=3)
    engine = _engine(url, folders[0], sync, "delta")
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


async def test_a_server_with_other_weights_gets_all_of_them(url: str, folders: list[Path]) -> None:
    said: list[str] = []
    sync = DeltaSync(bucket_bytes=1 << 20, full_every=9, tell=said.append)
    engine = _engine(url, folders[0], sync, "delta")
    stranger = VLLMServer(url, sync="delta")
    given = [*PROMPT, 1, 2, 3]
    await engine.start()
    try:
        async with stranger.updating(by_tensor=True):  # behind the back of `sync`
            await stranger.load_tensors(load_folder(folders[1], torch.float32), 1)
        weights = load_folder(folders[0], torch.float32)
        next(iter(weights.values()))[0] += 1
        for version in (1, 2):
            await engine.update_weights(weights, version=version)
            model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
            model.load_state_dict(weights, strict=False)
            (scored,) = await engine.logprobs_by_server([given])
            assert (torch.tensor(scored[0]) - logprobs_of(model, given)).abs().max() < AGREE
        assert ["refused changes of its weights" in text for text in said] == [True]
    finally:
        await stranger.close()
        await engine.close()


async def test_a_seed_draws_the_same_tokens_again(url: str, folders: list[Path]) -> None:
    engine = _engine(url, folders[0], TensorSync(bucket_bytes=1 << 20), "tensor")
    await engine.start()
    try:
        first, second = [await engine.generate(PROMPT, Sampling(max_tokens=20, seed=7)) for _ in range(2)]
        other = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=8))
        assert first.ids == second.ids
        assert first.ids != other.ids
    finally:
        await engine.close()


async def test_stop_ids_limits_and_cancellation(url: str, folders: list[Path]) -> None:
    engine = _engine(url, folders[0], TensorSync(bucket_bytes=1 << 20), "tensor")
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
        told: list[TokenLogprob] = []
        requests = [
            engine.generate_streaming(PROMPT, Sampling(max_tokens=240), GenerateOptions(told.append)),
            engine.generate(PROMPT, Sampling(max_tokens=240)),
        ]
        lost = [asyncio.create_task(request) for request in requests]
        while len(told) < 4 or await asyncio.to_thread(_running, url) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for task in lost:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(told) < 240
        while await asyncio.to_thread(_running, url):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.generate(PROMPT, Sampling(max_tokens=2))
    finally:
        await engine.close()


def _running(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))


# -- servers that the engine starts -------------------------------------------------------------------------------


async def test_an_adapter_alone_says_the_same_as_merged_weights(folders: list[Path], tmp_path: Path) -> None:
    lora = LoRAConfig(rank=4, alpha=4, targets=["q_proj", "v_proj", "down_proj"])
    adapter = random_adapter(folders[0], lora, tmp_path / "merged")
    config = EngineConfig(kind="vllm", device="cpu", max_slots=32, sync="lora", server=SERVER)
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


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*(was|is) lost")
@pytest.mark.filterwarnings("ignore:.*answers again")
def test_training_through_vllm_survives_the_death_of_its_server(tmp_path: Path) -> None:
    config = calculator(
        steps=4,
        model={"tiny": {"hidden": 128, "layers": 2, "vocab": 400, "max_context": 512}},
        warmup={"num": 60, "max_epochs": 2, "at_least": 0.0, "options": {"max_operations": 1}},
        eval={"tasks": 8},
        engine={"kind": "vllm", "device": "cpu", "max_slots": 64, "server": SERVER.model_dump(exclude_unset=True)},
    )
    killer = Killer()
    summary, lines = train(config, tmp_path / "run", killer)
    killer.timer.join()
    steps = [line for line in lines if line["step"] > 0]
    assert killer.killed, "no server was found"
    assert summary.steps == 4
    assert summary.infra_failures == 0
    assert all(line["sync_gap"] < AGREE for line in steps)
    assert all(line["drift/mean_abs"] < AGREE for line in steps)
