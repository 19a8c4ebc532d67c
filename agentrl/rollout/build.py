"""Build the engine, player, token check and guard from a configuration."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

from agentrl.chat.template import Renderer
from agentrl.chat.token_check import TokenCheckBudget
from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.engine.fork_server import fork_server
from agentrl.env.env import Env
from agentrl.env.images import refuse_images
from agentrl.errors import ConfigError
from agentrl.gpu import may_have_gpu
from agentrl.rollout.compaction import Compaction
from agentrl.rollout.episode import Player, TokenCheck
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.redraws import RedrawGuard
from agentrl.types import EVERY_TOKEN, Filters, Sampling

EPISODES_PER_PROCESS, MOST_PROCESSES = 32, 4
"""With so many episodes per step, the local engine runs in a separate process; with several times as many, in
several. Fewer episodes rarely block each other."""


async def make_engine(config: RunConfig, directory: Path, *, trains: bool = False) -> Engine:
    """The engine of the run for a model directory; the caller closes it.

    Args:
        trains: whether its weights will change; with `engine.sync: lora`, the directory is the adapters' base
            model.

    Raises:
        ConfigError: see `open_engine`; also if weights will change and the engine cannot receive them.
    """
    from agentrl.engine.open import open_engine

    processes = _engine_processes(config)
    lora = config.learner.lora if trains else None
    routes = trains and config.learner.replay_routes
    gpu = config.learner.device if config.learner.device.startswith("cuda") else "cuda"
    engine = await open_engine(
        config.engine, directory, lora, processes=processes, ray=config.ray, routes=routes, gpu=gpu
    )
    if routes and not engine.capabilities.routes:
        await engine.close()
        raise ConfigError(
            f"engine.kind {config.engine.kind} does not return the experts that routers choose (its "
            "capabilities.routes is False): remove learner.replay_routes, or use the local engine"
        )
    if trains and not engine.capabilities.weights:
        await engine.close()
        raise ConfigError(
            f"engine.kind {config.engine.kind} cannot take new weights (its capabilities.weights is False), so it "
            "can evaluate and serve a policy but not train one"
        )
    return engine


def expect_engine(config: RunConfig) -> None:
    """Start what the run's engine will be forked from, if it gets processes; see `agentrl.engine.fork_server`."""
    on_cpu = config.engine.device == "cpu" or (config.engine.device == "auto" and not may_have_gpu())
    forks = not multiprocessing.current_process().daemon
    if config.engine.kind == "local" and on_cpu and forks and _engine_processes(config):
        fork_server()


def _engine_processes(config: RunConfig) -> int:
    """Processes of a local engine on a CPU; 0 for a thread."""
    # An agent may request grammars and alternatives, which need a streaming engine.
    episodes = 0 if config.agent is not None else config.rollout.groups_per_step * config.rollout.group_size
    return min(episodes // EPISODES_PER_PROCESS, MOST_PROCESSES)


def make_player(
    config: RunConfig,
    engine: Engine,
    renderer: Renderer,
    make_env: Callable[[], Env],
    *,
    temperature: float,
    filters: Filters = EVERY_TOKEN,
    token_check: TokenCheck | None = None,
    hints: bool = False,
) -> Player:
    """The player of this run at this temperature. Raises ConfigError if a tool returns images, or
    `rollout.compact` has no effect."""
    refuse_images(make_env())
    return Player(
        engine=engine,
        renderer=renderer,
        make_env=make_env,
        limits=EpisodeLimits.of(config),
        sampling=Sampling(
            temperature=temperature,
            top_p=filters.top_p,
            top_k=filters.top_k,
            min_p=filters.min_p,
            max_tokens=config.rollout.max_tokens,
            stop_ids=renderer.stop_ids,
        ),
        token_check=token_check,
        compaction=Compaction.of(config, engine),
        hints=hints,
    )


def make_token_check(config: RunConfig) -> TokenCheck | None:
    """The run's comparison of transcripts with new renderings."""
    mode = config.rollout.tokenization_check
    return (
        None if mode == "disable" else TokenCheck(mode, TokenCheckBudget(config.rollout.tokenization_stop_above))
    )


def make_guard(config: RunConfig, tell: Callable[[str], None]) -> RedrawGuard:
    """The guard that stops the run if too many episodes are lost or rewards keep raising."""
    return RedrawGuard(config.rollout.redrawn_stop_above, config.rollout.faults_stop_above, tell)
