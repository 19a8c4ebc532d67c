"""One episode: alternate policy and env until it ends. The env is closed in any case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.chat.template import Renderer
from agentrl.chat.token_check import Mode, TokenCheckBudget, check_tokens
from agentrl.chat.transcript import Transcript
from agentrl.engine.base import Engine
from agentrl.env.env import Env, PolicyAccess
from agentrl.errors import EngineError
from agentrl.rollout.branch import PolicyBranch
from agentrl.rollout.compaction import IN_VAIN, Compaction, compact
from agentrl.rollout.lifecycle import (
    EpisodeStatus,
    OpenEpisode,
    attribution,
    closing,
    episode_clock,
    reset_env,
    score_env,
    step_env,
)
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.seeds import draw_seed
from agentrl.types import Completion, Episode, Message, Sampling, StopReason, Task, Turn


@dataclass(frozen=True, slots=True)
class Player:
    """Plays episodes: the engine samples tokens, and the renderer turns messages into tokens."""

    engine: Engine
    renderer: Renderer
    make_env: Callable[[], Env]
    limits: EpisodeLimits
    sampling: Sampling
    token_check: TokenCheck | None = None
    """Compares every transcript with a new rendering; None skips the check."""
    compaction: Compaction | None = None
    """Shortens contexts that fill up; None ends the episode instead."""
    hints: bool = False
    """Whether the env is asked for a teacher's hint."""

    async def play(
        self, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
    ) -> Episode:
        """Play one episode in this process; see `run_episode`."""
        return await run_episode(self, task, episode_id=episode_id, seed=seed, status=status)


async def run_episode(
    player: Player, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
) -> Episode:
    """Play one episode. Failures the policy did not cause become `Episode.error`; bugs of agentrl are raised.

    Args:
        player: engine, renderer, env factory and limits.
        task: the task passed to the env's `reset`.
        episode_id: unique within the run; also names the engine session.
        seed: with the turn number, it determines all sampling.
        status: updated with what the episode waits for.

    Raises:
        ConfigError: the user's input is invalid; every other episode would fail in the same way.
        TemplateError: the chat template rejects the opening messages.
    """
    engine, limits = player.engine, player.limits
    episode = OpenEpisode(task, status or EpisodeStatus(episode_id, task.id))
    release = partial(engine.release, episode_id)
    ledger = Transcript(player.renderer)
    model = _policy_branch(player, ledger, episode_id, seed)
    with attribution(episode):
        async with closing(player.make_env, episode, limits.timeout_s, release=release) as env:
            async with episode_clock(episode, limits.timeout_s, outage_s=lambda: engine.outage_s):
                env.gives_hints = player.hints
                env.bind(_policy_access(player.renderer, model))
                opening = observed = await reset_env(env, episode)
                transcript = episode.transcript = ledger.fork(keep=0, tools=env.tools)
                while episode.stop is None:
                    transcript.extend(observed)
                    transcript = episode.transcript = await _compacted(player, episode, opening, seed)
                    room, tight = _room(player, transcript)
                    if room < 1:
                        episode.stop = tight
                        break
                    number = len(episode.turns)
                    waited = episode.status.now(f"the engine (turn {number})")
                    sampling = replace(player.sampling, max_tokens=room, seed=draw_seed(seed, number))
                    completion = await engine.generate(transcript.ids, sampling, session=episode_id)
                    seconds = episode.status.now(f"env.step (turn {number})") - waited
                    turn = _turn(transcript, completion, number, seconds, waited - episode.status.started)
                    if completion.finish == "length":
                        episode.cut(turn, tight)
                        break
                    observed = await step_env(env, turn, episode, limits.max_turns)
            await score_env(env, episode, limits.timeout_s)
    transcripts = [*model.trained(), *filter(None, [episode.transcript])]
    return checked(player.token_check, episode.result(), transcripts)


