"""vLLM's dialect, against a loopback server that speaks its endpoints; the real one: tests/trainer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.config.engine import EngineConfig, ServerConfig, Sync
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.open import open_engine
from agentrl.engine.servers import vllm
from agentrl.engine.servers.client import Listener
from agentrl.engine.servers.http import ServerLost
from agentrl.engine.servers.opening import launch_recipe
from agentrl.engine.servers.server_engine import ServedEngine
from agentrl.engine.servers.streams import VLLMStream
from agentrl.errors import ConfigError, EngineError
from agentrl.testing.sglang_server import LoopbackVLLM
from agentrl.types import Sampling
from tests.engine.test_served import until

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 97}))
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    return folder


def expected(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append((sum(ids) + len(ids)) % 97)
    return ids[len(prompt) :]


@asynccontextmanager
async def opened(model: Path, server: LoopbackVLLM, **options: Any) -> AsyncIterator[ServedEngine]:
    config = {"kind": "vllm", "device": "cpu", "server": {"urls": [server.url]}} | options
    engine = await open_engine(EngineConfig.model_validate(config), model)
    assert isinstance(engine, ServedEngine)
    try:
        yield engine
    finally:
        await engine.close()


async def test_tokens_stop_ids_and_context(model: Path) -> None:
    async with LoopbackVLLM(max_context=12) as server, opened(model, server) as engine:
        completion = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert list(completion.ids) == expected(PROMPT, 4)
        assert completion.logprobs == tuple(-1.0 - token / 100 for token in completion.ids)
        stop = expected(PROMPT, 2)[-1]
        assert (await engine.generate(PROMPT, Sampling(stop_ids=frozenset([stop])))).finish == "stop"
        assert len((await engine.generate(PROMPT, Sampling(max_tokens=99))).ids) == 9
        assert await engine.logprobs_by_server([[1, 2, 3]]) == {server.url: [[-1.02, -1.03]]}
        first, second = await engine.prompt_logprobs([1, 2, 3], top=2)
        assert (first.id, first.logprob, first.top) == (2, -1.02, ((3, -0.1), (4, -0.2)))
        assert (second.id, second.logprob, second.top) == (3, -1.03, ((4, -0.1), (5, -0.2)))


async def test_no_penalty_of_the_models_own_changes_what_is_sampled(model: Path) -> None:
    """A server in `urls` may take its defaults from the model's generation_config.json."""
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        await engine.generate(PROMPT, Sampling(max_tokens=2, top_k=7, min_p=0.1))
        (asked,) = server.sampled_with
    assert asked.items() >= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}.items()
    assert (asked["top_k"], asked["top_p"], asked["min_p"]) == (7, 1.0, 0.1)


async def test_a_completion_crosses_an_update_in_two_parts_with_their_own_versions(model: Path) -> None:
    async with LoopbackVLLM(token_s=0.01) as server, opened(model, server) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20)))
        while not server.running or len(next(iter(server.running.values())).ids) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await engine.update_weights({"a": torch.ones(2)}, version=5)
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 20)
        assert set(completion.versions) == {0, 5}
        assert list(completion.versions) == sorted(completion.versions)
        assert server.log.count("/pause?mode=abort&clear_cache=true") == len(server.weights) == 2
        path, body = server.weights[-1]
        assert path == "/collective_rpc"
        assert body["method"] == "reload_weights"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_that_arrives_after_the_pause_has_the_new_version(model: Path, streamed: bool) -> None:
    """It is sampled with the new weights, though it was sent before the update."""
    async with LoopbackVLLM(token_s=0.01) as server, opened(model, server) as engine:
        told: list[TokenLogprob] = []
        early = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=100)))
        while not server.running or not next(iter(server.running.values())).ids:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        server.late_s = 0.3
        options = GenerateOptions(told.append) if streamed else None
        ask = engine.generate if options is None else partial(engine.generate_streaming, options=options)
        late = asyncio.create_task(ask(PROMPT, Sampling(max_tokens=20)))
        while len(server.prompts) < 2:  # noqa: ASYNC110 - received, and not yet scheduled
            await asyncio.sleep(0.005)
        await engine.update_weights({"a": torch.ones(2)}, version=5)
        completion = await late
        assert set(completion.versions) == {5}
        assert list(completion.ids) == expected(PROMPT, 20)
        if streamed:
            assert [(one.id, one.version) for one in told] == [(token, 5) for token in completion.ids]
        assert set((await early).versions) == {0, 5}


