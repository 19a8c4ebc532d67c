"""From scored groups to rows for the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from agentrl.algo.advantage import group_advantages
from agentrl.algo.estimators import StepData, TurnLevel, estimate
from agentrl.chat.transcript import rows_of
from agentrl.config.run import AlgorithmConfig
from agentrl.records import EpisodeRecord
from agentrl.types import LIMITS, Episode, Group, Sample


def penalised(groups: Sequence[Group], penalty: float) -> list[Group]:
    """The same groups with `penalty` taken from the rewards of what a limit cut, as part `overlong`."""

    def judged(episode: Episode) -> Episode:
        if episode.stop_reason not in LIMITS or episode.reward is None:
            return episode
        parts = dict(episode.rewards)
        parts["overlong"] = parts.get("overlong", 0.0) - penalty
        return replace(episode, reward=episode.reward - penalty, rewards=parts)

    return [replace(group, episodes=tuple(map(judged, group.episodes))) for group in groups]


def advantages(rewards: Sequence[float], config: AlgorithmConfig) -> list[float]:
    """One advantage for each episode of a group, from the rewards of those that ended without an error."""
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    values_G = group_advantages(rewards_G, normalize_std=config.advantage == "grpo")
    if config.advantage == "rloo" and len(rewards) > 1:  # r_i - mean of the others
        values_G = values_G * len(rewards) / (len(rewards) - 1)
    return [float(v) for v in values_G]


def turn_advantages(episodes: Sequence[Episode], discount: float) -> list[list[float]]:
    """One advantage for each turn of each episode of a group; the episode's own rewards belong to its last turn.

    An episode without a turn has an empty list: it has nothing to train or to compare with.
    """
    rewards: list[float] = []
    for episode in episodes:
        given = [turn.reward for turn in episode.turns]
        if given:  # what is not given by a turn is scored at the end
            given[-1] += (episode.reward or 0.0) - sum(given)
        rewards += given
    numbers = [(e, t) for e, episode in enumerate(episodes) for t in range(len(episode.turns))]
    if not numbers:
        return [[] for _ in episodes]
    episode_K, turn_K = torch.tensor(numbers).T
    step = StepData(
        rewards_E=torch.tensor([e.reward or 0.0 for e in episodes], dtype=torch.float64),
        group_E=torch.zeros(len(episodes), dtype=torch.long),
        sequence_N=episode_K,
        rewards_N=torch.tensor(rewards, dtype=torch.float64),
        turn_N=turn_K,
    )
    values = iter(estimate("turn_level", step, TurnLevel(gamma=discount)).advantages_N.tolist())
    return [[next(values) for _ in episode.turns] for episode in episodes]


def segment_advantages(episode: Episode, by_turn: Sequence[float]) -> list[float]:
    """One advantage for each sampled segment, in their order, from those of the turns.

    A turn's segment is found by its message. A branch (`self.model`) belongs to the turn that was sampled before
    it was called, the first turn where it was called in `setup`.
    """
    sampled = [s for s in episode.segments if s.origin == "sampled"]
    turn_of = {id(turn.message): number for number, turn in enumerate(episode.turns)}
    values, current = [], 0
    for segment in sampled:
        message = None if segment.message is None else episode.messages[segment.message]
        current = turn_of.get(id(message), current)
        values.append(by_turn[current] if by_turn else 0.0)
    return values


def to_samples(
    groups: Sequence[Group], config: AlgorithmConfig, *, overlong: str, step: int
) -> tuple[list[Sample], list[EpisodeRecord]]:
    """Rows for the loss, and what the run folder keeps of every episode.

    Episodes with an advantage of exactly 0 everywhere (all siblings scored the same) give no rows: they have no
    gradient. Neither do episodes whose tokens failed the tokenization check.
    Where `overlong` is "mask", neither do episodes that a limit cut; their rewards still count for the siblings.
    """
    samples: list[Sample] = []
    records: list[EpisodeRecord] = []
    for number, group in enumerate(groups):
        for episode, values in zip(group.episodes, _by_segment(group.episodes, config), strict=True):
            broken = bool(episode.metrics.get("tokens/failed"))
            trains = any(values) and not broken and not (overlong == "mask" and episode.stop_reason in LIMITS)
            if trains:
                samples += episode_samples(episode, values, group=number)
            records.append(EpisodeRecord(step, number, episode, tuple(values) if trains else ()))
        records += [EpisodeRecord(step, number, episode) for episode in group.failed]
    return samples, records


def _by_segment(episodes: Sequence[Episode], config: AlgorithmConfig) -> list[list[float]]:
    """For each episode of a group the advantages of its sampled segments, in their order."""
    if config.advantage == "turn_level":
        by_turn = turn_advantages(episodes, config.turn_level.gamma if config.turn_level else 1.0)
        return [segment_advantages(e, values) for e, values in zip(episodes, by_turn, strict=True)]
    found = advantages([episode.reward or 0.0 for episode in episodes], config)
    return [
        [value] * sum(segment.origin == "sampled" for segment in episode.segments)
        for episode, value in zip(episodes, found, strict=True)
    ]


def episode_samples(episode: Episode, advantage: float | Sequence[float], *, group: int = 0) -> list[Sample]:
    """The rows of one episode; rows without a sampled token are left out.

    Args:
        advantage: of all tokens, or of each sampled segment in their order.
    """
    sampled = [i for i, segment in enumerate(episode.segments) if segment.origin == "sampled"]
    values = [advantage] * len(sampled) if isinstance(advantage, float | int) else advantage
    value_of = dict(zip(sampled, values, strict=True))
    rows = []
    for row in rows_of(episode.segments):
        if any(row.loss_mask):
            by_token = [0.0] * len(row.ids)
            for segment, start, stop in row.spans:
                by_token[start:stop] = [value_of[segment]] * (stop - start)
            rows.append(
                Sample(
                    ids=row.ids,
                    loss_mask=row.loss_mask,
                    logprobs=row.logprobs,
                    advantages=tuple(by_token),
                    versions=row.versions,
                    episode_id=episode.id,
                    group=group,
                )
            )
    return rows
