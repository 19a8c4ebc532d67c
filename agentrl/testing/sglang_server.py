"""A real HTTP server on the loopback that speaks SGLang's wire format, without a model behind it.

For tests of whatever talks to inference servers: it generates tokens by a rule, at a configurable pace, pauses,
takes weights by version, and can be made to die, to hang or to send malformed answers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl

_PER_TOKEN = {"output_token_logprobs", "output_top_logprobs"}


@dataclass
class _Running:
    """A request under way."""

    prompt: list[int]
    most: int
    stops: frozenset[int]
    ids: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    retractions: int = 0
    aborted: bool = False
    adapter: str = ""
    script: list[int] | None = None
    experts: bool = False
    experts_from: int = 0


class LoopbackServer:
    """An asyncio server; a context manager. Its state is public, so that tests can read and change it.

    The next token of a sequence is `(sum(ids) + len(ids)) % vocabulary`, its log-probability -1 - token / 100.
    Under a structural tag, `write` says what is drawn, and each log-probability is 0.
    """

    def __init__(self, *, vocabulary: int = 97, max_context: int = 256, token_s: float = 0.0) -> None:
        self.vocabulary, self.max_context, self.token_s = vocabulary, max_context, token_s
        self.version = "default"
        self.weights: list[tuple[str, Mapping[str, object]]] = []
        """Path and body of each request that brought weights, in order."""
        self.log: list[str] = []
        """Path of each request, in order."""
        self.prompts: list[list[int]] = []
        """What each `/generate` was asked to continue."""
        self.sampled_with: list[Mapping[str, Any]] = []
        """The sampling parameters of each of these requests; vLLM's are part of the request."""
        self.answer: Callable[[dict[str, Any]], object] | None = None
        """Changes the answer of `/generate`, for instance into nonsense."""
        self.refuse: dict[str, tuple[int, object]] = {}
        """Status and body to answer instead, by path."""
        self.sick = False
        """Whether health checks fail."""
        self.adapters: dict[str, str] = {}
        """Folder of each adapter that is loaded, by name."""
        self.named: list[str] = []
        """The adapter that each request for tokens or log-probabilities named, or nothing."""
        self.incremental = False
        """Whether streams hold what is new only, as with `--incremental-streaming-output`."""
        self.break_after: int | None = None
        """Tokens after which a stream breaks off, once."""
        self.retract = 0
        """How many of the next answers say that their sequence was taken out of the cache once."""
        self.grammars = True
        """Whether it says that it takes structural tags."""
        self.tags: list[Any] = []
        """The structural tag of each request that has one."""
        self.write: Callable[[Any], list[int]] = lambda tag: []
        """The tokens to draw under a structural tag."""
        self.experts: tuple[int, int] | None = None
        """Layers and experts per token of what it reports on request; None: it was not started for it."""
        self.late_s = 0.0
        """Seconds from the arrival of a request for tokens to its place in the scheduler."""
        self.asleep: set[str] = set()
        self.session = False
        """Whether a weight update has begun and not ended."""
        self.running: dict[str, _Running] = {}
        self.most_running = 0
        self._go = asyncio.Event()
        self._go.set()
        self._server: asyncio.Server | None = None
        self.starts = 0
        self._open: set[asyncio.Task[None]] = set()
        self.host, self.port = "127.0.0.1", 0

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Listen on a free port; after `die`, on the same one again."""
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.starts += 1
        self.port = self._server.sockets[0].getsockname()[1]

    async def restart(self) -> None:
        """Die and start again, with the weights of a new process."""
        await self.die()
        self.version = "default"
        self.adapters.clear()
        await self.start()

    async def die(self) -> None:
        """Break every connection at once and stop listening; requests in progress are dropped."""
        server, self._server = self._server, None
        if server is not None:
            for listener in server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            for _ in range(3):  # a closed asyncio.Server leaks connections that it is about to hand over
                await asyncio.sleep(0)
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self.running.clear()
        self.version, self.session = "default", False
        self.adapters.clear()
        self._go.set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    # -- HTTP --------------------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next((int(v) for k, v in _headers(head) if k == "content-length"), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                status, answer = await self._handle(method, path, body)
                if isinstance(answer, AsyncGenerator):
                    await self._stream(writer, answer)
                    continue
                content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                kind = "text/plain" if isinstance(answer, str) else "application/json"
                size = len(content)
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n\r\n".encode()
                    + content
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _stream(self, writer: asyncio.StreamWriter, events: AsyncGenerator[object, None]) -> None:
        """Server-sent events in chunks; sampling ends if the client disconnects."""
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        async with contextlib.aclosing(events) as open_events:
            async for event in open_events:
                data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _handle(self, method: str, path: str, body: dict[str, object]) -> tuple[int, object]:
        self.log.append(path)
        path, _, query = path.partition("?")
        body = dict(parse_qsl(query)) | body
        if path in self.refuse:
            return self.refuse[path]
        name = path.strip("/").replace("/", "_").removeprefix("v1_")
        handler = getattr(self, f"_{method.lower()}_{name}", None)
        if handler is None:
            return 404, {"detail": "Not Found"}
        result: tuple[int, object] = await handler(body)
        return result

    # -- SGLang ------------------------------------------------------------------------------------------------

    async def _get_health(self, body: dict[str, object]) -> tuple[int, object]:
        sampling = self._go.is_set()  # it answers with the health of the scheduler, which samples a token for it
        return (200, "") if sampling and not self.sick else (503, "")

    async def _get_server_info(self, body: dict[str, object]) -> tuple[int, object]:
        info = {"max_req_input_len": self.max_context, "enable_deterministic_inference": True}
        experts = {"enable_return_routed_experts": self.experts is not None}
        return 200, info | experts | {"skip_tokenizer_init": not self.grammars}

    async def _get_model_info(self, body: dict[str, object]) -> tuple[int, object]:
        return 200, {"weight_version": self.version}

    async def _post_generate(self, body: dict[str, Any]) -> tuple[int, object]:
        ids, params = body["input_ids"], body["sampling_params"]
        if len(ids) >= self.max_context:
            return 400, {
                "error": {"message": f"Input length ({len(ids)} tokens) exceeds the maximum allowed length"}
            }
        adapter = str(body.get("lora_path") or "")
        if adapter and adapter not in self.adapters:
            return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}
        self.named.append(adapter)
        if "logprob_start_len" in body:
            names = [0 if token == self.vocabulary - 1 else token for token in ids]  # as SGLang 0.5.23 does
            scores = [[None if n == 0 else _logprob(ids[n]), name, None] for n, name in enumerate(names)]
            meta: dict[str, object] = {"input_token_logprobs": scores, "weight_version": self.version}
            if top := int(body.get("top_logprobs_num") or 0):
                meta["input_top_logprobs"] = [None, *(_alternatives(token, top) for token in ids[1:])]
            return 200, {"output_ids": [], "meta_info": meta}
        self.prompts.append(list(ids))
        self.sampled_with.append(params)
        most = min(params["max_new_tokens"], self.max_context - len(ids))
        request = _Running(list(ids), most, frozenset(params.get("stop_token_ids") or ()), adapter=adapter)
        request.experts = bool(body.get("return_routed_experts"))
        request.experts_from = int(body.get("routed_experts_start_len") or 0)
        if (tag := params.get("structural_tag")) is not None and (refused := self._obey(request, tag)):
            return (200, _aborted(*refused)) if body.get("stream") else refused
        rid = str(body.get("rid") or id(request))
        if body.get("stream"):
            return 200, self._events(request, rid, int(body.get("top_logprobs_num") or 0))
        with self._under_way(rid, request):
            kind = await self._draw(request)
        if self.retract:
            self.retract -= 1
            request.retractions += 1
        answer = {"output_ids": request.ids, "meta_info": self._meta(request, kind, rid)}
        return 200, answer if self.answer is None else self.answer(answer)

    def _obey(self, request: _Running, tag: str) -> tuple[int, dict[str, Any]] | None:
        """Draw under a structural tag; or how it is refused."""
        try:
            self.tags.append(json.loads(tag))
            request.script = self.write(self.tags[-1])
        except ValueError as e:
            return 400, {"error": {"message": f"Failed to compile the grammar: {e}"}}
        return None

    @contextlib.contextmanager
    def _under_way(self, rid: str, request: _Running) -> Iterator[None]:
        self.running[rid] = request
        self.most_running = max(self.most_running, len(self.running))
        try:
            yield
        finally:
            self.running.pop(rid, None)

    async def _events(self, request: _Running, rid: str, top: int) -> AsyncGenerator[object, None]:
        """What SGLang streams: everything so far, or what is new."""
        with self._under_way(rid, request):
            async for kind in self._drawing(request):
                meta = self._meta(request, kind or "", rid)
                if kind is None:
                    meta |= {"finish_reason": None, "weight_versions": None}
                if top:
                    meta["output_top_logprobs"] = [_alternatives(token, top) for token in request.ids]
                done = len(request.ids) - (kind is None) if self.incremental else 0
                meta |= {key: meta[key][done:] for key in meta.keys() & _PER_TOKEN}
                yield {"output_ids": request.ids[done:], "meta_info": meta}
        yield "[DONE]"

    async def _draw(self, request: _Running) -> str:
        return [kind async for kind in self._drawing(request)][-1] or ""

    async def _drawing(self, request: _Running) -> AsyncGenerator[str | None, None]:
        """None after each token, and at the end the reason."""
        while len(request.ids) < request.most:
            await self._go.wait()
            await asyncio.sleep(self.token_s)
            await self._go.wait()
            if request.aborted:
                yield "abort"
                return
            ids = request.prompt + request.ids
            token = (sum(ids) + len(ids)) % self.vocabulary
            if request.script is not None:
                token = request.script[len(request.ids)]
            request.ids.append(token)
            request.versions.append(self.version)
            yield None
            if len(request.ids) == self.break_after:
                self.break_after = None
                raise ConnectionError("broken off, as was asked for")
            if token in request.stops or (request.script and len(request.ids) == len(request.script)):
                yield "stop"
                return
        yield "length"

    def _meta(self, request: _Running, kind: str, rid: str) -> dict[str, Any]:
        spans: list[dict[str, object]] = []
        for place, version in enumerate(request.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"version": version, "start": place, "end": place + 1})
        return self._experts(request, kind) | {
            "id": rid,
            "finish_reason": {"type": kind},
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.ids),
            "cached_tokens": 0,
            "num_retractions": request.retractions,
            "weight_version": self.version,
            "weight_versions": spans,
            "output_token_logprobs": [[_drawn_logprob(request, token), token, None] for token in request.ids],
        }

    def expert(self, token: int, layer: int, place: int) -> int:
        """The expert that its present weights choose."""
        return (token + 7 * layer + place + 3 * len(self.weights)) % 64

    def _experts(self, request: _Running, kind: str) -> dict[str, Any]:
        """What SGLang reports at the end of a request: those of a context that was computed again, if it was."""
        if self.experts is None or not request.experts or kind not in ("stop", "length"):
            return {}
        layers, top_k = self.experts
        read = (request.prompt + request.ids)[request.experts_from : -1]
        experts = [self.expert(token, n, k) for token in read for n in range(layers) for k in range(top_k)]
        return {"routed_experts": base64.b64encode(array("i", experts).tobytes()).decode()}

    async def _post_abort_request(self, body: dict[str, object]) -> tuple[int, object]:
        for rid, request in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                request.aborted = True
        return 200, ""

    async def _post_pause_generation(self, body: dict[str, object]) -> tuple[int, object]:
        self._go.clear()
        if body.get("mode") == "retract":
            for request in self.running.values():
                request.retractions += 1
        return 200, {"status": "ok"}

    async def _post_continue_generation(self, body: dict[str, object]) -> tuple[int, object]:
        self._go.set()
        return 200, {"status": "ok"}

    async def _post_flush_cache(self, body: dict[str, object]) -> tuple[int, object]:
        return 200, "Cache flushed."

    async def _post_begin_weight_update(self, body: dict[str, object]) -> tuple[int, object]:
        if self.session:
            return 200, {"success": False, "message": "a weight-update session is already open"}
        self.session = True
        return 200, {"success": True, "message": "Success"}

    async def _post_end_weight_update(self, body: dict[str, object]) -> tuple[int, object]:
        if not self.session:
            return 200, {"success": False, "message": "no weight-update session is open"}
        self.session = False
        return 200, {"success": True, "message": "Success"}

    async def _take_weights(self, path: str, body: dict[str, Any]) -> tuple[int, object]:
        if self._go.is_set():
            return 400, {"success": False, "message": "this test server takes weights while it is paused only"}
        self.weights.append((path, body))
        self.version = body["weight_version"]
        return 200, {"success": True, "message": "Success"}

    async def _post_load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["lora_name"] in self.adapters:
            return 400, {"success": False, "error_message": "it is already loaded"}
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.weights.append(("/load_lora_adapter", body))
        return 200, {"success": True, "error_message": ""}

    async def _post_unload_lora_adapter(self, body: dict[str, object]) -> tuple[int, object]:
        name = body["lora_name"]
        if name not in self.adapters:
            return 400, {"success": False, "error_message": f"LoRA with name {name} does not exist"}
        while any(request.adapter == name for request in self.running.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        del self.adapters[name]
        return 200, {"success": True, "error_message": ""}

    async def _post_update_weights_from_disk(self, body: dict[str, object]) -> tuple[int, object]:
        return await self._take_weights("/update_weights_from_disk", body)

    async def _post_update_weights_from_tensor(self, body: dict[str, object]) -> tuple[int, object]:
        return await self._take_weights("/update_weights_from_tensor", body)

    async def _post_release_memory_occupation(self, body: dict[str, Any]) -> tuple[int, object]:
        self.asleep |= set(body.get("tags") or ("weights", "kv_cache"))
        return 200, None

    async def _post_resume_memory_occupation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.asleep -= set(body.get("tags") or ("weights", "kv_cache"))
        return 200, None


class LoopbackVLLM(LoopbackServer):
    """The same, speaking the part of vLLM's wire format that the engine uses."""

    extended = False
    """Whether its workers have the calls of `agentrl.engine.servers.inside`."""

    async def _get_health(self, body: dict[str, object]) -> tuple[int, object]:
        return (503, "") if self.sick else (200, "")

    async def _get_metrics(self, body: dict[str, object]) -> tuple[int, object]:
        return 200, f"python_info 1.0\nprocess_start_time_seconds {self.starts}\n"

    async def _get_models(self, body: dict[str, object]) -> tuple[int, object]:
        return 200, {"data": [{"id": "policy", "max_model_len": self.max_context}]}

    async def _post_completions(self, body: dict[str, Any]) -> tuple[int, object]:
        ids = body["prompt"]
        model = body["model"]
        if (model != "policy" and model not in self.adapters) or len(ids) + body["max_tokens"] > self.max_context:
            return 400, {"error": {"message": "no such model, or the maximum context length is exceeded"}}
        self.named.append("" if model == "policy" else model)
        if "prompt_logprobs" in body:
            top = int(body["prompt_logprobs"])
            table = [None if n == 0 else _prompt_entry(t, top) for n, t in enumerate(ids)]
            return 200, {"choices": [{"prompt_logprobs": table}]}
        self.prompts.append(list(ids))
        self.sampled_with.append(body)
        request = _Running(
            list(ids), body["max_tokens"], frozenset(body["stop_token_ids"]), adapter=self.named[-1]
        )
        if (held := body.get("structured_outputs")) is not None and (
            refused := self._obey(request, held["structural_tag"])
        ):
            return refused
        await asyncio.sleep(self.late_s)
        if body.get("stream"):
            assert body["return_tokens_as_token_ids"], "vLLM names tokens by their text otherwise"
            return 200, self._pieces(request, body["request_id"], int(body["logprobs"]), len(ids))
        with self._under_way(body["request_id"], request):
            kind = await self._draw(request)
        choice = {
            "token_ids": request.ids,
            "finish_reason": kind,
            "logprobs": {"token_logprobs": [_drawn_logprob(request, token) for token in request.ids]},
        }
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
        return 200, answer if self.answer is None else self.answer(answer)

    async def _pieces(self, request: _Running, rid: str, top: int, prompt: int) -> AsyncGenerator[object, None]:
        """What vLLM streams: one token after another, the reason with an empty piece, and the usage."""
        with self._under_way(rid, request):
            async for kind in self._drawing(request):
                ids = request.ids[-1:] if kind is None else []
                tops = [{f"token_id:{id}": value for value, id, _ in _alternatives(token, top)} for token in ids]
                for token, names in zip(ids, tops, strict=True):
                    names[f"token_id:{token}"] = _drawn_logprob(request, token)
                logprobs = {
                    "token_logprobs": [_drawn_logprob(request, token) for token in ids],
                    "top_logprobs": tops,
                }
                yield {"choices": [{"token_ids": ids, "logprobs": logprobs, "finish_reason": kind}], "usage": None}
        yield {"choices": [], "usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": 2}}}
        yield "[DONE]"

    async def _post_pause(self, body: dict[str, object]) -> tuple[int, object]:
        for request in self.running.values():
            request.aborted = body.get("mode") == "abort"
        while self.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._go.clear()
        return 200, {"status": "paused"}

    async def _post_resume(self, body: dict[str, object]) -> tuple[int, object]:
        self._go.set()
        return 200, {"status": "resumed"}

    async def _post_collective_rpc(self, body: dict[str, object]) -> tuple[int, object]:
        if str(body["method"]).startswith("agentrl_") and not self.extended:
            return 500, {"error": {"message": f"Method {body['method']!r} is not implemented."}}
        if body["method"] == "agentrl_ready":
            return 200, {"results": ["True"]}
        return await self._take_weights("/collective_rpc", body | {"weight_version": self.version})

    async def _get_weight_info(self, body: dict[str, object]) -> tuple[int, object]:
        return 200, {"weight_version": self.version}

    async def _post_update_weight_version(self, body: dict[str, Any]) -> tuple[int, object]:
        self.version = str(body["new_version"])
        return 200, {"success": True, "new_version": self.version}

    async def _post_sleep(self, body: dict[str, object]) -> tuple[int, object]:
        self.asleep = {"weights", "kv_cache"}
        return 200, None

    async def _post_wake_up(self, body: dict[str, object]) -> tuple[int, object]:
        self.asleep -= {body["tags"]}
        return 200, None


