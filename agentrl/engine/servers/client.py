"""The contract of an inference server: what the engine over servers asks of SGLang, vLLM, or another one.

One object stands for one server at one address. Every method raises `ServerLost` where the server is gone or broke
down, `ServerRefused` where it says no, and `EngineError` where its answer makes no sense.
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
from agentrl.types import Sampling

if TYPE_CHECKING:
    from torch import Tensor

CommandLine = tuple[list[str], dict[str, str]]
"""Arguments after `python -m`, and environment variables."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a server says of itself."""

    max_context: int
    """Largest number of tokens (prompt and completion together) of one sequence."""
    seeds: bool
    """Whether `Sampling.seed` has an effect."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What came of one request: sampled ids, their log-probabilities, and the version that drew each of them.

    `retractions` counts how often the server took the sequence out of its cache for lack of memory.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Literal["stop", "length", "abort"]
    cached_tokens: int = 0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class Listener:
    """Who wants to hear of tokens while they are drawn: `tell` gets each once, with `top` alternatives.

    The versions told are those known when a token arrives; the ones of the `ServerAnswer` count.
    """

    tell: Callable[[Sequence[TokenLogprob]], None]
    top: int = 0


@dataclass(frozen=True, slots=True)
class Scored:
    """A given token: its log-probability (temperature 1), and (id, logprob) of the likeliest, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A server's place in a process group that weights are broadcast in; the trainer is rank 0."""

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
        """Where it is."""
        ...

    async def describe(self) -> Description:
        """What the server can do; asked once, when it is up."""
        ...

    async def check(self, *, timeout_s: float) -> None:
        """Return if the server is able to answer requests."""
        ...

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request: str, listener: Listener | None = None
    ) -> ServerAnswer:
        """Continue `ids`; `request` names the request for `abort`."""
        ...

    async def abort(self, request: str) -> None:
        """Stop a request; unknown ones are fine."""
        ...

    async def score(self, ids: Sequence[int], *, top: int = 0) -> list[Scored]:
        """Each token but the first, given those before it."""
        ...

    def updating(self, *, by_tensor: bool) -> AbstractAsyncContextManager[None]:
        """Inside, nothing is computed and weights may be loaded; requests in flight go on afterwards.

        What was computed with the old weights is dropped, so that each later token is drawn from one set of
        weights over its whole context. After an error inside, the server stays paused: its weights may be half
        old.
        """
        ...

    async def load_folder(self, folder: Path, version: int) -> None:
        """Read the weights in a Hugging Face directory that the server can see. Inside of `updating`."""
        ...

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Sample with this adapter (a folder as peft writes it) on top of the model from now on.

        Not inside of `updating`: the server goes on. What is being drawn with an older one ends as it is
        (`finish` is abort), and the older one is unloaded when nothing uses it.
        """
        ...

    async def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Take some of the weights. Inside of `updating`."""
        ...

    async def join(self, place: GroupPlace) -> None:
        """Join a process group; returns when all members have joined."""
        ...

    async def receive(self, tensors: Mapping[str, Tensor], group: str, version: int) -> None:
        """Receive tensors of these names, shapes and types, one broadcast after another. Inside of `updating`."""
        ...

    async def leave(self, group: str) -> None:
        """Leave a process group."""
        ...

    async def sleep(self) -> None:
        """Free the memory of weights and cache. Nothing may be in flight."""
        ...

    async def wake(self, what: Literal["weights", "cache"]) -> None:
        """Take memory for the weights, or for the cache, again; what was in it is gone."""
        ...

    async def close(self) -> None:
        """Drop the connections; the server goes on."""
        ...


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server that `engine.kind` can name: how it is started, and how the engine talks to it.

    Attributes:
        connect: a client for the server at a URL.
        command: how to start a server over a model directory on the first of its GPUs; None stands for the CPU.
            The port is appended as `--port`.
        adapters: more of that command where weights arrive as LoRA adapters of the model.
        memory_share: of a GPU's memory, what a server takes where `gpu_memory_utilization` is not set.
    """

    connect: Callable[[str, EngineConfig], InferenceServer]
    command: Callable[[EngineConfig, Path, int | None], CommandLine]
    adapters: Callable[[EngineConfig, LoRAConfig, Path, int | None], CommandLine]
    memory_share: float
