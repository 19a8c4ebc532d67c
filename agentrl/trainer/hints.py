"""Hints for a teacher: what it reads at the end of the opening of an episode, and the policy does not.

Sources: Shenfeld et al., "Self-Distillation Enables Continual Learning", arXiv:2601.19897 (a demonstration);
Hübotter et al., "Reinforcement Learning via Self-Distillation", arXiv:2601.20802 (another attempt and feedback).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.algo.metrics import Metric, Metrics
from agentrl.chat.ids import num_shared
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import path_of
from agentrl.config.run import RunConfig
from agentrl.config.teacher import TeacherConfig
from agentrl.env.env import Env
from agentrl.errors import ConfigError, TemplateError
from agentrl.learner.pack import longest_ids, packed_size
from agentrl.rollout.compaction import INTRODUCTION
from agentrl.rollout.content import Content, require_solved
from agentrl.rollout.rewards.text import conversation_text
from agentrl.trainer.samples import own_segments, with_constant
from agentrl.trainer.teacher_check import longest_on_server, model_sizes
from agentrl.types import Episode, Group, HintedOpening, Message, Sample

SOLVED = "This attempt solved the task:\n\n{attempt}\n\nSolve the task in the same way."


@dataclass(frozen=True, slots=True)
class Hinted:
    """The rows of a step with the openings that the teacher reads, and the text of each hint that was used, by
    episode."""

    rows: list[Sample]
    texts: Mapping[str, str]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Hints:
    """Makes hints for the episodes of a run. An episode that is too long with its hint has no teacher.

    Attributes:
        room: tokens that all rows of an episode may have together, as packed for the learner.
        context: tokens that each row may have, if the teacher limits them.
        unweighted: the envs whose episodes learn nothing from the teacher.
    """

    teacher: TeacherConfig
    renderer: Renderer
    room: int
    context: int | None = None
    unweighted: frozenset[str] = frozenset()

    def add(self, rows: Sequence[Sample], groups: Sequence[Group]) -> Hinted:
        """The rows with the hints of their episodes.

        A row keeps its tokens; the hint is in `Sample.hinted`. The column `taught` says for each trained token
        whether there is one.
        """
        by_episode: dict[str, list[Sample]] = {}
        for row in rows:
            by_episode.setdefault(row.episode_id, []).append(row)
        made: dict[str, list[Sample]] = {}
        texts: dict[str, str] = {}
        too_long = elsewhere = 0
        for group in groups:
            for episode in group.episodes:
                own = None if group.task.env in self.unweighted else by_episode.get(episode.id)
                if own is None or (text := hint_of(self.teacher, episode, group)) is None:
                    continue
                hinted = self._rows(episode, own, text)
                elsewhere += hinted is None
                if hinted is not None and not self._fits(hinted):
                    too_long += 1
                elif hinted is not None:
                    made[episode.id], texts[episode.id] = hinted, text
        found = {
            name: iter(
                [with_constant(row, "taught", float(row.hinted is not None)) for row in made.get(name, own)]
            )
            for name, own in by_episode.items()
        }
        counts = {"hinted_episodes": len(made), "hints_too_long": too_long, "hints_misplaced": elsewhere}
        return Hinted(
            [next(found[row.episode_id]) for row in rows],
            texts,
            {name: Metric("sum", float(count)) for name, count in counts.items()},
        )

    def _fits(self, rows: Sequence[Sample]) -> bool:
        longest = max(len(longest_ids(row)) for row in rows)
        return packed_size(rows) <= self.room and longest <= (self.context or longest)

    def _rows(self, episode: Episode, rows: Sequence[Sample], text: str) -> list[Sample] | None:
        """The rows that begin with the episode's opening get the hint; None if none does."""
        opening = opening_of(episode)
        try:
            plain, taught = (self._ids(messages, episode) for messages in (opening, with_hint(opening, text)))
        except TemplateError:  # it takes the opening, and not with the hint
            return None
        rest = plain[num_shared(plain, taught) :]  # a hint may say again what the opening ends with
        same = num_shared(rest[::-1], taught[::-1])
        cut = len(plain) - same
        hinted = HintedOpening(cut, taught[: len(taught) - same])
        found = [self._opened(row, plain[:cut], hinted) for row in rows]
        if not any(found):
            return None
        return [replace(row, hinted=own) if own else row for row, own in zip(rows, found, strict=True)]

    def _opened(self, row: Sample, opening: Sequence[int], hinted: HintedOpening) -> HintedOpening | None:
        """The opening of a row and the hint in it; None if the row does not begin with `opening`.

        Where a summary follows the question, a token may have the end of the one and the beginning of the other.
        """
        at = num_shared(row.ids, opening)
        end = self.renderer.decode(opening[at:])
        text, stop = "", at
        while len(text) < len(end) and end.startswith(text) and stop < len(row.ids):
            stop += 1
            text = self.renderer.decode(row.ids[at:stop])
        more = text.removeprefix(end)
        if not text.startswith(end) or not INTRODUCTION.startswith(more) or any(row.loss_mask[:stop]):
            return None
        return HintedOpening(stop, (*hinted.ids, *self.renderer.encode_text(more)))

    def _ids(self, messages: Sequence[Message], episode: Episode) -> tuple[int, ...]:
        pieces = self.renderer.opening(messages, episode.tools).pieces
        return tuple(id for piece in pieces for id in piece.ids)


