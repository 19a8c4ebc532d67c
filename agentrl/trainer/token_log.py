"""The learner's values of each sampled token, mapped from its rows back to the episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.transcript import TrainingRow, rows_of
from agentrl.learner.split import TokenValues
from agentrl.run_folder.token_records import CLIPPED, MASKED, REJECTED, SKIPPED, TRAINED, VETOED, TokenColumns
from agentrl.trainer.samples import TrainingRows
from agentrl.types import Episode, Group, Sample

VALUES = ("learner_logprobs", "ref_logprobs", "entropy", "ratio", "weights")


def token_columns(
    groups: Sequence[Group], rows: TrainingRows, values: Sequence[TokenValues]
) -> dict[str, TokenColumns]:
    """The columns of every scored episode, by its id.

    Args:
        rows: as the learner's step got them.
        values: what the step returned for each of them; empty if it returned nothing.
    """
    of_episode: dict[str, list[tuple[Sample, TokenValues]]] = {}
    for row, one in zip(rows.samples, values or [{}] * len(rows.samples), strict=True):
        of_episode.setdefault(row.episode_id, []).append((row, one))
    return {
        episode.id: _columns(episode, of_episode.get(episode.id, []), rows)
        for group in groups
        for episode in group.episodes
    }


def _columns(episode: Episode, found: Sequence[tuple[Sample, TokenValues]], rows: TrainingRows) -> TokenColumns:
    starts, total = _starts(episode)
    given = {name for _, values in found for name in values}
    columns = {name: np.full(total, np.nan) for name in VALUES if name in given}
    estimated = rows.by_segment.get(episode.id, {})
    flags = np.full(total, 0 if found else _why_absent(estimated, rows), dtype=np.int64)
    advantages = np.full(total, np.nan)
    for segment, advantage in estimated.items():
        start = starts[segment]
        advantages[start : start + len(episode.segments[segment].ids)] = advantage
    left = list(found)
    for row in (row for row in rows_of(episode.segments) if found and any(row.loss_mask)):
        place_of = np.full(len(row.ids), -1, dtype=np.int64)
        place_of[np.flatnonzero(row.loss_mask)] = _places(row, starts)
        if not left or left[0][0].ids != row.ids:  # rejected as a whole, so that it was left out
            flags[place_of[place_of >= 0]] |= REJECTED
            continue
        sample, values = left.pop(0)
        trained = np.asarray(sample.loss_mask)
        flags[place_of[~trained & (place_of >= 0)]] |= REJECTED
        places = place_of[trained]
        known = places >= 0  # all of them, unless something has moved the mask
        flags[places[known]] |= SKIPPED if episode.id in rows.idle else TRAINED
        _fill(columns, advantages, flags, places[known], {k: column[known] for k, column in values.items()})
    if left:
        raise ValueError(f"{len(left)} rows of {episode.id} are not rows of its segments")
    present = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    return TokenColumns(advantages=advantages, flags=flags, **present)


def _why_absent(estimated: Mapping[int, float], rows: TrainingRows) -> int:
    """The flag of an episode without rows: it was kept out before its advantages were `estimated`, its group was
    dropped because they are 0, or the correction rejected all of its tokens."""
    if not estimated:
        return MASKED
    dropped = "dropped_groups" in rows.metrics and not any(estimated.values())
    return SKIPPED if dropped else REJECTED


def _fill(
    columns: Mapping[str, NDArray[np.float64]],
    advantages: NDArray[np.float64],
    flags: NDArray[np.int64],
    places: NDArray[np.int64],
    values: TokenValues,
) -> None:
    """Put the values of one row into the columns of its episode."""
    for name, column in columns.items():
        if name in values:
            column[places] = values[name]
    if "advantages" in values:
        advantages[places] = values["advantages"]
    if "clipped" in values:
        flags[places[values["clipped"] > 0]] |= CLIPPED
    if "kept" in values:
        vetoed = places[values["kept"] == 0]
        flags[vetoed] = (flags[vetoed] & ~TRAINED) | VETOED


def _starts(episode: Episode) -> tuple[dict[int, int], int]:
    """Where each sampled segment begins among the sampled tokens, and how many these are."""
    starts, at = {}, 0
    for index, segment in enumerate(episode.segments):
        if segment.origin == "sampled":
            starts[index] = at
            at += len(segment.ids)
    return starts, at


def _places(row: TrainingRow, starts: Mapping[int, int]) -> NDArray[np.int64]:
    """For each trained token of a row its place among the sampled tokens of the episode."""
    places: list[int] = []
    begun: dict[int, int] = {}
    for segment, start, stop in row.spans:
        first = starts[segment] + begun.get(segment, 0)
        places += range(first, first + stop - start)
        begun[segment] = begun.get(segment, 0) + stop - start
    return np.asarray(places, dtype=np.int64)
