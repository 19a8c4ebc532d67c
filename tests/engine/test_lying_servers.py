"""Servers that answer what no policy samples, or later: an error or a restart, never a gradient or a hang."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from agentrl.config.engine import EngineConfig
from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.servers import replica_pool, weight_sync
from agentrl.engine.servers.client import GroupPlace, Listener
from agentrl.engine.servers.http import ServerLost, ServerRefused
from agentrl.engine.servers.sglang import SGLangServer
from agentrl.engine.servers.streams import SGLangStream
from agentrl.engine.servers.weight_sync import AdapterSync, BroadcastSync, DiskSync, _address_towards
from agentrl.errors import EngineError
from agentrl.testing.sglang_server import LoopbackServer
from agentrl.types import Sampling
from tests.engine.broadcast_peer import serve
from tests.engine.test_served import (
    PROMPT,
    VOCABULARY,
    adapter,
    engine_over,
    expected,
    model,
    servers,
    until,
    weights,
)

__all__ = ["model"]


def first_id(id: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(answer: dict[str, Any]) -> dict[str, Any]:
        answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = id
        return answer

    return changed


def first_logprob(logprob: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changed(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["output_token_logprobs"][0][0] = logprob
        return answer

    return changed


def one_more(answer: dict[str, Any]) -> dict[str, Any]:
    answer["output_ids"].append(1)
    answer["meta_info"]["output_token_logprobs"].append([-1.0, 1, None])
    answer["meta_info"]["weight_versions"][-1]["end"] += 1
    return answer


def cached(count: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda answer: {**answer, "meta_info": {**answer["meta_info"], "cached_tokens": count}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (first_id(VOCABULARY), "sampled the id 97, outside the vocabulary of 97"),
        (first_id(-1), "sampled the id -1, outside"),
        (first_id(2**70), "outside the vocabulary"),
        (first_id(3.7), "not a completion"),
        (first_id("5"), "not a completion"),
        (first_id(math.inf), "not a completion"),
        (first_logprob(5.0), r"log-probability 5\.0 is above 0"),
        (one_more, "5 tokens, more than max_tokens=4"),
        (cached(math.inf), "not a completion"),
        (lambda answer: {**answer, "meta_info": [1]}, "not a completion"),
    ],
)
async def test_what_no_policy_samples_is_an_error(model: Path, change: Any, problem: str) -> None:
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.answer = change
        with pytest.raises(EngineError, match=problem):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        server.answer = None
        assert list((await engine.generate(PROMPT, Sampling(max_tokens=4))).ids) == expected(PROMPT, 4)


@pytest.mark.parametrize("label", ["0", "3", "99", "default", "-3", "v1", "model@main", ""])
@pytest.mark.parametrize("way", ["tensor", "disk"])
async def test_a_server_that_was_started_again_gets_the_weights(
    model: Path, tmp_path: Path, label: str, way: str
) -> None:
    """Behind a supervisor or a load balancer: nothing was lost that anybody could see."""
    sync = DiskSync(model, tmp_path) if way == "disk" else None
    async with servers(1) as (server,), engine_over(model, server, sync=sync, health_every_s=60.0) as engine:
        await engine.update_weights(weights(3), 3)
        taken, server.version = len(server.weights), label
        completion = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert completion.versions == (3,) * 4
        assert len(server.weights) > taken


@pytest.mark.parametrize("version", [0, 2, 4, 99])
async def test_a_server_with_other_weights_of_this_run_gets_the_right_ones(model: Path, version: int) -> None:
    async with servers(1) as (server,), engine_over(model, server, health_every_s=60.0) as engine:
        await engine.update_weights(weights(3), 3)
        taken, (number, at, own) = len(server.weights), server.version.partition("@")
        assert (number, at) == ("3", "@")
        server.version = f"{version}@{own}"
        completion = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert completion.versions == (3,) * 4
        assert len(server.weights) > taken


@pytest.mark.parametrize("act", ["generate", "stream", "score", "check", "update"])
async def test_a_run_ends_where_another_one_has_sent_its_weights(model: Path, act: str) -> None:
    """Both count their versions from 0."""
    async with servers(1) as (server,), engine_over(model, server) as first, engine_over(model, server) as second:
        sampling, taken = Sampling(max_tokens=4), len(server.weights)
        acts: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "generate": lambda: first.generate(PROMPT, sampling),
            "stream": lambda: first.generate_streaming(PROMPT, sampling, GenerateOptions()),
            "score": lambda: first.prompt_logprobs(PROMPT),
            "check": lambda: first.logprobs_by_server([PROMPT]),
            "update": lambda: first.update_weights(weights(2), 1),
        }
        for each in (act, *acts):  # each ends all later ones
            with pytest.raises(EngineError, match="another run has sent its weights to this server"):
                await acts[each]()
        assert len(server.weights) == taken
        assert (await second.generate(PROMPT, sampling)).versions == (0,) * 4


@pytest.mark.parametrize("act", ["generate", "stream", "score"])
async def test_a_run_with_adapters_ends_where_another_one_has_sent_its_weights(
    model: Path, tmp_path: Path, act: str
) -> None:
    sync = AdapterSync(model, tmp_path, alpha=8.0)
    async with servers(1) as (server,), engine_over(model, server, sync=sync, adapters=True) as engine:
        await engine.update_weights(adapter(1), version=1)
        server.version = "1@0123456789ab"
        acts: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "generate": lambda: engine.generate(PROMPT, Sampling(max_tokens=4)),
            "stream": lambda: engine.generate_streaming(PROMPT, Sampling(max_tokens=4), GenerateOptions()),
            "score": lambda: engine.prompt_logprobs(PROMPT),
        }
        with pytest.raises(EngineError, match="another run has sent its weights to this server"):
            await acts[act]()


@pytest.mark.parametrize("label", ["default", "soon", None])
async def test_a_server_that_never_has_the_weights_it_was_sent_is_given_up(model: Path, label: object) -> None:
    def unnamed(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["weight_versions"][0]["version"] = label
        return answer

    async with servers(1) as (server,), engine_over(model, server, restarts=2) as engine:
        server.answer = unnamed
        with pytest.raises(EngineError, match=r"no server is left: .* with weights that have no version"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_server_is_asked_again_after_a_while(
    model: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_pool, "BACK_OFF_S", 0.02)
    async with servers(1) as (server,), engine_over(model, server) as engine:
        server.refuse["/generate"] = (status, "<html>\n<h1>busy</h1>\n</html>")
        asked = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=4)))
        await until(lambda: server.log.count("/generate") >= 3)
        del server.refuse["/generate"]
        assert list((await asked).ids) == expected(PROMPT, 4)
        server.refuse["/generate"] = (status, "<html>\n<h1>busy</h1>\n</html>")
        with pytest.raises(EngineError, match=r"HTTP \d+: <html> <h1>busy</h1> </html>$"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))


@pytest.mark.parametrize(
    "path", ["/server_info", "/pause_generation", "/update_weights_from_tensor", "/continue_generation"]
)
@pytest.mark.parametrize("busy", [True, False], ids=["502", "cut connections"])
async def test_a_server_that_is_busy_for_a_moment_at_the_start_is_asked_again(
    model: Path, path: str, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cutting(LoopbackServer):
        async def _handle(self, method: str, path: str, body: dict[str, object]) -> tuple[int, object]:
            status, answer = await super()._handle(method, path, body)
            if status == 502 and not busy:
                raise ConnectionResetError
            return status, answer

    async def heal() -> None:
        await until(lambda: server.log.count(path) >= 3)
        server.refuse.clear()

    monkeypatch.setattr(replica_pool, "BACK_OFF_S", 0.02)
    async with Cutting() as server:
        server.refuse[path] = (502, "<html>\n<h1>502 Bad Gateway</h1>\n</html>")
        healing = asyncio.create_task(heal())
        async with engine_over(model, server) as engine:
            assert list((await engine.generate(PROMPT, Sampling(max_tokens=4))).ids) == expected(PROMPT, 4)
        await healing


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_tensor"])
@pytest.mark.parametrize(
    "answer",
    [
        (307, ""),
        (200, {"error": {"message": "boom", "code": 500}}),
        (200, {"success": False, "message": "boom"}),
    ],
)
async def test_an_update_that_was_not_done_is_not_believed(model: Path, path: str, answer: Any) -> None:
    async with servers(1) as (server,), engine_over(model, server, restarts=0) as engine:
        server.refuse[path] = answer
        with pytest.raises(EngineError):
            await engine.update_weights(weights(3), 3)
        assert engine.policy_version == 0


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_an_update_goes_on_where_a_server_does_not_say_whose_weights_it_has(
    model: Path, status: int
) -> None:
    said: list[str] = []
    async with servers(1) as (server,), engine_over(model, server, said=said) as engine:
        server.refuse["/model_info"] = (status, {"error": "it has no such attribute"})
        for version in range(1, 4):
            await engine.update_weights(weights(version), version)
        assert (await engine.generate(PROMPT, Sampling(max_tokens=4))).versions == (3,) * 4
        assert not [text for text in said if "is lost" in text]


async def test_a_redirect_says_what_to_do(model: Path) -> None:
    async with servers(1) as (server,):
        server.refuse["/server_info"] = server.refuse["/get_server_info"] = (307, "")
        client = SGLangServer(server.url, timeout_s=5.0)
        with pytest.raises(ServerRefused, match="HTTP 307"):
            await client.describe()
        await client.close()


async def test_an_error_of_another_kind_during_recovery_hangs_nobody(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(1) as (server,), engine_over(model, server, restarts=1) as engine:

        async def broken(*_: object) -> None:
            raise ZeroDivisionError("not an error of the engine")

        monkeypatch.setattr(engine._pool, "_prepare", broken)
        engine._pool.lose(engine._pool.replicas[0], "as was asked for")
        with pytest.raises(EngineError, match="could not be started again: ZeroDivisionError"):
            await asyncio.wait_for(engine.generate(PROMPT, Sampling(max_tokens=4)), 20)


def event(ids: list[Any], names: list[Any] | None = None, **meta: Any) -> dict[str, Any]:
    logprobs = [[-1.0, name, None] for name in (ids if names is None else names)]
    return {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": len(ids),
            "weight_version": "0",
            "output_token_logprobs": logprobs,
            **meta,
        },
    }


@pytest.mark.parametrize(
    "events",
    [
        [event([1], [7])],
        [event([1, 2]), event([9, 8, 7])],
        [event([1], finish_reason="stop")],
        [{"output_ids": [1], "meta_info": [1]}],
        [event([math.inf])],
    ],
)
def test_a_stream_reports_only_what_it_can_stand_by(events: list[dict[str, Any]]) -> None:
    told: list[TokenLogprob] = []
    stream = SGLangStream("here", lambda label: 0, Listener(told.extend, 0))
    for one in events[:-1]:
        stream.take(one)
    with pytest.raises(EngineError, match="not a completion"):
        stream.take(events[-1])
    assert [token.id for token in told] == ([1, 2] if len(events) == 2 else [])


@pytest.mark.parametrize(("code", "kind"), [(500, ServerLost), (503, ServerLost), (400, ServerRefused)])
def test_an_error_in_a_stream_is_that_of_its_status(code: int, kind: type[EngineError]) -> None:
    ended = event([1], finish_reason={"type": "abort", "status_code": code, "message": "no"})
    for said in ({"error": {"code": code, "message": "no"}}, ended):
        with pytest.raises(kind, match="no"):
            SGLangStream("here", lambda label: 0, Listener(lambda drawn: None)).take(said)


@pytest.mark.parametrize("broken_off", [False, True])
async def test_a_streamed_id_outside_the_vocabulary_is_an_error(model: Path, broken_off: bool) -> None:
    async with servers(1, vocabulary=VOCABULARY + 200) as (server,), engine_over(model, server) as engine:
        server.break_after = 1 if broken_off else None
        sampling = Sampling(max_tokens=1 if broken_off else 20)
        with pytest.raises(EngineError, match="outside the vocabulary"):
            await engine.generate_streaming([90] * 3, sampling, GenerateOptions(lambda token: None))


async def test_a_broadcast_to_a_name_that_is_unknown_fails_for_that_server() -> None:
    sync = BroadcastSync(backend="gloo", bucket_bytes=1 << 20, timeout_s=2.0)
    server = SGLangServer("http://no-such-host.invalid:1")
    failures = await sync.push([server], weights(0), 0)
    await server.close()
    assert isinstance(failures[server], ServerLost)
    assert "no-such-host" in str(failures[server])


class Receiver:
    """A server that is a process with nothing but the broadcasts in it."""

    def __init__(self, number: int, *, dies: str = "", refuses: str = "") -> None:
        self.url, self.dies, self.refuses = f"http://127.0.0.1:{number}", dies, refuses
        self.pipe, there = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    @asynccontextmanager
    async def updating(self, *, by_tensor: bool) -> AsyncIterator[None]:
        yield

    async def join(self, place: GroupPlace) -> None:
        await self._do("join", place)

    async def receive(self, tensors: Mapping[str, torch.Tensor], group: str, version: int) -> None:
        await self._do("receive", [tuple(tensor.shape) for tensor in tensors.values()])

    async def leave(self, group: str) -> None:
        await self._do("leave", None)

    async def _do(self, what: str, given: Any) -> None:
        if what == self.refuses:
            raise ServerRefused("no such weights")
        if what == self.dies:
            self.process.kill()
        try:
            self.pipe.send((what, given))
            answer = await asyncio.to_thread(self.pipe.recv)
        except (EOFError, OSError) as e:
            raise ServerLost(f"{self.url}: {e!r}") from e
        if answer is not True:
            raise ServerRefused(answer)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("place", "fault"),
    [
        pytest.param(0, {"dies": "join"}, marks=pytest.mark.slow),
        (0, {"dies": "receive"}),
        pytest.param(1, {"dies": "receive"}, marks=pytest.mark.slow),
        (2, {"dies": "receive"}),  # gloo reaches the third through the first
        pytest.param(0, {"refuses": "receive"}, marks=pytest.mark.slow),
        (2, {"refuses": "receive"}),
    ],
)
async def test_a_server_that_is_lost_to_a_broadcast_leaves_the_others_with_all_weights_at_once(
    place: int, fault: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remaining servers stop waiting, and receive all weights in a new broadcast."""
    monkeypatch.setattr(weight_sync, "JOIN_S", 20.0)
    monkeypatch.setattr(weight_sync, "LEAVE_S", 10.0)
    receivers = [Receiver(n, **(fault if n == place else {})) for n in range(3)]
    for one in receivers:
        await one._do("ready", None)  # its imports take a while
    sync = BroadcastSync(backend="gloo", bucket_bytes=1 << 20, timeout_s=3600.0)
    sent = {str(n): torch.ones(1000, 1000) for n in range(8)}
    try:
        failures = await asyncio.wait_for(sync.push(cast("Any", receivers), sent, 1), 300)
        assert receivers[place] in failures
        # On a busy machine, the gloo of another one may not notice that its connection was closed.
        waiting = [str(e) for one, e in failures.items() if one is not receivers[place]]
        assert all("after the broadcast broke off" in text for text in waiting)
        await sync.close()
    finally:
        for one in receivers:
            one.process.kill()