class SlowVLLM(LoopbackVLLM):
    """Goes on long after it was asked to."""

    async def _post_resume(self, body: dict[str, object]) -> tuple[int, object]:
        await asyncio.sleep(0.5)
        return await super()._post_resume(body)


async def test_scores_during_an_update_have_the_version_of_their_weights(model: Path) -> None:
    """One server has the new weights before the other."""
    async with LoopbackVLLM() as quick, SlowVLLM() as slow:
        config = EngineConfig.model_validate(
            {"kind": "vllm", "device": "cpu", "server": {"urls": [quick.url, slow.url]}}
        )
        engine = await open_engine(config, model)
        try:
            update = asyncio.create_task(engine.update_weights({"a": torch.ones(2)}, version=5))
            while "/resume" not in quick.log:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert not update.done()
            rows = await asyncio.gather(*(engine.prompt_logprobs([1, 2, 3]) for _ in range(4)))
            assert {one.version for row in rows for one in row} == {5}
            await update
        finally:
            await engine.close()


@pytest.mark.parametrize(
    ("sync", "calls"),
    [
        ("tensor", ["take", "load"] * 2),
        ("delta", ["take", *["change", "load"] * 4]),
    ],
)
async def test_weights_in_requests_are_collected_and_loaded_once(model: Path, sync: str, calls: list[str]) -> None:
    async with LoopbackVLLM() as server:
        server.extended = True
        async with opened(model, server, sync=sync, dtype="bfloat16") as engine:
            for version in (1, 2, 2):
                await engine.update_weights({"a": torch.tensor([0.0, version])}, version=version)
            assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (2, 2)
        bodies = [body for _, body in server.weights]
        assert [str(body["method"]).removeprefix("agentrl_") for body in bodies[: len(calls)]] == calls
        keep = {body["kwargs"]["keep"] for body in bodies if body["method"] == "agentrl_load"}
        assert keep == {"yes" if sync == "delta" else "no"}


async def test_a_server_without_the_calls_for_tensors_is_refused(model: Path) -> None:
    async with LoopbackVLLM() as server:
        with pytest.raises(EngineError, match=r"not started for engine.sync tensor.*--worker-extension-cls"):
            async with opened(model, server, sync="tensor"):
                pass


async def test_a_folder_is_read_by_our_call_where_there_is_one(model: Path) -> None:
    async with LoopbackVLLM() as server:
        server.extended = True
        async with opened(model, server) as engine:
            await engine.update_weights({"a": torch.ones(2)}, version=1)
        assert server.weights[-1][1]["method"] == "agentrl_load_folder"


async def test_it_sleeps_and_wakes_with_new_weights(model: Path) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        await engine.sleep()
        assert server.asleep == {"weights", "kv_cache"}
        await engine.update_weights({"a": torch.ones(2)}, version=1)
        assert server.asleep == set()
        assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": [{"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}]},
        {"choices": [{"token_ids": [1], "finish_reason": "stop", "logprobs": {"token_logprobs": [None]}}]},
        {"choices": [{"token_ids": [1], "finish_reason": "odd", "logprobs": {"token_logprobs": [-1.0]}}]},
        [],
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error(model: Path, answer: object) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        server.answer = lambda whole: answer
        with pytest.raises(EngineError):
            await engine.generate(PROMPT, Sampling(max_tokens=3))


def test_the_command_line_asks_for_what_training_needs() -> None:
    config = EngineConfig(kind="vllm", device="cpu", server=ServerConfig(sleep=True, gpu_memory_utilization=0.5))
    recipe = launch_recipe(config, Path("/m"), "/venv/bin/python", 0)
    line = " ".join(recipe.command(8000))
    for part in ("--logprobs-mode processed_logprobs", "--enable-sleep-mode", "--gpu-memory-utilization 0.5"):
        assert part in line
    assert recipe.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in recipe.environment


