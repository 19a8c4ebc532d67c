"""From the configuration to an engine that samples."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.engine import EngineConfig
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import Engine
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.engine.servers.launch.hosts import Connect, Recipe
    from agentrl.engine.servers.launch.ray_host import RayCluster
    from agentrl.engine.servers.pool import Host
    from agentrl.engine.servers.weight_sync import WeightSync

_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Ten times faster than two threads, which wait for one another at every small operation.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_CPU_TOKENS = 262_144
"""Bound of SGLang's cache in host memory, which would take most of it otherwise."""


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for; smaller adapters are padded."""


async def open_engine(
    config: EngineConfig,
    model: Path,
    lora: LoRAConfig | None = None,
    *,
    apart: bool = False,
    ray: str | None = None,
) -> Engine:
    """An engine over the model directory; with servers it returns when all of them answer.

    Args:
        lora: what `sync: lora` will send adapters of; without it the directory is all there is to serve, and
            weights travel as with `sync: auto`.
        apart: on a CPU, have the local engine in a process of its own; it cannot be watched there.
        ray: address of the cluster for servers with `launch: ray`; without it one is started on this machine.

    Raises:
        ConfigError: the model, the device or the server's installation cannot be used.
        EngineError: a server did not start.
    """
    from agentrl.models.device import pick_device

    if config.kind == "local":
        from agentrl.engine.local.engine import LocalEngine
        from agentrl.engine.local.process import ProcessEngine

        device = pick_device(config.device)
        if config.cuda_graphs == "off" and device.type != "cuda":
            raise ConfigError(f"engine.cuda_graphs has no effect on the device {device}; remove it")
        if apart and device.type == "cpu" and not multiprocessing.current_process().daemon:  # which can have none
            return await ProcessEngine.start(model, dtype=config.resolved_dtype, max_slots=config.max_slots)
        return LocalEngine.from_directory(
            model,
            dtype=config.resolved_dtype,
            device=str(device),
            cuda_graphs=config.cuda_graphs == "auto",
            max_slots=config.max_slots,
        )
    if config.sync != "lora":
        lora = None
    elif lora is None:
        config = config.model_copy(update={"sync": "auto"})
    if lora is not None and config.kind == "sglang":
        _check_targets(lora)
    return await _open_served(config, model.absolute(), lora, ray)


async def _open_served(config: EngineConfig, model: Path, lora: LoRAConfig | None, ray: str | None) -> Engine:
    import torch

    from agentrl.engine.servers.engine import ServedEngine, ServedLimits
    from agentrl.engine.servers.launch.ray_host import RayCluster
    from agentrl.engine.servers.launch.scratch import ScratchFolder

    if not (model / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json, so it is not a Hugging Face model directory")
    scratch = ScratchFolder()
    folder = scratch.path
    server = config.server
    cluster = RayCluster(ray) if server.launch == "ray" else None

    def clean_up() -> None:
        scratch.close()
        if cluster is not None:
            cluster.close()

    try:
        engine = ServedEngine(
            _hosts(config, model, folder, cluster, lora),
            _sync(config, model, folder, lora),
            model=model,
            dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.resolved_dtype],
            given=bool(server.urls) and lora is None,
            limits=ServedLimits(
                capacity=config.max_slots, restarts=server.restarts, health_every_s=server.health_every_s
            ),
            on_close=clean_up,
        )
    except BaseException:
        clean_up()
        raise
    await engine.start()
    return engine


def _hosts(
    config: EngineConfig, model: Path, folder: Path, cluster: RayCluster | None, lora: LoRAConfig | None
) -> list[Host]:
    from agentrl.engine.servers.launch.hosts import GivenHost, LaunchedHost
    from agentrl.engine.servers.launch.ray_host import RayHost
    from agentrl.models.device import pick_device

    server, connect = config.server, _connect(config)
    if server.urls:
        return [GivenHost(url, connect, start_timeout_s=server.start_timeout_s) for url in server.urls]
    python = _python(config)
    recipes = [_recipe(config, model, python, number, lora) for number in range(server.replicas)]
    if cluster is not None:
        gpus = 0 if pick_device(config.device).type == "cpu" else server.tensor_parallel
        return [
            RayHost(
                f"{config.kind} server {number}",
                recipe,
                connect,
                cluster=cluster,
                gpus=gpus,
                start_timeout_s=server.start_timeout_s,
            )
            for number, recipe in enumerate(recipes)
        ]
    return [
        LaunchedHost(
            f"{config.kind} server {number}",
            recipe,
            connect,
            log=folder / f"server-{number}.log",
            start_timeout_s=server.start_timeout_s,
        )
        for number, recipe in enumerate(recipes)
    ]


def _connect(config: EngineConfig) -> Connect:
    from agentrl.engine.servers.sglang import SGLangServer
    from agentrl.engine.servers.vllm import VLLMServer

    timeout_s, ranks, adapters = (
        config.server.request_timeout_s,
        config.server.tensor_parallel,
        config.sync == "lora",
    )
    if config.kind == "vllm":
        return lambda url: VLLMServer(url, timeout_s=timeout_s, update_timeout_s=timeout_s, adapters=adapters)
    return lambda url: SGLangServer(
        url, timeout_s=timeout_s, update_timeout_s=timeout_s, tensor_parallel=ranks, adapters=adapters
    )


def _sync(config: EngineConfig, model: Path, folder: Path, lora: LoRAConfig | None) -> WeightSync:
    from agentrl.engine.servers.weight_sync import AdapterSync, BroadcastSync, DiskSync, TensorSync
    from agentrl.models.device import pick_device

    server = config.server
    if lora is not None:
        return AdapterSync(
            model, Path(server.sync_folder) if server.sync_folder else folder, alpha=lora.plain_alpha
        )
    if config.resolved_sync == "disk":
        return DiskSync(model, Path(server.sync_folder) if server.sync_folder else folder)
    if config.resolved_sync == "tensor":
        return TensorSync(bucket_bytes=server.bucket_mb << 20)
    return BroadcastSync(
        backend="nccl" if pick_device(config.device).type == "cuda" else "gloo",
        bucket_bytes=server.bucket_mb << 20,
        ranks_per_server=server.tensor_parallel,
        timeout_s=server.request_timeout_s,
    )


def _python(config: EngineConfig) -> str:
    """The Python that has the server. Raises ConfigError where this one is meant and has none."""
    if config.server.python is not None:
        return config.server.python
    if importlib.util.find_spec(config.kind) is None:
        raise ConfigError(
            f"engine.kind is {config.kind}, which is not installed here: name the Python of an environment that "
            f"has it (engine.server.python), or servers that run already (engine.server.urls), or "
            f"`pip install {config.kind}`; see docs/engines.md"
        )
    return sys.executable


def _recipe(config: EngineConfig, model: Path, python: str, number: int, lora: LoRAConfig | None = None) -> Recipe:
    """The command line and environment of server `number`."""
    from agentrl.engine.servers.launch.hosts import Recipe
    from agentrl.models.device import pick_device

    server = config.server
    device = pick_device(config.device)
    # An actor of Ray sees the GPUs that it was given, counted from 0.
    first = 0 if server.launch == "ray" else (device.index or 0) + number * server.tensor_parallel
    make = _vllm_line if config.kind == "vllm" else _sglang_line
    command, environment = make(config, model, None if device.type == "cpu" else first)
    if lora is not None:
        more, switches = (
            (_vllm_adapters(lora), _VLLM_ADAPTERS)
            if config.kind == "vllm"
            else (_sglang_adapters(lora, model, cpu=device.type == "cpu"), {})
        )
        command, environment = [*command, *more], environment | switches
    command = [python, "-m", *command, *server.args]
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | environment | server.environment
    return Recipe(lambda port: [*command, "--port", str(port)], environment)


def _sglang_line(config: EngineConfig, model: Path, gpu: int | None) -> tuple[list[str], dict[str, str]]:
    server, share = config.server, config.server.gpu_memory_utilization
    # fmt: off
    line = [
        "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
        "--dtype", config.resolved_dtype, "--tp-size", str(server.tensor_parallel),
        "--max-running-requests", str(config.max_slots), "--weight-version", "0",
        "--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "warning", "--sleep-on-idle",
        "--incremental-streaming-output",  # else each event of a stream repeats all before it
    ]
    # fmt: on
    environment = {}
    if gpu is None:
        line += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
        line += ["--disable-overlap-schedule", "--max-total-tokens", str(_CPU_TOKENS)]
        environment, share = _CPU_ENVIRONMENT, share or 0.1
    else:
        line += ["--device", "cuda", "--base-gpu-id", str(gpu)]
    line += ["--mem-fraction-static", str(share)] if share is not None else []
    line += ["--enable-memory-saver"] if server.sleep else []
    return line, environment


def _vllm_line(config: EngineConfig, model: Path, gpu: int | None) -> tuple[list[str], dict[str, str]]:
    server, share = config.server, config.server.gpu_memory_utilization
    # fmt: off
    line = [
        "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy",
        "--host", "127.0.0.1", "--dtype", config.resolved_dtype,
        "--tensor-parallel-size", str(server.tensor_parallel), "--max-num-seqs", str(config.max_slots),
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        "--enable-prompt-tokens-details",
    ]
    # fmt: on
    line += ["--gpu-memory-utilization", str(share)] if share is not None else []
    line += ["--enable-sleep-mode"] if server.sleep else []
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    if gpu is not None and server.launch == "process":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu + n) for n in range(server.tensor_parallel))
    return line, environment


_VLLM_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


def _vllm_adapters(lora: LoRAConfig) -> list[str]:
    """Room for the adapter that is sampled with and the one after it."""
    rank = next((rank for rank in VLLM_RANKS if rank >= lora.rank), None)
    if rank is None:
        raise ConfigError(
            f"learner.lora.rank is {lora.rank}, and vLLM serves ranks up to {VLLM_RANKS[-1]}: lower it, or use "
            "engine.sync disk, which sends merged weights"
        )
    return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]


def _sglang_adapters(lora: LoRAConfig, model: Path, *, cpu: bool) -> list[str]:
    """As for vLLM; SGLang counts requests without an adapter (health checks) as a third one."""
    targets = linear_names(model) if lora.targets == "all-linear" else sorted(set(lora.targets))
    line = ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]
    line += ["--max-loras-per-batch", "3"]
    return line + (["--lora-backend", "torch_native"] if cpu else [])


def _check_targets(lora: LoRAConfig) -> None:
    """SGLang 0.5 joins layers that read the same input, and drops or refuses an adapter of only some of them."""
    has = set(lora.targets) if isinstance(lora.targets, list) else set()
    needed = {"q_proj", "v_proj"} if has & {"q_proj", "k_proj", "v_proj"} else set()
    needed |= {"gate_proj"} if "up_proj" in has else set()
    if missing := sorted(needed - has):
        raise ConfigError(
            f"learner.lora.targets {lora.targets} lack {', '.join(missing)}, without which SGLang cannot serve "
            "them: add what is missing, or use another engine.sync, which sends merged weights"
        )


def linear_names(model: Path) -> list[str]:
    """The linear layers in the blocks of a model directory, by the ends of their names."""
    from safetensors import safe_open

    names = set()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                if (
                    name.endswith(".weight")
                    and ".layers." in name
                    and len(tensors.get_slice(name).get_shape()) == 2
                ):
                    names.add(name.split(".")[-2])
    if not names:
        raise ConfigError(f"{model} has no linear layers in blocks: name them in learner.lora.targets")
    return sorted(names)
