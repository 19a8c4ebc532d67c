"""vLLM's server as an `InferenceServer`; tested with vLLM 0.32.0 on a CPU, compared with the sources of 0.33.0.

It needs VLLM_SERVER_DEV_MODE=1 (pausing and loading weights), `--logprobs-mode processed_logprobs` (the logprobs
of the tokens as sampled, at the temperature) and `--generation-config vllm` (no model-specific defaults); servers
started by the run have them.

Source: docs.vllm.ai, "OpenAI-compatible server", "Async reinforcement learning", "Sleep mode".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from agentrl.config.engine import EngineConfig, Sync
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import TokenLogprob
from agentrl.engine.servers.adapters import Adapter, AdapterStand, adapted_layers
from agentrl.engine.servers.client import (
    NO_PENALTIES,
    CommandLine,
    Description,
    GroupPlace,
    Listener,
    Scored,
    ServerAnswer,
    ServerKind,
)
from agentrl.engine.servers.http import HttpServer, ServerLost, ServerRefused, ServerRestarted, WeightLabels
from agentrl.engine.servers.inside import LOADER_FOLDER, WORKER
from agentrl.engine.servers.reported_routes import RoutesAsked
from agentrl.engine.servers.streams import VLLMStream
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks supported by vLLM's kernels; smaller adapters are padded."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes supported by vLLM's attention on a CPU; with others its engine dies at the first request."""
_CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in the engine's process: half the time to start
    "OMP_NUM_THREADS": "1",
}
_CPU_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "2"}
"""GiB of host memory for the cache, which would otherwise take most of it."""
_TAGS = {"weights": "weights", "cache": "kv_cache"}
_LATE_S = 0.5
"""How long answers to aborted requests may take after a pause; those that come later are asked for again."""
_SURE_S = 2.0
"""A server that answered less than this long ago is the same process: it takes longer to start another."""
_NO_GROUP = "vLLM does not receive weights by broadcast: use another engine.sync"


