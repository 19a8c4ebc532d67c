"""Bad input gets the right answer, clients that vanish leave nothing behind, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from agentrl.chat.template import Renderer
from agentrl.engine.base import EngineCapabilities, GenerateOptions, StructureRefused, TokenLogprob
from agentrl.errors import EngineError
from agentrl.serve import listen
from agentrl.serve.service import Client, GenerationRequest
from agentrl.testing.engine import ScriptedEngine
from agentrl.types import Message
from tests.serve.serve_kit import Served, incoming, serving

GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "What is 2 plus 3?"}]}


def talker(renderer: Renderer, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(renderer, lambda turn: Message("assistant", "The answer is 5."), **options)


async def post(served: Served, body: Any, path: str = "/chat/completions", **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient() as client:
        return await client.post(served.base_url + path, content=content, **options)


BAD: list[tuple[Any, str | None, str]] = [
    (b"{", None, "invalid_json"),
    (b"", None, "invalid_json"),
    (b"\xff\xfe", None, "invalid_json"),
    (b"[1, 2]", None, "invalid_value"),
    (b'{"model": "tiny", "messages": ' + b"[" * 5000, None, "invalid_json"),
    ({"messages": GOOD["messages"]}, "model", "missing_required_parameter"),
    ({**GOOD, "messages": []}, "messages", "invalid_value"),
    ({**GOOD, "messages": "hello"}, "messages", "invalid_value"),
    ({**GOOD, "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({**GOOD, "messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_value"),
    ({**GOOD, "messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id", "invalid_value"),
    (
        {**GOOD, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {**GOOD, "messages": [{"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}]},
        "messages[0].function_call",
        "unsupported_parameter",
    ),
    ({**GOOD, "temperature": "hot"}, "temperature", "invalid_value"),
    ({**GOOD, "temperature": -1}, "temperature", "invalid_value"),
    ({**GOOD, "n": 1.5}, "n", "invalid_value"),
    ({**GOOD, "n": "2"}, "n", "invalid_value"),
    ({**GOOD, "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({**GOOD, "max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
    ({**GOOD, "stop": ["a", ""]}, "stop", "invalid_value"),
    ({**GOOD, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({**GOOD, "logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({**GOOD, "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({**GOOD, "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    ({**GOOD, "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({**GOOD, "stream_options": 5}, "stream_options", "invalid_value"),
    ({**GOOD, "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "invalid_value"),
    (
        {
            **GOOD,
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{"}}]}
            ],
        },
        "messages[0].tool_calls[0].function.arguments",
        "invalid_value",
    ),
    ({**GOOD, "messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
    ({**GOOD, "messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content", "invalid_value"),
    ({**GOOD, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (
        {**GOOD, "response_format": {"type": "json_object", "schema": {"type": "object"}}},
        "response_format.schema",
        "invalid_value",
    ),
    (
        {**GOOD, "response_format": {"type": "json_object", "json_schema": {"schema": {"type": "object"}}}},
        "response_format.json_schema",
        "invalid_value",
    ),
    ({**GOOD, "input": "hi"}, "input", "unsupported_parameter"),
]


async def test_every_mistake_is_a_400_that_names_its_parameter(renderer: Renderer):
    async with serving(talker(renderer), renderer) as served:
        for body, param, code in BAD:
            answer = await post(served, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, code), (body, answer.text)
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
        assert (await post(served, GOOD)).status_code == 200


CALLED = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "user", "content": "a"}, {"type": "function_call", "call_id": "c"}]}, "input[1].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": ""}]}, "input[0].name"),
    ({"input": "a", "tools": [{"type": "function", "name": "f" * 257}]}, "tools[0].name"),
    ({"input": "a", "metadata": {"n": 1}}, "metadata.n"),
    ({"input": "a", "metadata": {"n": "x" * 513}}, "metadata.n"),
    ({"input": "a", "metadata": {"N" * 65: "x"}}, "metadata"),
    ({"input": "a", "metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": "a", "text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
    ({"input": "a", "stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"input": [CALLED, CALLED, {"role": "user"}]}, "input[2].content"),
    ({"input": [CALLED, {**CALLED, "arguments": "{"}], "instructions": "Be brief."}, "input[1].arguments"),
]


async def test_every_mistake_in_a_response_is_a_400_that_names_its_place(renderer: Renderer):
    async with serving(talker(renderer), renderer) as served:
        for body, param in BAD_RESPONSES:
            answer = await post(served, {"model": "tiny", **body}, "/responses")
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value"), (
                answer.text
            )
        odd = [{"type": "audio", "role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        answer = await post(served, {"model": "tiny", "input": odd}, "/responses")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].type")


async def test_other_paths_methods_and_keys_get_the_same_envelope(renderer: Renderer):
    async with serving(talker(renderer), renderer, api_key="secret-key") as served, httpx.AsyncClient() as client:
        for given in (None, "Bearer wrong", "secret-key", "Bearer secret-keyx", "Bearer"):
            headers = {} if given is None else {"Authorization": given}
            answer = await client.post(served.base_url + "/chat/completions", json=GOOD, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        client.headers["Authorization"] = "Bearer secret-key"
        assert (await client.post(served.base_url + "/chat/completions", json=GOOD)).status_code == 200
        missing = await client.get(served.base_url + "/nothing")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, None)
        wrong = await client.get(served.base_url + "/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_supported"
        assert (await client.get(served.url + "/health", headers={"Authorization": ""})).json()["status"] == "ok"
        assert (await client.get(served.url + "/metrics", headers={"Authorization": ""})).status_code == 401
        text = (await client.get(served.url + "/metrics")).text
        assert 'agentrl_requests_total{route="/chat/completions",status="200"} 1.0' in text


async def test_huge_bodies_are_refused_whether_or_not_they_say_their_size(renderer: Renderer):
    async def parts() -> Any:
        for _ in range(40):
            yield b"x" * 1000

    async with serving(talker(renderer), renderer, max_body_bytes=20_000) as served, httpx.AsyncClient() as client:
        told = await client.post(served.base_url + "/chat/completions", content=b"x" * 30_000)
        untold = await client.post(served.base_url + "/chat/completions", content=parts())
        assert [told.status_code, untold.status_code] == [413, 413]
        assert told.json()["error"]["code"] == "request_too_large"
        assert (await post(served, GOOD)).status_code == 200


async def test_a_client_that_sends_too_slowly_is_told_so(renderer: Renderer):
    async def slow() -> Any:
        yield b'{"model": '
        await asyncio.sleep(30)
        yield b'"tiny"}'

    async with serving(talker(renderer), renderer, body_timeout_s=0.2) as served:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode())
        status = await asyncio.wait_for(reader.readline(), 10)
        assert b"408" in status
        writer.close()
        await writer.wait_closed()
        assert (await post(served, GOOD)).status_code == 200


class Endless(ScriptedEngine):
    """Never answers; says who was cancelled."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer, [])
        self.running = self.cancelled = 0

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def generate_streaming(self, *args: Any, **options: Any) -> Any:
        return await self.generate()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_client_that_vanishes_frees_its_slot(renderer: Renderer, stream: bool):
    engine = Endless(renderer)
    async with serving(engine, renderer, max_requests=2) as served:
        clients = [asyncio.ensure_future(post(served, {**GOOD, "stream": stream, "n": 2}))]
        async with asyncio.timeout(20):
            while engine.running < 2:  # noqa: ASYNC110 - the engine counts, it tells nobody
                await asyncio.sleep(0.01)
        busy = await post(served, GOOD)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        assert busy.json()["error"]["code"] == "rate_limit_exceeded"
        for client in clients:
            client.cancel()
        async with asyncio.timeout(20):
            while engine.cancelled < 2 or served.service.gate.running:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        assert len(set(engine.released)) == 2, "both conversations: nobody goes on with them"


