"""From scored groups to rows of sampled tokens, and their trained tokens as flat tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType

import torch
from torch import Tensor

from agentrl.algo.metrics import merge_metrics
from agentrl.chat.transcript import rows_of
from agentrl.learner.split import StepRows
from agentrl.rollout.episode_metrics import compared_parts
from agentrl.rollout.limits import less_overlong
from agentrl.run_folder.records import EpisodeRecord
from agentrl.types import LIMITS, Episode, Group, Message, Sample, Segment, Turn


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored episodes of a step. All of them count in group statistics; those that train have rows.

    Attributes:
        episodes: their ids.
        rewards: total reward of each.
        groups: the number of each one's group.
        greedy: reward of the greedy episode of the same task, if there is one.
        parts: the rewards of each by name. A missing reward counts as 0; nan means that it does not apply to the
            episode, which is then excluded from its statistics.
        lengths: sampled tokens of each, also of those without rows; () if all have rows.
    """

    episodes: Sequence[str]
    rewards: Sequence[float]
    groups: Sequence[int]
    greedy: Sequence[float] | None = None
    parts: Sequence[Mapping[str, float]] = ()
    lengths: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TrainingRows(StepRows):
    """The rows of a step, from sampled tokens to what the loss reads.

    Attributes:
        scores: what advantages are estimated from.
        by_env: the scores of each env's episodes, with several envs.
        num_episodes: how many episodes have rows.
        hints: what the teacher read of each episode with a hint.
        by_segment: the advantage of each episode's sampled segments, by their number, once it was estimated.
    """

    scores: Scores = Scores((), (), ())
    by_env: Mapping[str, Scores] = field(default_factory=dict)
    num_episodes: int = 0
    hints: Mapping[str, str] = field(default_factory=dict)
    by_segment: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def penalized(groups: Sequence[Group], penalty: float) -> list[Group]:
    """The same groups with `penalty` subtracted from the rewards of truncated episodes, as part `overlong`."""

    def judged(episode: Episode) -> Episode:
        return less_overlong(episode, penalty)

    return [
        replace(
            group,
            episodes=tuple(map(judged, group.episodes)),
            greedy=None if group.greedy is None else judged(group.greedy),
        )
        for group in groups
    ]


def to_samples(groups: Sequence[Group], *, overlong: str, observed: bool = False) -> tuple[list[Sample], Scores]:
    """Rows for the loss, without advantages yet, and the scores that advantages are computed from.

    Every scored episode counts in group statistics. Episodes that failed the tokenization check have no rows; nor
    do truncated ones if `overlong` is "mask".

    Args:
        observed: whether the rows say which of their tokens are the env's answers.
    """
    samples: list[Sample] = []
    lengths: list[int] = []
    numbered = [(number, episode) for number, group in enumerate(groups) for episode in group.episodes]
    for number, episode in numbered:
        rows = episode_samples(episode, group=number, observed=observed)
        lengths.append(sum(sum(row.loss_mask) for row in rows))
        broken = bool(episode.metrics.get("tokens/failed"))
        if not broken and not (overlong == "mask" and episode.stop_reason in LIMITS):
            samples += rows
    greedy = [group.greedy.reward or 0.0 for group in groups if group.greedy is not None]
    scores = Scores(
        episodes=[episode.id for _, episode in numbered],
        rewards=[episode.reward or 0.0 for _, episode in numbered],
        groups=[number for number, _ in numbered],
        greedy=[greedy[number] for number, _ in numbered] if groups and len(greedy) == len(groups) else None,
        parts=[compared_parts(episode) for _, episode in numbered],
        lengths=lengths,
    )
    return samples, scores


def scores_by_env(groups: Sequence[Group], *, overlong: str) -> dict[str, Scores]:
    """The scores of each env's episodes; empty if there is only one env, which has no name."""
    envs = dict.fromkeys(group.task.env for group in groups if group.task.env)
    return {
        env: to_samples([group for group in groups if group.task.env == env], overlong=overlong)[1] for env in envs
    }