class VLLMServer:
    """One vLLM server. Weights reach it through a folder, or in requests; adapters through a folder.

    vLLM does not report which weights sampled a token. Therefore no request spans two versions: an update ends
    running requests with their tokens so far, and the engine requests the rest with the new weights. A request
    that reached the server after it was paused would be sampled with the new weights; it is cut off before the
    server continues, and requested again. A server that was started again has other weights: it is recognized by
    the start time of its process, which it is asked for after a silence. vLLM keeps a name for its weights, which
    every update changes: after each answer, it shows whether another run has sent weights.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0, sync: Sync = "disk") -> None:
        """Connect lazily; `sync` is the way that weights are sent. See `SGLangServer`."""
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.url = self._http.url
        self._model = ""
        self._version = 0
        self._sync = sync
        self._collected = False
        self._extended: bool | None = None
        self._adapters = AdapterStand() if sync == "lora" else None
        self._go = asyncio.Event()
        self._go.set()
        self._in_flight: set[anyio.CancelScope] = set()
        self._idle = asyncio.Event()
        self._started: str | None = None
        self._labels = WeightLabels(self.url)
        self._sent = sync == "lora"
        """Whether another run's weights would show: we set the label, or with adapters, nobody should."""
        self._heard = -math.inf
        self._recognizing = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._asked = -math.inf

    async def describe(self) -> Description:
        """Return the context length of the server's first model."""
        answer = await self._http.get("/v1/models", timeout_s=30.0)
        try:
            model = answer["data"][0]
            self._model = str(model["id"])
            return Description(int(model["max_model_len"]), seeds=True)
        except (TypeError, KeyError, IndexError, ValueError) as e:
            raise EngineError(f"{self.url}/v1/models does not name a model with max_model_len: {e!r}") from e

    async def check(self, *, timeout_s: float) -> None:
        """Return if the server is up."""
        await self._http.get("/health", timeout_s=timeout_s)

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        request: str,
        listener: Listener | None = None,
        structure: str | None = None,
        routes: RoutesAsked | None = None,
    ) -> ServerAnswer:
        """Return one completion; all its tokens are sampled with the same weights."""
        assert routes is None, "agentrl does not ask vLLM for routes"
        await self._go.wait()
        body = {
            "prompt": list(ids),
            "request_id": request,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            **NO_PENALTIES,
            "stop_token_ids": sorted(sampling.stop_ids),
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**63
        if structure is not None:
            body["structured_outputs"] = {"structural_tag": structure}
        told: list[TokenLogprob] = []
        answer = await self._unless_cut(self._complete(body, listener and _noting(listener, told)))
        if answer is None:
            return ServerAnswer.partial(told)
        choice, usage, version = answer
        try:
            tokens = tuple(index(token) for token in choice["token_ids"])
            found = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            logprobs = tuple(float(value) for value in found)
            kind = choice["finish_reason"]
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as e:
            raise EngineError(f"{self.url}: the answer is not a completion ({e!r}): {choice!r:.300}") from e
        if kind not in ("stop", "length", "abort"):
            raise EngineError(f"{self.url}: unknown finish reason {kind!r}")
        if len(logprobs) != len(tokens):
            raise EngineError(f"{self.url}: {len(tokens)} tokens and {len(logprobs)} log-probabilities")
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(f"{self.url}: a log-probability is not finite: weights or cache are damaged")
        return ServerAnswer(tokens, logprobs, (version,) * len(tokens), kind, cached)

    async def abort(self, request: str) -> None:
        """Do nothing: vLLM ends a request whose connection is closed."""

    async def score(self, ids: Sequence[int], *, top: int = 0) -> list[Scored]:
        """Return the logprobs of given tokens."""
        body = {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
        while True:
            await self._go.wait()
            answer = await self._unless_cut(self._complete(body))
            if answer is not None and answer[0].get("finish_reason") != "abort":
                break
        choice, _, _ = answer
        try:
            entries = choice["prompt_logprobs"]
            found = [_scored(token, entry, top) for token, entry in zip(ids[1:], entries[1:], strict=True)]
        except (TypeError, KeyError, IndexError, ValueError) as e:
            raise EngineError(f"{self.url}: no log-probabilities of the given tokens: {e!r}") from e
        if not all(math.isfinite(one.logprob) for one in found):
            raise EngineError(f"{self.url}: log-probabilities of given tokens are not finite")
        return found

    @asynccontextmanager
    async def updating(self, *, by_tensor: bool) -> AsyncIterator[None]:
        """End running requests, hold back new ones, flush the cache, let weights be loaded, continue."""
        await self._recognize()
        await self._refuse_others()
        self._go.clear()
        await self._control("/pause?mode=abort&clear_cache=true")
        paused = time.monotonic()
        self._collected = False
        yield
        if self._collected:
            await self._rpc("agentrl_load", keep="yes" if self._sync == "delta" else "no")
        with contextlib.suppress(ServerRefused):  # earlier versions keep no name for weights
            await self._control("/update_weight_version", {"new_version": self._labels.name(self._version)})
            self._sent = True
        await self._cut_the_late(paused)
        await self._control("/resume")
        self._go.set()

    async def _cut_the_late(self, paused: float) -> None:
        """Cut requests that the pause did not end: they reached the server after it."""
        while self._in_flight and (left := paused + _LATE_S - time.monotonic()) > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), left)
        for scope in self._in_flight:
            scope.cancel()

    async def _unless_cut(self, request: Awaitable[_T]) -> _T | None:
        """Return the result of a request to the server; None if an update cut it."""
        with anyio.CancelScope() as scope:
            self._in_flight.add(scope)
            try:
                return await request
            finally:
                self._in_flight.discard(scope)
                if not self._in_flight:
                    self._idle.set()
        return None

    async def unpause(self) -> None:
        """End a pause, during which requests wait."""
        await self._http.post("/resume", timeout_s=10.0)

    async def load_folder(self, folder: Path, version: int) -> None:
        """Load the weights in a folder that the server can read."""
        if await self._has_calls():
            await self._rpc("agentrl_load_folder", path=str(folder))
        else:
            await self._rpc("reload_weights", weights_path=str(folder))
        self._version = version

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load it in addition to the others, end running requests, use it in all requests from now on.

        The cache is kept: vLLM keeps the state of each adapter separate.
        """
        assert self._adapters is not None, "the server was not opened for adapters"
        await self._recognize()
        adapter = Adapter.of(version)
        try:
            await self._control("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(folder)})
        except ServerLost as e:  # it answers 500 to an adapter of layers that it cannot adapt
            if e.status == 500:
                await self.check(timeout_s=30.0)
                raise ServerRefused(str(e)) from e
            raise
        self._go.clear()
        await self._control("/pause?mode=abort&clear_cache=false")
        self._adapters.change(adapter)
        await self._control("/resume")
        self._go.set()
        for name in await self._adapters.unused():
            await self._control("/v1/unload_lora_adapter", {"lora_name": name})

    async def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Send some of the weights, by value; they are loaded when `updating` ends."""
        await self._collect("agentrl_take", tensors, version)

    async def load_changes(self, changes: Mapping[str, Tensor], version: int) -> None:
        """Send changes of weights; the workers make them to their copy, which is loaded when `updating` ends."""
        await self._collect("agentrl_change", changes, version)

    async def _collect(self, method: str, tensors: Mapping[str, Tensor], version: int) -> None:
        await self._has_calls()
        if tensors:
            await self._rpc(method, payload=await asyncio.to_thread(_serialized, tensors))
            self._collected = True
        self._version = version

    async def join(self, place: GroupPlace) -> None:
        """Not supported."""
        raise ServerRefused(_NO_GROUP)

    async def receive(self, tensors: Mapping[str, Tensor], group: str, version: int) -> None:
        """Not supported."""
        raise ServerRefused(_NO_GROUP)

    async def leave(self, group: str) -> None:
        """Do nothing: there is no group."""

    async def sleep(self) -> None:
        """Free the GPU memory of weights and cache; the server needs `--enable-sleep-mode` for it."""
        await self._control("/sleep?level=2")

    async def wake(self, what: Literal["weights", "cache"]) -> None:
        """Allocate the memory again."""
        await self._control(f"/wake_up?tags={_TAGS[what]}")

    async def close(self) -> None:
        """Unload the adapters, if the server is still there, and close the connections."""
        for name in [] if self._adapters is None else self._adapters.names():
            with contextlib.suppress(EngineError):
                await self._http.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=5.0)
        await self._http.close()

    async def _complete(self, body: dict[str, Any], listener: Listener | None = None) -> tuple[Any, Any, int]:
        """Return the completion's only choice, the usage, and the version of the weights that sampled it."""
        if not self._model:
            await self.describe()
        await self._recognize()
        version = self._version
        if self._adapters is None:
            answer = await self._answer({"model": self._model, **body}, listener, version)
        else:
            with self._adapters.use(uuid.uuid4().hex) as adapter:
                version = adapter.version
                answer = await self._answer({"model": adapter.name or self._model, **body}, listener, version)
        self._heard = time.monotonic()
        await self._refuse_others()
        try:
            return answer["choices"][0], answer.get("usage") or {}, version
        except (TypeError, KeyError, IndexError, AttributeError) as e:
            raise EngineError(f"{self.url}/v1/completions: an answer without a choice: {answer!r:.300}") from e

    async def _answer(self, body: dict[str, Any], listener: Listener | None, version: int) -> Any:
        """Return the whole answer, reporting it incrementally if there is a listener."""
        if listener is None:
            return await self._http.post("/v1/completions", body)
        stream = VLLMStream(f"{self.url}/v1/completions", version, listener)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"logprobs": max(1, listener.top), "return_tokens_as_token_ids": True}
        async with contextlib.aclosing(self._http.events("/v1/completions", body)) as events:
            async for event in events:
                stream.take(event)
        return stream.whole()

    async def _recognize(self) -> None:
        """Check that the server is still the process that was sent the weights: it does not report their version.

        Raises:
            ServerRestarted: it has been started again.
        """
        async with self._recognizing:
            if time.monotonic() - self._heard < _SURE_S:
                return
            try:
                metrics = str(await self._http.get("/metrics", timeout_s=30.0))
            except (ServerLost, ServerRefused) as e:
                if e.status is None:
                    raise
                metrics = ""  # it has none, or is behind something that does not pass them on
            found = re.search(r"^process_start_time_seconds (\S+)", metrics, re.MULTILINE)
            if found is not None and self._started not in (None, found[1]):
                raise ServerRestarted(f"{self.url} has been started again, without the weights that it was sent")
            self._started = found[1] if found is not None else self._started
            self._heard = time.monotonic()

    async def _refuse_others(self) -> None:
        """Raise ServerTaken if another run has sent weights since ours.

        vLLM answers between two of its steps, so all who wait in the meantime share the next question. It does not
        answer while it loads weights; an update asks before that.
        """
        came = time.monotonic()
        async with self._asking:
            if not self._sent or self._asked > came or not self._go.is_set():
                return
            asked = time.monotonic()
            try:
                info = await self._http.get("/weight_info", timeout_s=30.0)
            except ServerRefused:
                self._sent = False  # it keeps no name for them, or is behind something that does not pass it on
            except ServerLost as e:
                if e.status is None:
                    raise
            else:
                self._labels.refuse_others(info.get("weight_version") if isinstance(info, Mapping) else None)
                self._asked = asked

    async def _has_calls(self) -> bool:
        """Return whether the server was started with our calls of its workers.

        Raises:
            ServerRefused: it was not, and weights are sent by them.
        """
        if self._extended is None:
            try:
                await self._rpc("agentrl_ready")
                self._extended = True
            except EngineError as e:
                if self._sync in ("tensor", "delta"):
                    raise ServerRefused(
                        f"{self.url} was not started for engine.sync {self._sync}: start it with "
                        f"VLLM_SERVER_DEV_MODE=1, --worker-extension-cls {WORKER} and {LOADER_FOLDER} on "
                        "PYTHONPATH, or use engine.sync disk"
                    ) from e
                self._extended = False
        return self._extended

    async def _rpc(self, method: str, **arguments: str) -> None:
        await self._control("/collective_rpc", {"method": method, "kwargs": arguments})

    async def _control(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        answer = await self._http.post(path, body)
        if isinstance(answer, Mapping) and answer.get("error"):
            raise ServerRefused(f"{self.url}{path}: {answer['error']!s:.300}", status=200)


def _noting(listener: Listener, told: list[TokenLogprob]) -> Listener:
    """The same listener, which also collects its tokens in a list."""

    def tell(drawn: Sequence[TokenLogprob]) -> None:
        told.extend(drawn)
        listener.tell(drawn)

    return Listener(tell, listener.top)


def _serialized(tensors: Mapping[str, Tensor]) -> str:
    """Return tensors in the format of safetensors, in base64."""
    from safetensors.torch import save

    return base64.b64encode(save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})).decode()


