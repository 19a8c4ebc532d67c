"""Episodes that a program of the user's plays: it talks to the recorder, and the env scores what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from agentrl.agents.program import Access, Agent, AgentCrashedError, AgentTask, Clients
from agentrl.agents.recorder import Recorder, Recording
from agentrl.env.env import Env
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import EngineError, InfraError
from agentrl.rollout.episode import TokenCheck
from agentrl.rollout.frame import Progress, Whereabouts, reset_env, run_framed
from agentrl.types import Episode, StopReason, Task


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """Plays episodes by letting a program play them.

    A request beyond the recorder's limits is refused, and the episode is scored as it stands.

    Args:
        recorder: where the program finds the policy, at `address`.
        agent: starts the program.
        make_env: makes the env, whose `reset` says what the task is and whose rewards score the outcome; its
            `step` is not called: the program has its own tools.
        temperature: at which all completions are drawn, whatever the program asks for.
        places: bounds the programs that run at the same time.
        crash: what a program that does not end well means: "infra" (the episode neither trains nor votes) or
            "score" (it is scored as it stands).
        token_check: compares every branch with a fresh rendering.
        clients: what functions share; closed by who made it.
    """

    recorder: Recorder
    address: str
    agent: Agent
    make_env: Callable[[], Env]
    temperature: float
    places: asyncio.Semaphore
    crash: Literal["infra", "score"] = "score"
    token_check: TokenCheck | None = None
    clients: Clients = field(default_factory=Clients)

    async def play(self, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None) -> Episode:
        """Play one episode; infrastructure failures become its `error`."""
        where = where or Whereabouts(episode_id, task.id)
        where.now("a place among agent.max_running")
        async with self.places:
            where.started = where.since
            return await self._episode(task, where, seed)

    async def _episode(self, task: Task, where: Whereabouts, seed: int) -> Episode:
        recorder = self.recorder
        recording = recorder.open(temperature=self.temperature, seed=seed)

        async def play(env: Env, progress: Progress) -> None:
            await self._play(env, task, progress, where, recording)

        async def release() -> None:
            await recorder.close(recording)

        episode, _ = await run_framed(
            play, task, make_env=self.make_env, timeout_s=recorder.limits.timeout_s, where=where, release=release
        )
        return self._checked(episode, recording)

    async def _play(
        self, env: Env, task: Task, progress: Progress, where: Whereabouts, recording: Recording
    ) -> None:
        where.now("env.reset")
        if isinstance(env, ToolEnv):
            env.count_tokens = lambda text: len(self.recorder.renderer.encode_text(text))
            env.decode = self.recorder.renderer.vocabulary.decode_plain
        opening = await reset_env(env, task)
        progress.transcript = recording.ledger
        access = Access(self.address + recording.path, recording.key, clients=self.clients)
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
        if crashed and recording.stop is None and (self.crash == "infra" or not progress.turns):
            raise InfraError(f"the agent crashed after {recording.num_turns} turns: {crashed}")
        if not progress.turns:
            raise InfraError("the agent ended without a completion of the policy: is it given the base URL?")
        progress.count({"agent/crashed": float(bool(crashed))} if crashed else {})
        if isinstance(env, ToolEnv):
            env.outcome = outcome
        last = progress.turns[-1]
        ended = StopReason.TERMINATED if last.message.tool_calls else StopReason.ANSWERED
        progress.stop = recording.stop or (StopReason.MAX_TOKENS if last.finish == "length" else ended)

    def _checked(self, episode: Episode, recording: Recording) -> Episode:
        """The episode with the counts of the token check over all its branches."""
        if self.token_check is None or episode.error is not None:
            return episode
        metrics = dict(episode.metrics)
        for branch in recording.leaves():
            for name, value in self.token_check.metrics(branch, episode.id).items():
                metrics[name] = metrics.get(name, 0.0) + value
        return replace(episode, metrics=metrics)
