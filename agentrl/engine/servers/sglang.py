"""SGLang's server as an `InferenceServer`; the wire format is that of SGLang 0.5.18 to 0.5.23.

Source: docs.sglang.io, "SGLang native APIs" and "SGLang for RL systems".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import math
import pickle
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.config.engine import EngineConfig
from agentrl.config.run import LoRAConfig
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
from agentrl.engine.servers.inside import LOADER, LOADER_FOLDER
from agentrl.engine.servers.reported_routes import RoutesAsked, read_routes
from agentrl.engine.servers.streams import ReadVersion, SGLangStream, best_of
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

ADAPTED = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "qkvr", "wo_ud", "q_a_proj", "q_b_proj", "kv_b_proj"),
    *("kv_a_proj_with_mqa", "wq_b", "wk", "weights_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    "lm_head",
}
"""Linear layers that SGLang 0.5.23 starts with adapters for."""
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Ten times faster than two threads, which wait for each other at every small operation.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_CPU_TOKENS = 262_144
"""Size limit of SGLang's cache in host memory, which would otherwise take most of it."""
_CPU_SHARE = 0.3
"""Share of host memory for weights and cache. While it starts, SGLang counts memory that other programs take as
its own, and gives up if that is more than this share."""
_TAGS = {"weights": "weights", "cache": "kv_cache"}


