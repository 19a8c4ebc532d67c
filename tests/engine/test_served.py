"""The engine over servers, against real HTTP servers on the loopback that misbehave on demand."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import pickle
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.servers.adapters import Adapter, AdapterStand
from agentrl.engine.servers.client import Listener
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.http import ServerLost
from agentrl.engine.servers.launch.hosts import GivenHost
from agentrl.engine.servers.replica_pool import ServedLimits
from agentrl.engine.servers.reported_routes import RouteLayout
from agentrl.engine.servers.server_engine import ServedEngine, load_folder
from agentrl.engine.servers.sglang import SGLangServer
from agentrl.engine.servers.streams import SGLangStream
from agentrl.engine.servers.weight_sync import (
    AdapterSync,
    DiskSync,
    TensorSync,
    WeightSync,
    buckets,
    distinct,
    push_to_each,
)
from agentrl.errors import EngineError
from agentrl.models.stored import as_saved, exact_tensors
from agentrl.testing.sglang_server import LoopbackServer
from agentrl.trainer.training_run import Run
from agentrl.types import Sampling
from bench.families import FAMILIES, config_of

PROMPT = [5, 6, 7]
VOCABULARY = 97


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a model directory must hold for an engine over servers."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(weights(0), folder / "model.safetensors")
    return folder


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 8, generator=generator) for name in ("a.weight", "b.weight", "c.weight")}


def expected(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append((sum(ids) + len(ids)) % VOCABULARY)
    return ids[len(prompt) :]


@asynccontextmanager
async def engine_over(
    model: Path,
    *servers: LoopbackServer,
    sync: WeightSync | None = None,
    said: list[str] | None = None,
    adapters: bool = False,
    dtype: torch.dtype = torch.float32,
    routes: RouteLayout | None = None,
    **limits: Any,
) -> AsyncIterator[ServedEngine]:
    """An engine over started servers; warnings of losses go to `said`."""
    said = [] if said is None else said

    def connect(url: str) -> SGLangServer:
        return SGLangServer(url, timeout_s=20.0, adapters=adapters)

    engine = ServedEngine(
        [GivenHost(s.url, connect, start_timeout_s=20.0) for s in servers],
        sync or TensorSync(bucket_bytes=1 << 20),
        model=model,
        dtype=dtype,
        given=not adapters,
        routes=routes,
        limits=ServedLimits(**{"health_every_s": 0.1, "health_timeout_s": 2.0, **limits}),
        tell=said.append,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def servers(count: int, **options: Any) -> AsyncIterator[list[LoopbackServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(LoopbackServer(**options)) for _ in range(count)]


async def sent_again(engine: ServedEngine, server: LoopbackServer, said: list[str]) -> dict[str, torch.Tensor]:
    """What a server gets that dies and comes back, in its first request with weights of version 1."""
    await server.die()
    await until(lambda: said)
    server.weights.clear()
    await server.start()
    assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (1, 1)
    _, body = server.weights[0]
    return dict(pickle.loads(base64.b64decode(str(cast("Any", body)["serialized_named_tensors"][0]))))


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens on the other side."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_no_server_did_is_raised_and_what_a_server_did_is_returned() -> None:
    async def work(server: object) -> None:
        if server in failing:
            raise failing[server]

    async def own(error: Exception | None) -> None:
        if error is not None:
            raise error

    one, two = cast("Any", "one"), cast("Any", "two")
    lost, mistake = EngineError("lost"), KeyError("mistake")
    failing: dict[object, Exception] = {}
    assert await push_to_each([one, two], work) == await push_to_each([one, two], work, own(None)) == {}
    assert await push_to_each([one, two], work, own(lost)) == {one: lost, two: lost}
    failing[two] = EngineError("refused")
    assert await push_to_each([one, two], work, own(lost)) == {two: failing[two]}
    for alongside in (mistake, None):
        failing[one] = mistake if alongside is None else EngineError("lost, too")
        with pytest.raises(KeyError, match="mistake"):
            await push_to_each([one, two], work, own(alongside))


async def test_tokens_logprobs_and_versions_come_as_drawn(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        completion = await engine.generate(PROMPT, Sampling(max_tokens=6))
        assert list(completion.ids) == expected(PROMPT, 6)
        assert completion.logprobs == tuple(-1.0 - token / 100 for token in completion.ids)
        assert completion.versions == (0,) * 6
        assert completion.finish == "length"
        stop = expected(PROMPT, 3)[-1]
        completion = await engine.generate(PROMPT, Sampling(max_tokens=6, stop_ids=frozenset([stop])))
        assert completion.ids[-1] == stop
        assert completion.finish == "stop"


async def test_no_penalty_of_the_servers_own_changes_what_is_sampled(model: Path) -> None:
    """Servers may take their defaults from the model's generation_config.json."""
    async with servers(1) as (server,), engine_over(model, server) as engine:
        await engine.generate(PROMPT, Sampling(max_tokens=2, top_k=7, min_p=0.1))
        (asked,) = server.sampled_with
        await engine.generate(PROMPT, Sampling(max_tokens=2))
        assert server.sampled_with[1]["top_k"] == -1, "SGLang refuses 0"
        assert (asked["no_stop_trim"], asked["skip_special_tokens"]) == (True, False), "every token is returned"
    assert asked.items() >= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}.items()
    assert (asked["top_k"], asked["top_p"], asked["min_p"]) == (7, 1.0, 0.1)


async def test_a_completion_ends_with_the_context(model: Path) -> None:
    async with servers(1, max_context=10) as (server,), engine_over(model, server) as engine:
        longest = await engine.generate([1] * (engine.max_context - 1), Sampling(max_tokens=50))
        assert len(longest.ids) == 1
        completion = await engine.generate(PROMPT, Sampling(max_tokens=50))
        assert len(PROMPT) + len(completion.ids) == engine.max_context
        assert completion.finish == "length"