def hint_of(teacher: TeacherConfig, episode: Episode, group: Group) -> str | None:
    """What the teacher reads of an episode, and the policy does not; None if there is nothing."""
    parts = []
    if teacher.shows_solved and (other := _solved_by(episode, group)) is not None:
        attempt = conversation_text(other.messages[_opening(other).stop :])
        parts.append(SOLVED.format(attempt=attempt))
    if teacher.asks_env and episode.hint:
        parts.append(episode.hint)
    return "\n\n".join(parts) or None


async def make_hints(config: RunConfig, renderer: Renderer, policy: Path) -> Hints | None:
    """What makes the hints of a run; None if its teacher reads none.

    Args:
        policy: the folder of the policy.
    """
    teacher = config.teacher
    if teacher is None or teacher.hint == "none" or config.algorithm.kl.coef == 0:
        return None
    if teacher.url is None:
        _, context = model_sizes(Path(teacher.path or policy))
    else:
        context = await longest_on_server(teacher)
    unweighted = {name for name, view in config.by_env.items() if view.algorithm.kl.coef == 0}
    return Hints(teacher, renderer, config.learner.micro_batch_tokens, context, frozenset(unweighted))


def check_hints(config: RunConfig, content: Content) -> None:
    """Check that there is something that gives hints.

    Raises:
        ConfigError: an env has no method `teacher_hint`, or does not declare when an episode is solved.
    """
    teacher = config.teacher
    if teacher is None or teacher.hint == "none":
        return
    for name, view in config.by_env.items():
        if view.algorithm.kl.coef == 0:
            continue
        part = content.by_env[name]
        if teacher.shows_solved:
            require_solved(part, f"teacher.hint: {teacher.hint}")
        env = part.make_env()
        if teacher.asks_env and type(env).teacher_hint is Env.teacher_hint:
            where = f"envs.{name}: " if name else ""
            raise ConfigError(
                f"{where}teacher.hint {teacher.hint} needs a method `teacher_hint(self, episode)` of "
                f"{type(env).__name__} that returns text, and it has none: write it, or use teacher.hint solved"
            )


def opening_of(episode: Episode) -> tuple[Message, ...]:
    """The messages before the policy's first one, without those of `self.model` in `setup`."""
    return episode.messages[_opening(episode)]


def _opening(episode: Episode) -> slice:
    """Which messages are the opening; an example among them may say what the policy says first."""
    first = own_segments(episode).get(0)
    if first is None:  # by a scripted policy, without tokens
        said = episode.turns[0].message if episode.turns else None
        return slice(next((n for n, m in enumerate(episode.messages) if m == said), len(episode.messages)))
    segments = episode.segments  # without what branches of `self.model` were asked before
    places = [place for i in path_of(segments, first) if (place := segments[i].message) is not None]
    return slice(min(places), segments[first].message)


def with_hint(opening: Sequence[Message], text: str) -> list[Message]:
    """The opening with a hint at the end of its last user message, or of its last message if there is none."""
    users = [n for n, message in enumerate(opening) if message.role == "user"]
    if not opening:
        return [Message("user", text)]
    place = users[-1] if users else len(opening) - 1
    content = opening[place].content
    longer = f"{content}\n\n{text}" if isinstance(content, str) else (*content, f"\n\n{text}")
    return [*opening[:place], replace(opening[place], content=longer), *opening[place + 1 :]]


def _solved_by(episode: Episode, group: Group) -> Episode | None:
    """Another attempt that solved the task: of those with the highest reward the shortest."""
    others = [e for e in group.episodes if e.solved and e.id != episode.id]
    return min(others, key=lambda e: (-(e.reward or 0.0), sum(turn.tokens for turn in e.turns)), default=None)
