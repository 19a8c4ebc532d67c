"""The result of an evaluation: estimates over tasks, and counts over episodes. Does not import torch."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from agentrl.clean import first_reason
from agentrl.errors import CheckpointError
from agentrl.eval.stats import Estimate, estimate, pass_all, pass_counts
from agentrl.rollout.episode_metrics import is_malformed, pass_at, reward_parts, sampled_tokens
from agentrl.run_folder.files import read_bounded
from agentrl.run_folder.records import EpisodeRecord
from agentrl.run_folder.redraws import Redraws
from agentrl.run_folder.task_digests import task_digest
from agentrl.types import LIMITS, Episode, Group

RESULTS_FILE = "results.json"
"""File in an evaluation folder with its result."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for a million tokens; `cached` is for prompt tokens that the endpoint had in its cache."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None

    def cost(self, prompt: int, cached: int, completion: int) -> float:
        """Dollars for so many tokens; `cached` are among `prompt`."""
        of_cached = self.prompt if self.cached is None else self.cached
        return (self.prompt * (prompt - cached) + of_cached * cached + self.completion * completion) / 1e6


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """Identifies what was evaluated.

    `policy` names the checkpoint or the endpoint, `digest` its content (the configuration and weights, as far as
    they are known).
    """

    policy: str
    env: str
    split: str
    tasks: int
    attempts: int
    temperature: float
    seed: int
    digest: str
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The result of an evaluation.

    Attributes:
        estimates: means over tasks by name: `solved`, `reward`, `reward/NAME`, and with several attempts `pass@K`
            (at least one of K solves it) and `pass^K` (all K do), with 95 % confidence intervals. Without a
            declaration of what is solved there are only the rewards.
        stop_reasons: how often each.
        lost: tasks that could not be played (excluded from all metrics).
        infra_failures: episodes that failed in the infrastructure and were played again.
        redrawn: the same by the class of their error.
        redrawn_examples: the first line of one error of each class.
        biased: signs that which of them failed depended on the policy.
        faults: episodes in which a reward, by its name, or the env itself (`step`) raised; such a reward is 0.
        prompt_tokens: tokens read, all turns together, `cached_tokens` of them from a cache.
        unreported: requests whose tokens the endpoint did not report.
        turn_seconds: 50th, 90th and 99th percentile of the time that the policy took for a turn.
        episode_seconds: the same of whole episodes.
        seconds: wall time of playing, resumed parts not counted.
        cost: dollars, if prices were given.
        solved: what counts as solved.
    """

    folder: str
    spec: EvalSpec
    estimates: Mapping[str, Estimate]
    episodes: int
    lost: int = 0
    infra_failures: int = 0
    redrawn: Mapping[str, int] = field(default_factory=dict)
    redrawn_examples: Mapping[str, str] = field(default_factory=dict)
    biased: Sequence[str] = field(default_factory=list)
    faults: Mapping[str, int] = field(default_factory=dict)
    malformed: int = 0
    limits: int = 0
    turns: float = 0.0
    stop_reasons: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    unreported: int = 0
    turn_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    episode_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    seconds: float = 0.0
    cost: float | None = None
    solved: str = ""

    @property
    def counted(self) -> bool:
        """Whether all tokens are known: some endpoints report none, or not for every request."""
        return not self.turns or (self.prompt_tokens + self.sampled_tokens > 0 and not self.unreported)

    def priced(self, prices: Prices | None) -> EvalResult:
        """The result with its cost at these prices; None if the tokens are not known."""
        if prices is None or not self.counted:
            return replace(self, cost=None)
        return replace(self, cost=prices.cost(self.prompt_tokens, self.cached_tokens, self.sampled_tokens))

    def to_json(self) -> str:
        """The content of results.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, folder: Path) -> EvalResult:
        """Read results.json.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        path = folder / RESULTS_FILE
        try:
            return replace(
                TypeAdapter(cls).validate_json(read_bounded(path)), folder=str(folder)
            )  # may have moved
        except FileNotFoundError:
            raise CheckpointError(f"{folder}: holds no {RESULTS_FILE}; give the folder of an evaluation") from None
        except ValidationError as e:
            raise CheckpointError(f"{path}: damaged: {first_reason(e)}") from None

    def metrics(self) -> dict[str, float]:
        """The evaluation as a line of metrics.jsonl."""
        return {name: value.mean for name, value in self.estimates.items()} | {
            "episodes": float(self.episodes),
            "lost": float(self.lost),
            "infra_failures": float(self.infra_failures),
            "malformed": float(self.malformed),
            "limits": float(self.limits),
            "turns": self.turns,
            "sampled_tokens": float(self.sampled_tokens),
            "prompt_tokens": float(self.prompt_tokens),
            "seconds": self.seconds,
            **{f"stop/{reason}": float(count) for reason, count in self.stop_reasons.items()},
            **{f"redrawn/{reason}": float(count) for reason, count in self.redrawn.items()},
            **{f"faults/{name}": float(count) for name, count in self.faults.items()},
        }


class TaskKey(NamedTuple):
    """Identifies a task: by its id, a digest of its row, and, among equal ones, by their order."""

    id: str
    digest: str
    number: int


def _keys(records: Iterable[EpisodeRecord]) -> dict[int, TaskKey]:
    """The task of each group."""
    taken: Counter[tuple[str, str]] = Counter()
    found: dict[int, TaskKey] = {}
    for group, task in {record.group: record.episode.task for record in records}.items():
        same = (task.id, task_digest(task))
        taken[same] += 1
        found[group] = TaskKey(*same, taken[same])
    return found


def task_values(records: Iterable[EpisodeRecord]) -> dict[str, dict[TaskKey, list[float]]]:
    """By name (`solved` where declared, `reward`, `reward/NAME`) and task, one value for each scored attempt."""
    found: dict[str, dict[TaskKey, list[float]]] = {}
    scored = sorted((r for r in records if r.episode.error is None), key=lambda r: (r.group, r.episode.id))
    keys = _keys(scored)
    declared = any(record.episode.solved is not None for record in scored)
    parts = sorted({part for record in scored for part in reward_parts(record.episode)})
    for record in scored:
        episode = record.episode
        values = {"reward": episode.reward or 0.0}
        if declared:
            values = {"solved": float(episode.solved is True)} | values
        own = reward_parts(episode)
        values |= {f"reward/{part}": own.get(part, 0.0) for part in parts}
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(keys[record.group], []).append(value)
    return found


def mean_of(values: Sequence[float]) -> float:
    """The mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def are_shares(tasks: Mapping[TaskKey, Sequence[float]]) -> bool:
    """Whether every attempt has a value of 0 or 1, so that the mean of a task is a share of its attempts."""
    return all(value in (0.0, 1.0) for values in tasks.values() for value in values)


