"""Players of a run's episodes: the built-in loop, here or on workers, or the program under `agent:`."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentrl.chat.template import Renderer
from agentrl.config.place import Places, located
from agentrl.config.run import AgentConfig, RunConfig
from agentrl.engine.base import Engine
from agentrl.env.env import Env
from agentrl.errors import ConfigError
from agentrl.importing import load_object
from agentrl.rollout.build import make_player
from agentrl.rollout.episode import TokenCheck
from agentrl.rollout.group import Plays
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.ray.workers import placed
from agentrl.types import EVERY_TOKEN, Filters

if TYPE_CHECKING:
    from agentrl.agents.program import Agent
    from agentrl.agents.recorder import Recorder
    from agentrl.sandbox import Sandbox


class MakePlayer(Protocol):
    """Creates a player for a sampling temperature."""

    def __call__(
        self,
        *,
        env: str = "",
        temperature: float,
        filters: Filters = EVERY_TOKEN,
        token_check: TokenCheck | None = None,
        hints: bool = False,
    ) -> Plays:
        """Create the player of an env.

        Raises:
            ConfigError: the player does not support sampling filters.
        """
        ...


MakeEnv = Callable[[], Env]


@asynccontextmanager
async def players(
    config: RunConfig,
    model: Path | None,
    engine: Engine,
    renderer: Renderer,
    make_env: MakeEnv | Mapping[str, MakeEnv],
) -> AsyncIterator[MakePlayer]:
    """Yields the factory of the run's players; their shared resources exist while the block runs.

    Args:
        config: configuration of the run; `agent` and `rollout.workers` choose the player.
        model: directory with the tokenizer, for workers; None plays in this process.
        engine: samples for all of them.
        renderer: renderer of the run.
        make_env: creates the env of an episode; with several envs, one for each by name.

    Raises:
        ConfigError: the program under `agent:` cannot be found, or does not fit the env.
        WorkerLost: no worker could be started.
    """
    make_envs = make_env if isinstance(make_env, Mapping) else {"": make_env}
    if config.agent is not None:
        (make_env,) = make_envs.values()
        async with _agent_players(config, config.agent, engine, renderer, make_env) as make:
            yield make
        return

    async with AsyncExitStack() as stack:
        place = None if model is None else await stack.enter_async_context(placed(config, model, engine))

        def make(
            *,
            env: str = "",
            temperature: float,
            filters: Filters = EVERY_TOKEN,
            token_check: TokenCheck | None = None,
            hints: bool = False,
        ) -> Plays:
            player = make_player(
                config.by_env[env],
                engine,
                renderer,
                make_envs[env],
                temperature=temperature,
                filters=filters,
                token_check=token_check,
                hints=hints,
            )
            return player if place is None else place(player)

        yield make


@asynccontextmanager
async def _agent_players(
    config: RunConfig, agent: AgentConfig, engine: Engine, renderer: Renderer, make_env: Callable[[], Env]
) -> AsyncIterator[MakePlayer]:
    try:
        from agentrl.agents.player import AgentPlayer
        from agentrl.agents.program import Clients
        from agentrl.agents.recorder import Recorder
        from agentrl.agents.worker_pool import WorkerAgent
        from agentrl.serve.listen import running
    except ImportError as e:
        raise ConfigError(f"agent: the recorder needs {e.name}: pip install 'agentrl-train[serve]'") from e
    _check_env(make_env())
    recorder = Recorder(engine, renderer, EpisodeLimits.of(config))
    places = asyncio.Semaphore(min(agent.max_running, agent.workers or agent.max_running))
    program = make_agent(agent) if agent.sandbox is None else _make_boxed(agent, recorder)
    clients = Clients()
    async with AsyncExitStack() as stack:
        if isinstance(program, WorkerAgent):
            await stack.enter_async_context(program.running())
        address = await stack.enter_async_context(running(recorder.app()))

        def make(
            *,
            env: str = "",
            temperature: float,
            filters: Filters = EVERY_TOKEN,
            token_check: TokenCheck | None = None,
            hints: bool = False,
        ) -> Plays:
            if filters != EVERY_TOKEN:
                raise ConfigError("agent: its completions are drawn as in training, without top_p, top_k or min_p")
            return AgentPlayer(
                recorder,
                address,
                program,
                make_env,
                temperature,
                places,
                agent.crash,
                token_check,
                clients,
                agent.offer_tools,
                hints,
            )

        try:
            yield make
        finally:
            await clients.close()


def make_agent(config: AgentConfig) -> Agent:
    """Load the program named in the configuration.

    Raises:
        ConfigError: the function cannot be found or called, or the command cannot be started.
    """
    from agentrl.agents.program import CommandAgent, FunctionAgent
    from agentrl.agents.worker_pool import WorkerAgent

    if config.use is None:
        _check_command(config.command[0], config.cwd)
        if config.workers is not None:
            return WorkerAgent(config.command, config.workers, config.cwd)
        return CommandAgent(config.command, config.cwd)
    function = load_object(config.use)
    if not callable(function):
        raise ConfigError(f"agent.use {config.use!r}: is not a function; write `async def f(task, access)`")
    return FunctionAgent(function)


def check_agent(config: AgentConfig, places: Places | None = None, *, timeout_s: float) -> None:
    """Check that the program can be started, in episodes of at most `timeout_s`.

    Raises:
        ConfigError: it cannot, or its sandbox would not hold it.
    """
    with located(places):
        if config.sandbox is None:
            make_agent(config)
        else:
            _make_spec(config, timeout_s)


def _make_spec(config: AgentConfig, timeout_s: float) -> Sandbox:
    from agentrl.agents.boxed import box_spec

    return box_spec(config.sandbox or {}, timeout_s)


def _make_boxed(config: AgentConfig, recorder: Recorder) -> Agent:
    """Raises ConfigError if the sandbox could not keep the program to its episode."""
    from agentrl.agents.boxed import BoxedAgent

    return BoxedAgent(config.command, _make_spec(config, recorder.limits.timeout_s), recorder.app())


def _check_command(program: str, cwd: str | None) -> None:
    """Raises ConfigError if the program of `agent.command` cannot be started."""
    if cwd is not None and not Path(cwd).is_dir():
        raise ConfigError(f"agent.cwd {cwd}: no such folder")
    if program == "python" or "{" in program:  # this interpreter, or substituted for each episode
        return
    path = program if os.sep not in program else str(Path(cwd or ".", program).absolute())
    if shutil.which(path) is None:
        raise ConfigError(
            f"agent.command {program!r}: no such program; name one in PATH, or the path of an executable file"
        )


def _check_env(env: Env) -> None:
    per_turn = [name for name, reward in (env.declared_rewards() or {}).items() if reward.per == "turn"]
    if per_turn:
        raise ConfigError(
            f"agent: reward {per_turn[0]!r} of {type(env).__name__} is computed per turn, but an agent "
            "plays without the env's turns: use rewards per episode or group"
        )
