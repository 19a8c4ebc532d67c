"""One episode: alternate engine and env until it ends. Whatever happens, the env is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.chat.check import Mode, Watch
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.engine.base import Engine
from agentrl.env.env import Env
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import EngineError
from agentrl.rollout.branch import PolicyBranch
from agentrl.rollout.frame import Limits, Progress, Whereabouts, draw_seed, reset_env, run_framed, step_env
from agentrl.types import Episode, Sampling, StopReason, Task, Turn


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that plays episodes: where tokens come from and how text becomes tokens."""

    engine: Engine
    renderer: Renderer
    make_env: Callable[[], Env]
    limits: Limits
    sampling: Sampling
    token_check: TokenCheck | None = None
    """Compares every ledger with a fresh rendering; None where nothing is compared."""

    async def play(self, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None) -> Episode:
        """Play one episode in this process; see `run_episode`."""
        return await run_episode(self, task, episode_id=episode_id, seed=seed, where=where)


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """How ledgers are compared with fresh renderings, and what that has found in this run."""

    mode: Mode
    watch: Watch

    def metrics(self, transcript: Transcript, episode_id: str) -> dict[str, float]:
        """Counts of differing windows by class; `tokens/failed` where the transcript must not train.

        Raises:
            TemplateError: too many of the run's transcripts failed.
        """
        report = transcript.check(self.mode)
        trains = self.watch.add(report, episode_id)
        found = {f"tokens/{drift.value}": float(count) for drift, count in report.counts.items()}
        return found | ({} if trains else {"tokens/failed": 1.0})


async def run_episode(
    player: Player, task: Task, *, episode_id: str, seed: int, where: Whereabouts | None = None
) -> Episode:
    """Play one episode; trouble that the policy cannot cause becomes `Episode.error`, never an exception.

    Args:
        player: engine, renderer, env factory and limits.
        task: what the env is reset to.
        episode_id: unique in the run; also the engine's session.
        seed: with the turn number it determines every draw of the sampler.
        where: kept up to date with what the episode waits for.
    """
    where = where or Whereabouts(episode_id, task.id)

    async def play(env: Env, progress: Progress) -> None:
        outage_s = player.engine.outage_s
        try:
            await _play(player, env, task, progress, where, seed)
        except asyncio.CancelledError:
            if player.engine.outage_s > outage_s:
                progress.outside = "an episode during which no server could answer"
            raise

    async def release() -> None:
        with contextlib.suppress(EngineError):
            await player.engine.release(episode_id)

    episode, progress = await run_framed(
        play, task, make_env=player.make_env, timeout_s=player.limits.timeout_s, where=where, release=release
    )
    return checked(player.token_check, episode, progress.transcript)


def checked(check: TokenCheck | None, episode: Episode, transcript: Transcript | None) -> Episode:
    """The episode with the counts of its token check; as it is where there is nothing to check."""
    if check is None or transcript is None or episode.error is not None:
        return episode
    return replace(episode, metrics={**episode.metrics, **check.metrics(transcript, episode.id)})


async def _play(player: Player, env: Env, task: Task, progress: Progress, where: Whereabouts, seed: int) -> None:
    """Alternate policy and env until `progress.stop` is set."""
    session = where.episode_id
    where.now("env.reset")
    ledger = Transcript(player.renderer)
    if isinstance(env, ToolEnv):
        env.reads_images = False  # renderers know text only
        env.count_tokens = lambda text: len(player.renderer.encode_text(text))
        env.decode = player.renderer.vocabulary.decode_plain
        sampling = replace(player.sampling, max_tokens=player.limits.max_tokens, seed=draw_seed(seed, "branch"))
        env.model = PolicyBranch(player.engine, player.renderer, ledger, sampling, session)
    observation = await reset_env(env, task)
    transcript = ledger.fork(keep=0, tools=env.tools)
    transcript.extend(observation)
    progress.transcript = transcript
    while progress.stop is None:
        room, tight = _room(player, len(transcript.ids))
        if room < 1:
            progress.stop = tight
            return
        sampling = replace(player.sampling, max_tokens=room, seed=draw_seed(seed, len(progress.turns)))
        where.now(f"the engine (turn {len(progress.turns)})")
        began = where.since
        completion = await player.engine.generate(transcript.ids, sampling, session=session)
        where.now(f"env.step (turn {len(progress.turns)})")
        if completion.finish == "abort":
            raise EngineError(f"the engine aborted the completion of turn {len(progress.turns)}")
        message = transcript.complete(completion)
        turn = Turn(message, (), 0.0, completion.finish, len(completion.ids), where.since - began, 0.0)
        if completion.finish == "length":
            progress.turns.append(turn)
            progress.stop = tight
            return
        observed = await step_env(env, turn, progress, player.limits.max_turns)
        if progress.stop is None:
            transcript.extend(observed)


def _room(player: Player, used: int) -> tuple[int, StopReason]:
    """Tokens that the next completion may have, and the stop reason if that many do not suffice."""
    limits = player.limits
    by_context, by_budget = player.engine.max_context - used, limits.token_budget - used
    room = min(limits.max_tokens, by_context, by_budget)
    if by_context <= max(room, 0):
        return room, StopReason.CONTEXT_FULL
    return room, StopReason.TOKEN_BUDGET if by_budget <= max(room, 0) else StopReason.MAX_TOKENS
