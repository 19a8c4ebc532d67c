"""The configuration of what samples the tokens."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentrl.config.address import address_problem
from agentrl.config.section import Count, Device, Positive, Section
from agentrl.gpu import gpus_here

Seconds = Annotated[float, Field(gt=0)]


class ServerConfig(Section):
    """Inference servers: started by the run on this machine, or given by `urls`."""

    urls: list[str] = Field(default_factory=list)
    """Servers that run already, as `http://host:port`; empty: the run starts its own and ends them."""
    replicas: Positive = 1
    """Servers that are started; requests are spread over them."""
    tensor_parallel: Positive = 1
    """GPUs that the model of one server is split over."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of a GPU's memory for weights and KV cache; the server's own default where nothing is given."""
    ray: str | None = None
    """Start the servers as actors on this Ray cluster: its address, `auto`, or `local` for one started on this
    machine. Without it they are child processes of the run. Their nodes must see the model's directory."""
    python: str | None = None
    """Python of the environment that the server is installed in; this one's where nothing is given."""
    args: list[str] = Field(default_factory=list)
    """More arguments for the server's command line."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables for the server."""
    start_timeout_s: Seconds = 600.0
    """How long a server may take until it answers."""
    request_timeout_s: Seconds = 1200.0
    """How long one completion, or taking new weights, may take before the server counts as lost."""
    health_every_s: Seconds = 15.0
    """How often a server from which nothing comes is asked whether it lives."""
    restarts: Count = 3
    """How often a lost server is started again (or waited for) before it has answered anything."""
    sync_folder: str | None = None
    """`sync: disk` and `lora`: a folder that run and servers both see; a temporary one where nothing is given."""
    bucket_mb: Positive = 512
    """`sync: tensor` and `broadcast`: weights on their way at once."""
    sleep: bool = False
    """Free the servers' GPU memory while the learner works on the same GPU."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if problem := address_problem(url):
                raise ValueError(f"{url}: {problem}; give an address such as http://127.0.0.1:30000")
        return urls

    def changed(self) -> set[str]:
        """Names of the fields that differ from their defaults."""
        default = type(self)()
        return {name for name in type(self).model_fields if getattr(self, name) != getattr(default, name)}


class EngineConfig(Section):
    """What samples the tokens."""

    kind: Literal["local", "sglang", "vllm"] = "local"
    """`local` is the embedded PyTorch engine; `sglang` and `vllm` are servers, see docs/engines.md."""
    device: Device = "auto"
    """`cpu`, `cuda`, `cuda:N`, or `auto`: CUDA where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the sampler's weights. `auto`: bfloat16 on CUDA, float32 on a CPU, where bfloat16 is slower."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """`local` on CUDA records its decode steps and replays them; `off` computes each anew: slower, less memory."""
    max_slots: Positive = 256
    """Sequences held in the KV cache at once; of servers, in each."""
    sync: Literal["auto", "disk", "tensor", "broadcast", "lora"] = "auto"
    """How weights reach servers: a folder, tensors in a request, a process group, or (`lora`) the adapter of
    `learner.lora` alone. `auto`: `tensor` for servers that the run starts (vLLM: `disk`), `disk` for given."""
    sync_tolerance: Annotated[float, Field(gt=0)] | None = None
    """Mean difference of the log-probabilities of fixed tokens between servers and learner, after each sync, above
    which the run stops; 0.002 in float32 and 0.1 in bfloat16 where nothing is given."""
    server: ServerConfig = ServerConfig()
    """The servers of `sglang` and `vllm`."""

    @model_validator(mode="after")
    def _no_dead_keys(self) -> Self:
        server, changed = self.server, self.server.changed()
        if self.cuda_graphs != "auto" and (self.kind != "local" or self.device == "cpu"):
            why = (
                "device is cpu" if self.kind == "local" else f"kind is {self.kind}: give the server's own in args"
            )
            raise ValueError(f"cuda_graphs has no effect while {why}; remove it")
        if self.kind == "local":
            for name, dead in (
                ("sync", self.sync != "auto"),
                ("sync_tolerance", self.sync_tolerance is not None),
                (f"server.{next(iter(changed), '')}", bool(changed)),
            ):
                if dead:
                    raise ValueError(f"{name} has no effect while kind is local: remove it, or set kind")
            return self
        if server.urls:
            dead_keys = {
                "replicas",
                "tensor_parallel",
                "gpu_memory_utilization",
                "python",
                "args",
                "environment",
                "ray",
            }
            if self.sync == "broadcast":
                dead_keys -= {"tensor_parallel"}  # how many ranks each of them is
            for key in sorted(changed & dead_keys):
                raise ValueError(f"server.{key} has no effect on servers given by server.urls: remove one of them")
        self._check_sync(changed)
        return self

    def _check_sync(self, changed: set[str]) -> None:
        sync = self.resolved_sync
        if "sync_folder" in changed and sync not in ("disk", "lora"):
            raise ValueError(f"server.sync_folder has no effect while sync is {sync}: remove one of them")
        if "bucket_mb" in changed and sync in ("disk", "lora"):
            raise ValueError(f"server.bucket_mb has no effect while sync is {sync}: remove one of them")
        if self.kind == "vllm" and sync not in ("disk", "lora"):
            raise ValueError(f"sync {sync} does not exist for vllm: use disk or lora")
        if sync == "lora" and self.server.sleep:
            raise ValueError(
                "sync lora sends no model, which a server that has slept needs anew: use another sync, or leave "
                "server.sleep out"
            )
        if sync == "tensor" and self.server.urls and self.device.startswith("cuda"):
            raise ValueError(
                "sync tensor reaches a GPU of this machine only, not server.urls: use disk or broadcast"
            )

    @property
    def resolved_sync(self) -> Literal["disk", "tensor", "broadcast", "lora"]:
        """What `auto` means here."""
        if self.sync != "auto":
            return self.sync
        return "disk" if self.server.urls or self.kind == "vllm" else "tensor"

    @property
    def resolved_dtype(self) -> Literal["float32", "bfloat16"]:
        """What `auto` means here; `device: auto` is looked up on this machine."""
        if self.dtype != "auto":
            return self.dtype
        if self.device == "auto":
            return "bfloat16" if gpus_here() else "float32"
        return "bfloat16" if self.device.startswith("cuda") else "float32"

    @property
    def resolved_tolerance(self) -> float:
        """The bound of `sync_tolerance`."""
        if self.sync_tolerance is not None:
            return self.sync_tolerance
        return 0.002 if self.resolved_dtype == "float32" else 0.1