class SGLangServer:
    """One SGLang server. Sessions need no special handling: its radix cache finds common prefixes."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        tensor_parallel: int = 1,
        adapters: bool = False,
        changes: bool = False,
    ) -> None:
        """Connect lazily.

        Args:
            url: `http://host:port`.
            timeout_s: time limit of a completion, and of each call of a weight update.
            tensor_parallel: number of GPUs that the server's model is split over.
            adapters: the policy is the server's model, which never changes, with an adapter that does.
            changes: only changed weights are sent, which the server must have been started for.
        """
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.url = self._http.url
        self._tensor_parallel = tensor_parallel
        self._adapters = AdapterStand() if adapters else None
        self._changes = changes
        self._sent = False
        self._labels = WeightLabels(self.url)

    async def describe(self) -> Description:
        """Return context length and capabilities, from `/server_info`."""
        info = await self._http.get("/server_info", timeout_s=30.0)
        try:
            above = int(info["max_req_input_len"])  # the least number of tokens that is refused
            seeds = bool(info.get("enable_deterministic_inference"))
        except (TypeError, KeyError, ValueError) as e:
            raise EngineError(f"{self.url}/server_info does not say max_req_input_len: {e}") from e
        if self._changes and LOADER not in (info.get("custom_weight_loader") or ()):
            raise EngineError(
                f"{self.url} was not started for engine.sync delta: start it with --custom-weight-loader {LOADER} "
                f"and with {LOADER_FOLDER} on PYTHONPATH, or use another engine.sync"
            )
        silent = info.get("skip_tokenizer_init") or info.get("grammar_backend") == "none"
        routes = bool(info.get("enable_return_routed_experts"))
        return Description(above, seeds, grammars=not silent, routes=routes)

    async def check(self, *, timeout_s: float) -> None:
        """Return if the server can sample a token, or is sampling."""
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
        """Return one completion with the logprob and weights version of each token."""
        body = {
            "input_ids": list(ids),
            "sampling_params": _sampling_params(sampling) | ({"structural_tag": structure} if structure else {}),
            "return_logprob": True,
            "rid": request,
            **({"return_routed_experts": True, "routed_experts_start_len": routes.start} if routes else {}),
        }
        if self._adapters is None:
            read: ReadVersion = partial(self._labels.version, sent=self._sent)
            answer = await self._generate(body, listener, read)
            return self._with_routes(_read_answer(answer, self.url, read), answer, ids, routes)
        with self._adapters.use(request) as adapter, _restarted_without(adapter):
            read = self._reader(adapter)
            answer = await self._generate(body | _named(adapter), listener, read)
        return self._with_routes(_read_answer(answer, self.url, read), answer, ids, routes)

    def _with_routes(
        self, read: ServerAnswer, answer: Any, ids: Sequence[int], routes: RoutesAsked | None
    ) -> ServerAnswer:
        text = answer["meta_info"].get("routed_experts")
        if routes is None or (text is None and read.finish == "abort"):  # broken off before it had any
            return read
        length = len(ids) + len(read.ids)
        return replace(read, routes=read_routes(text, routes, length, f"{self.url}/generate"))

    def _reader(self, adapter: Adapter) -> ReadVersion:
        """The version of an adapter that samples, whatever the label of the model below it is."""

        def read(label: object) -> int:
            self._labels.refuse_others(label)
            return adapter.version

        return read

    async def _generate(self, body: dict[str, Any], listener: Listener | None, read: ReadVersion) -> Any:
        """Return the whole answer, reporting it incrementally if there is a listener."""
        if listener is None:
            return await self._http.post("/generate", body)
        stream = SGLangStream(f"{self.url}/generate", read, listener)
        body |= {"stream": True} | ({"top_logprobs_num": listener.top} if listener.top else {})
        async with contextlib.aclosing(self._http.events("/generate", body)) as events:
            async for event in events:
                stream.take(event)
        return stream.whole()

    async def abort(self, request: str) -> None:
        """Abort a request."""
        await self._http.post("/abort_request", {"rid": request}, timeout_s=10.0)

    async def score(self, ids: Sequence[int], *, top: int = 0) -> list[Scored]:
        """Return the logprobs of given tokens."""
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        sent = self._sent
        if self._adapters is None:
            answer = await self._http.post("/generate", body)
        else:
            with self._adapters.use(uuid.uuid4().hex) as adapter, _restarted_without(adapter):
                answer = await self._http.post("/generate", body | _named(adapter))
        try:
            if (label := answer["meta_info"].get("weight_version")) is not None:
                if sent:
                    self._labels.version(label, sent=True)
                self._labels.refuse_others(label)
            entries = answer["meta_info"]["input_token_logprobs"]
            tops = answer["meta_info"]["input_top_logprobs"] if top else ()
            found = [Scored(float(entries[n][0]), best_of(tops, n, top)) for n in range(1, len(entries))]
            named = [int(entry[1]) for entry in entries]
        except (TypeError, KeyError, IndexError, ValueError, AttributeError) as e:
            raise EngineError(f"{self.url}/generate: no log-probabilities of the given tokens: {e!r}") from e
        last = max(ids)  # SGLang 0.5.23 calls the last id of the vocabulary 0
        if len(named) != len(ids) or any(
            one != id and (one, id) != (0, last) for one, id in zip(named, ids, strict=False)
        ):
            raise EngineError(
                f"{self.url}/generate: log-probabilities of {len(named)} tokens, {len(ids)} were given"
            )
        if not all(math.isfinite(one.logprob) for one in found):
            raise EngineError(f"{self.url}/generate: log-probabilities of given tokens are not finite")
        return found

    @asynccontextmanager
    async def updating(self, *, by_tensor: bool) -> AsyncIterator[None]:
        """Retract running requests, let weights be loaded, flush the cache, continue.

        Requests must be retracted before the cache can be flushed; a cache that survived would mix keys of the old
        weights with queries of the new ones.
        """
        if self._sent:
            try:
                info = await self._http.get("/model_info", timeout_s=30.0)
            except (ServerLost, ServerRefused) as e:  # one that fails only in this call, or a version without it
                if e.status is None:
                    raise
            else:
                self._labels.refuse_others(info.get("weight_version") if isinstance(info, Mapping) else None)
        await self._control("/pause_generation", {"mode": "retract"})
        session = by_tensor and await self._begin()
        try:
            yield
        finally:
            if session:  # a session left open would block the next
                await self._control("/end_weight_update", {})
        await self._control("/flush_cache", None)
        await self._control("/continue_generation", {})

    async def _begin(self) -> bool:
        """Use a session: from 0.5.21 on, tensors require one; earlier versions have none and answer 404."""
        try:
            await self._control("/begin_weight_update", {})
        except ServerRefused as e:
            if e.status == 404:
                return False
            await self._control("/end_weight_update", {})  # left open by a run that was killed during its update
            await self._control("/begin_weight_update", {})
        return True

    async def unpause(self) -> None:
        """End a pause, during which health checks fail."""
        await self._http.post("/continue_generation", {}, timeout_s=10.0)

    async def load_folder(self, folder: Path, version: int) -> None:
        """Load the weights in a folder that the server can read."""
        self._sent = True
        await self._control(
            "/update_weights_from_disk",
            {"model_path": str(folder), "weight_version": self._labels.name(version), "flush_cache": False},
        )

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Load it in addition to the others, use it in all requests from now on, end those that use an older one.

        The cache need not be flushed: SGLang keeps the state of each adapter separate.
        """
        assert self._adapters is not None, "the server was not opened for adapters"
        adapter = Adapter.of(version)
        await self._control("/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(folder)})
        await asyncio.gather(*map(self.abort, self._adapters.change(adapter)))
        for name in await self._adapters.unused():
            with contextlib.suppress(ServerRefused):  # it has been started again, without them
                await self._control("/unload_lora_adapter", {"lora_name": name})

    async def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load some of the weights: those on a GPU by handle (same GPU, no copy through the host), others by
        value."""
        await self._load(tensors, version, {})

    async def load_changes(self, changes: Mapping[str, Tensor], version: int) -> None:
        """Change some of the weights, by a loader that the server imports."""
        await self._load(changes, version, {"load_format": LOADER})

    async def _load(self, tensors: Mapping[str, Tensor], version: int, how: Mapping[str, str]) -> None:
        payload = _serialized(tensors)
        self._sent = True
        await self._control(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [payload] * self._tensor_parallel,
                "weight_version": self._labels.name(version),
                "flush_cache": False,
                **how,
            },
        )

    async def join(self, place: GroupPlace) -> None:
        """Join the process group; every GPU of the server is a rank."""
        await self._control(
            "/init_weights_update_group",
            {
                "master_address": place.host,
                "master_port": place.port,
                "rank_offset": place.first_rank,
                "world_size": place.world_size,
                "group_name": place.name,
                "backend": place.backend,
            },
        )

    async def receive(self, tensors: Mapping[str, Tensor], group: str, version: int) -> None:
        """Receive these tensors, broadcast in this order."""
        self._sent = True
        await self._control(
            "/update_weights_from_distributed",
            {
                "names": list(tensors),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
                "shapes": [list(tensor.shape) for tensor in tensors.values()],
                "group_name": group,
                "weight_version": self._labels.name(version),
                "flush_cache": False,
            },
        )

    async def leave(self, group: str) -> None:
        """Leave the process group."""
        await self._control("/destroy_weights_update_group", {"group_name": group})

    async def sleep(self) -> None:
        """Free the GPU memory of weights and cache; the server needs `--enable-memory-saver` for it."""
        await self._control("/release_memory_occupation", {})

    async def wake(self, what: Literal["weights", "cache"]) -> None:
        """Allocate the memory again."""
        await self._control("/resume_memory_occupation", {"tags": [_TAGS[what]]})

    async def close(self) -> None:
        """Unload the adapters, if the server is still there, and close the connections."""
        for name in [] if self._adapters is None else self._adapters.names():
            with contextlib.suppress(EngineError):
                await self._http.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=5.0)
        await self._http.close()

    async def _control(self, path: str, body: Mapping[str, Any] | None) -> Any:
        """Make a call that answers `success`; some answer 200 with success false."""
        answer = await self._http.post(path, body)
        if isinstance(answer, Mapping) and (answer.get("success") is False or answer.get("error")):
            raise ServerRefused(f"{self.url}{path}: {answer.get('error') or answer.get('message')}", status=200)
        return answer


@contextlib.contextmanager
def _restarted_without(adapter: Adapter) -> Iterator[None]:
    """Raise ServerRestarted where the server does not know an adapter that it has loaded."""
    try:
        yield
    except ServerRefused as e:
        if adapter.name and adapter.name in str(e):
            raise ServerRestarted(str(e)) from e
        raise


def _named(adapter: Adapter) -> dict[str, str]:
    return {"lora_path": adapter.name} if adapter.name else {}


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        **NO_PENALTIES,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sorted(sampling.stop_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % 2**31
    return params


def _read_answer(answer: Any, url: str, read: ReadVersion) -> ServerAnswer:
    """Check everything that training relies on, so that no error becomes a gradient."""
    where = f"{url}/generate"
    try:
        ids = tuple(index(token) for token in answer["output_ids"])
        meta = answer["meta_info"]
        entries = meta["output_token_logprobs"]
        logprobs = tuple(float(entry[0]) for entry in entries)
        named = tuple(index(entry[1]) for entry in entries)
        kind = meta["finish_reason"]["type"]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
        cached, retractions = int(meta.get("cached_tokens") or 0), int(meta.get("num_retractions") or 0)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError) as e:
        raise EngineError(f"{where}: the answer is not a completion ({e!r}): {str(answer)[:300]}") from e
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"{where}: unknown finish reason {kind!r}")
    if named != ids:
        raise EngineError(
            f"{where}: {len(ids)} tokens, and log-probabilities of {len(named)} that are not the same"
        )
    if not all(map(math.isfinite, logprobs)):
        raise EngineError(f"{where}: a log-probability is not finite: the weights or the cache are damaged")
    return ServerAnswer(ids, logprobs, _versions(spans, len(ids), where, read), kind, cached, retractions)


def _versions(spans: Any, count: int, where: str, read: ReadVersion) -> tuple[int, ...]:
    """Return the version of each token, from spans that must cover all of them in order."""
    versions: list[int] = []
    try:
        for span in spans:
            version, start, end = read(span["version"]), int(span["start"]), int(span["end"])
            if start != len(versions) or end < start:
                raise ValueError(f"the span [{start}, {end}) does not follow token {len(versions)}")
            versions += [version] * (end - start)
    except (TypeError, KeyError, ValueError, OverflowError) as e:
        raise EngineError(f"{where}: versions of the weights {spans!r:.200} cannot be read: {e}") from e
    if len(versions) != count:
        raise EngineError(f"{where}: versions of {len(versions)} tokens for {count} that were sampled")
    return tuple(versions)


def _serialized(tensors: Mapping[str, Tensor]) -> str:
    """Serialize a list of (name, tensor) in the format the server unpickles, in base64."""
    buffer = io.BytesIO()
    named = [(name, tensor.detach()) for name, tensor in tensors.items()]
    if any(tensor.is_cuda for _, tensor in named):
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing  # noqa: F401  (teaches the pickler to send handles)

        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(named)
    else:
        # By value: handles of host memory need a file-descriptor server between unrelated processes, and a server
        # that cannot reach it crashes. clone(): a view would include its whole storage.
        pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump([(name, tensor.clone()) for name, tensor in named])
    return base64.b64encode(buffer.getvalue()).decode()


# -- how a run starts it ----------------------------------------------------------------------------------------


def _command(config: EngineConfig, model: Path, gpu: int | None) -> CommandLine:
    server, share = config.server, config.server.gpu_memory_utilization
    # fmt: off
    line = [
        "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
        "--dtype", config.resolved_dtype, "--tp-size", str(server.tensor_parallel),
        "--max-running-requests", str(config.max_slots), "--weight-version", "0",
        "--skip-server-warmup", "--log-level", "warning", "--sleep-on-idle",
        "--incremental-streaming-output",  # otherwise each event of a stream repeats all previous ones
    ]
    # fmt: on
    line += [] if server.grammars else ["--skip-tokenizer-init"]
    environment: dict[str, str] = {}
    if gpu is None:
        line += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
        line += ["--disable-overlap-schedule", "--max-total-tokens", str(_CPU_TOKENS)]
        environment, share = _CPU_ENVIRONMENT, share or _CPU_SHARE
    else:
        line += ["--device", "cuda", "--base-gpu-id", str(gpu)]
    if config.sync == "delta":
        line += ["--custom-weight-loader", LOADER]
        environment = environment | {"PYTHONPATH": LOADER_FOLDER}
    line += ["--mem-fraction-static", str(share)] if share is not None else []
    line += ["--enable-memory-saver"] if server.sleep else []
    return line, environment


def _adapters(config: EngineConfig, lora: LoRAConfig, model: Path, gpu: int | None) -> CommandLine:
    """Reserve room for two adapters; SGLang counts requests without one (health checks) as a third."""
    check_targets(lora)
    targets = adapted_layers(lora, model)
    if not targets:
        raise ConfigError(
            f"{model} has no safetensors with linear layers in numbered blocks: name the layers in "
            "learner.lora.targets"
        )
    if unknown := sorted(set(targets) - ADAPTED):
        raise ConfigError(
            f"learner.lora.targets {lora.targets}: SGLang serves no adapters of {', '.join(unknown)}: name other "
            "layers, or use another engine.sync, which sends merged weights"
        )
    line = ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
    line += ["--max-loras-per-batch", "3"]
    return line + (["--lora-backend", "torch_native"] if gpu is None else []), {}


def check_targets(lora: LoRAConfig) -> None:
    """Check adapter targets: SGLang 0.5 fuses layers with the same input, and drops or rejects partial
    adapters."""
    has = {target.rpartition(".")[2] for target in lora.targets} if isinstance(lora.targets, list) else set()
    needed = {"q_proj", "v_proj"} if has & {"q_proj", "k_proj", "v_proj"} else set()
    needed |= {"gate_proj"} if "up_proj" in has else set()
    if missing := sorted(needed - has):
        raise ConfigError(
            f"learner.lora.targets {lora.targets} lack {', '.join(missing)}, without which SGLang cannot serve "
            "them: add what is missing, or use another engine.sync, which sends merged weights"
        )


def _connect(url: str, config: EngineConfig) -> SGLangServer:
    return SGLangServer(
        url,
        timeout_s=config.server.request_timeout_s,
        tensor_parallel=config.server.tensor_parallel,
        adapters=config.sync == "lora",
        changes=config.sync == "delta",
    )


SGLANG = ServerKind(
    connect=_connect,
    command=_command,
    adapters=_adapters,
    memory_share=0.85,
    routes=("--enable-return-routed-experts",),
)