def _headers(head: str) -> list[tuple[str, str]]:
    found = []
    for line in head.split("\r\n")[1:]:
        with contextlib.suppress(ValueError):
            name, value = line.split(":", 1)
            found.append((name.strip().lower(), value.strip()))
    return found


async def _aborted(status: int, error: dict[str, Any]) -> AsyncGenerator[object, None]:
    """How SGLang refuses a request once it streams the answer."""
    why = {"type": "abort", "message": error["error"]["message"], "status_code": status}
    meta = {"finish_reason": why, "completion_tokens": 1, "weight_version": "0", "output_token_logprobs": []}
    yield {"output_ids": [1], "meta_info": meta}
    yield "[DONE]"


def _drawn_logprob(request: _Running, token: int) -> float:
    return _logprob(token) if request.script is None else 0.0


def _logprob(token: int) -> float:
    return -1.0 - token / 100


def _prompt_entry(token: int, top: int) -> dict[str, Any]:
    """The likeliest tokens at a place, and the one that is there."""
    found = {str(id): {"logprob": value} for value, id, _ in _alternatives(token, top)}
    return found | {str(token): {"logprob": _logprob(token)}}


def _alternatives(token: int, count: int) -> list[list[Any]]:
    """[logprob, id, text] of tokens that are likelier than the one that was drawn."""
    return [[-0.1 * (n + 1), (token + n + 1) % 97, None] for n in range(count)]