@pytest.mark.parametrize("ids", [[], [1] * 256, [VOCABULARY], [-1]])
async def test_ids_that_would_hurt_the_server_never_reach_it(model: Path, ids: list[int]) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        with pytest.raises(ValueError, match=r"ids is empty|no room|outside the model's vocabulary"):
            await engine.generate(ids, Sampling())
        assert server.prompts == []


async def test_the_rest_of_a_completion_that_the_server_gave_up_is_asked_for(model: Path) -> None:
    """An end that we did not ask for (another stop token, an abort of the server's) is gone on from."""
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=12)))
        await until(lambda: server.running and len(next(iter(server.running.values())).ids) >= 3)
        next(iter(server.running.values())).aborted = True
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 12)
        assert server.prompts[1] == PROMPT + expected(PROMPT, len(server.prompts[1]) - len(PROMPT))


async def test_sessions_stick_and_load_is_spread(model: Path) -> None:
    async with servers(2, token_s=0.002) as (a, b), engine_over(model, a, b) as engine:
        for turn in range(3):
            await asyncio.gather(
                *(
                    engine.generate([session, turn], Sampling(max_tokens=4), session=f"s{session}")
                    for session in range(8)
                )
            )
        homes = [{ids[0] for ids in server.prompts} for server in (a, b)]
        assert homes[0] | homes[1] == set(range(8))
        assert not homes[0] & homes[1], "a session moved although its server was free"
        assert len(homes[0]) == len(homes[1]) == 4


async def test_no_server_gets_more_than_its_capacity(model: Path) -> None:
    async with servers(2, token_s=0.002) as (a, b), engine_over(model, a, b, capacity=3) as engine:
        done = await asyncio.gather(*(engine.generate([n], Sampling(max_tokens=3)) for n in range(20)))
        assert [list(c.ids) for c in done] == [expected([n], 3) for n in range(20)]
        assert (a.most_running, b.most_running) == (3, 3)


async def test_a_place_that_its_caller_no_longer_wants_is_given_to_the_next(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(1, token_s=0.002) as (server,), engine_over(model, server, capacity=1) as engine:
        serve = engine._pool._serve_waiting

        def serve_and_cancel() -> None:
            serve()
            late.cancel()  # between the grant and the moment at which it hears of it

        asked = [asyncio.create_task(engine.generate([n], Sampling(max_tokens=3))) for n in range(4)]
        _, early, late, _ = asked
        await until(lambda: len(engine._pool._waiting) == 3)
        early.cancel()
        monkeypatch.setattr(engine._pool, "_serve_waiting", serve_and_cancel)
        async with asyncio.timeout(20):
            await asyncio.wait(asked)
        assert [task.cancelled() for task in asked] == [False, True, True, False]
        assert server.prompts == [[0], [3]]
        assert engine._pool.replicas[0].running == 0


async def test_less_is_asked_of_a_server_that_runs_out_of_cache(model: Path) -> None:
    async with servers(1, token_s=0.002) as (server,), engine_over(model, server, capacity=8) as engine:
        replica = engine._pool.replicas[0]
        server.retract = 8
        await asyncio.gather(*(engine.generate([n], Sampling(max_tokens=3)) for n in range(8)))
        shrunk = replica.limit
        assert shrunk < 8
        for _ in range(12):
            await asyncio.gather(*(engine.generate([n], Sampling(max_tokens=2)) for n in range(8)))
        assert replica.limit == 8, "memory is there again"


async def test_a_dead_server_costs_a_delay_and_nothing_else(model: Path) -> None:
    said: list[str] = []
    async with servers(2, token_s=0.01) as (a, b), engine_over(model, a, b, said=said) as engine:
        tasks = [
            asyncio.create_task(engine.generate([n], Sampling(max_tokens=10), session=str(n))) for n in range(6)
        ]
        await until(lambda: len(a.running) == 3)
        await a.die()
        done = await asyncio.gather(*tasks)
        assert [list(c.ids) for c in done] == [expected([n], 10) for n in range(6)]
        assert any("is lost" in text for text in said)
        assert engine.outage_s < 20


async def test_the_only_server_comes_back_with_the_current_weights(model: Path) -> None:
    said: list[str] = []
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server, said=said, restarts=50) as engine:
        await engine.update_weights(weights(1), version=7)
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=10)))
        await until(lambda: server.running)
        await server.die()
        await until(lambda: said)
        outage = engine.outage_s
        await server.start()
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 10)
        assert completion.versions == (7,) * 10, "it was given the weights of version 7 again"
        assert engine.outage_s > outage
        assert "answers again" in said[-1]


async def test_a_server_that_hangs_is_given_up(model: Path) -> None:
    async with servers(2, token_s=0.005) as (a, b), engine_over(model, a, b) as engine:
        a.token_s, a.sick = 3600, True
        done = await asyncio.gather(*(engine.generate([n], Sampling(max_tokens=4)) for n in range(4)))
        assert [list(c.ids) for c in done] == [expected([n], 4) for n in range(4)]
        assert len(b.prompts) == 4


async def test_when_no_server_is_left_callers_are_told(model: Path) -> None:
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server, restarts=0) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=50)))
        await until(lambda: server.running)
        await server.die()
        with pytest.raises(EngineError, match="no server is left"):
            await task
        with pytest.raises(EngineError, match="no server is left"):
            await engine.generate(PROMPT, Sampling())


async def test_a_server_that_is_given_up_is_named_while_others_go_on(model: Path) -> None:
    said: list[str] = []
    async with servers(2) as (a, b), engine_over(model, a, b, said=said, restarts=2) as engine:
        b.refuse["/update_weights_from_tensor"] = (500, "out of memory")
        await engine.update_weights(weights(1), 1)
        await until(lambda: len(said) > 1)
        assert said[1].startswith(f"going on without {b.url}, which could not be started again: ")
        assert said[1].endswith("out of memory")
        assert (await engine.generate(PROMPT, Sampling(max_tokens=4))).versions == (1,) * 4