def test_on_a_cpu_its_attention_has_limits(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    config = EngineConfig(kind="vllm", device="cpu")
    for heads, accepted in ((4, False), (2, True)):
        (tmp_path / "config.json").write_text(json.dumps(shape | {"num_attention_heads": heads}))
        if accepted:
            recipe = launch_recipe(config, tmp_path, "python", 0)
            assert recipe.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
            assert "--no-enable-chunked-prefill" in recipe.command(1)
        else:
            with pytest.raises(ConfigError, match="heads of 16 numbers, and vLLM on a CPU supports"):
                launch_recipe(config, tmp_path, "python", 0)


async def test_an_adapter_travels_alone(model: Path) -> None:
    config = EngineConfig(kind="vllm", device="cpu", sync="lora")
    async with LoopbackVLLM(token_s=0.01) as server:
        config = config.model_copy(update={"server": ServerConfig(urls=[server.url])})
        engine = await open_engine(config, model, LoRAConfig(rank=2, alpha=4))
        assert isinstance(engine, ServedEngine)
        try:
            task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20)))
            while not server.running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            state = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 8)}
            for version in (1, 2):
                await engine.update_weights(state, version=version)
            completion = await task
            assert list(completion.ids) == expected(PROMPT, 20)
            assert completion.versions[0] == 0
            assert completion.versions[-1] == 2
            assert [name.rsplit("-", 1)[0] for name in server.adapters] == ["agentrl-2"]
            await engine.logprobs_by_server([[1, 2, 3]])
            assert server.named[-1] in server.adapters
        finally:
            await engine.close()
        assert not server.adapters


async def test_an_adapter_that_is_refused_stops_the_run_with_the_reason(model: Path) -> None:
    """vLLM answers 500 to one of layers that it cannot adapt."""
    async with LoopbackVLLM() as server:
        config = EngineConfig(kind="vllm", device="cpu", sync="lora", server=ServerConfig(urls=[server.url]))
        engine = await open_engine(config, model, LoRAConfig(rank=2))
        server.refuse["/v1/load_lora_adapter"] = (500, {"error": {"message": "expected target modules in q_proj"}})
        state = {"base_model.model.model.layers.0.mlp.gate_up_proj.lora_A.weight": torch.ones(2, 8)}
        with pytest.raises(EngineError, match=r"weights of version 1 were refused.*expected target modules"):
            await engine.update_weights(state, version=1)
        await engine.close()


@pytest.mark.filterwarnings("ignore:.*is lost")
@pytest.mark.filterwarnings("ignore:.*answers again")
async def test_an_adapter_that_a_dying_server_does_not_take_is_sent_again(model: Path) -> None:
    """It answers 500 for this reason as well."""
    async with LoopbackVLLM() as server:
        config = EngineConfig(kind="vllm", device="cpu", sync="lora", server=ServerConfig(urls=[server.url]))
        engine = await open_engine(config, model, LoRAConfig(rank=2))
        server.refuse["/v1/load_lora_adapter"] = (500, {"error": {"message": "EngineCore died"}})
        server.sick = True
        state = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 8)}
        update = asyncio.create_task(engine.update_weights(state, version=1))
        await until(lambda: server.log.count("/health") > 2 or update.done())
        server.refuse.clear()
        server.sick = False
        await update
        assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).versions == (1, 1, 1)
        await engine.close()


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/resume"])
async def test_an_update_that_was_not_done_is_not_believed(model: Path, path: str) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        server.refuse[path] = (200, {"error": {"message": "boom"}})
        with pytest.raises(EngineError, match="boom"):
            await engine.update_weights({"a": torch.ones(2)}, version=1)
        assert engine.policy_version == 0


async def test_a_server_stays_paused_after_an_update_that_failed_half_way() -> None:
    async with LoopbackVLLM() as server:
        client = vllm.VLLMServer(server.url)
        with pytest.raises(EngineError, match="half"):
            async with client.updating(by_tensor=True):
                raise EngineError("half of the weights")
        assert "/resume" not in server.log
        await client.close()


@pytest.mark.parametrize("score", [float("nan"), None])
async def test_scores_that_are_no_numbers_are_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, score: object
) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as engine:

        async def odd(body: dict[str, Any]) -> tuple[int, object]:
            table = [None, *({str(token): {"logprob": score}} for token in body["prompt"][1:])]
            return 200, {"choices": [{"prompt_logprobs": table}]}

        monkeypatch.setattr(server, "_post_completions", odd)
        with pytest.raises(EngineError, match=r"log-probabilities of (the )?given tokens"):
            await engine.prompt_logprobs([1, 2, 3])


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [([-1.0], "2 tokens and 1 log-probabilities"), ([-1.0, float("nan")], "a log-probability is not finite")],
)
async def test_every_token_has_a_finite_log_probability(model: Path, logprobs: list[float], problem: str) -> None:
    choice = {"token_ids": [1, 2], "finish_reason": "length", "logprobs": {"token_logprobs": logprobs}}
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        server.answer = lambda whole: {"choices": [choice]}
        with pytest.raises(EngineError, match=problem):
            await engine.generate(PROMPT, Sampling(max_tokens=2))


