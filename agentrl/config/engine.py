"""The configuration of the inference engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentrl.config.address import address_problem, server_of, without_credentials
from agentrl.config.choice import is_own, known_or_own
from agentrl.config.facts import Advanced, NamesCode, NeverWhen, NeverWith, OnlyWhen, OnResume, PathTo, UnusedBy
from agentrl.config.section import Count, Device, Positive, Section
from agentrl.gpu import gpus_here

Seconds = Annotated[float, Field(gt=0)]
Sync = Literal["disk", "tensor", "broadcast", "lora", "delta"]

SERVERS: Mapping[str, tuple[Sync, ...]] = {
    "sglang": ("tensor", "disk", "broadcast", "lora", "delta"),
    "vllm": ("disk", "lora", "tensor", "delta"),
}
"""Kinds of servers, each with the ways weights reach it; the first is the default for servers the run starts."""
VLLM_TEMPERATURES = 0.01, 2.0
"""The lowest and the highest that vLLM samples with: it takes the lowest for anything colder, and refuses more."""


class ServerConfig(Section):
    """Inference servers: started by the run on this machine, or given by `urls`."""

    urls: list[str] = Field(default_factory=list)
    """Running servers, as `http://host:port`; if empty, the run starts and stops its own."""
    replicas: Annotated[Positive, NeverWith("urls")] = 1
    """Number of servers to start; requests are spread over them."""
    tensor_parallel: Positive = 1
    """GPUs per server."""
    gpu_memory_utilization: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, NeverWith("urls")] = None
    """Share of a GPU's memory for weights and KV cache; the server's own default if unset."""
    launch: Annotated[Literal["process", "ray"], NeverWith("urls")] = "process"
    """Start servers as child processes of the run, or as actors on its Ray cluster (`ray`), whose nodes must be
    able to read the model directory."""
    python: Annotated[str | None, PathTo("file"), NeverWith("urls")] = None
    """Python interpreter with the server installed; by default the run's."""
    args: Annotated[list[str], NeverWith("urls")] = Field(default_factory=list)
    """Additional command-line arguments for the server."""
    environment: Annotated[dict[str, str], NeverWith("urls"), Advanced()] = Field(default_factory=dict)
    """Additional environment variables for the server."""
    grammars: Annotated[bool, NeverWith("urls"), OnlyWhen("kind", "sglang"), UnusedBy("serve"), Advanced()] = False
    """Start SGLang with its tokenizer, which its grammars need: for an agent that forces calls or JSON answers.
    `agentrl serve` always does."""
    start_timeout_s: Annotated[Seconds, Advanced()] = 600.0
    """Startup timeout of a server."""
    request_timeout_s: Annotated[Seconds, Advanced()] = 1200.0
    """Timeout of one completion or weight update; after it the server counts as lost."""
    health_every_s: Annotated[Seconds, Advanced()] = 15.0
    """Interval of health checks while a server is silent."""
    restarts: Annotated[Count, Advanced()] = 3
    """Consecutive restarts of (or waits for) a lost server that has not answered in between."""
    sync_folder: Annotated[
        str | None, PathTo("folder", made=True), OnlyWhen("sync", "disk", "lora"), Advanced()
    ] = None
    """Folder that both the run and the servers can read; by default a temporary one."""
    bucket_mb: Annotated[Positive, OnlyWhen("sync", "tensor", "broadcast", "delta"), Advanced()] = 512
    """Megabytes of weights per transfer."""
    full_every: Annotated[Positive, OnlyWhen("sync", "delta"), Advanced()] = 50
    """Send all weights at every n-th update."""
    sleep: Annotated[bool, UnusedBy("eval", "serve")] = False
    """Free the servers' GPU memory during the update, for a learner on the same GPU."""

    @property
    def addresses(self) -> list[str]:
        """`urls` without credentials, for messages and files."""
        return [without_credentials(url) for url in self.urls]

    @field_validator("args")
    @classmethod
    def _no_port(cls, args: list[str]) -> list[str]:
        if any(arg.partition("=")[0] == "--port" for arg in args):
            raise ValueError("--port has no effect: the run gives each server a free port; remove it")
        return args

    @field_validator("environment")
    @classmethod
    def _variables(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"{name!r} cannot be set: the name of a variable is not empty and has no `=`, and neither it "
                    "nor the value has a null character"
                )
        return environment

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for place, url in enumerate(urls):
            address = without_credentials(url)
            if problem := address_problem(url):
                raise ValueError(f"{address}: {problem}; give an address such as http://127.0.0.1:30000")
            parts = urlsplit(url)
            extra = parts.path.rstrip("/") if parts.path.rstrip("/") == "/v1" else parts.query or parts.fragment
            if extra:
                raise ValueError(f"{address}: leave out {extra!r}: the engine appends its own paths")
            if server_of(url) in map(server_of, urls[:place]):
                raise ValueError(f"{address} is there twice; give each server once")
        return urls


