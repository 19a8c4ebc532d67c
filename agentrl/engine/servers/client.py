"""The contract of an inference server: what the server engine needs from SGLang, vLLM or another server.

One object represents one server at one address. Every method raises `ServerLost` if the server is gone or failed,
`ServerRefused` if it rejects the request, and `EngineError` if its answer is invalid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.config.engine import EngineConfig
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import TokenLogprob
from agentrl.engine.servers.reported_routes import RoutesAsked
from agentrl.types import Routes, Sampling

if TYPE_CHECKING:
    from torch import Tensor

CommandLine = tuple[list[str], dict[str, str]]
"""Arguments after `python -m`, and environment variables."""


NO_PENALTIES: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sent with every request: by default, a server may take others from the model's generation_config.json."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a server reports about itself."""

    max_context: int
    """Maximum number of tokens (prompt and completion together) per sequence."""
    seeds: bool
    """Whether `Sampling.seed` has an effect."""
    grammars: bool = True
    """Whether it takes structural tags."""
    routes: bool = False
    """Whether it reports the experts that routers chose."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The result of one request: sampled ids, their logprobs, and the version that sampled each of them.

    `retractions` counts how often the server evicted the sequence from its cache for lack of memory. `routes` are
    those that were asked for.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int = 0
    retractions: int = 0
    routes: Routes | None = None

    @classmethod
    def partial(cls, drawn: Sequence[TokenLogprob]) -> ServerAnswer:
        """The tokens reported so far of a request that was broken off, as if the server had aborted it there."""
        return cls(
            tuple(one.id for one in drawn),
            tuple(one.logprob for one in drawn),
            tuple(one.version for one in drawn),
            "abort",
        )


@dataclass(frozen=True, slots=True)
class Listener:
    """Receives tokens while they are sampled: `tell` gets each once, with `top` alternatives.

    Its versions are those known when a token arrives; the versions in the `ServerAnswer` are authoritative.
    """

    tell: Callable[[Sequence[TokenLogprob]], None]
    top: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A given token: its logprob (temperature 1), and (id, logprob) of the most likely tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A server's rank in a process group that weights are broadcast in; the trainer is rank 0."""

    name: str
    host: str
    port: int
    first_rank: int
    world_size: int
    backend: Literal["gloo", "nccl"]


class InferenceServer(Protocol):
    """One server. Safe to call from many tasks of one event loop."""

    @property
    def url(self) -> str:
        """The server's address."""
        ...

    async def describe(self) -> Description:
        """Return what the server can do; called once, when it is up."""
        ...

    async def check(self, *, timeout_s: float) -> None:
        """Return if the server is able to answer requests."""
        ...

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
        """Continue `ids`; `request` names the request for `abort`, `structure` is a structural tag to obey, and
        `routes` says which routes the answer must have."""
        ...

    async def abort(self, request: str) -> None:
        """Abort a request; unknown ones are ignored."""
        ...

    async def score(self, ids: Sequence[int], *, top: int = 0) -> list[Scored]:
        """Return each token but the first, scored given the tokens before it."""
        ...

    def updating(self, *, by_tensor: bool) -> AbstractAsyncContextManager[None]:
        """Pause computation during the block, so that weights can be loaded; requests in flight continue
        afterwards.

        State computed with the old weights is dropped, so that each later token is sampled from one set of weights
        over its whole context. After an error inside the block, the server stays paused, because its weights may
        be partly old.
        """
        ...

    async def unpause(self) -> None:
        """End the pause of an update that was never finished, because its run was killed."""
        ...

    async def load_folder(self, folder: Path, version: int) -> None:
        """Read the weights in a Hugging Face directory that the server can see. Call inside `updating`."""
        ...

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Sample with this adapter (a folder in peft's format) on top of the model from now on.

        Do not call inside `updating`: the server keeps running. Completions in progress with an older adapter end
        (`finish` is abort), and the older adapter is unloaded when it is no longer in use.
        """
        ...

    async def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Load some of the weights. Call inside `updating`."""
        ...

    async def load_changes(self, changes: Mapping[str, Tensor], version: int) -> None:
        """Change some of the weights; see `agentrl.engine.servers.inside`. Call inside `updating`."""
        ...

    async def join(self, place: GroupPlace) -> None:
        """Join a process group; returns when all members have joined."""
        ...

    async def receive(self, tensors: Mapping[str, Tensor], group: str, version: int) -> None:
        """Receive tensors of these names, shapes and types, one broadcast after another. Call inside
        `updating`."""
        ...

    async def leave(self, group: str) -> None:
        """Leave a process group."""
        ...

    async def sleep(self) -> None:
        """Free the memory of weights and cache. No requests may be in flight."""
        ...

    async def wake(self, what: Literal["weights", "cache"]) -> None:
        """Allocate memory for the weights or the cache again; its previous contents are gone."""
        ...

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        ...


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server that `engine.kind` can name: how to start it and how to connect to it.

    Attributes:
        connect: a client for the server at a URL.
        command: returns the command to start a server for a model directory on the first of its GPUs; None means
        the CPU. The port is appended as `--port`.
        adapters: additional arguments of that command if weights arrive as LoRA adapters of the model.
        routes: additional arguments of that command if answers have routes; None if the server cannot do that.
        memory_share: fraction of a GPU's memory that a server takes if `gpu_memory_utilization` is not set.
    """

    connect: Callable[[str, EngineConfig], InferenceServer]
    command: Callable[[EngineConfig, Path, int | None], CommandLine]
    adapters: Callable[[EngineConfig, LoRAConfig, Path, int | None], CommandLine]
    memory_share: float
    routes: tuple[str, ...] | None = None
