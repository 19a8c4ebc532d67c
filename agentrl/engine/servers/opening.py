"""Create an engine over running servers from the configuration."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from agentrl.config.engine import EngineConfig
from agentrl.config.run import LoRAConfig
from agentrl.engine.servers.client import InferenceServer, ServerKind
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.kinds import KINDS
from agentrl.engine.servers.launch.hosts import Connect, GivenHost, LaunchedHost, Recipe
from agentrl.engine.servers.launch.ray_host import RayCluster, RayHost
from agentrl.engine.servers.replica_pool import Host, ServedLimits
from agentrl.engine.servers.reported_routes import layout_of
from agentrl.engine.servers.server_engine import ServedEngine
from agentrl.engine.servers.weight_sync import AdapterSync, BroadcastSync, DiskSync, TensorSync, WeightSync
from agentrl.errors import ConfigError
from agentrl.extras import installed
from agentrl.models.device import pick_device
from agentrl.models.folder import check_model_folder, refuse_unlisted_optimizer
from agentrl.scratch import ScratchFolder


async def open_served(
    config: EngineConfig,
    model: Path,
    lora: LoRAConfig | None,
    ray: str | None,
    gpu: str = "cuda",
    *,
    routes: bool = False,
) -> ServedEngine:
    """Start the servers, or connect to existing ones; see `agentrl.engine.open.open_engine`."""
    if config.sync != "lora":
        lora = None
    elif lora is None:
        config = config.model_copy(update={"sync": "auto"})
    check_model_folder(model, f"model directory {str(model)!r}")
    if lora is not None:  # what the servers would reject later
        KINDS[config.kind].adapters(config, lora, model, None)
    if not config.server.urls:
        refuse_unlisted_optimizer(model, f"model directory {str(model)!r}")
    scratch = ScratchFolder("engine")
    server = config.server
    cluster = RayCluster(ray) if server.launch == "ray" else None

    def clean_up() -> None:
        scratch.close()
        if cluster is not None:
            cluster.close()

    try:
        engine = ServedEngine(
            _hosts(config, model, scratch.path, cluster, lora, routes=routes),
            _sync(config, model, scratch.path, lora, gpu),
            model=model,
            dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[config.resolved_dtype],
            given=bool(server.urls) and lora is None,
            local=server.launch == "process" and not server.urls,
            routes=layout_of(model) if routes else None,
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
    config: EngineConfig,
    model: Path,
    folder: Path,
    cluster: RayCluster | None,
    lora: LoRAConfig | None,
    *,
    routes: bool,
) -> list[Host]:
    server, kind = config.server, KINDS[config.kind]
    connect: Connect = partial(_connect, kind, config)
    wait_s = server.start_timeout_s
    if server.urls:
        return [GivenHost(url, connect, start_timeout_s=wait_s) for url in server.urls]
    python = _python(config)
    recipes = {
        f"{config.kind} server {number}": launch_recipe(config, model, python, number, lora, routes=routes)
        for number in range(server.replicas)
    }
    if cluster is not None:
        gpus = 0 if pick_device(config.device).type == "cpu" else server.tensor_parallel
        return [
            RayHost(name, recipe, connect, cluster=cluster, gpus=gpus, start_timeout_s=wait_s)
            for name, recipe in recipes.items()
        ]
    return [
        LaunchedHost(name, recipe, connect, log=folder / f"server-{number}.log", start_timeout_s=wait_s)
        for number, (name, recipe) in enumerate(recipes.items())
    ]


def _connect(kind: ServerKind, config: EngineConfig, url: str) -> InferenceServer:
    return kind.connect(url, config)


def _sync(config: EngineConfig, model: Path, folder: Path, lora: LoRAConfig | None, gpu: str) -> WeightSync:
    server = config.server
    shared = Path(server.sync_folder) if server.sync_folder else folder
    if lora is not None:
        return AdapterSync(model, shared, alpha=lora.plain_alpha)
    if config.resolved_sync == "disk":
        return DiskSync(model, shared)
    if config.resolved_sync == "delta":
        if config.resolved_dtype == "float32":
            raise ConfigError(
                "engine.sync delta has no effect in float32, where nearly every weight changes in each step: set "
                "engine.dtype to bfloat16, or use another sync"
            )
        return DeltaSync(bucket_bytes=server.bucket_mb << 20, full_every=server.full_every)
    if config.resolved_sync == "tensor":
        return TensorSync(bucket_bytes=server.bucket_mb << 20)
    return BroadcastSync(
        backend="nccl" if pick_device(config.device).type == "cuda" else "gloo",
        bucket_bytes=server.bucket_mb << 20,
        ranks_per_server=server.tensor_parallel,
        timeout_s=server.request_timeout_s,
        gpu=gpu,
    )


def _python(config: EngineConfig) -> str:
    """Return the Python that has the server installed. Raises ConfigError if it is this one and has none."""
    if config.server.python is not None:
        return config.server.python
    if not installed(config.kind):
        raise ConfigError(
            f"engine.kind is {config.kind}, which is not installed here: set engine.server.python to the Python "
            f"of an environment that has it, or engine.server.urls to running servers, or `pip install "
            f"{config.kind}`; see docs/engines.md"
        )
    return sys.executable


def launch_recipe(
    config: EngineConfig,
    model: Path,
    python: str,
    number: int,
    lora: LoRAConfig | None = None,
    *,
    routes: bool = False,
) -> Recipe:
    """Return the command line and environment of server `number`.

    Raises:
        ConfigError: the server cannot serve such adapters.
    """
    server, kind = config.server, KINDS[config.kind]
    device = pick_device(config.device)
    # A Ray actor sees the GPUs assigned to it, numbered from 0.
    first = 0 if server.launch == "ray" else (device.index or 0) + number * server.tensor_parallel
    gpu = None if device.type == "cpu" else first
    command, environment = kind.command(config, model, gpu)
    if lora is not None:
        more, switches = kind.adapters(config, lora, model, gpu)
        command, environment = [*command, *more], environment | switches
    if routes:
        command = [*command, *(kind.routes or ())]
    command = [python, "-m", *command, *server.args]
    own = dict(server.environment)
    if "PYTHONPATH" in own and "PYTHONPATH" in environment:
        own["PYTHONPATH"] = f"{environment['PYTHONPATH']}:{own['PYTHONPATH']}"
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | environment | own
    return Recipe(lambda port: [*command, "--port", str(port)], environment)
