"""Compute the rewards of recorded episodes again, with today's env or another one.

The recorded messages of the policy are replayed on a new env. If the env answers as it did, its state is that of
the recorded episode, and every reward can be computed. Otherwise only the rewards that read nothing but the
episode can be, and each of the others says why not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.async_tasks import time_limit
from agentrl.chat.template import Renderer
from agentrl.config import RunConfig
from agentrl.config.load import load_sampling_config
from agentrl.env.env import Env, PolicyAccess
from agentrl.env.load import load_env
from agentrl.env.toolenv.observe import plain_text
from agentrl.env.toolenv.rewards import leaving_out_lost
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, EnvError, InfraError
from agentrl.rollout.content import env_factory
from agentrl.rollout.group import with_group_rewards
from agentrl.rollout.lifecycle import EpisodeStatus, OpenEpisode, close_env, score_env, step_env
from agentrl.rollout.limits import less_overlong
from agentrl.rollout.renderer import load_renderer
from agentrl.run_folder.earlier_configs import file_at
from agentrl.run_folder.records import EpisodeRecord, iter_records, recorded_steps
from agentrl.run_folder.store import find_checkpoint
from agentrl.sandbox import SandboxBroken, close_pools
from agentrl.types import Episode, Message, Segment, StopReason, Turn

TURNS = "(turns)"
"""The name under which the rewards of an episode's turns are compared."""
ALL = ""
AT_ONCE = 32
FIXED = {
    StopReason.SANDBOX_BROKEN: "its sandbox broke, which fixes its reward",
    StopReason.FAULT: "the env or the chat template raised, which fixes its reward",
}
CUT = frozenset({StopReason.MAX_TOKENS, StopReason.TOKEN_BUDGET, StopReason.CONTEXT_FULL})
"""Stop reasons after which the env never saw the last completion, if that was cut."""


@dataclass(frozen=True, slots=True)
class RescoredPart:
    """One part of an episode's reward.

    Attributes:
        recorded: its value in the run; None if the episode had no such part.
        rescored: its value now; None if it was not computed, for `reason`, or the env does not have it any more.
        reason: why it was not computed; empty if it was.
    """

    recorded: float | None
    rescored: float | None
    reason: str = ""

    @property
    def value(self) -> float:
        """What counts toward the new total: the new value, or the recorded one if it was not computed."""
        return (self.recorded if self.reason else self.rescored) or 0.0

    @property
    def changed(self) -> bool:
        """Whether it was computed and differs by more than rounding."""
        return not self.reason and abs((self.recorded or 0.0) - (self.rescored or 0.0)) > 1e-9


@dataclass(frozen=True, slots=True)
class RescoredEpisode:
    """One episode.

    Attributes:
        recorded: its reward in the run.
        rescored: its reward now; parts that were not computed count as recorded.
        parts: by name; turn rewards are the part `(turns)`.
        replayed: empty if the env answered the recorded messages as it did in the run, else why not.
        faults: rewards that raised, by name.
    """

    step: int
    group: int
    id: str
    task: str
    env: str
    recorded: float
    rescored: float
    solved_recorded: bool | None
    solved: bool | None
    parts: Mapping[str, RescoredPart]
    replayed: str
    faults: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rescoring:
    """The rescored episodes of a run in order, and how many were left out, by reason."""

    episodes: Sequence[RescoredEpisode]
    left_out: Mapping[str, int]

    def parts(self) -> Iterator[tuple[str, Sequence[RescoredPart]]]:
        """Every part by name, with its values in all episodes that have it."""
        names = sorted({name for episode in self.episodes for name in episode.parts})
        for name in names:
            yield name, [episode.parts[name] for episode in self.episodes if name in episode.parts]

    def steps(self) -> Iterator[tuple[int, Sequence[RescoredEpisode]]]:
        """The episodes of each step."""
        for step in sorted({episode.step for episode in self.episodes}):
            yield step, [episode for episode in self.episodes if episode.step == step]


@dataclass(frozen=True, slots=True)
class RescoreOptions:
    """The settings of a rescoring.

    Attributes:
        steps: which steps; empty means all that were recorded.
        play_outside: call tools that act outside of the episode (MCP servers, HTTP) again.
    """

    steps: Sequence[int] = ()
    play_outside: bool = False


