"""Transfer weights to inference servers: through a folder, as tensors in a request, by broadcast, or as an
adapter. Changes only: `delta_sync`.

Each `push` brings one version to several servers and returns those that failed, with the reason; such a server is
paused and must be restarted, because its weights may be partly old.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from agentrl.engine.servers.client import GroupPlace, InferenceServer
from agentrl.engine.servers.http import ServerLost, ServerRefused
from agentrl.errors import EngineError
from agentrl.ports import reserved_port
from agentrl.run_folder.files import share_weights

Failures = dict[InferenceServer, EngineError]
Work = Callable[[InferenceServer], Coroutine[Any, Any, None]]
JOIN_S = 120.0
"""Time limit for forming a process group: if a server dies meanwhile, the others wait for it."""
LEAVE_S = 30.0
"""Time limit for answering after a broadcast has failed: gloo does not always notice a closed connection."""


class WeightSync(Protocol):
    """One way to transfer weights."""

    async def push(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        """Bring weights to servers and return those that failed."""
        ...

    async def close(self) -> None:
        """Free all resources; idempotent."""
        ...


def distinct(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep only the first name of tied parameters: servers tie them again by the model's configuration."""
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    found = {}
    for name, tensor in weights.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen or tensor.numel() == 0:  # empty ones all have the same address
            seen.add(key)
            found[name] = tensor
    return found


def buckets(weights: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield groups of tensors with at most `bucket_bytes` in total (a larger tensor forms its own group)."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


class DiskSync:
    """Writes a Hugging Face directory that every server reads. Works with any server that sees the folder."""

    def __init__(self, model: Path, folder: Path) -> None:
        """Write below `folder`, with config and tokenizer of the directory `model`."""
        self._model, self._folder = model, folder
        self._count = 0
        self._current: Path | None = None

    async def push(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        """Write the weights, have all servers read them, and remove the previous ones."""
        self._count += 1
        target = self._folder / f"weights-{self._count}"
        try:
            await asyncio.to_thread(self._write, target, weights)
        except OSError as e:
            raise EngineError(f"the weights cannot be written to {target}: {e}") from e
        failures = await push_to_each(servers, lambda server: self._load(server, target, version))
        if self._current is not None:
            await asyncio.to_thread(shutil.rmtree, self._current, ignore_errors=True)
        self._current = target
        return failures

    async def close(self) -> None:
        """Remove the last folder."""
        if self._current is not None:
            await asyncio.to_thread(shutil.rmtree, self._current, ignore_errors=True)
            self._current = None

    def _write(self, target: Path, weights: Mapping[str, Tensor]) -> None:
        aside = target.with_name(f".{target.name}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        self._fill(aside, weights)
        share_weights(aside)
        aside.rename(target)

    async def _load(self, server: InferenceServer, folder: Path, version: int) -> None:
        async with server.updating(by_tensor=False):
            await server.load_folder(folder, version)

    def _fill(self, aside: Path, weights: Mapping[str, Tensor]) -> None:
        for file in self._model.iterdir():
            if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model"):
                if file.name.endswith(".index.json"):
                    continue
                shutil.copyfile(file, aside / file.name)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, aside / "model.safetensors")


class AdapterSync(DiskSync):
    """Writes an adapter that every server loads on top of its initial model.

    Its weights are only those of the adapter, with the names that peft uses in a file.
    """

    def __init__(self, model: Path, folder: Path, *, alpha: float) -> None:
        """Write below `folder`; the adapter's contribution is scaled by alpha / rank."""
        super().__init__(model, folder)
        self._alpha = alpha

    async def _load(self, server: InferenceServer, folder: Path, version: int) -> None:
        await server.load_adapter(folder, version)

    def _fill(self, aside: Path, weights: Mapping[str, Tensor]) -> None:
        inner = {name: tensor for name, tensor in weights.items() if name.endswith(".lora_A.weight")}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(self._model),
            "r": next(iter(inner.values())).shape[0],
            "lora_alpha": self._alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted({name.split(".")[-3] for name in inner}),
            "bias": "none",
            "inference_mode": True,
        }
        (aside / "adapter_config.json").write_text(json.dumps(config))
        tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, aside / "adapter_model.safetensors")