def _policy_branch(player: Player, ledger: Transcript, episode_id: str, seed: int) -> PolicyBranch:
    """Separate conversations with the policy, for the env."""
    limits = player.limits
    sampling = replace(player.sampling, max_tokens=limits.max_tokens, seed=draw_seed(seed, "branch"))
    return PolicyBranch(player.engine, player.renderer, ledger, sampling, episode_id, limits.token_budget)


def _policy_access(renderer: Renderer, model: PolicyBranch) -> PolicyAccess:
    """The env's access to the policy: separate conversations and its tokenizer."""
    return PolicyAccess(
        model=model,
        count_tokens=lambda text: len(renderer.encode_text(text)),
        decode=renderer.vocabulary.decode_plain,
        reads_images=False,  # renderers accept text only
    )


def _turn(transcript: Transcript, completion: Completion, number: int, seconds: float, start_s: float) -> Turn:
    """Add a completion to the transcript. Raises EngineError if the engine aborted it."""
    if completion.finish == "abort":
        raise EngineError(f"the engine aborted the completion of turn {number}")
    message, tokens = transcript.complete(completion), len(completion.ids)
    place = len(transcript.messages) - 1
    return Turn(message, (), 0.0, completion.finish, tokens, seconds, 0.0, start_s=start_s, place=place)


async def _compacted(player: Player, episode: OpenEpisode, opening: Sequence[Message], seed: int) -> Transcript:
    """The transcript, or a shorter branch of it if its context is full and the run makes contexts shorter."""
    how, transcript = player.compaction, episode.transcript
    assert transcript is not None
    if how is None or not how.due(transcript):
        return transcript
    if how.asks and (not episode.turns or IN_VAIN in episode.metrics):  # nothing to sum up, or nothing gained
        return transcript
    left = player.limits.token_budget - transcript.spent
    if left < 1:
        return transcript
    number = len(episode.turns)
    episode.status.now(f"the engine (summary before turn {number})")
    sampling = replace(player.sampling, max_tokens=left, seed=draw_seed(seed, f"compact{number}"))
    session = episode.status.episode_id
    found = await compact(how, transcript, opening, player.engine, sampling, session)
    episode.count(found.metrics)
    if found.transcript is not transcript and player.token_check is not None:
        episode.count(player.token_check.metrics(transcript, session))
    return found.transcript


def _room(player: Player, transcript: Transcript) -> tuple[int, StopReason]:
    """Tokens left for the next completion, and the stop reason if that many do not suffice."""
    limits, how = player.limits, player.compaction
    context = player.engine.max_context if how is None else how.context
    by_context, by_budget = context - len(transcript.ids), limits.token_budget - transcript.spent
    room = min(limits.max_tokens, by_context, by_budget)
    if by_context <= max(room, 0):
        return room, StopReason.CONTEXT_FULL
    return room, StopReason.TOKEN_BUDGET if by_budget <= max(room, 0) else StopReason.MAX_TOKENS


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Compares transcripts with new renderings and accumulates the differences found in this run."""

    mode: Mode
    watch: TokenCheckBudget

    def metrics(self, transcript: Transcript, episode_id: str) -> dict[str, float]:
        """Counts of differing windows by class; `tokens/failed` if the transcript must not be trained.

        Raises:
            TemplateError: too many of the run's transcripts failed.
        """
        report = check_tokens(transcript, self.mode)
        trains = self.watch.add(report, episode_id)
        found = {f"tokens/{drift.value}": float(count) for drift, count in report.counts.items()}
        return found | ({} if trains else {"tokens/failed": 1.0})


def checked(check: TokenCheck | None, episode: Episode, transcripts: Sequence[Transcript]) -> Episode:
    """The episode with the counts of the token check of these branches, added to those of earlier ones."""
    if check is None or episode.error is not None:
        return episode
    metrics = dict(episode.metrics)
    for transcript in transcripts:
        for name, value in check.metrics(transcript, episode.id).items():
            metrics[name] = metrics.get(name, 0.0) + value
    return replace(episode, metrics=metrics)