def rescore(
    run: Path, config: RunConfig, options: RescoreOptions, say: Callable[[str], None] = lambda text: None
) -> Rescoring:
    """Compute the rewards of a run's episodes again.

    Args:
        run: the run folder.
        config: the run's configuration, with the env and the weights to score by.
        options: which steps, and what may be replayed.
        say: told about the progress.

    Raises:
        CheckpointError: the run has no episodes of a step, or they are damaged.
        ConfigError: the env cannot be loaded, or does not know an episode's tasks.
    """
    steps = options.steps or recorded_steps(run)
    if not steps:
        raise CheckpointError(f"{run}: has no recorded episodes")
    return asyncio.run(_rescore(_Rescorer.of(run, config, options), run, steps, say))


async def _rescore(scorer: _Rescorer, run: Path, steps: Sequence[int], say: Callable[[str], None]) -> Rescoring:
    found: list[RescoredEpisode] = []
    left_out: dict[str, int] = {}
    try:
        for number, step in enumerate(steps):
            say(f"step {step} ({number + 1} of {len(steps)})")
            groups: dict[int, list[EpisodeRecord]] = {}
            for record in iter_records(run, step):
                groups.setdefault(record.group, []).append(record)
            rollout = load_sampling_config(file_at(run, step), check_paths=False, rescores=True).rollout
            penalty = rollout.overlong_penalty if rollout.overlong == "penalise" else 0.0
            for each in await asyncio.gather(*(scorer.group(records, penalty) for records in groups.values())):
                for reason in each.left_out:
                    left_out[reason] = left_out.get(reason, 0) + 1
                found += each.episodes
    finally:
        await close_pools()
    return Rescoring(found, left_out)


@dataclass(slots=True)
class _Replayed:
    """An episode whose messages were replayed: the env's turns with their faults, or why they differ from the
    record."""

    turns: tuple[Turn, ...] = ()
    faults: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""


@dataclass(slots=True)
class _Scored:
    """A record with its newly computed episode.

    Attributes:
        replay: why the env's state is not that of the record; empty if it is.
        only: the rewards that could be computed then; None if all could.
        lost: why rewards were lost to an unreachable judge, by name; the episode has their recorded values. `ALL`
            are those that it does not have.
    """

    record: EpisodeRecord
    episode: Episode
    replay: str
    only: frozenset[str] | None
    lost: dict[str, str]


@dataclass(slots=True)
class _Group:
    episodes: list[RescoredEpisode] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class _Unrecorded(InfraError):
    """The env asked for something that the record does not have."""