async def test_a_server_in_its_last_restart_is_still_waited_for_when_another_is_given_up(model: Path) -> None:
    said: list[str] = []
    async with servers(2) as (a, b), engine_over(model, a, b, said=said, restarts=1) as engine:
        await a.die()
        b.refuse["/update_weights_from_tensor"] = (500, "out of memory")
        update = asyncio.create_task(engine.update_weights(weights(1), 1))
        await until(lambda: any(text.startswith(f"going on without {b.url}") for text in said))
        await a.start()
        await update
        assert (await engine.generate(PROMPT, Sampling(max_tokens=4))).versions == (1,) * 4


async def test_a_cancelled_call_is_aborted_on_the_server(model: Path) -> None:
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server, capacity=1) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200)))
        await until(lambda: server.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not server.running)
        assert "/abort_request" in server.log
        completion = await engine.generate(PROMPT, Sampling(max_tokens=3))
        assert list(completion.ids) == expected(PROMPT, 3), "its place is free again"


def _with(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def answer(whole: dict[str, Any]) -> Any:
        copy = json.loads(json.dumps(whole))
        return change(copy) or copy

    return answer


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: ["no", "object"], "not a completion"),
        (lambda a: a.pop("output_ids") and a, "not a completion"),
        (lambda a: a["meta_info"]["output_token_logprobs"].pop() and a, "not the same"),
        (lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(1, 96), "not the same"),
        (lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, None), "not a completion"),
        (lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, math.nan), "not finite"),
        (lambda a: a["meta_info"]["weight_versions"][0].update(end=1), "versions of 1 tokens for 3"),
        (lambda a: a["meta_info"]["weight_versions"][0].update(start="soon"), "cannot be read"),
        (lambda a: a["meta_info"]["weight_versions"][0].update(start=1, end=4), "does not follow token 0"),
        (
            lambda a: a["meta_info"]["weight_versions"].append(
                {**a["meta_info"]["weight_versions"][0], "start": 3, "end": 1}
            ),
            "does not follow token 3",
        ),
        (lambda a: a["meta_info"]["finish_reason"].update(type="confused"), "finish reason"),
        (lambda a: "hello", "not a completion"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error(model: Path, change: Any, match: str) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.answer = _with(change)
        with pytest.raises(EngineError, match=match):
            await engine.generate(PROMPT, Sampling(max_tokens=3))
        server.answer = None
        await engine.generate(PROMPT, Sampling(max_tokens=3))


async def test_a_cancelled_call_whose_server_is_lost_at_once_stays_cancelled(model: Path) -> None:
    async with servers(2, token_s=0.01) as (a, b), engine_over(model, a, b) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200)))
        await until(lambda: a.running)
        engine._pool.lose(engine._pool.replicas[0], "as was asked for")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert b.prompts == []


async def test_one_failed_health_check_is_no_loss(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with servers(1) as (server,), engine_over(model, server, said=said) as engine:
        healthy, count = server._get_health, 0

        async def sick_twice(body: dict[str, object]) -> tuple[int, object]:
            nonlocal count
            count += 1
            return (503, "") if count in (1, 3) else await healthy(body)

        monkeypatch.setattr(server, "_get_health", sick_twice)
        await until(lambda: count > 4)
        assert said == []
        assert len(engine._pool.ready) == 1


async def test_an_engine_does_not_sleep_while_it_samples(model: Path) -> None:
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=10)))
        await until(lambda: server.running)
        with pytest.raises(EngineError, match="cannot sleep while completions are in flight"):
            await engine.sleep()
        assert server.asleep == set()
        assert list((await task).ids) == expected(PROMPT, 10)


async def test_an_adapter_that_a_request_still_uses_is_not_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.engine.servers.adapters.GRACE_S", 0.01)
    stand, first, second, third = AdapterStand(), *map(Adapter.of, (1, 2, 3))
    assert stand.change(first) == []
    with stand.use("request") as used:
        assert used is first
        assert stand.change(second) == ["request"]
        assert await stand.unused() == []
        assert stand.change(third) == ["request"]
        assert await stand.unused() == [second.name]
        assert stand.names() == [first.name, third.name]
    assert await stand.unused() == [first.name]
    assert stand.names() == [third.name]


async def test_a_server_stays_paused_after_an_update_that_failed_half_way() -> None:
    """It would sample with weights of two versions."""
    async with servers(1, token_s=0.01) as (server,):
        server.version = "0"
        client = SGLangServer(server.url)
        drawing = asyncio.create_task(client.generate(PROMPT, Sampling(max_tokens=20), request="r"))
        await until(lambda: server.running)
        with pytest.raises(EngineError, match="half"):
            async with client.updating(by_tensor=True):
                raise EngineError("half of the weights")
        assert not {"/flush_cache", "/continue_generation"} & set(server.log)
        assert not server.session
        await client.unpause()
        assert (await drawing).retractions == 1, "what was computed with the old weights was dropped"
        await client.close()


async def test_a_server_without_sessions_takes_tensors_all_the_same(model: Path) -> None:
    """As SGLang before 0.5.21."""
    async with servers(1) as (server,):
        server.refuse["/begin_weight_update"] = (404, {"detail": "Not Found"})
        async with engine_over(model, server) as engine:
            await engine.update_weights(weights(1), version=2)
            assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (2, 2)
        assert "/end_weight_update" not in server.log


