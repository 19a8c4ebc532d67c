"""Episodes played by the user's program: it talks to the recorder, and the env scores the outcome."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from agentrl.agents.program import Access, Agent, AgentCrashedError, AgentTask, Clients
from agentrl.agents.recorder import EpisodeRecording, Recorder
from agentrl.env.env import Env, PolicyAccess
from agentrl.errors import EngineError, InfraError
from agentrl.plural import plural
from agentrl.rollout.episode import TokenCheck, checked
from agentrl.rollout.lifecycle import (
    EpisodeStatus,
    OpenEpisode,
    attribution,
    closing,
    episode_clock,
    reset_env,
    score_env,
)
from agentrl.types import Episode, Task


def read_outcome(text: str) -> Any:
    """What a program returned: the value of a JSON object or array, else the text itself."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_policy(recording: EpisodeRecording) -> None:
    """Check that what an episode lacks is not our fault, however its program took it.

    Raises:
        EngineError: the policy could not answer.
        Exception: a bug of agentrl that a request met.
    """
    if recording.bug is not None:
        raise recording.bug
    if recording.trouble is not None:
        raise EngineError(recording.trouble)


def _without_completion(recording: EpisodeRecording) -> InfraError:
    why = "does it use the base URL it is given?"
    if recording.refusal is not None:
        why = f"its request was refused ({recording.refusal.status}): {recording.refusal.message[:300]}"
    return InfraError(f"the agent ended without a completion of the policy: {why}")


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """Plays episodes by running a program.

    A request beyond the recorder's limits is rejected, and the episode so far is scored.

    Args:
        recorder: serves the policy to the program, at `address`.
        agent: starts the program.
        make_env: creates the env; its `reset` defines the task and its rewards score the outcome. Its `step` is
            not called, because the program brings its tools.
        temperature: sampling temperature of all completions, regardless of the program's requests.
        places: bounds the number of concurrent programs.
        crash: how to treat a program that fails: "infra" (the episode is excluded from training and group
            statistics) or "score" (the episode so far is scored).
        token_check: compares every branch with a new rendering.
        clients: HTTP client shared by functions; closed by its creator.
        offer_tools: requests without tools offer those of the env.
        hints: whether the env is asked for a teacher's hint.
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
    offer_tools: bool = False
    hints: bool = False

    async def play(
        self, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
    ) -> Episode:
        """Play one episode; infrastructure failures become its `error`."""
        status = status or EpisodeStatus(episode_id, task.id)
        status.now("a place among agent.max_running")
        async with self.places:
            status.started = status.since
            return await self._run_episode(OpenEpisode(task, status), seed)

    async def _run_episode(self, episode: OpenEpisode, seed: int) -> Episode:
        recorder, renderer, engine = self.recorder, self.recorder.renderer, self.recorder.engine
        timeout_s = recorder.limits.timeout_s
        recording = recorder.open(temperature=self.temperature, seed=seed)
        release = partial(recorder.close, recording)
        with attribution(episode):
            async with closing(self.make_env, episode, timeout_s, release=release) as env:
                async with episode_clock(episode, timeout_s, outage_s=lambda: engine.outage_s):
                    count_tokens = lambda text: len(renderer.encode_text(text))  # noqa: E731
                    env.gives_hints = self.hints
                    env.bind(PolicyAccess(count_tokens=count_tokens, decode=renderer.vocabulary.decode_plain))
                    opening = await reset_env(env, episode)
                    recording.offered = tuple(env.tools) if self.offer_tools else ()
                    episode.transcript = recording.ledger
                    box = getattr(env, "box", None) if getattr(env, "sandbox", None) is not None else None
                    given = AgentTask(episode.task, opening, env.tools, box)
                    said = await self._run_agent(given, episode, recording)
                    env.outcome = read_outcome(said)
                _check_policy(recording)  # the time may have run out
                if not (episode.turns or recording.cut_off):
                    raise _without_completion(recording)
                await score_env(env, episode, timeout_s)
        return checked(self.token_check, episode.result(), recording.leaves())

    async def _run_agent(self, task: AgentTask, episode: OpenEpisode, recording: EpisodeRecording) -> str:
        """Run the program and read its turns from the recording; returns the program's return value.

        Raises:
            InfraError: the policy could not answer, or the program failed with `crash: infra`.
            Exception: a bug of agentrl that a request met.
        """
        episode.status.now("the agent")
        access = Access(self.address + recording.path, recording.key, clients=self.clients)
        outcome, crashed = "", ""
        try:
            outcome = await self.agent.run(task, access)
        except AgentCrashedError as e:
            crashed = str(e)
        finally:  # also after a timeout
            recording.seal()
            episode.turns[:] = recording.turns(episode.status.started)
            episode.tools = recording.tools
            episode.count(recording.metrics())
        _check_policy(recording)
        episode.crash = crashed if recording.stop is None else ""  # at a limit, that is the reason
        if episode.crash and (self.crash == "infra" or not episode.turns):
            raise InfraError(f"the agent crashed after {plural(recording.num_turns, 'turn')}: {crashed}")
        if not episode.turns:
            raise _without_completion(recording)
        episode.count({"agent/crashed": 1.0} if crashed else {})
        episode.stop = recording.ending
        return outcome
