"""What the engine must do over every real inference server: `test_sglang` and `test_vllm_server` run these."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from agentrl.config.engine import SERVERS, EngineConfig, ServerConfig, Sync
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.open import open_engine
from agentrl.engine.servers.client import InferenceServer
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.launch.hosts import GivenHost, LaunchedHost, Recipe
from agentrl.engine.servers.opening import launch_recipe
from agentrl.engine.servers.replica_pool import Host
from agentrl.engine.servers.server_engine import ServedEngine, load_folder
from agentrl.engine.servers.weight_sync import BroadcastSync, DiskSync, TensorSync, WeightSync
from agentrl.types import Completion, Sampling
from tests.trainer.real_servers import (
    AGREE,
    PROMPT,
    calculator,
    gap,
    logprobs_of,
    random_adapter,
    serving,
    train,
    two_policies,
)

GIVEN = [*PROMPT, 1, 2, 3]


@dataclass(frozen=True)
class Kind:
    """A kind of server.

    Attributes:
        name: as in `engine.kind`.
        server: how to start one.
        hidden: size of a model that it supports.
        connect: a client for its address and way of updates.
        running: the number of requests that it works on.
        refusal_kills: it dies of changes that it refuses, so that the engine must start another.
    """

    name: str
    server: ServerConfig
    hidden: int
    connect: Callable[[str, Sync], InferenceServer]
    running: Callable[[str], int]
    refusal_kills: bool = False


def _way(sync: Sync, model: Path, folder: Path, said: list[str] | None = None) -> WeightSync:
    if sync == "disk":
        return DiskSync(model, folder)
    if sync == "broadcast":
        return BroadcastSync(backend="gloo", bucket_bytes=100_000, timeout_s=120.0)
    if sync == "delta":
        return DeltaSync(bucket_bytes=20_000, full_every=3, tell=(said if said is not None else []).append)
    return TensorSync(bucket_bytes=100_000)


async def _serves(engine: ServedEngine, weights: dict[str, torch.Tensor], model: Path) -> bool:
    """Whether all servers score tokens as transformers does with these weights."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert set(policy.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}
    wanted = logprobs_of(policy, GIVEN)
    found = await engine.logprobs_by_server([GIVEN])
    return all(bool((torch.tensor(rows[0]) - wanted).abs().max() < AGREE) for rows in found.values())


@asynccontextmanager
async def _closing(engine: ServedEngine) -> AsyncIterator[ServedEngine]:
    try:
        yield engine
    finally:
        await engine.close()


async def _generated_during(engine: ServedEngine, update: Coroutine[Any, Any, None]) -> list[Completion]:
    """Make an update while six requests are in flight at all times; return all completions."""
    done: list[Completion] = []
    over = asyncio.Event()

    async def keep_asking(session: str, length: int) -> None:
        while not over.is_set():
            done.append(await engine.generate(PROMPT, Sampling(max_tokens=length), session=session))

    async with asyncio.TaskGroup() as tasks:
        for n in range(6):
            tasks.create_task(keep_asking(str(n), 200 - 23 * n))  # so that they do not all end at once
        await engine.generate(PROMPT, Sampling(max_tokens=12))
        await update
        over.set()
    return done