class _NoModel:
    """In place of `self.model`, whose answers are not recorded."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, object]] = (), train: bool = False
    ) -> Message:
        """See `PolicyModel.chat`."""
        raise _Unrecorded("the env calls the policy (self.model), whose answers are not recorded")


@dataclass
class _Rescorer:
    """Scores episodes with envs of one run."""

    make_env: Mapping[str, Callable[[], Env]]
    options: RescoreOptions
    timeout_s: float
    program: bool
    reward_model: str
    renderer: Renderer | None
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    @classmethod
    def of(cls, run: Path, config: RunConfig, options: RescoreOptions) -> _Rescorer:
        """Load the envs, and the tokenizer that the run's checkpoint has, which envs count tokens with."""
        make = {}
        for name, view in config.by_env.items():
            make[name] = env_factory(load_env(view.sole_env.use, view.sole_env.options), view)
        try:
            renderer = load_renderer(config, find_checkpoint(run).path)
        except (AgentRLError, OSError):
            renderer = None
        return cls(
            make,
            options,
            config.rollout.timeout_s,
            program=config.agent is not None,
            reward_model=config.reward_model.name if config.reward_model else "",
            renderer=renderer,
        )

    async def group(self, records: Sequence[EpisodeRecord], overlong_penalty: float) -> _Group:
        """Rescore the episodes of one group, with what the run subtracted from those that a limit cut."""
        found = _Group()
        playable = []
        for record in records:
            if record.episode.error is not None:
                found.left_out.append("infrastructure failure")
            elif why := FIXED.get(record.episode.stop_reason):
                found.left_out.append(why)
            else:
                playable.append(record)
        scored = await asyncio.gather(*(self._one(record) for record in playable))
        compared = await self._with_group_rewards(records, scored)
        if overlong_penalty:
            compared = [less_overlong(episode, overlong_penalty) for episode in compared]
        found.episodes = [self._compare(each, episode) for each, episode in zip(scored, compared, strict=True)]
        return found

    async def _one(self, record: EpisodeRecord) -> _Scored:
        async with self._places:
            task = record.episode.task
            if task.env not in self.make_env:
                raise ConfigError(
                    f"episode {record.episode.id} was played in the env {task.env!r}, which is not under `envs`; "
                    f"they are: {', '.join(self.make_env)}"
                )
            env = self.make_env[task.env]()
            env.hold_back = not self.options.play_outside
            try:
                return await self._score(env, record)
            finally:
                await close_env(env, self.timeout_s)

    async def _score(self, env: Env, record: EpisodeRecord) -> _Scored:
        """Replay one episode, then compute its rewards."""
        recorded = record.episode
        renderer = self.renderer
        access = PolicyAccess(model=_NoModel(), reads_images=True)
        if renderer is not None:
            counted, decode = renderer, renderer.vocabulary.decode_plain
            access = replace(access, count_tokens=lambda text: len(counted.encode_text(text)), decode=decode)
        env.bind(access)
        try:
            async with time_limit(self.timeout_s):
                replayed = await self._replay(env, recorded)
        except TimeoutError:
            replayed = _Replayed(reason=f"the replay took longer than {self.timeout_s:g} s")
        turns = recorded.turns if replayed.reason else replayed.turns
        episode = _Reopened(
            recorded.task,
            EpisodeStatus(recorded.id, recorded.task.id),
            env=env,
            messages=list(recorded.messages),
            tools=recorded.tools,
            turns=list(turns),
            metrics=dict(recorded.metrics),
            stop=recorded.stop_reason,
            faults=dict(replayed.faults),
            segments=recorded.segments,
            seconds=recorded.seconds,
        )
        with leaving_out_lost() as unreachable:
            lost = {}
            try:
                await score_env(env, episode, self.timeout_s)
            except InfraError as e:
                lost[ALL] = _line(e)
        lost |= {name: _line(text) for name, text in unreachable.items()}
        kept = {name: value for name, value in recorded.rewards.items() if _reward(name) in lost}
        episode.rewards = {**kept, **episode.rewards}  # which rewards per group may read
        only = frozenset(env.rewards_of_record()) if replayed.reason else None
        return _Scored(record, self._with_model_score(episode.result(), recorded), replayed.reason, only, lost)

    def _with_model_score(self, episode: Episode, recorded: Episode) -> Episode:
        """The episode with the recorded score of the reward model, which rewards per group may read."""
        if not self.reward_model or self.reward_model not in recorded.rewards:
            return episode
        score = recorded.rewards[self.reward_model]
        rewards = {**episode.rewards, self.reward_model: score}
        return replace(episode, rewards=rewards, reward=(episode.reward or 0.0) + score)

    async def _replay(self, env: Env, recorded: Episode) -> _Replayed:
        """Give the env the policy's messages again. Raises ConfigError if it does not know the task."""
        if self.program:
            return _Replayed(reason="a program (agent) played it, and its return value is not recorded")
        if recorded.stop_reason is StopReason.TIMEOUT:
            return _Replayed(reason="it ran out of time, perhaps inside a tool")
        try:
            opening, _ = await env.reset(recorded.task)
            first = recorded.messages[: len(opening)]
            if _texts(opening) != _texts(first):
                return _Replayed(reason="the env opens it with other messages")
            outside = set(env.outside_tools()) if not self.options.play_outside else set()
            for turn in recorded.turns:
                if acts := outside.intersection(call.name for call in turn.message.tool_calls):
                    why = f"it calls {sorted(acts)[0]}, which acts outside of the episode (--play calls it again)"
                    return _Replayed(reason=why)
            return await _steps(env, recorded)
        except (ConfigError, _Unrecorded) as e:
            return _Replayed(reason=_line(e))
        except Exception as e:
            cause = e.__cause__ if isinstance(e, EnvError) and e.__cause__ is not None else e
            what = "a sandbox broke" if isinstance(e, SandboxBroken) else f"the env raised {type(cause).__name__}"
            return _Replayed(reason=f"{what}: {' '.join(str(cause).split())[:160]}")

    async def _with_group_rewards(
        self, records: Sequence[EpisodeRecord], scored: Sequence[_Scored]
    ) -> Sequence[Episode]:
        """The scored episodes with the rewards that compare all episodes of the group, as in the run."""
        own = [each.episode for each in scored]
        if not scored:
            return own
        env = self.make_env[scored[0].record.episode.task.env]()
        if not env.scores_groups:
            return own
        by_id = {episode.id: episode for episode in own}
        group = [by_id.get(r.episode.id, r.episode) for r in records if r.episode.error is None]
        with leaving_out_lost() as unreachable:
            try:
                judged = await with_group_rewards(env, group, self.timeout_s)
            except InfraError as e:
                for each in scored:
                    each.lost.setdefault(ALL, _line(e))
                return own
        for each in scored:
            each.lost |= {name: _line(text) for name, text in unreachable.items()}
        return [episode for episode in judged if episode.id in by_id]

    def _compare(self, scored: _Scored, episode: Episode) -> RescoredEpisode:
        """The parts of a newly scored episode next to the recorded ones."""
        recorded, record = scored.record.episode, scored.record
        of_group = episode.rewards.keys() - scored.episode.rewards.keys()
        parts: dict[str, RescoredPart] = {}
        for name in [*recorded.rewards, *(n for n in episode.rewards if n not in recorded.rewards)]:
            reason = self._why_not(scored, name, computed=name in episode.rewards, of_group=name in of_group)
            value = None if reason else episode.rewards.get(name, 0.0)
            parts[name] = RescoredPart(recorded.rewards.get(name), value, reason)
        before = sum(turn.reward for turn in recorded.turns)
        after = sum(turn.reward for turn in episode.turns)
        if before or after:
            parts[TURNS] = RescoredPart(before, None if scored.replay else after, scored.replay)
        known = not any(part.reason for name, part in parts.items() if name != self.reward_model)
        return RescoredEpisode(
            step=record.step,
            group=record.group,
            id=recorded.id,
            task=recorded.task.id,
            env=recorded.task.env,
            recorded=recorded.reward or 0.0,
            rescored=sum(part.value for part in parts.values()),
            solved_recorded=recorded.solved,
            solved=episode.solved if known else None,
            parts=parts,
            replayed=scored.replay,
            faults={
                name: text
                for name, text in episode.faults.items()
                if scored.only is None or _reward(name) in scored.only
            },
        )

    def _why_not(self, scored: _Scored, name: str, *, computed: bool, of_group: bool) -> str:
        """Why a part was not computed; empty if it was, or if the env does not have it any more."""
        if name == self.reward_model:
            return "it is the score of reward_model"
        if why := scored.lost.get(_reward(name)) or (not computed and scored.lost.get(ALL)):
            return why
        if scored.only is None or of_group or _reward(name) in scored.only:
            return ""
        return scored.replay