class TensorSync:
    """Sends tensors in requests: by handle on one GPU, by value from host memory."""

    def __init__(self, *, bucket_bytes: int) -> None:
        """Send at most `bucket_bytes` in one request."""
        self._bucket_bytes = bucket_bytes

    async def push(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        """Send all weights to all servers, which are paused meanwhile."""

        async def load(server: InferenceServer) -> None:
            async with server.updating(by_tensor=True):
                for bucket in buckets(weights, self._bucket_bytes):
                    await server.load_tensors(bucket, version)

        return await push_to_each(servers, load)

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


class BroadcastSync:
    """Broadcasts tensors in a process group of this process (rank 0) and every GPU of every server."""

    def __init__(
        self,
        *,
        backend: Literal["gloo", "nccl"],
        bucket_bytes: int,
        ranks_per_server: int = 1,
        timeout_s: float = 300.0,
        gpu: str = "cuda",
    ) -> None:
        """Form the group at the first push, and again whenever the servers change.

        Args:
            backend: gloo for host memory, nccl between GPUs.
            bucket_bytes: maximum number of bytes in flight.
            ranks_per_server: tensor-parallel size of a server.
            timeout_s: time limit for joining, or for one broadcast.
            gpu: the one that nccl sends from.
        """
        self._backend, self._bucket_bytes = backend, bucket_bytes
        self._ranks, self._timeout_s = ranks_per_server, timeout_s
        self._device = gpu if backend == "nccl" else "cpu"
        self._group: Any = None
        self._name = ""
        self._members: tuple[InferenceServer, ...] = ()
        self._count = 0
        self._broken_off = asyncio.Event()

    async def push(
        self, servers: Sequence[InferenceServer], weights: Mapping[str, Tensor], version: int
    ) -> Failures:
        """Broadcast all weights; if a server fails, repeat for the others without it."""
        failures: Failures = {}
        left = list(servers)
        while left:
            try:
                await self._form(tuple(left))
                self._broken_off.clear()
                broken = await push_to_each(left, self._receiver(weights, version), self._sender(weights))
            except _JoinFailed as e:
                broken = e.failures
            if not broken:
                break
            await self._dissolve({s for s, e in broken.items() if isinstance(e, ServerLost) and e.status is None})
            # Servers that refuse the rest after another one is lost still respond: they receive all weights again.
            own = {server: e for server, e in broken.items() if not isinstance(e, _Collateral)}
            lost = {server: e for server, e in own.items() if not isinstance(e, ServerRefused)}
            failures |= lost or own or broken
            left = [server for server in left if server not in failures]
        return failures

    async def close(self) -> None:
        """Leave the group."""
        await self._dissolve()

    def _receiver(self, weights: Mapping[str, Tensor], version: int) -> Work:
        refused = False

        async def receive(server: InferenceServer) -> None:
            nonlocal refused
            try:
                await self._receive(server, weights, version)
            except (ServerLost, ServerRefused) as e:
                self._broken_off.set()
                collateral = refused and isinstance(e, ServerRefused)
                refused = refused or isinstance(e, ServerRefused)
                if e.status is not None:  # gloo forwards tensors from server to server: others wait for this one
                    with contextlib.suppress(EngineError):
                        await server.leave(self._name)
                if collateral:
                    raise _Collateral(str(e)) from e
                raise

        return receive

    async def _receive(self, server: InferenceServer, weights: Mapping[str, Tensor], version: int) -> None:
        async def all_buckets() -> None:
            async with server.updating(by_tensor=True):
                for bucket in buckets(weights, self._bucket_bytes):
                    await server.receive(bucket, self._name, version)

        receiving = asyncio.create_task(all_buckets())
        receiving.add_done_callback(lambda task: task.cancelled() or task.exception())
        ending = asyncio.create_task(self._broken_off.wait())
        try:
            await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({receiving}, timeout=LEAVE_S)
            if not receiving.done():
                raise ServerLost(f"{server.url}: no answer for {LEAVE_S:g} s after the broadcast broke off")
            receiving.result()
        finally:
            receiving.cancel()
            ending.cancel()

    async def _sender(self, weights: Mapping[str, Tensor]) -> None:
        def broadcast(group: Any) -> None:
            for tensor in weights.values():
                dist.broadcast(tensor.to(self._device).contiguous(), src=0, group=group)

        try:
            await asyncio.to_thread(broadcast, self._group)
        except RuntimeError as e:
            e.__traceback__ = None  # it holds the group
            self._broken_off.set()
            await self._cut()  # otherwise, servers that are still there would wait for the rest
            raise _Collateral(f"the broadcast of the weights broke off: {e}") from e

    async def _form(self, servers: tuple[InferenceServer, ...]) -> None:
        if self._group is not None and self._members == servers:
            return
        await self._dissolve()
        self._count += 1
        self._name = f"agentrl-weights-{self._count}"
        with reserved_port("") as port:
            failures = await self._join(servers, port)
        self._members = servers
        if failures:
            raise _JoinFailed(failures)

    async def _join(self, servers: tuple[InferenceServer, ...], port: int) -> Failures:
        try:
            host = _address_towards(servers[0].url)
        except ServerLost as e:
            raise _JoinFailed(dict.fromkeys(servers, e)) from e
        size = 1 + len(servers) * self._ranks
        places = {
            server: GroupPlace(self._name, host, port, 1 + number * self._ranks, size, self._backend)
            for number, server in enumerate(servers)
        }

        async def join(server: InferenceServer) -> None:
            await server.join(places[server])

        own = asyncio.to_thread(_own_end, host, port, size, self._name, self._backend, self._timeout_s)
        joining = asyncio.ensure_future(own)
        failures = await push_to_each(servers, join)
        try:
            self._group = await joining
        except (RuntimeError, dist.DistError) as e:
            error = ServerLost(f"the process group for weights could not be formed: {e}")
            raise _JoinFailed(failures or dict.fromkeys(servers, error)) from e
        return failures

    async def _dissolve(self, gone: Collection[InferenceServer] = ()) -> None:
        """Let all members leave the group, except servers that no longer respond (`gone`)."""
        members, name = [server for server in self._members if server not in gone], self._name
        self._members = ()
        if members:
            await push_to_each(members, lambda server: server.leave(name))
        await self._cut()

    async def _cut(self) -> None:
        """Close the connections to all members: those of gloo close with the last reference to the group."""
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(dist.destroy_process_group, group)


class _Collateral(EngineError):
    """Failed because another member of the group did."""


class _JoinFailed(EngineError):
    def __init__(self, failures: Failures) -> None:
        super().__init__("some servers did not join the process group")
        self.failures = failures


async def push_to_each(
    servers: Sequence[InferenceServer], work: Work, alongside: Coroutine[Any, Any, None] | None = None
) -> Failures:
    """Run `work` for all servers at once, together with `alongside`; return which failed, and why.

    Exceptions other than EngineError are raised, because no server caused them.
    """
    jobs = [work(server) for server in servers] + ([alongside] if alongside is not None else [])
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    failures = {s: result for s, result in zip(servers, results, strict=False) if isinstance(result, EngineError)}
    if alongside is not None and isinstance(results[-1], EngineError) and not failures:
        failures = dict.fromkeys(servers, results[-1])
    return failures


def _own_end(host: str, port: int, size: int, name: str, backend: str, timeout_s: float) -> Any:
    """Create rank 0 of an additional process group, in the same way as the servers join it.

    The public `init_process_group` creates the default group, which belongs to the learner's ranks; an additional
    group whose members share no default group is created with the helper below it, as the servers do.
    """
    import torch.distributed.distributed_c10d as module

    c10d: Any = module  # these names are not part of its public interface

    timeout = timedelta(seconds=timeout_s)
    soon = min(timeout, timedelta(seconds=JOIN_S))
    store, _, _ = next(c10d.rendezvous(f"tcp://{host}:{port}", 0, size, timeout=soon))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _address_towards(url: str) -> str:
    """Return this machine's address on the route to a server, as in a URL.

    Raises:
        ServerLost: there is no route, or its name is unknown.
    """
    try:
        family, kind, _, _, there = socket.getaddrinfo(urlsplit(url).hostname, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError as e:
        raise ServerLost(f"{url}: {e}") from e
    return f"[{own}]" if ":" in own else own


def vocabulary_of(model: Path) -> int:
    """Return the vocabulary size of a model directory. Raises EngineError if it does not specify one."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise EngineError(f"{model}/config.json does not say vocab_size: {e!r}") from e