def estimates_of(records: Iterable[EpisodeRecord]) -> dict[str, Estimate]:
    """The estimates of an evaluation by name."""
    by_name = task_values(records)
    found = {
        name: estimate([mean_of(v) for v in tasks.values()], shares=are_shares(tasks))
        for name, tasks in by_name.items()
    }
    attempts = [[int(v) for v in values] for values in by_name.get("solved", {}).values()]
    for k in pass_counts(min(map(len, attempts), default=1)):
        found[f"pass@{k}"] = estimate([pass_at(k, len(a), sum(a)) for a in attempts], shares=True)
        found[f"pass^{k}"] = estimate([pass_all(k, len(a), sum(a)) for a in attempts], shares=True)
    return found


def result_of(
    folder: Path,
    spec: EvalSpec,
    records: Sequence[EpisodeRecord],
    *,
    lost: int,
    seconds: float,
    prices: Prices | None,
    solved: str = "",
) -> EvalResult:
    """Everything that is said about the episodes of an evaluation; failed ones are counted and enter no mean."""
    episodes = [record.episode for record in records if record.episode.error is None]
    turns = [turn for episode in episodes for turn in episode.turns]
    prompt, cached = sum(map(prompt_tokens, episodes)), int(sum(map(_cached, episodes)))
    sampled = sum(map(sampled_tokens, episodes))
    redraws = Redraws.of(_groups(records))
    result = EvalResult(
        folder=str(folder),
        spec=spec,
        estimates=estimates_of(records),
        episodes=len(episodes),
        lost=lost,
        infra_failures=len(records) - len(episodes),
        redrawn=dict(redraws.reasons.most_common()),
        redrawn_examples=redraws.examples,
        biased=list(redraws.findings().values()),
        faults=dict(Counter(name for episode in episodes for name in episode.faults)),
        malformed=sum(map(is_malformed, episodes)),
        limits=sum(e.stop_reason in LIMITS for e in episodes),
        turns=mean_of([len(e.turns) for e in episodes]),
        stop_reasons=dict(sorted(Counter(e.stop_reason.value for e in episodes).items())),
        prompt_tokens=prompt,
        cached_tokens=cached,
        sampled_tokens=sampled,
        unreported=int(sum(e.metrics.get("usage/unreported", 0.0) for e in episodes)),
        turn_seconds=_percentiles([turn.engine_seconds for turn in turns]),
        episode_seconds=_percentiles([e.seconds for e in episodes]),
        seconds=seconds,
        solved=solved,
    )
    return result.priced(prices)


def _groups(records: Sequence[EpisodeRecord]) -> list[Group]:
    played: dict[int, list[Episode]] = {}
    for record in records:
        played.setdefault(record.group, []).append(record.episode)
    return [
        Group(of[0].task, tuple(e for e in of if e.error is None), tuple(e for e in of if e.error is not None))
        for of in played.values()
    ]


def prompt_tokens(episode: Episode) -> int:
    """Tokens that the policy read, turn by turn: as the endpoint counts them, else the contexts of the ledger."""
    if not episode.segments:
        return int(episode.metrics.get("usage/prompt_tokens", 0.0))
    ends: list[int] = []  # length of the context that each segment ends
    for segment in episode.segments:
        ends.append((ends[segment.parent] if segment.parent >= 0 else 0) + len(segment.ids))
    return sum(
        end - len(segment.ids)
        for end, segment in zip(ends, episode.segments, strict=True)
        if segment.origin == "sampled"
    )


def _cached(episode: Episode) -> float:
    return episode.metrics.get("usage/cached_tokens", 0.0)


def _percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return 0.0, 0.0, 0.0
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return float(p50), float(p90), float(p99)