def test_a_stream_without_an_end_is_asked_for_again() -> None:
    stream = VLLMStream("here", 0, Listener(lambda drawn: None))
    stream.take({"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": None}]})
    with pytest.raises(ServerLost, match="without an end"):
        stream.whole()


async def test_a_score_that_an_update_ends_is_asked_for_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        answer, ended = server._post_completions, [{"finish_reason": "abort", "prompt_logprobs": None}]

        async def abort_once(body: dict[str, Any]) -> tuple[int, object]:
            return (200, {"choices": [ended.pop()]}) if ended else await answer(body)

        monkeypatch.setattr(server, "_post_completions", abort_once)
        assert [one.logprob for one in await engine.prompt_logprobs([1, 2, 3])] == [-1.02, -1.03]
        assert server.log.count("/v1/completions") == 2


@pytest.mark.filterwarnings("ignore:.*started again, without the weights")
@pytest.mark.filterwarnings("ignore:.*answers again")
@pytest.mark.parametrize("sync", ["disk", "lora"])
async def test_a_server_that_was_restarted_in_a_silence_gets_the_weights_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, sync: Sync
) -> None:
    """It answers at once, with the weights that it started with."""
    monkeypatch.setattr(vllm, "_SURE_S", 0.0)
    async with LoopbackVLLM() as server:
        config = EngineConfig(kind="vllm", device="cpu", sync=sync, server=ServerConfig(urls=[server.url]))
        engine = await open_engine(config, model, LoRAConfig(rank=2) if sync == "lora" else None)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" if sync == "lora" else "a"
        for version in (1, 2):
            await engine.update_weights({name: torch.ones(2, 8)}, version=version)
            await server.restart()
            server.weights.clear()
            completion = await engine.generate(PROMPT, Sampling(max_tokens=3))
            assert completion.versions == (version,) * 3
            assert len(server.weights) == 1, "sampled with other weights"
            await server.restart()
        server.weights.clear()
        assert {one.version for one in await engine.prompt_logprobs(PROMPT)} == {2}
        assert len(server.weights) == 1
        await engine.close()


@pytest.mark.parametrize("act", ["generate", "score", "check", "update"])
async def test_a_run_ends_where_another_one_has_sent_its_weights(model: Path, act: str) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as first, opened(model, server) as second:
        sampling, taken = Sampling(max_tokens=4), len(server.weights)
        acts: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "generate": lambda: first.generate(PROMPT, sampling),
            "score": lambda: first.prompt_logprobs(PROMPT),
            "check": lambda: first.logprobs_by_server([PROMPT]),
            "update": lambda: first.update_weights({"a": torch.ones(2)}, 1),
        }
        for each in (act, *acts):
            with pytest.raises(EngineError, match="another run has sent its weights to this server"):
                await acts[each]()
        assert len(server.weights) == taken
        assert (await second.generate(PROMPT, sampling)).versions == (0,) * 4