async def test_one_server_that_refuses_the_weights_does_not_stop_the_others(model: Path) -> None:
    said: list[str] = []
    async with servers(2) as (a, b), engine_over(model, a, b, said=said, restarts=1) as engine:
        a.refuse["/update_weights_from_tensor"] = (400, {"success": False, "message": "wrong shape"})
        await engine.update_weights(weights(1), version=1)
        assert "wrong shape" in said[0]
        assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (1, 1)
        assert b.prompts == [PROMPT]


async def test_a_server_that_comes_back_while_the_engine_sleeps_is_awake(model: Path) -> None:
    said: list[str] = []
    async with servers(1) as (server,), engine_over(model, server, said=said, restarts=50) as engine:
        await engine.sleep()
        await server.die()
        engine._pool.lose(engine._pool.replicas[0], "as was asked for")
        await server.start()
        assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (0, 0)


@pytest.mark.parametrize("score", [math.nan, math.inf, "soon"])
async def test_scores_that_are_no_numbers_are_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch, score: Any
) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        answer = server._post_generate

        async def odd(body: dict[str, Any]) -> tuple[int, Any]:
            status, found = await answer(body)
            found["meta_info"]["input_token_logprobs"][1][0] = score
            return status, found

        monkeypatch.setattr(server, "_post_generate", odd)
        with pytest.raises(EngineError, match=r"log-probabilities of (the )?given tokens"):
            await engine.prompt_logprobs(PROMPT)


async def test_a_refused_request_is_not_repeated(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.refuse["/generate"] = (400, {"error": "unknown field"})
        with pytest.raises(EngineError, match="unknown field"):
            await engine.generate(PROMPT, Sampling(max_tokens=3))
        assert server.log.count("/generate") == 1


async def test_a_request_that_breaks_every_server_ends(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.refuse["/generate"] = (500, {"error": "out of luck"})
        with pytest.raises(EngineError, match="lost 6 times"):
            await engine.generate(PROMPT, Sampling(max_tokens=3))


async def test_new_weights_reach_requests_in_flight_in_the_safe_order(model: Path) -> None:
    async with servers(1, token_s=0.01) as (server,), engine_over(model, server) as engine:
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20)))
        await until(lambda: server.running and len(next(iter(server.running.values())).ids) > 4)
        server.log.clear()
        await engine.update_weights(weights(1), version=3)
        assert [path for path in server.log if path != "/health"] == [
            "/model_info",
            "/pause_generation",
            "/begin_weight_update",
            "/update_weights_from_tensor",
            "/end_weight_update",
            "/flush_cache",
            "/continue_generation",
        ]
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 20)
        assert set(completion.versions) == {0, 3}
        assert list(completion.versions) == sorted(completion.versions)
        assert engine.policy_version == 3
        assert engine._pool.replicas[0].limit == 256, "being retracted for new weights is no lack of memory"


async def test_tensors_travel_in_buckets_and_arrive_as_they_are(model: Path) -> None:
    sync = TensorSync(bucket_bytes=2 * 4 * 8 * 4)
    async with servers(1) as (server,), engine_over(model, server, sync=sync) as engine:
        server.weights.clear()
        sent = weights(1)
        await engine.update_weights(sent | {"tied.weight": sent["a.weight"]}, version=1)
        assert len(server.weights) == 2
        found: dict[str, torch.Tensor] = {}
        for _, body in server.weights:
            found |= dict(pickle.load(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0]))))
        assert found.keys() == sent.keys(), "a tied parameter travels once"
        assert all(torch.equal(found[name], sent[name]) for name in sent)


def deepseek(folder: Path) -> DeepseekV3ForCausalLM:
    """A tiny model whose router has biases that are no parameters, saved in a folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    sizes |= {"v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": None, "first_k_dense_replace": 0}
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=VOCABULARY, **sizes, **routing))
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.copy_(5 + 0.02 * torch.randn(buffer.shape))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


async def test_the_biases_of_a_router_travel_exactly(tmp_path: Path) -> None:
    policy = deepseek(tmp_path / "model")
    sent = dict(policy.state_dict())
    biases = {name for name in sent if "e_score" in name}
    assert exact_tensors(tmp_path / "model") == biases
    assert len(biases) == 2
    way = DiskSync(tmp_path / "model", tmp_path / "out")
    async with (
        servers(1) as (server,),
        engine_over(tmp_path / "model", server, sync=way, dtype=torch.bfloat16) as engine,
    ):
        for version in (0, 1):  # of the folder, and of an update
            if version:
                await engine.update_weights(sent, version=version)
            written = Path(server.weights[-1][1]["model_path"])
            modes = {file.stat().st_mode for file in written.iterdir()}
            assert len(modes) == 1  # the server may run as another user
            found = load_file(written / "model.safetensors")
            assert all(torch.equal(found[name], sent[name]) for name in biases)
            assert {t.dtype for name, t in found.items() if name not in biases} == {torch.bfloat16}


def sent_to(server: LoopbackServer) -> tuple[dict[str, torch.Tensor], set[str]]:
    """All weights that were sent, however they came, and the names of those that were sent as changes."""
    whole: dict[str, torch.Tensor] = {}
    changed = set()
    for path, body in server.weights:
        if path == "/update_weights_from_disk":
            whole = load_file(Path(body["model_path"]) / "model.safetensors")
            continue
        named = pickle.load(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0])))
        if body.get("load_format"):
            changed |= {json.loads(header)["name"] for header, _ in named}
        else:
            whole |= dict(named)
    return whole, changed


@pytest.mark.parametrize("way", ["disk", "tensor", "delta"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "hy_v3", "granitemoe"])
async def test_experts_travel_under_the_names_that_servers_load(tmp_path: Path, kind: str, way: str) -> None:
    """One by one, as in the folder of the model; SGLang skips a name that it does not know."""
    (family,) = (f for f in FAMILIES if (f.model_type, f.about) == (kind, ""))
    policy, folder = AutoModelForCausalLM.from_config(config_of(family)), tmp_path / "model"
    policy.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    wanted = load_file(folder / "model.safetensors")
    assert any("experts.0." in name for name in wanted) or kind == "granitemoe"
    ways: dict[str, WeightSync] = {
        "disk": DiskSync(folder, tmp_path / "out"),
        "tensor": TensorSync(bucket_bytes=1 << 14),
        "delta": DeltaSync(bucket_bytes=1 << 20, full_every=9),
    }
    async with servers(1) as (server,), engine_over(folder, server, sync=ways[way]) as engine:
        if way != "delta":  # which begins with all weights, those of the folder
            server.weights.clear()
        before = len(server.weights)
        await engine.update_weights(policy.state_dict(), version=1)
        found, changed = sent_to(server)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert changed == (wanted.keys() if way == "delta" else set())
        if way == "delta":
            assert all(body.get("load_format") for _, body in server.weights[before:]), "not all of them again"
        assert len({name for name in exact_tensors(folder) if name in wanted}) == (3 if kind == "hy_v3" else 0)


def test_experts_are_copied_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second copy of all of them would take much of the memory that the weights do."""
    (family,) = (f for f in FAMILIES if (f.model_type, f.about) == ("qwen3_moe", ""))
    policy = AutoModelForCausalLM.from_config(config_of(family))
    policy.config.save_pretrained(tmp_path)
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    stacks = [StorageWeakRef(t.untyped_storage()) for n, t in weights.items() if n.endswith("gate_up_proj")]
    left, copied = set(), torch.Tensor.contiguous

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        left.add(sum(not stack.expired() for stack in stacks))
        return copied(tensor)

    monkeypatch.setattr(torch.Tensor, "contiguous", seen)
    as_saved(weights, tmp_path)
    assert len(stacks) > 1
    assert left == set(range(len(stacks) + 1))