class EngineConfig(Section):
    """The inference engine that samples the tokens."""

    kind: Annotated[str, NamesCode("class", or_word=True)] = "local"
    """`local` is the embedded PyTorch engine; `sglang` and `vllm` are servers; `module:Name` or
    `path/to/file.py:Name` is your own engine. See docs/engines.md."""
    options: Annotated[dict[str, Any], NeverWhen("kind", "local", *SERVERS)] = Field(default_factory=dict)
    """Keyword arguments of your own engine."""
    device: Annotated[Device, OnResume("free")] = "auto"
    """`cpu`, `cuda`, `cuda:N` (also the first GPU of servers that the run starts as child processes), or `auto`:
    CUDA if there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the sampler's weights. `auto`: bfloat16 on CUDA, float32 on a CPU, where bfloat16 is slower."""
    cuda_graphs: Annotated[
        Literal["auto", "off"], OnlyWhen("kind", "local"), NeverWhen("device", "cpu"), Advanced()
    ] = "auto"
    """Whether `local` on CUDA captures its decode steps as CUDA graphs and replays them; `off` is slower but needs
    less memory."""
    max_slots: Annotated[Positive, OnResume("free")] = 256
    """Maximum number of concurrent sequences in the KV cache; for servers, per server."""
    sync: Annotated[Literal["auto"] | Sync, OnlyWhen("kind", *SERVERS)] = "auto"
    """How weights are sent to servers: through a folder, as tensors in a request, over a process group, or
    (`lora`) only the adapter of `learner.lora`, or (`delta`) only the bfloat16 weights that changed. `auto`:
    `tensor` for servers that the run starts (vLLM: `disk`), `disk` for those in `urls`."""
    sync_tolerance: Annotated[
        Annotated[float, Field(gt=0)] | None, NeverWhen("kind", "local"), UnusedBy("eval", "serve")
    ] = None
    """Stop the run if, after a sync, the log-probabilities of fixed tokens differ by more than this on average
    between servers and learner; by default 0.002 in float32 and 0.1 in bfloat16."""
    server: Annotated[ServerConfig, OnlyWhen("kind", *SERVERS), OnResume("free")] = ServerConfig()
    """The servers of `sglang` and `vllm`."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        return known_or_own(kind, ["local", *SERVERS])

    @model_validator(mode="after")
    def _sync_fits(self) -> Self:
        if not self.on_servers:
            return self
        sync, server = self.resolved_sync, self.server
        if server.urls and "tensor_parallel" in server.written and sync != "broadcast":
            raise ValueError(
                f"server.tensor_parallel has no effect while server.urls is given and sync is {sync}: remove one "
                "of them"
            )
        if sync not in SERVERS[self.kind]:
            ways = " or ".join(SERVERS[self.kind])
            raise ValueError(f"sync {sync} does not exist for {self.kind}: use {ways}")
        if sync == "delta" and self.dtype == "float32":
            raise ValueError(
                "sync: delta has no effect with dtype: float32, in which nearly every weight changes in each "
                "step: use bfloat16 or another sync"
            )
        if sync == "delta" and server.full_every == 1:
            raise ValueError(
                "sync: delta has no effect with server.full_every: 1, which sends all weights at every update: "
                "raise it, or use another sync"
            )
        if sync in ("lora", "delta") and self.server.sleep:
            what = "the adapter" if sync == "lora" else "what changed"
            raise ValueError(
                f"sync: {sync} sends only {what}, but a server that slept needs the full weights again: use "
                "another sync, or leave server.sleep out"
            )
        if sync == "broadcast" and self.server.sleep and self.device != "cpu":
            raise ValueError(
                "sync: broadcast needs servers on other GPUs than the learner's, since NCCL refuses a group that "
                "has a GPU twice, and server.sleep is for servers on the same: use sync tensor or disk"
            )
        by_handle = self.kind == "sglang" and sync in ("tensor", "delta")
        if by_handle and self.server.urls and self.device.startswith("cuda"):
            raise ValueError(
                f"sync {sync} reaches a GPU of this machine only, not server.urls: use disk or broadcast"
            )
        return self

    @property
    def on_servers(self) -> bool:
        """Whether inference servers sample."""
        return self.kind in SERVERS

    @property
    def own(self) -> bool:
        """Whether `kind` names a user-supplied engine."""
        return is_own(self.kind)

    def refuse_temperature(self, temperature: float, key: str) -> None:
        """Check that the engine can sample with a temperature; `key` is where it is written.

        Raises:
            ValueError: it would sample with another one, or not at all.
        """
        low, high = VLLM_TEMPERATURES
        if self.kind == "vllm" and temperature and not low <= temperature <= high:
            raise ValueError(
                f"{key} is {temperature:g}, and vLLM samples with {low:g} to {high:g} (or 0, greedy): change it, "
                "or use another engine.kind"
            )

    @property
    def resolved_sync(self) -> Sync:
        """What `auto` resolves to; without servers it has no meaning."""
        if self.sync != "auto":
            return self.sync
        return "disk" if self.server.urls or not self.on_servers else SERVERS[self.kind][0]

    @property
    def resolved_dtype(self) -> Literal["float32", "bfloat16"]:
        """What `auto` resolves to; `device: auto` is resolved on this machine."""
        if self.dtype != "auto":
            return self.dtype
        if self.device == "auto":
            return "bfloat16" if gpus_here() else "float32"
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    @property
    def resolved_tolerance(self) -> float:
        """The effective `sync_tolerance`."""
        if self.sync_tolerance is not None:
            return self.sync_tolerance
        return 0.002 if self.resolved_dtype == "float32" else 0.1
