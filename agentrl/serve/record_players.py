"""Who plays the episodes of a run: the built-in loop, or the program under `agent:`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from agentrl.chat.template import Renderer
from agentrl.config.run import AgentConfig, RunConfig
from agentrl.engine.base import Engine
from agentrl.env.env import Env
from agentrl.env.load import load_object
from agentrl.env.toolenv import ToolEnv
from agentrl.errors import ConfigError
from agentrl.rollout.episode import Player, TokenCheck
from agentrl.rollout.frame import Limits
from agentrl.rollout.setup import make_player

if TYPE_CHECKING:
    from agentrl.serve.record_agent import AgentPlayer, RecorderServer
    from agentrl.serve.record_program import Agent


class Players:
    """Makes the players of a run and closes what they share.

    Raises:
        ConfigError: the program under `agent:` cannot be found, or does not fit the env.
    """

    def __init__(self, config: RunConfig, engine: Engine, renderer: Renderer, make_env: Callable[[], Env]) -> None:
        self._config, self._engine, self._renderer, self._make_env = config, engine, renderer, make_env
        self._server: RecorderServer | None = None
        if config.agent is not None:
            _check_env(make_env())
            self._agent = make_agent(config.agent)
            self._server = self._make_server()
            self._places = asyncio.Semaphore(config.agent.max_running)

    def make(self, *, temperature: float, token_check: TokenCheck | None = None) -> Player | AgentPlayer:
        """A player at this temperature."""
        config = self._config
        if config.agent is None or self._server is None:
            return make_player(
                config,
                self._engine,
                self._renderer,
                self._make_env,
                temperature=temperature,
                token_check=token_check,
            )
        from agentrl.serve.record_agent import AgentPlayer

        return AgentPlayer(
            self._server,
            self._agent,
            self._make_env,
            self._server.recorder.limits,
            temperature,
            self._places,
            config.agent.crash,
            token_check,
        )

    async def close(self) -> None:
        """Stop the recorder, if there is one; idempotent."""
        if self._server is not None:
            await self._server.close()

    def _make_server(self) -> RecorderServer:
        try:
            from agentrl.serve.record import Recorder
            from agentrl.serve.record_agent import RecorderServer
        except ImportError as e:
            raise ConfigError(f"agent: the recorder needs {e.name}: pip install 'agentrl-train[serve]'") from e
        rollout = self._config.rollout
        limits = Limits(rollout.max_turns, rollout.max_tokens, rollout.token_budget, rollout.timeout_s)
        return RecorderServer(Recorder(self._engine, self._renderer, limits))


def make_agent(config: AgentConfig) -> Agent:
    """The program that a configuration names.

    Raises:
        ConfigError: the function cannot be found or called.
    """
    from agentrl.serve.record_program import CommandAgent, FunctionAgent

    if config.use is None:
        return CommandAgent(config.command, config.cwd)
    function = load_object(config.use)
    if not callable(function):
        raise ConfigError(f"agent.use {config.use!r}: is no function; write `async def f(task, access)`")
    return FunctionAgent(function)


def _check_env(env: Env) -> None:
    if isinstance(env, ToolEnv):
        per_turn = [reward.name for reward in env.spec().rewards if reward.mark.per == "turn"]
        if per_turn:
            raise ConfigError(
                f"agent: reward {per_turn[0]!r} of {type(env).__name__} is asked for each turn, and the env takes "
                "no part in the turns of an agent: use rewards per episode or group"
            )