def test_names_are_found_without_a_change_of_the_default_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The default dtype is global, and other threads (the learner, the envs) create tensors at the same time."""
    deepseek(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    defaults, change = set(), torch.set_default_dtype

    def seen(dtype: torch.dtype) -> None:
        defaults.add(dtype)
        change(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", seen)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    assert defaults == {torch.bfloat16, torch.float32}
    defaults.clear()
    assert exact_tensors(tmp_path / "model")
    assert defaults <= {torch.float32}


async def test_weights_travel_through_a_folder(model: Path, tmp_path: Path) -> None:
    async with servers(2) as (a, b), engine_over(model, a, b, sync=DiskSync(model, tmp_path)) as engine:
        await engine.update_weights(weights(1), version=1)
        await engine.update_weights(weights(2), version=2)
        folder = Path(a.weights[-1][1]["model_path"])
        assert folder == Path(b.weights[-1][1]["model_path"])
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert torch.equal(load_file(folder / "model.safetensors")["b.weight"], weights(2)["b.weight"])
        assert len(list(tmp_path.iterdir())) == 1, "older ones are removed"
    assert list(tmp_path.iterdir()) == []


def adapter(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj.lora_A": (4, 8), "self_attn.q_proj.lora_B": (8, 4), "mlp.up_proj.lora_A": (4, 8)}
    return {
        f"base_model.model.model.layers.0.{name}.weight": torch.randn(*shape, generator=generator)
        for name, shape in shapes.items()
    }


async def test_an_adapter_travels_alone_and_requests_in_flight_go_on_with_it(model: Path, tmp_path: Path) -> None:
    sync = AdapterSync(model, tmp_path, alpha=8.0)
    async with (
        servers(2, token_s=0.01) as (a, b),
        engine_over(model, a, b, sync=sync, adapters=True) as engine,
    ):
        before = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20)))
        await until(lambda: a.running and len(next(iter(a.running.values())).ids) > 4)
        await engine.update_weights(adapter(1), version=3)
        crossing = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20)))
        completion = await before
        assert list(completion.ids) == expected(PROMPT, 20)
        assert set(completion.versions) == {0, 3}, "the model itself is version 0"
        assert list(completion.versions) == sorted(completion.versions)
        await until(lambda: sum(len(r.ids) for s in (a, b) for r in s.running.values()) > 4)
        await engine.update_weights(adapter(2), version=4)
        assert set((await crossing).versions) == {3, 4}
        assert "/pause_generation" not in a.log, "nothing else has to wait"
        for server in (a, b):
            ((name, folder),) = server.adapters.items()  # the one before is unloaded
            assert name.startswith("agentrl-4-")
            assert [path for path, _ in server.weights] == ["/load_lora_adapter"] * 2
        found = load_file(Path(folder) / "adapter_model.safetensors")
        assert found.keys() == adapter(2).keys()
        assert all(torch.equal(found[key], value) for key, value in adapter(2).items())
        said = json.loads((Path(folder) / "adapter_config.json").read_text())
        assert (said["r"], said["lora_alpha"], said["target_modules"]) == (4, 8.0, ["q_proj", "up_proj"])
        assert len(list(tmp_path.iterdir())) == 1, "older ones are removed"
        await engine.logprobs_by_server([[1, 2, 3]])
        assert b.named[-1].startswith("agentrl-4-"), "the drift check asks for the adapter too"
        await engine.close()
        assert not a.adapters, "a server that goes on keeps nothing of ours"
        assert not b.adapters
    assert list(tmp_path.iterdir()) == []


async def test_a_server_that_comes_back_gets_the_current_adapter(model: Path, tmp_path: Path) -> None:
    sync = AdapterSync(model, tmp_path, alpha=8.0)
    said: list[str] = []
    async with (
        servers(1, token_s=0.01) as (server,),
        engine_over(model, server, sync=sync, adapters=True, said=said, restarts=50) as engine,
    ):
        await engine.update_weights(adapter(1), version=7)
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=10)))
        await until(lambda: server.running)
        await server.die()
        await until(lambda: said)
        await server.start()
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 10)
        assert completion.versions == (7,) * 10
        assert len(server.adapters) == 1


async def test_a_server_that_was_restarted_in_a_silence_gets_the_current_adapter(
    model: Path, tmp_path: Path
) -> None:
    sync = AdapterSync(model, tmp_path, alpha=8.0)
    async with (
        servers(1) as (server,),
        engine_over(model, server, sync=sync, adapters=True, health_every_s=60.0) as engine,
    ):
        await engine.update_weights(adapter(1), version=7)
        await server.restart()
        assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).versions == (7,) * 3
        assert server.named[-1] in server.adapters
        await server.restart()
        assert {one.version for one in await engine.prompt_logprobs([1, 2, 3])} == {7}
        assert server.named[-1] in server.adapters
        await server.restart()
        await engine.update_weights(adapter(2), version=8)
        assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).versions == (8,) * 3


async def test_scores_of_a_server_that_was_restarted_in_a_silence_are_those_of_the_sent_weights(
    model: Path,
) -> None:
    async with servers(1) as (server,), engine_over(model, server, health_every_s=60.0) as engine:
        await engine.update_weights(weights(1), version=3)
        await server.restart()
        server.weights.clear()
        assert {one.version for one in await engine.prompt_logprobs([1, 2, 3])} == {3}
        assert server.weights, "the scores are of other weights"


async def test_a_server_that_names_one_version_for_all_tokens_is_believed(model: Path) -> None:
    def without_spans(answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "meta_info": {**answer["meta_info"], "weight_versions": None}}

    async with servers(1) as (server,), engine_over(model, server) as engine:
        await engine.update_weights(weights(1), version=3)
        server.answer = without_spans
        assert (await engine.generate(PROMPT, Sampling(max_tokens=4))).versions == (3,) * 4


async def test_a_server_that_cannot_take_changes_is_refused() -> None:
    async with servers(1) as (server,):
        client = SGLangServer(server.url, changes=True)
        with pytest.raises(
            EngineError, match=r"not started for engine\.sync delta: start it with --custom-weight"
        ):
            await client.describe()
        await client.close()


async def test_scores_on_their_way_at_the_first_update_are_no_restart(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that the run has started has the weights of the model, without a version."""
    async with servers(1) as (server,):
        client = SGLangServer(server.url, timeout_s=20.0)
        arrived, sent = asyncio.Event(), asyncio.Event()
        answer = server._post_generate

        async def late(body: dict[str, Any]) -> tuple[int, object]:
            found = await answer(body)
            arrived.set()
            await sent.wait()
            return found

        monkeypatch.setattr(server, "_post_generate", late)
        scoring = asyncio.create_task(client.score([1, 2, 3]))
        await arrived.wait()
        async with client.updating(by_tensor=False):
            await client.load_folder(model, 3)
        sent.set()
        assert len(await scoring) == 2
        await client.close()