async def _steps(env: Env, recorded: Episode) -> _Replayed:
    """Replay the turns that the env saw, by the rules of a run."""
    replay = OpenEpisode(recorded.task, EpisodeStatus(recorded.id, recorded.task.id), env=env)
    for number, turn in enumerate(recorded.turns):
        last = number == len(recorded.turns) - 1
        if last and turn.finish == "length" and recorded.stop_reason in CUT:
            replay.turns.append(turn)
            break
        observed = await step_env(env, turn, replay, max_turns=len(recorded.turns) + 1)
        if _texts(observed) != _texts(turn.observation):
            return _Replayed(reason=f"the env answers turn {number} differently")
        if replay.stop is not None and not last:
            return _Replayed(reason=f"the env ends the episode at turn {number}")
        replay.turns[-1] = replace(replay.turns[-1], observation=turn.observation, env_seconds=turn.env_seconds)
    return _Replayed(tuple(replay.turns), replay.faults)


def _reward(part: str) -> str:
    """The reward that a part belongs to: `score` of `score/solved`."""
    return part.partition("/")[0]


def _line(error: object) -> str:
    """The text of an error on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]


def _texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(message.role, plain_text(message.content)) for message in messages]


@dataclass(slots=True)
class _Reopened(OpenEpisode):
    """An episode in progress whose tokens and length are those of the record."""

    segments: tuple[Segment, ...] = ()
    seconds: float = 0.0

    def unscored(self) -> Episode:
        """See `OpenEpisode.unscored`."""
        return replace(OpenEpisode.unscored(self), segments=self.segments, seconds=self.seconds)