def joined(rows: TrainingRows, parts: Sequence[TrainingRows]) -> TrainingRows:
    """`rows` as scored in parts, in the order of `rows`."""
    of_episode: dict[str, list[Sample]] = {}
    for sample in (sample for part in parts for sample in part.samples):
        of_episode.setdefault(sample.episode_id, []).append(sample)
    scored = {episode: iter(samples) for episode, samples in of_episode.items()}
    return replace(
        rows,
        samples=[next(scored[sample.episode_id]) for sample in rows.samples],
        by_segment={episode: segments for part in parts for episode, segments in part.by_segment.items()},
        metrics=merge_metrics(part.metrics for part in parts),
    )


def to_records(
    groups: Sequence[Group],
    advantages: Mapping[str, Mapping[int, float]],
    *,
    step: int,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> list[EpisodeRecord]:
    """The records of all episodes for the run folder.

    Args:
        advantages: by episode and sampled segment; all 0 or nothing where an episode did not train.
        hints: what the teacher read, by episode.
    """
    records: list[EpisodeRecord] = []
    for number, group in enumerate(groups):
        for episode in group.episodes:
            own = advantages.get(episode.id, {})
            by_segment = tuple(own.get(i, 0.0) for i, s in enumerate(episode.segments) if s.origin == "sampled")
            kept = by_segment if any(by_segment) else ()
            records.append(EpisodeRecord(step, number, episode, kept, hint=hints.get(episode.id)))
        records += [EpisodeRecord(step, number, episode) for episode in group.failed]
        if group.greedy is not None:
            records.append(EpisodeRecord(step, number, group.greedy, baseline=True))
    return records


def episode_samples(episode: Episode, *, group: int = 0, observed: bool = False) -> list[Sample]:
    """The rows of one episode; rows without a sampled token are left out.

    Columns: `segment` and `turn` of each trained token, and `reward`: a turn's rewards are on its last token, the
        episode's rewards on the very last token.
    """
    turn_of = segment_turns(episode)
    reward_of = _segment_rewards(episode, turn_of)
    rows = []
    for row in rows_of(episode.segments):
        if not any(row.loss_mask):
            continue
        columns: dict[str, list[float]] = {"segment": [], "turn": [], "reward": []}
        for segment, start, stop in row.spans:
            columns["segment"] += [float(segment)] * (stop - start)
            columns["turn"] += [float(turn_of[segment])] * (stop - start)
            columns["reward"] += [0.0] * (stop - start - 1) + [reward_of.get(segment, 0.0)]
        rows.append(
            Sample(
                ids=row.ids,
                loss_mask=row.loss_mask,
                logprobs=row.logprobs,
                advantages=(0.0,) * len(row.ids),
                versions=row.versions,
                episode_id=episode.id,
                group=group,
                columns={name: tuple(values) for name, values in columns.items()},
                routes=row.routes,
                observed=row.observed if observed else (),
                env=episode.task.env,
            )
        )
    return rows


def with_constant(row: Sample, name: str, value: float) -> Sample:
    """The row with a column that has one value."""
    return replace(row, columns={**row.columns, name: (value,) * sum(row.loss_mask)})


def segment_turns(episode: Episode) -> dict[int, int]:
    """The turn of each sampled segment.

    A branch (`self.model`) belongs to the turn that was sampled before it was called, the first turn if it was
    called in `setup`.
    """
    number_of = {segment: number for number, segment in own_segments(episode).items()}
    found, current = {}, 0
    for i, segment in enumerate(episode.segments):
        if segment.origin == "sampled":
            current = found[i] = number_of.get(i, current)
    return found


def own_segments(episode: Episode) -> dict[int, int]:
    """The segment of each turn; turns of a scripted policy have none.

    Records of earlier versions do not say where a turn's message is: it is then the next that says the same.
    """
    segments, turns = episode.segments, episode.turns
    sampled = [i for i, segment in enumerate(segments) if segment.origin == "sampled"]
    if all(turn.place is not None for turn in turns):
        of_message = {segments[i].message: i for i in sampled}
        return {number: of_message[turn.place] for number, turn in enumerate(turns) if turn.place in of_message}
    found: dict[int, int] = {}
    for i in sampled:
        message = None if (at := segments[i].message) is None else episode.messages[at]
        if len(found) < len(turns) and _is_of(turns[len(found)], segments[i], message):
            found[len(found)] = i
    return found


def _is_of(turn: Turn, segment: Segment, message: Message | None) -> bool:
    return turn.message == message and turn.tokens == len(segment.ids)


def _segment_rewards(episode: Episode, turn_of: Mapping[int, int]) -> dict[int, float]:
    """Place rewards: each turn's on its last segment, the episode's on the very last one."""
    last_of = {turn: i for i, turn in turn_of.items() if episode.segments[i].ids}
    rewards: dict[int, float] = {}
    given = 0.0
    for number, turn in enumerate(episode.turns):
        if turn.reward and number in last_of:
            rewards[last_of[number]] = turn.reward
            given += turn.reward
    if last_of:
        last = max(last_of.values())
        rewards[last] = rewards.get(last, 0.0) + (episode.reward or 0.0) - given
    return rewards


class Flat:
    """All trained tokens of some rows, end to end in the order of the rows, and back."""

    def __init__(self, rows: Sequence[Sample], counts: list[int], sequence_N: Tensor) -> None:
        self.rows, self.counts, self.sequence_N = list(rows), counts, sequence_N

    @classmethod
    def of(cls, rows: Sequence[Sample], episodes: Iterable[str] | None = None) -> Flat:
        """Numbers the episodes in the order of `episodes`, else as they come."""
        number = {e: i for i, e in enumerate(dict.fromkeys(episodes or (row.episode_id for row in rows)))}
        counts = [sum(row.loss_mask) for row in rows]
        sequence = [number[row.episode_id] for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        return cls(rows, counts, torch.tensor(sequence, dtype=torch.long))

    @property
    def keys_N(self) -> Tensor:
        """A number for each token that depends on its episode's id and its place there only."""
        order = sorted(range(len(self.rows)), key=lambda r: (self.rows[r].episode_id, self.rows[r].ids))
        start_of, seen = [0] * len(self.rows), dict[str, int]()
        for r in order:
            start_of[r] = seen.get(self.rows[r].episode_id, 0)
            seen[self.rows[r].episode_id] = start_of[r] + self.counts[r]
        keys: list[int] = []
        for row, count, start in zip(self.rows, self.counts, start_of, strict=True):
            base = int.from_bytes(blake2b(row.episode_id.encode(), digest_size=8).digest(), "big") >> 2
            keys += range(base + start, base + start + count)
        return torch.tensor(keys, dtype=torch.long)

    def trained(self, name: str) -> Tensor:
        """[N] a field of the rows that has one number for each token of the row."""
        return torch.tensor(
            [v for row in self.rows for v, on in zip(getattr(row, name), row.loss_mask, strict=True) if on],
            dtype=torch.float64,
        )

    def column(self, name: str) -> Tensor:
        """[N] a column of the rows."""
        return torch.tensor([v for row in self.rows for v in row.columns[name]], dtype=torch.float64)

    def add(self, name: str, values_N: Tensor) -> None:
        """Add a column to the rows."""
        parts = torch.split(values_N, self.counts)
        self.rows = [
            replace(row, columns={**row.columns, name: tuple(part.tolist())})
            for row, part in zip(self.rows, parts, strict=True)
        ]

    def kept(self, keep_N: Tensor) -> list[Sample]:
        """The rows with only the kept tokens under the loss mask; rows without any are left out."""
        out = []
        for row, part in zip(self.rows, torch.split(keep_N, self.counts), strict=True):
            keep = part.tolist()
            if not any(keep):
                continue
            flags = iter(keep)
            mask = tuple(on and next(flags) for on in row.loss_mask)
            columns = {
                name: tuple(v for v, on in zip(values, keep, strict=True) if on)
                for name, values in row.columns.items()
            }
            out.append(replace(row, loss_mask=mask, columns=columns))
        return out