async def test_an_adapter_that_is_refused_stops_the_run_with_the_reason(model: Path, tmp_path: Path) -> None:
    sync = AdapterSync(model, tmp_path, alpha=8.0)
    async with servers(1) as (server,), engine_over(model, server, sync=sync, adapters=True) as engine:
        server.refuse["/load_lora_adapter"] = (400, {"success": False, "error_message": "LoRA is not enabled"})
        with pytest.raises(EngineError, match="LoRA is not enabled"):
            await engine.update_weights(adapter(1), version=1)
        assert engine.policy_version == 0


async def test_refused_weights_stop_the_run_with_the_reason(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.refuse["/update_weights_from_tensor"] = (400, {"success": False, "message": "wrong shape"})
        with pytest.raises(EngineError, match="wrong shape"):
            await engine.update_weights(weights(1), version=1)
        assert engine.policy_version == 0


async def test_after_refused_weights_a_server_that_comes_back_gets_those_before(model: Path) -> None:
    said: list[str] = []
    sync = DeltaSync(bucket_bytes=1 << 20, full_every=9)
    async with servers(1) as (server,), engine_over(model, server, said=said, sync=sync, restarts=50) as engine:
        await engine.update_weights(weights(1), version=1)
        with pytest.raises(EngineError, match=r"b\.weight contains NaN"):
            await engine.update_weights(weights(2) | {"b.weight": torch.full((4, 8), math.nan)}, version=2)
        assert_same_weights(await sent_again(engine, server, said), weights(1))


async def test_a_session_that_a_killed_run_left_open_blocks_nobody(model: Path) -> None:
    async with servers(1) as (server,):
        killed = SGLangServer(server.url)
        assert await killed._begin()  # not `updating`, which ends the session when it is garbage
        async with engine_over(model, server) as engine:
            assert server.log.count("/begin_weight_update") == 3
            await engine.update_weights(weights(1), version=1)
            assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (1, 1)
        assert not server.session
        await killed.close()


async def test_a_pause_that_a_killed_run_left_blocks_no_run_with_adapters(model: Path, tmp_path: Path) -> None:
    """Which loads no weights before its first step, and pauses nothing."""
    async with servers(1) as (server,):
        killed = SGLangServer(server.url)
        await killed.updating(by_tensor=False).__aenter__()
        with pytest.raises(EngineError, match="503"):
            await killed.check(timeout_s=5.0)
        async with engine_over(
            model, server, sync=AdapterSync(model, tmp_path, alpha=8.0), adapters=True
        ) as engine:
            assert len((await engine.generate(PROMPT, Sampling(max_tokens=2))).ids) == 2
        await killed.close()


async def test_a_server_lost_during_an_update_gets_the_weights_later(model: Path) -> None:
    async with servers(2) as (a, b), engine_over(model, a, b, restarts=50) as engine:
        await a.die()
        await engine.update_weights(weights(1), version=4)
        assert b.version.partition("@")[0] == "4"
        await a.start()
        await until(lambda: len(engine._pool.ready) == 2)
        assert a.version.partition("@")[0] == "4"


async def test_a_server_that_loads_weights_for_long_is_not_lost(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with servers(1) as (server,), engine_over(model, server, said=said) as engine:
        load = server._post_update_weights_from_tensor

        async def long(body: dict[str, Any]) -> tuple[int, object]:
            before = server.log.count("/health")  # which it answers with 503 meanwhile
            await until(lambda: server.log.count("/health") >= before + 4)
            return await load(body)

        monkeypatch.setattr(server, "_post_update_weights_from_tensor", long)
        await engine.update_weights(weights(1), version=1)
        assert said == []
        assert (await engine.generate(PROMPT, Sampling(max_tokens=2))).versions == (1, 1)


async def test_a_sleeping_engine_wakes_with_the_next_weights(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        await engine.sleep()
        assert server.asleep == {"weights", "kv_cache"}
        task = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert server.prompts == []
        await engine.update_weights(weights(1), version=1)
        assert server.asleep == set()
        assert (await task).versions == (1, 1, 1)


async def test_an_engine_is_not_asleep_whose_servers_ended_while_they_slept(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        assert (engine.ready, engine.asleep) == (True, False)
        await engine.sleep()
        assert (engine.ready, engine.asleep) == (False, True)
        run: Any = SimpleNamespace(stop=True, engine=engine)
        assert not Run.leaving(run), "the servers wake with the weights of the step"
        (replica,) = engine._pool.replicas
        engine._pool.lose(replica, "it ended")
        assert (engine.ready, engine.asleep) == (False, False)
        assert Run.leaving(run)


async def test_logprobs_of_given_tokens_by_server(model: Path) -> None:
    async with servers(2) as (a, b), engine_over(model, a, b) as engine:
        found = await engine.logprobs_by_server([[1, 2, 3], [9, 9]])
        assert found == {each.url: [[-1.02, -1.03], [-1.09]] for each in (a, b)}


async def test_a_server_that_dies_before_its_weights_are_checked_costs_a_delay_and_nothing_else(
    model: Path,
) -> None:
    async with servers(2) as (a, b), engine_over(model, a, b, health_every_s=60.0) as engine:
        await engine.update_weights(weights(1), version=3)
        await a.die()
        assert await engine.logprobs_by_server([[1, 2, 3]]) == {b.url: [[-1.02, -1.03]]}, "the other one's"
        await b.die()
        b.weights.clear()
        asking = asyncio.create_task(engine.logprobs_by_server([[1, 2, 3]]))
        await until(lambda: not engine.ready)
        await b.start()
        assert await asking == {b.url: [[-1.02, -1.03]]}
        assert b.weights, "it was scored without the weights that it was to have"


async def test_a_server_that_lives_and_never_scores_is_not_left_out_of_the_check(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engine.servers.replica_pool.BACK_OFF_S", 0.001)
    async with servers(2) as (a, b), engine_over(model, a, b) as engine:
        b.refuse["/generate"] = (503, "busy")
        with pytest.raises(EngineError, match=r"lost 6 times.*503: \W*busy"):
            await engine.logprobs_by_server([[1, 2, 3]])


async def test_a_server_that_ends_whenever_it_is_to_score_ends_the_check(model: Path) -> None:
    """Though it is restarted, and answers other requests in between."""
    async with servers(1) as (server,), engine_over(model, server, health_every_s=60.0) as engine:
        answered, revivals = asyncio.Event(), []

        async def die_when_asked(_: object) -> None:
            await answered.wait()
            await server.die()
            answered.clear()
            revivals.append(asyncio.create_task(revive()))
            raise ServerLost("the connection broke")

        async def revive() -> None:
            await until(lambda: not engine.ready)
            await server.start()

        async def sample() -> None:
            while len(revivals) < 8:
                await engine.generate(PROMPT, Sampling(max_tokens=1))
                answered.set()

        sampling = asyncio.create_task(sample())
        with pytest.raises(EngineError, match="every server was lost, 6 times in a row"):
            await engine._pool.call_each(die_when_asked)
        sampling.cancel()
        await asyncio.gather(sampling, *revivals, return_exceptions=True)
        assert len(revivals) == 6


async def test_the_last_id_of_the_vocabulary_is_scored_though_sglang_names_it_0(model: Path) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        last = server.vocabulary - 1
        found = await engine.logprobs_by_server([[1, last, 0, 3]])
        assert found == {server.url: [[-1.0 - last / 100, -1.0, -1.03]]}
        server.vocabulary = 3  # now 2 is called 0, though 5 is the last
        with pytest.raises(EngineError, match="log-probabilities of 3 tokens"):
            await engine.logprobs_by_server([[1, 2, 5]])


async def test_a_prompt_is_scored_with_alternatives_by_whichever_server_lives(model: Path) -> None:
    async with servers(2) as (a, b), engine_over(model, a, b) as engine:
        await engine.update_weights(weights(1), version=3)
        first, second = await engine.prompt_logprobs([7, 2, 3], top=2)
        assert first == TokenLogprob(2, -1.02, 3, ((3, -0.1), (4, -0.2)))
        assert (second.id, second.logprob, len(second.top)) == (3, -1.03, 2)
        assert [one.top for one in await engine.prompt_logprobs([7, 2, 3])] == [(), ()]
        for server in (a, b):
            server.refuse["/generate"] = (400, {"error": {"message": "too many alternatives"}})
        with pytest.raises(EngineError, match="too many alternatives"):
            await engine.prompt_logprobs([7, 2, 3], top=99)
        for server in (a, b):
            server.refuse.clear()
        await a.die()
        assert len(await engine.prompt_logprobs([7, 2, 3, 4], top=1)) == 3
        with pytest.raises(ValueError, match="outside the model's vocabulary"):
            await engine.prompt_logprobs([7, 10**6])


def test_buckets_hold_everything_once() -> None:
    tensors = {str(n): torch.zeros(n) for n in (10, 1, 1, 50, 2, 3)} | {"big": torch.zeros(1000)}
    parts = list(buckets(tensors, 200))
    assert [name for part in parts for name in part] == list(tensors)
    assert all(sum(t.nbytes for t in part.values()) <= 200 or len(part) == 1 for part in parts)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "optimizer-00002-of-00002.safetensors"])
def test_a_checkpoint_is_read_without_its_optimizer(model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model, tmp_path / "step-1")
    save_file({"a.weight/exp_avg": torch.ones(4)}, folder / name)
    assert load_folder(folder, torch.float32).keys() == weights(0).keys()


def test_tied_parameters_are_found_by_their_memory() -> None:
    a = torch.zeros(3)
    assert list(distinct({"x": a, "y": a, "z": torch.zeros(3)})) == ["x", "z"]
    square = torch.arange(9.0).view(3, 3)
    assert list(distinct({"x": square, "y": square.T, "z": square[:2], "w": square.view(3, 3)})) == ["x", "y", "z"]
    assert list(distinct({"x": torch.empty(0), "y": torch.empty(0)})) == ["x", "y"]


def heard(told: list[TokenLogprob]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(one.id for one in told), tuple(one.logprob for one in told)


@pytest.mark.parametrize("incremental", [False, True])
async def test_tokens_are_told_while_they_are_drawn(model: Path, incremental: bool):
    async with LoopbackServer(token_s=0.01) as server, engine_over(model, server) as engine:
        assert not engine.capabilities.masks
        server.incremental = incremental
        told: list[TokenLogprob] = []
        half = asyncio.Event()

        def hear(drawn: TokenLogprob) -> None:
            told.append(drawn)
            if len(told) == 5:
                assert len(next(iter(server.running.values())).ids) < 10  # it is still drawing
                half.set()

        sampling = Sampling(max_tokens=10)
        completion = await engine.generate_streaming(PROMPT, sampling, GenerateOptions(hear, top=2))
        assert half.is_set()
        assert list(completion.ids) == expected(PROMPT, 10)
        assert heard(told) == (completion.ids, completion.logprobs)
        assert completion == await engine.generate(PROMPT, sampling)
        assert told[3].top == tuple((((told[3].id + n) % 97), pytest.approx(-0.1 * n)) for n in (1, 2))
        stop = completion.ids[4]
        stopped = await engine.generate_streaming(
            PROMPT, Sampling(stop_ids=frozenset([stop])), GenerateOptions(told.append)
        )
        assert (stopped.ids, stopped.finish) == (completion.ids[:5], "stop")
        with pytest.raises(ValueError, match="do not support grammar masks"):
            await engine.generate_streaming(PROMPT, sampling, GenerateOptions(mask=object()))  # type: ignore[arg-type]


async def test_a_stream_that_breaks_off_is_gone_on_with_and_nothing_is_told_twice(model: Path):
    said: list[str] = []
    async with LoopbackServer() as server, engine_over(model, server, said=said) as engine:
        server.break_after = 6
        told: list[TokenLogprob] = []
        completion = await engine.generate_streaming(PROMPT, Sampling(max_tokens=10), GenerateOptions(told.append))
        assert list(completion.ids) == expected(PROMPT, 10)
        assert heard(told) == (completion.ids, completion.logprobs)
        assert [len(prompt) for prompt in server.prompts] == [3, 9]  # what was told is not drawn again


async def test_nobody_listens_any_more_so_the_server_is_told_to_stop(model: Path):
    async with LoopbackServer(token_s=0.02) as server, engine_over(model, server) as engine:
        first = asyncio.Event()
        watch = GenerateOptions(lambda drawn: first.set())
        task = asyncio.create_task(engine.generate_streaming(PROMPT, Sampling(max_tokens=200), watch))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            while server.running or "/abort_request" not in server.log:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


async def test_new_weights_in_the_middle_of_a_stream_are_told_of(model: Path):
    async with LoopbackServer(token_s=0.02) as server, engine_over(model, server) as engine:
        told: list[TokenLogprob] = []
        some = asyncio.Event()

        def hear(drawn: TokenLogprob) -> None:
            told.append(drawn)
            if len(told) == 4:
                some.set()

        task = asyncio.create_task(
            engine.generate_streaming(PROMPT, Sampling(max_tokens=20), GenerateOptions(hear))
        )
        await some.wait()
        await engine.update_weights(weights(1), version=7)
        completion = await task
        assert list(completion.ids) == expected(PROMPT, 20)
        assert set(completion.versions) == {0, 7}
        assert [one.version for one in told[:4]] == [0] * 4
        assert told[-1].version == 7


async def test_events_that_are_no_completion_end_a_stream_with_an_error(model: Path):
    async with LoopbackServer() as server, engine_over(model, server) as engine:
        server.refuse["/generate"] = (400, {"error": {"message": "top_logprobs_num is too large"}})
        with pytest.raises(EngineError, match="top_logprobs_num is too large"):
            await engine.generate_streaming(PROMPT, Sampling(max_tokens=4), GenerateOptions())
    for event, error in (
        ({"error": {"message": "grammar", "code": 400}}, "grammar"),
        ({"output_ids": [1]}, "not a completion"),
        (
            {
                "output_ids": [1],
                "meta_info": {
                    "completion_tokens": 1,
                    "weight_version": "0",
                    "output_token_logprobs": [[math.nan, 1]],
                },
            },
            "not finite",
        ),
    ):
        with pytest.raises(EngineError, match=error):
            SGLangStream("here", lambda label: 0, Listener(lambda drawn: None)).take(event)
