"""Episodes that a program of the user's plays: it talks to the recorder, and the env scores what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from agentrl.chat.template import Renderer
from agentrl.env.env import Env
from agentrl.env.toolenv import ToolEnv
from agentrl.errors import EngineError, InfraError
from agentrl.rollout.episode import TokenCheck
from agentrl.rollout.frame import Limits, Progress, Whereabouts, run_framed
from agentrl.serve.record import Recorder, Recording
from agentrl.serve.record_program import Access, Agent, AgentCrashedError, AgentTask
from agentrl.serve.run import running
from agentrl.types import Episode, StopReason, Task


@dataclass
class RecorderServer:
    """A recorder on a loopback port, started when it is first needed."""

    recorder: Recorder
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _address: str | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def address(self) -> str:
        """http://127.0.0.1:PORT"""
        async with self._lock:
            if self._address is None:
                self._address = await self._stack.enter_async_context(running(self.recorder.app()))
            return self._address

    async def close(self) -> None:
        """Stop it; idempotent."""
        async with self._lock:
            self._address = None
            await self._stack.aclose()


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """Plays episodes by letting a program play them.

    Args:
        server: where the program finds the policy.
        agent: starts the program.
        make_env: makes the env, whose `reset` says what the task is and whose rewards score the outcome; its
            `step` is not called: the program has its own tools.
        limits: as in the built-in loop; a request beyond them is refused, and the episode scored as it stands.
        temperature: at which all completions are drawn, whatever the program asks for.
        places: bounds the programs that run at the same time.
        crash: what a program that does not end well means: "infra" (the episode neither trains nor votes) or
            "score" (it is scored as it stands).
        token_check: compares every branch with a fresh rendering.
    """

    server: RecorderServer
    agent: Agent
    make_env: Callable[[], Env]
    limits: Limits
    temperature: float
    places: asyncio.Semaphore
    crash: Literal["infra", "score"] = "infra"
    token_check: TokenCheck | None = None

    @property
    def renderer(self) -> Renderer:
        """Turns messages into tokens."""
        return self.server.recorder.renderer

    async def play(self, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None) -> Episode:
        """Play one episode; infrastructure failures become its `error`."""
        where = where or Whereabouts(episode_id, task.id)
        where.now("a place among agent.max_running")
        async with self.places:
            where.started = where.since
            return await self._episode(task, where, seed)

    async def _episode(self, task: Task, where: Whereabouts, seed: int) -> Episode:
        recorder = self.server.recorder
        recording = recorder.open(temperature=self.temperature, seed=seed)

        async def play(env: Env, progress: Progress) -> None:
            await self._play(env, task, progress, where, recording)

        async def release() -> None:
            await recorder.close(recording)

        episode, _ = await run_framed(
            play, task, make_env=self.make_env, timeout_s=self.limits.timeout_s, where=where, release=release
        )
        return self._checked(episode, recording)

    async def _play(
        self, env: Env, task: Task, progress: Progress, where: Whereabouts, recording: Recording
    ) -> None:
        address = await self.server.address()
        where.now("env.reset")
        if isinstance(env, ToolEnv):
            env.count_tokens = lambda text: len(self.renderer.encode_text(text))
        opening, _ = await env.reset(task)
        progress.transcript = recording.ledger
        access = Access(address + recording.path, recording.key)
        where.now("the agent")
        outcome, crashed = "", ""
        try:
            outcome = await self.agent.run(AgentTask(task, opening, env.tools), access)
        except AgentCrashedError as e:
            crashed = str(e)
        finally:  # also when its time is up
            recording.seal()
            progress.turns[:] = recording.turns()
            progress.tools = recording.tools
            progress.count(recording.metrics())
        if recording.trouble is not None:
            raise EngineError(recording.trouble)
        if crashed and recording.stop is None and self.crash == "infra":
            raise InfraError(f"the agent crashed after {recording.num_turns} turns: {crashed}")
        if not progress.turns:
            raise InfraError("the agent ended without a completion of the policy: is it given the base URL?")
        progress.count({"agent/crashed": float(bool(crashed))} if crashed else {})
        if isinstance(env, ToolEnv):
            env.outcome = outcome
        last = progress.turns[-1]
        ended = StopReason.TERMINATED if last.message.tool_calls else StopReason.ANSWERED
        progress.stop = recording.stop or (StopReason.TOKEN_BUDGET if last.finish == "length" else ended)

    def _checked(self, episode: Episode, recording: Recording) -> Episode:
        """The episode with the counts of the token check over all its branches."""
        if self.token_check is None or episode.error is not None:
            return episode
        metrics = dict(episode.metrics)
        for branch in recording.leaves():
            for name, value in self.token_check.metrics(branch, episode.id).items():
                metrics[name] = metrics.get(name, 0.0) + value
        return replace(episode, metrics=metrics)