def _scored(token: int, entry: Mapping[str, Any], top: int) -> Scored:
    """Convert a prompt token: `entry` has its logprob and those of the most likely tokens, by id."""
    pairs = sorted(((int(id), float(one["logprob"])) for id, one in entry.items()), key=lambda pair: -pair[1])
    return Scored(float(entry[str(token)]["logprob"]), tuple(pairs[:top]))


# -- how a run starts it ----------------------------------------------------------------------------------------


def _command(config: EngineConfig, model: Path, gpu: int | None) -> CommandLine:
    server, share = config.server, config.server.gpu_memory_utilization
    # fmt: off
    line = [
        "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy",
        "--host", "127.0.0.1", "--dtype", config.resolved_dtype,
        "--tensor-parallel-size", str(server.tensor_parallel), "--max-num-seqs", str(config.max_slots),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--enable-prompt-tokens-details", "--worker-extension-cls", WORKER,
    ]
    # fmt: on
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": LOADER_FOLDER}
    if gpu is None:
        _check_heads(model)
        # On a CPU, vLLM 0.32 dies of a prompt that it takes in pieces if the request has a seed.
        line += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment |= _CPU_CACHE if share is None else {}
        if server.tensor_parallel == 1:
            line += ["--distributed-executor-backend", "uni"]
            environment |= _CPU_ENVIRONMENT
    line += ["--gpu-memory-utilization", str(share)] if share is not None else []
    line += ["--enable-sleep-mode"] if server.sleep else []
    if gpu is not None and server.launch == "process":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu + n) for n in range(server.tensor_parallel))
    return line, environment