async def test_adapters_are_not_put_on_the_weights_of_another_run(model: Path) -> None:
    async with LoopbackVLLM() as server:
        async with opened(model, server):
            pass  # as `agentrl eval`, which has ended
        given: dict[str, Any] = {"kind": "vllm", "device": "cpu", "sync": "lora", "server": {"urls": [server.url]}}
        engine = await open_engine(EngineConfig.model_validate(given), model, LoRAConfig(rank=2))
        with pytest.raises(EngineError, match="also restart this one"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        await engine.close()


async def test_a_completion_that_another_run_cuts_is_not_continued_with_its_weights(model: Path) -> None:
    async with LoopbackVLLM(token_s=0.01) as server, opened(model, server) as first:
        sampling = asyncio.create_task(first.generate(PROMPT, Sampling(max_tokens=200)))
        while not server.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        async with opened(model, server):
            with pytest.raises(EngineError, match="another run has sent its weights to this server"):
                await sampling


async def test_an_update_keeps_the_tokens_so_far_though_vllm_answers_nothing_while_it_loads(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LoopbackVLLM(token_s=0.01, max_context=3000) as server, opened(model, server) as engine:
        [replica] = engine._pool.ready
        assert isinstance(replica.server, vllm.VLLMServer)
        there, load, name = replica.server, server._post_collective_rpc, server._get_weight_info
        busy = asyncio.Lock()

        async def load_for_long(body: dict[str, object]) -> tuple[int, object]:
            async with busy:
                server.token_s = 0.0
                await until(lambda: not there._in_flight)
                return await load(body)

        async def name_between(body: dict[str, object]) -> tuple[int, object]:
            async with busy:
                return await name(body)

        monkeypatch.setattr(server, "_post_collective_rpc", load_for_long)
        monkeypatch.setattr(server, "_get_weight_info", name_between)
        sampling = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=2000))) for _ in range(3)]
        await until(lambda: len(server.running) == 3 and all(one.ids for one in server.running.values()))
        await engine.update_weights({"a": torch.ones(2)}, 1)
        for completion in await asyncio.gather(*sampling):
            assert set(completion.versions) == {0, 1}
            assert list(completion.ids) == expected(PROMPT, 2000)


async def test_answers_that_wait_share_the_next_question_for_the_weights(model: Path) -> None:
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        await engine.generate(PROMPT, Sampling(max_tokens=1))
        [replica] = engine._pool.ready
        assert isinstance(replica.server, vllm.VLLMServer)
        before = server.log.count("/weight_info")
        await asyncio.gather(*(replica.server._refuse_others() for _ in range(20)))
        assert server.log.count("/weight_info") == before + 2


async def test_a_server_that_does_not_say_when_it_started_is_used_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_SURE_S", 0.0)
    async with LoopbackVLLM() as server, opened(model, server) as engine:
        for number, answer in enumerate([(404, {"detail": "Not Found"}), (500, ""), (200, "")]):
            server.refuse["/metrics"] = answer
            await engine.update_weights({"a": torch.ones(2)}, version=number)
            assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (number, number)


def test_vllm_starts_with_room_for_two_adapters(model: Path) -> None:
    config = EngineConfig(kind="vllm", device="cpu", sync="lora")
    recipe = launch_recipe(config, model, "python", 0, LoRAConfig(rank=12))
    line = " ".join(recipe.command(1))
    assert "--enable-lora --max-lora-rank 16 --max-loras 2" in line
    assert recipe.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    with pytest.raises(ConfigError, match=r"learner\.lora\.rank is 600"):
        launch_recipe(config, model, "python", 0, LoRAConfig(rank=600))


async def test_tokens_are_told_while_they_are_drawn_with_alternatives(model: Path) -> None:
    async with LoopbackVLLM(token_s=0.01) as server, opened(model, server) as engine:
        told: list[TokenLogprob] = []
        running: list[int] = []

        def hear(drawn: TokenLogprob) -> None:
            told.append(drawn)
            running.append(len(server.running))

        completion = await engine.generate_streaming(PROMPT, Sampling(max_tokens=6), GenerateOptions(hear, top=2))
        assert list(completion.ids) == expected(PROMPT, 6)
        assert (completion.finish, completion.cached_tokens) == ("length", 2)
        assert [(one.id, one.logprob) for one in told] == list(
            zip(completion.ids, completion.logprobs, strict=True)
        )
        assert told[0].top == ((told[0].id + 1, -0.1), (told[0].id + 2, -0.2))
        assert running[0] == 1
        plain = await engine.generate(PROMPT, Sampling(max_tokens=6))
        assert plain.logprobs == completion.logprobs


async def test_a_stream_that_an_update_ends_is_gone_on_with(model: Path) -> None:
    async with LoopbackVLLM(token_s=0.02) as server, opened(model, server) as engine:
        told: list[TokenLogprob] = []
        some = asyncio.Event()

        def hear(drawn: TokenLogprob) -> None:
            told.append(drawn)
            if len(told) == 3:
                some.set()

        task = asyncio.create_task(
            engine.generate_streaming(PROMPT, Sampling(max_tokens=12), GenerateOptions(hear))
        )
        await some.wait()
        await engine.update_weights({"a": torch.ones(2)}, version=4)
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 12) == [one.id for one in told]
        assert set(completion.versions) == {0, 4}
        assert [one.version for one in told] == list(completion.versions)