def _change(weights: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor[torch.rand(tensor.shape, generator=generator) < 0.03] *= 1.5


class EngineTests:
    """Tests of one kind of server."""

    KIND: ClassVar[Kind]

    @pytest.fixture(scope="class")
    @classmethod
    def folders(cls, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        """Two policies."""
        return two_policies(tmp_path_factory.mktemp("policies"), cls.KIND.hidden)

    @pytest.fixture(scope="class")
    @classmethod
    def recipe(cls, folders: list[Path]) -> Recipe:
        """How to start a server over the first policy."""
        config = EngineConfig(kind=cls.KIND.name, device="cpu", max_slots=32, sync="delta", server=cls.KIND.server)
        assert cls.KIND.server.python is not None
        return launch_recipe(config, folders[0], cls.KIND.server.python, 0)

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        """One server for most tests."""
        with serving(recipe, tmp_path_factory.mktemp("server") / "log") as url:
            yield url

    @asynccontextmanager
    async def opened(
        self, at: str | Recipe, model: Path, way: WeightSync, sync: Sync, said: list[str] | None = None
    ) -> AsyncIterator[ServedEngine]:
        """An engine over a server that runs, or over one that it starts."""

        def connect(url: str) -> InferenceServer:
            return self.KIND.connect(url, sync)

        if isinstance(at, str):
            host: Host = GivenHost(at, connect, start_timeout_s=300.0)
        else:
            host = LaunchedHost(
                "the server", at, connect, log=model.parent / "launched.log", start_timeout_s=300.0
            )
        tell = (said if said is not None else []).append
        engine = ServedEngine([host], way, model=model, given=isinstance(at, str), tell=tell)
        await engine.start()
        async with _closing(engine):
            yield engine

    async def test_tokens_are_told_while_the_server_draws_them(
        self, url: str, folders: list[Path], tmp_path: Path
    ) -> None:
        async with self.opened(url, folders[0], _way("disk", folders[0], tmp_path), "disk") as engine:
            for attempt in range(3):  # a busy machine may not look in time
                told: list[TokenLogprob] = []
                options = GenerateOptions(told.append, top=3)
                task = asyncio.create_task(
                    engine.generate_streaming(PROMPT, Sampling(temperature=0.7, max_tokens=100), options)
                )
                lengths = set()
                while not task.done():
                    lengths.add(len(told))
                    await asyncio.sleep(0.001)
                if lengths - {0, 100}:
                    break
                assert attempt < 2, "the server sent all tokens at once"
            completion = await task
            assert [(one.id, one.logprob) for one in told] == list(
                zip(completion.ids, completion.logprobs, strict=True)
            )
            model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 : -1]
            best = torch.log_softmax(logits / 0.7, -1).topk(3).values
            assert torch.tensor([[value for _, value in one.top] for one in told]) == pytest.approx(
                best, abs=AGREE
            )

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_logprobs_are_those_of_the_policy_at_the_temperature(
        self, url: str, folders: list[Path], tmp_path: Path, temperature: float
    ) -> None:
        async with self.opened(url, folders[0], _way("disk", folders[0], tmp_path), "disk") as engine:
            completion = await engine.generate(PROMPT, Sampling(temperature=temperature, max_tokens=60))
            model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 : -1]
            table = torch.log_softmax(logits / temperature, -1)
            drawn = table.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
            assert torch.tensor(completion.logprobs) == pytest.approx(drawn, abs=AGREE)

    async def test_more_prompts_than_a_server_takes_in_one_step_are_sampled_with_their_seeds(
        self, url: str, folders: list[Path]
    ) -> None:
        policy = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
        prompts = [[(n + 7 * place) % 256 for place in range(240)] for n in range(32)]
        async with self.opened(url, folders[0], _way("tensor", folders[0], folders[0]), "tensor") as engine:
            asked = (engine.generate(ids, Sampling(max_tokens=4, seed=n)) for n, ids in enumerate(prompts))
            for ids, completion in zip(prompts, await asyncio.gather(*asked), strict=True):
                wanted = logprobs_of(policy, [*ids, *completion.ids])[len(ids) - 1 :]
                assert (torch.tensor(completion.logprobs) - wanted).abs().max() < AGREE

    @pytest.mark.parametrize("sync", ["disk", "tensor", "broadcast", "delta"])
    async def test_weights_arrive_and_requests_in_flight_go_on_with_them(
        self, url: str, folders: list[Path], tmp_path: Path, sync: Sync
    ) -> None:
        if sync not in SERVERS[self.KIND.name]:
            with pytest.raises(ValueError, match=f"sync {sync} does not exist for {self.KIND.name}"):
                EngineConfig(kind=self.KIND.name, sync=sync)
            return
        async with self.opened(url, folders[0], _way(sync, folders[0], tmp_path), sync) as engine:
            weights = load_folder(folders[1], torch.float32)
            done = await _generated_during(engine, engine.update_weights(weights, version=1))
            assert all(list(c.versions) == sorted(c.versions) for c in done)
            assert any(set(c.versions) == {0, 1} for c in done), "no completion crossed the update"
            assert max(gap(c, {0: folders[0], 1: folders[1]}) for c in done) < AGREE
            assert await _serves(engine, weights, folders[0])
            wanted = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
            with torch.no_grad():
                likeliest = torch.log_softmax(wanted(torch.tensor([GIVEN])).logits[0, :-1], -1).topk(2)
            for one, values in zip(await engine.prompt_logprobs(GIVEN, top=2), likeliest.values, strict=True):
                assert (torch.tensor([value for _, value in one.top]) - values).abs().max() < AGREE

    async def test_changed_weights_alone_arrive(self, url: str, folders: list[Path]) -> None:
        said: list[str] = []
        sync, sent = DeltaSync(bucket_bytes=20_000, full_every=3, tell=said.append), []
        async with self.opened(url, folders[0], sync, "delta") as engine:
            weights = load_folder(folders[0], torch.float32)
            size = sum(tensor.nbytes for tensor in weights.values())
            for version in (1, 2, 3, 4, 5):
                if version < 5:  # the last one changes nothing
                    _change(weights, version)
                await engine.update_weights(weights, version=version)
                sent.append(sync.bytes_sent)
                assert await _serves(engine, weights, folders[0])
        assert sent[2] == size, "every third update brings all weights"
        assert max(sent[0], sent[1], sent[3]) < size / 10
        assert sent[4] < size / 100
        assert said == []

    async def test_a_server_with_other_weights_than_the_trainer_believes_gets_them_again(
        self, recipe: Recipe, url: str, folders: list[Path], tmp_path: Path
    ) -> None:
        said: list[str] = []
        way = _way("delta", folders[0], tmp_path, said)
        at = recipe if self.KIND.refusal_kills else url
        async with self.opened(at, folders[0], way, "delta", said) as engine:
            weights = load_folder(folders[0], torch.float32)
            await engine.update_weights(weights, version=1)
            (replica,) = engine._pool.replicas
            assert replica.server is not None
            stranger: Any = self.KIND.connect(replica.server.url, "delta")
            stranger._labels = replica.server._labels  # type: ignore[attr-defined] # so that hashes alone find out
            async with stranger.updating(by_tensor=True):
                await stranger.load_tensors(load_folder(folders[1], torch.float32), 1)
            await stranger.close()
            said.clear()
            for version in (2, 3):
                _change(weights, version)
                await engine.update_weights(weights, version=version)
                assert await _serves(engine, weights, folders[0])
            assert said, "nobody noticed"
            assert set((await engine.generate(PROMPT, Sampling(max_tokens=5))).versions) == {3}

    async def test_experts_arrive(self, folders: list[Path], tmp_path: Path) -> None:
        model = tmp_path / "experts"
        shutil.copytree(folders[0], model)
        shape = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        moe = Qwen3MoeConfig(vocab_size=320, num_hidden_layers=2, max_position_embeddings=256, **shape, **experts)
        policy = AutoModelForCausalLM.from_config(moe, dtype=torch.float32).eval()
        policy.save_pretrained(model)
        config = EngineConfig(kind=self.KIND.name, device="cpu", max_slots=32, server=self.KIND.server)
        engine = await open_engine(config, model)
        assert isinstance(engine, ServedEngine)
        async with _closing(engine):
            for version in (1, 2):
                weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
                _change(weights, version)
                policy.load_state_dict(weights)
                await engine.update_weights(weights, version=version)
                (found,) = (await engine.logprobs_by_server([GIVEN])).values()
                assert (torch.tensor(found[0]) - logprobs_of(policy, GIVEN)).abs().max() < AGREE

    async def test_a_checkpoint_is_served(self, tmp_path: Path) -> None:
        shape = {"hidden": self.KIND.hidden, "layers": 2, "vocab": 320, "max_context": 512}
        run = calculator(steps=1, model={"tiny": shape}, engine={"device": "cpu"}, eval={"tasks": 1})
        await asyncio.to_thread(train, run, tmp_path)
        saved = tmp_path / "checkpoints" / "step-1"
        assert (saved / "optimizer.safetensors").is_file()
        config = EngineConfig(kind=self.KIND.name, device="cpu", max_slots=32, server=self.KIND.server)
        engine = await open_engine(config, saved)
        assert isinstance(engine, ServedEngine)
        async with _closing(engine):
            (found,) = (await engine.logprobs_by_server([GIVEN])).values()
        policy = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
        assert (torch.tensor(found[0]) - logprobs_of(policy, GIVEN)).abs().max() < AGREE

    async def test_an_adapter_alone_says_the_same_as_merged_weights(
        self, folders: list[Path], tmp_path: Path
    ) -> None:
        lora = LoRAConfig(rank=4, alpha=4, targets=["q_proj", "v_proj", "down_proj"])
        adapter = random_adapter(folders[0], lora, tmp_path / "merged")
        config = EngineConfig(
            kind=self.KIND.name, device="cpu", max_slots=32, sync="lora", server=self.KIND.server
        )
        engine = await open_engine(config, folders[0], lora)
        assert isinstance(engine, ServedEngine)
        async with _closing(engine):
            done = await _generated_during(engine, engine.update_weights(adapter, version=1))
            done.append(await engine.generate(PROMPT, Sampling(max_tokens=12)))
            assert all(list(c.versions) == sorted(c.versions) for c in done)
            assert any(set(c.versions) == {0, 1} for c in done), "no completion crossed the update"
            assert set(done[-1].versions) == {1}
            assert max(gap(c, {0: folders[0], 1: tmp_path / "merged"}) for c in done) < AGREE
            assert max(gap(c, {1: folders[0]}) for c in done) > 100 * AGREE, "the adapter changes nothing"

    async def test_a_seed_draws_the_same_tokens_again_or_is_said_to_be_ignored(
        self, url: str, folders: list[Path], tmp_path: Path
    ) -> None:
        said: list[str] = []
        async with self.opened(url, folders[0], _way("disk", folders[0], tmp_path), "disk", said) as engine:
            (replica,) = engine._pool.replicas
            assert replica.server is not None
            if not (await replica.server.describe()).seeds:
                assert ["ignore seeds" in text for text in said] == [True]
                return
            first, second = [await engine.generate(PROMPT, Sampling(max_tokens=20, seed=7)) for _ in range(2)]
            other = await engine.generate(PROMPT, Sampling(max_tokens=20, seed=8))
            assert first.ids == second.ids
            assert first.ids != other.ids

    async def _in_flight(
        self, engine: ServedEngine, url: str, told: list[TokenLogprob]
    ) -> list[asyncio.Task[Completion]]:
        """A streamed request and another, both with the server; others if they end before that is seen."""
        while True:
            told.clear()
            requests: list[Coroutine[Any, Any, Completion]] = [
                engine.generate_streaming(PROMPT, Sampling(max_tokens=240), GenerateOptions(told.append)),
                engine.generate(PROMPT, Sampling(max_tokens=240)),
            ]
            tasks = [asyncio.create_task(request) for request in requests]
            while not any(task.done() for task in tasks):
                running = await asyncio.to_thread(self.KIND.running, url)
                if running == 2 and 0 < len(told) < 240 and not any(task.done() for task in tasks):
                    return tasks
            await asyncio.gather(*tasks)

    async def test_stop_ids_limits_and_cancellation(self, url: str, folders: list[Path], tmp_path: Path) -> None:
        async with self.opened(url, folders[0], _way("tensor", folders[0], tmp_path), "tensor") as engine:
            greedy = await engine.generate(PROMPT, Sampling(temperature=0.0, max_tokens=20))
            assert (len(greedy.ids), greedy.finish) == (20, "length")
            stop = greedy.ids[6]
            again = await engine.generate(
                PROMPT, Sampling(temperature=0.0, max_tokens=20, stop_ids=frozenset([stop]))
            )
            assert again.ids == greedy.ids[: greedy.ids.index(stop) + 1]
            assert again.finish == "stop"
            long = await engine.generate([7] * (engine.max_context - 3), Sampling(max_tokens=50))
            assert (len(long.ids), long.finish) == (3, "length")
            assert len((await engine.generate([7] * (engine.max_context - 1), Sampling(max_tokens=50))).ids) == 1
            told: list[TokenLogprob] = []
            lost = await self._in_flight(engine, url, told)
            for task in lost:
                task.cancel()
            for task in lost:
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert len(told) < 240
            while await asyncio.to_thread(self.KIND.running, url):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await engine.update_weights(load_folder(folders[0], torch.float32), version=1)
            assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).versions == (1, 1, 1)