async def test_a_broadcast_is_sent_from_the_gpu_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight:
        def to(self, device: str) -> Weight:
            sent.append(device)
            return self

        def contiguous(self) -> Weight:
            return self

    sent: list[str] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src, group: None)
    given: dict[str, Any] = {"w": Weight()}
    for backend, gpu in (("nccl", "cuda:1"), ("nccl", "cuda"), ("gloo", "cuda:1")):
        await BroadcastSync(backend=backend, bucket_bytes=1, gpu=gpu)._sender(given)
    assert sent == ["cuda:1", "cuda", "cpu"]


@pytest.mark.parametrize(("url", "own"), [("http://127.0.0.1:1", "127.0.0.1"), ("http://[::1]:1", "[::1]")])
def test_a_broadcast_comes_from_an_address_of_the_servers_family(url: str, own: str) -> None:
    try:
        found = _address_towards(url)
    except ServerLost:
        pytest.skip("this machine has no such address")
    assert found == own


@pytest.mark.parametrize(
    "urls",
    [
        ["http://a:1", "http://a:1"],
        ["http://a:1", "http://a:1/"],
        ["http://A", "http://a:80"],
        ["http://localhost:1", "http://127.0.0.1:1"],
        ["http://localhost:1", "http://[::1]:1"],
        ["http://0.0.0.0:1", "http://127.0.0.1:1"],
        ["http://a:1/v1"],
        ["http://a:1/v1/"],
        ["http://a:1?x=1"],
        ["http://a:1/#f"],
    ],
)
def test_addresses_that_cannot_work_are_refused(urls: list[str]) -> None:
    with pytest.raises(ValueError, match=r"is there twice|leave out"):
        EngineConfig.model_validate({"kind": "vllm", "server": {"urls": urls}})
    others = ["http://a:1", "http://b:1/", "http://a:2", "http://a:1/b"]
    EngineConfig.model_validate({"kind": "vllm", "server": {"urls": others}})