def _check_heads(model: Path) -> None:
    try:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config") or config
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # another error names the file
    if size not in CPU_HEADS:
        raise ConfigError(
            f"{model} has attention heads of {size} numbers, and vLLM on a CPU supports {CPU_HEADS}: use another "
            "model (`model.tiny`: hidden divided by heads), or engine.kind local or sglang"
        )


def _adapters(config: EngineConfig, lora: LoRAConfig, model: Path, gpu: int | None) -> CommandLine:
    """Reserve room for the current adapter and the next one.

    Unless layers are named, vLLM also prepares the output layer, with which it cannot score a prompt while it
    samples (its issue 16668), and the experts, which get no adapters on a CPU.
    """
    rank = next((rank for rank in RANKS if rank >= lora.rank), None)
    if rank is None:
        raise ConfigError(
            f"learner.lora.rank is {lora.rank}, and vLLM serves ranks up to {RANKS[-1]}: lower it, or use "
            "engine.sync disk, which sends merged weights"
        )
    targets = adapted_layers(lora, model)
    if "lm_head" in targets:
        raise ConfigError(
            f"learner.lora.targets {lora.targets}: vLLM ignores an adapter of lm_head when it scores a prompt, as "
            "the check after each update does: remove lm_head, or use another engine.sync, which sends merged "
            "weights"
        )
    line = ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    line += ["--lora-target-modules", *targets] if targets else []
    return line, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def _connect(url: str, config: EngineConfig) -> VLLMServer:
    return VLLMServer(url, timeout_s=config.server.request_timeout_s, sync=config.resolved_sync)


VLLM = ServerKind(connect=_connect, command=_command, adapters=_adapters, memory_share=0.9)