class Illiterate(ScriptedEngine):
    """As an inference server that cannot read a grammar."""

    capabilities = EngineCapabilities(streaming=True, structures=True)

    async def generate_streaming(self, *args: Any, **options: Any) -> Any:
        raise StructureRefused("it has no grammars")


async def test_a_request_whose_grammar_is_refused_leaves_nothing_in_the_engine(renderer: Renderer):
    engine = Illiterate(renderer, [])
    async with serving(engine, renderer) as served:
        answer = await post(served, {**GOOD, "response_format": {"type": "json_object"}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
        assert len(engine.released) == 1


async def test_a_client_that_vanishes_while_its_answer_is_kept_leaves_nothing_in_the_engine(renderer: Renderer):
    engine = ScriptedEngine(renderer, ["5"])
    async with serving(engine, renderer) as served:
        job = await served.service.prepare(GenerationRequest([incoming("user", "?")]), Client(served.session))
        async with served.session.lock:  # as while the prompt of another client is rendered
            answering = asyncio.ensure_future(job.run())
            async with asyncio.timeout(20):
                while not engine._turns:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
        assert served.session.turns == ()
        assert len(engine.released) == 1


class Unhurried(ScriptedEngine):
    """Says a word now and then, for ever."""

    async def generate(self, ids: Any, sampling: Any, *, session: str | None = None) -> Any:
        return await self.generate_streaming(ids, sampling, GenerateOptions())

    async def generate_streaming(self, ids: Any, sampling: Any, watch: Any, *, session: str | None = None) -> Any:
        while True:
            for id in self._renderer.vocabulary.encode_text("word "):
                if watch.on_token is not None:
                    watch.on_token(TokenLogprob(id, 0.0, 0))
            await asyncio.sleep(0.01)


async def test_the_seconds_of_a_streamed_answer_are_counted_at_its_end(renderer: Renderer):
    async with serving(Unhurried(renderer, []), renderer) as served, httpx.AsyncClient() as client:

        async def count() -> bool:
            text = (await client.get(served.url + "/metrics")).text
            return 'agentrl_request_seconds_count{route="/chat/completions"} 1.0' in text

        request = {**GOOD, "stream": True}
        async with client.stream("POST", served.base_url + "/chat/completions", json=request) as answer:
            assert await anext(answer.aiter_bytes())
            assert not await count()
        async with asyncio.timeout(20):
            while not await count():  # noqa: ASYNC110 - the server counts, it tells nobody
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
async def test_who_is_being_answered_when_the_server_ends_is_told_so(
    renderer: Renderer, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(listen, "SHUTDOWN_S", 0.1)
    body = GOOD if path == "/chat/completions" else {"model": "tiny", "input": "What is 2 plus 3?"}
    async with httpx.AsyncClient() as client:
        async with serving(Unhurried(renderer, []), renderer) as served:
            begun = asyncio.Event()

            async def stream() -> str:
                request = {**body, "stream": True}
                async with client.stream("POST", served.base_url + path, json=request) as answer:
                    text = ""
                    async for piece in answer.aiter_text():
                        text += piece
                        begun.set()
                    return text

            streamed = asyncio.ensure_future(stream())
            plain = asyncio.ensure_future(client.post(served.base_url + path, json=body))
            await begun.wait()
            async with asyncio.timeout(20):
                while served.service.gate.running < 2:  # noqa: ASYNC110 - the gate counts, it tells nobody
                    await asyncio.sleep(0.01)
        last = (await streamed).strip().splitlines()
    assert json.loads(last[-1].removeprefix("data: "))["error"]["code"] == "server_ending"
    assert (last[-2] == "event: error") == (path == "/responses")
    answer = await plain
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_ending")
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert served.service.gate.running == 0


async def test_a_client_that_stops_reading_does_not_hold_the_engine(renderer: Renderer):
    engine = ScriptedEngine(renderer, lambda turn: Message("assistant", "word " * 4000))
    async with serving(engine, renderer, write_timeout_s=0.5) as served:
        host, port = served.url.removeprefix("http://").split(":")
        body = json.dumps({**GOOD, "stream": True, "n": 8}).encode()
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        assert b"200" in await reader.readline()
        async with asyncio.timeout(50):
            while served.service.gate.running:  # noqa: ASYNC110 - the gate counts, it tells nobody
                await asyncio.sleep(0.05)
        writer.close()
        assert (await post(served, GOOD)).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_lost_engine_is_a_503_and_the_next_request_is_answered(renderer: Renderer, stream: bool):
    lines: list[Any] = [EngineError("it is gone"), Message("assistant", "Back.")]
    engine = ScriptedEngine(renderer, lambda turn: lines.pop(0))
    async with serving(engine, renderer) as served:
        lost = await post(served, {**GOOD, "stream": stream})
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_error")
        back = await post(served, {**GOOD, "stream": stream})
        assert (back.status_code, '"finish_reason":"stop"' in back.text) == (200, True)
        assert served.service.gate.running == 0


async def test_health_is_a_503_while_requests_would_wait_for_the_engine(renderer: Renderer):
    class Restarting(ScriptedEngine):
        up = True

        @property
        def ready(self) -> bool:
            return self.up

    engine = Restarting(renderer, [])
    async with serving(engine, renderer) as served, httpx.AsyncClient() as client:
        for ready, status, said in ((False, 503, "waiting"), (True, 200, "ok")):
            engine.up = ready
            answer = await client.get(served.url + "/health")
            assert (answer.status_code, answer.json()) == (status, {"status": said, "policy_version": 0})


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"", b""),
        (HEAD, b"HTTP/1.1 408"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD, b"HTTP/1.1 200"),
        (b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 404"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
    ],
    ids=["silent", "half", "second", "body", "nonsense"],
)
async def test_a_client_that_never_ends_its_request_is_hung_up_on(renderer: Renderer, sent: bytes, told: bytes):
    async with serving(talker(renderer), renderer, head_timeout_s=0.3) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        if b"\r\n\r\n" not in sent and sent:
            await asyncio.sleep(0.1)
            writer.write(b"n")  # a byte now and then does not help
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert answer.startswith(told)
        assert bool(answer) == bool(told)
        if told.endswith((b"408", b"400")):
            assert set(json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]) == {
                "message",
                "type",
                "param",
                "code",
            }
        if b"200" in told:
            assert b"HTTP/1.1 408" in answer
        assert (await post(served, GOOD)).status_code == 200


