"""Create an engine from the configuration."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from agentrl.config.engine import EngineConfig
from agentrl.config.run import LoRAConfig
from agentrl.engine.base import Engine
from agentrl.errors import ConfigError


async def open_engine(
    config: EngineConfig,
    model: Path,
    lora: LoRAConfig | None = None,
    *,
    processes: int = 0,
    ray: str | None = None,
    routes: bool = False,
    gpu: str = "cuda",
) -> Engine:
    """Create an engine for the model directory; with servers, return when all of them respond.

    Args:
        lora: describes the adapters that `sync: lora` will send; without it only the directory is served, and
        weights are synchronized as with `sync: auto`.
        processes: on a CPU, run the local engine in up to this many separate processes, where it cannot stream
        tokens; 0 runs it in a thread.
        ray: address of the cluster for servers with `launch: ray`; without it, one is started on this machine.
        routes: have completions report the experts that routers chose, as the local engine and SGLang can.
        gpu: of this process; what weights are broadcast to servers from.

    Raises:
        ConfigError: the model, the device, the server's installation or the user's own engine cannot be used.
        EngineError: a server did not start.
    """
    if config.on_servers:
        from agentrl.engine.servers.opening import open_served

        return await open_served(config, model.absolute(), lora, ray, gpu, routes=routes)
    if config.own:
        from agentrl.engine.own import open_own

        return await open_own(config, model.absolute())
    return await _open_local(config, model, processes, routes)


async def _open_local(config: EngineConfig, model: Path, processes: int, routes: bool) -> Engine:
    from agentrl.engine.local.local_engine import LocalEngine
    from agentrl.engine.local.process_pool import start_processes
    from agentrl.models.device import pick_device

    device = pick_device(config.device)
    if config.cuda_graphs == "off" and device.type != "cuda":
        raise ConfigError(f"engine.cuda_graphs has no effect on the device {device}; remove it")
    can_fork = not multiprocessing.current_process().daemon
    if processes and device.type == "cpu" and can_fork:
        return await start_processes(
            model, processes, dtype=config.resolved_dtype, routes=routes, max_slots=config.max_slots
        )
    return LocalEngine.from_directory(
        model,
        dtype=config.resolved_dtype,
        device=str(device),
        cuda_graphs=config.cuda_graphs == "auto",
        routes=routes,
        max_slots=config.max_slots,
    )