async def test_a_connection_is_kept_for_the_next_request_longer_than_a_head_may_take(renderer: Renderer):
    async with serving(talker(renderer), renderer, head_timeout_s=0.2) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert b"HTTP/1.1 200" in head
            length = next(
                int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
            )
            await reader.readexactly(length)
            await asyncio.sleep(0.5)
        writer.close()


async def test_memory_of_past_turns_is_bounded_and_the_engine_is_told(renderer: Renderer):
    engine = talker(renderer)
    async with serving(engine, renderer) as served, httpx.AsyncClient() as client:
        served.session._max_tokens = 300
        for number in range(30):
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"What is {number} plus 3?"}]}
            await client.post(served.base_url + "/chat/completions", json=body)
        assert sum(len(turn.branch.ids) for turn in served.session.turns) <= 300
        assert len(engine.released) == 30 - len(served.session.turns)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_client_that_closes_only_its_sending_side_gets_its_answer(renderer: Renderer, stream: bool):
    body = json.dumps({**GOOD, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(talker(renderer, delay_s=0.6), renderer) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(interim)
    rest = answer.replace(interim, b"")
    assert rest.startswith(b"HTTP/1.1 200 OK")
    assert (b"data: [DONE]" if stream else b"The answer is 5.") in rest


async def test_a_client_that_closes_its_socket_frees_its_place_at_once(renderer: Renderer):
    body = json.dumps(GOOD).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    async with serving(talker(renderer, delay_s=3600), renderer) as served:
        host, port = served.url.removeprefix("http://").split(":")
        for half_first in (False, True):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + body)
            async with asyncio.timeout(15):
                while not served.service.gate.running:  # noqa: ASYNC110 - the gate counts, it tells nobody
                    await asyncio.sleep(0.01)
                if half_first:
                    writer.write_eof()
                    await asyncio.sleep(0.3)
                    assert served.service.gate.running == 1
                writer.close()
                while served.service.gate.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


async def test_what_a_client_did_wrong_is_not_printed(renderer: Renderer, caplog: pytest.LogCaptureFixture):
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    async with serving(talker(renderer), renderer) as served:
        host, port = served.url.removeprefix("http://").split(":")
        for sent, told in ((b"nonsense\r\n\r\n", b"HTTP/1.1 400"), (upgrade, b"HTTP/1.1 200")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert (await asyncio.wait_for(reader.readline(), 20)).startswith(told)
            writer.close()
    assert [record.message for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize("kind", ["input_image", "input_file", "x"])
async def test_parts_that_no_assistant_says_are_refused(renderer, kind):
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": kind, "text": "b"}]}
    body = {"model": "tiny", "input": [said, {"role": "user", "content": "And?"}]}
    async with serving(talker(renderer), renderer) as served:
        answer = await post(served, body, "/responses")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[1].type"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "reasoning_content": "r " * 500_000},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f" * 900_000, "arguments": "{}"}}]},
        {"role": "user", "content": "r " * 500_000},
    ],
)
async def test_long_text_of_any_kind_is_counted_before_it_is_rendered(renderer, message, monkeypatch):
    def render(*_: object) -> None:
        raise AssertionError("rendered on the event loop")

    monkeypatch.setattr("agentrl.serve.conversations.Conversations.prompt", render)
    async with serving(talker(renderer), renderer) as served:
        answer = await post(served, {**GOOD, "messages": [*GOOD["messages"], message, *GOOD["messages"]]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
