"""Episodes lost to infrastructure failures and replayed: how many, why, on which tasks, and whether the losses are
independent of the policy's behavior.

If bad episodes are lost more often, training on the survivors teaches the policy to get lost. Independence cannot
be proven, but three signs contradict it, and `findings` checks for them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from agentrl.errors import AgentRLError, EnvError
from agentrl.run_folder.records import MAX_LINE, bounded_lines
from agentrl.types import HINT_FAULT, SANDBOX_FAULT, SOLVED_FAULT, Episode, Group, StopReason, Task

RECENT = 1000
"""Episodes that the shares of a run's guard are taken over."""
AT_LEAST = 20
"""Episodes that are lost, or at fault, before a share of them stops a run."""
_SURE = 1e-3
_LINE = 200
"""Maximum length of an example, in characters."""
_GROUPS = 8


def reason_of(error: str) -> str:
    """The class that `Episode.error` begins with."""
    return error.partition(":")[0]


def _example(error: str) -> str:
    """The first line of an error, without its class."""
    return error.partition(":")[2].strip().partition("\n")[0][:_LINE]


def task_name(task: Task) -> str:
    """The id of a task, which only its env knows one task by."""
    return f"{task.env}/{task.id}" if task.env else task.id


@dataclass(slots=True)
class Moments:
    """Count, sum and sum of squares of the mean rewards of groups."""

    num: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Count one more."""
        self.num, self.total, self.squares = self.num + 1, self.total + value, self.squares + value * value

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.num if self.num else 0.0

    @property
    def variance_of_mean(self) -> float:
        """How far the mean may be off, squared."""
        spread = max(self.squares / self.num - self.mean**2, 0.0) if self.num else 0.0
        return spread / max(self.num - 1, 1)

    def __add__(self, other: Self) -> Moments:
        return Moments(self.num + other.num, self.total + other.total, self.squares + other.squares)


@dataclass(slots=True)
class Redraws:
    """What was redrawn, over the groups of some steps.

    Attributes:
        episodes: how many were played, those that were redrawn included.
        reasons: redrawn episodes by the class of their error.
        acted: redrawn episodes in which the policy had acted already.
        examples: the first line of an error of each class.
        tasks: of each task with a redrawn episode, how many by their reasons.
        played: episodes of each task, also of those without any: if only groups that lost some counted, each of
            these tasks would seem to lose more than all together.
        hit: mean rewards of the groups with a redrawn episode.
        clean: mean rewards of the others.
        broken: episodes that ended because the policy broke its sandbox, by task. They are scored, not redrawn.
    """

    episodes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    acted: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, Counter[str]] = field(default_factory=dict)
    played: Counter[str] = field(default_factory=Counter)
    hit: Moments = field(default_factory=Moments)
    clean: Moments = field(default_factory=Moments)
    broken: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, groups: Iterable[Group]) -> Self:
        """Count the episodes of complete groups."""
        found = cls()
        for group in groups:
            rewards = [episode.reward or 0.0 for episode in group.episodes]
            mean = sum(rewards) / max(len(rewards), 1)
            (found.hit if group.failed else found.clean).add(mean)
            found.episodes += len(group.episodes) + len(group.failed)
            found.played[task_name(group.task)] += len(group.episodes) + len(group.failed)
            broken = sum(e.stop_reason is StopReason.SANDBOX_BROKEN for e in group.episodes)
            if broken:
                found.broken[task_name(group.task)] += broken
            if group.failed:
                task = found.tasks.setdefault(task_name(group.task), Counter())
                for episode in group.failed:
                    reason = reason_of(episode.error or "")
                    task[reason] += 1
                    found.reasons[reason] += 1
                    found.examples.setdefault(reason, _example(episode.error or ""))
                    found.acted += bool(episode.turns)
        return found

    @property
    def redrawn(self) -> int:
        """How many episodes were played again."""
        return self.reasons.total()

    def __iadd__(self, other: Self) -> Self:
        """Add the groups of further steps, in place: there may be many tasks."""
        self.episodes += other.episodes
        self.reasons.update(other.reasons)
        self.acted += other.acted
        self.examples = other.examples | self.examples
        for name, counts in other.tasks.items():
            self.tasks.setdefault(name, Counter()).update(counts)
        self.played.update(other.played)
        self.hit += other.hit
        self.clean += other.clean
        self.broken.update(other.broken)
        return self

    @classmethod
    def together(cls, parts: Iterable[Redraws]) -> Redraws:
        """The sum of several."""
        found = Redraws()
        for part in parts:
            found += part
        return found

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> Self:
        """From what `redraws_line` wrote; raises as int() and float() do, or KeyError, elsewhere."""
        tasks = {name: _counts(counts) for name, counts in data["tasks"].items()}
        earlier = {name: counts.pop("played", 0) for name, counts in tasks.items()}  # of earlier versions
        return cls(
            _count(data["episodes"]),
            _counts(data["reasons"]),
            _count(data["acted"]),
            {str(name)[:_LINE]: str(text)[:_LINE] for name, text in data.get("examples", {}).items()},
            tasks,
            _counts(data.get("played", earlier)),
            Moments(**{name: _finite(value) for name, value in data["hit"].items()}),
            Moments(**{name: _finite(value) for name, value in data["clean"].items()}),
            _counts(data["broken"]),
        )

    def worst_tasks(self, num: int) -> dict[str, dict[str, int]]:
        """The tasks with most redrawn episodes: their reasons with counts, and `played`."""
        worst = sorted(self.tasks, key=lambda name: (-self.tasks[name].total(), name))[:num]
        return {name: {"played": self.played[name], **self.tasks[name]} for name in worst}

    def why(self) -> str:
        """The reasons with counts, and the tasks with most of them."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.most_common())
        worst = [f"{name} ({_lost(counts)} of {counts['played']})" for name, counts in self.worst_tasks(3).items()]
        return f"{reasons}; most on the tasks {', '.join(worst)}" if worst else reasons

    def findings(self) -> dict[str, str]:
        """The signs, by kind, that losses depend on the policy; empty if there are none."""
        found: dict[str, str] = {}
        if self.redrawn < 4:
            return found
        share = self.redrawn / self.episodes
        for name, counts in self.worst_tasks(1).items():
            played, lost = counts["played"], _lost(counts)
            tasks = max(self.hit.num + self.clean.num, 1.0)
            if lost >= 4 and _tail(lost, played, share) * tasks < _SURE and len(self.tasks) < tasks:
                found["task"] = (
                    f"task {name} was lost to the infrastructure in {lost} of {played} episodes, all tasks "
                    f"together in {self.redrawn} of {self.episodes}: something about this task breaks it"
                )
        if min(self.hit.num, self.clean.num) >= _GROUPS:
            error = math.sqrt(self.hit.variance_of_mean + self.clean.variance_of_mean)
            if self.clean.mean - self.hit.mean > 3.3 * error and self.clean.mean > self.hit.mean:
                found["reward"] = (
                    f"groups that lost episodes to the infrastructure score {self.hit.mean:.3g} on average, the "
                    f"others {self.clean.mean:.3g}: the loss is not blind to what the policy does, and the "
                    "episodes that remain are a biased sample"
                )
        if found and self.acted:
            found = {
                kind: f"{text} ({self.why()}; in {self.acted} of {self.redrawn} the policy had acted before)"
                for kind, text in found.items()
            }
        return found


def _lost(counts: Mapping[str, int]) -> int:
    """How many episodes of a task were redrawn."""
    return sum(counts.values()) - counts["played"]


def _counts(data: Mapping[str, Any]) -> Counter[str]:
    return Counter({name: _count(count) for name, count in data.items()})


def _finite(value: Any) -> float:
    """A number that can be squared."""
    if not abs(float(value)) < 1e100:
        raise ValueError(f"{value!r} is too large")
    return float(value)


def _count(value: Any) -> int:
    """A number of episodes of one step."""
    if not 0 <= int(value) <= 10**7:
        raise ValueError(f"{value!r} is not a number of episodes")
    return int(value)


def redraws_file(run: Path) -> Path:
    """Where a run folder notes what each step lost."""
    return run / "redrawn.jsonl"


def redraws_line(step: int, found: Redraws) -> str:
    """A line of that file."""
    counts = {"episodes": found.episodes, "reasons": found.reasons, "acted": found.acted, "tasks": found.tasks}
    counts |= {"played": found.played, "examples": found.examples, "broken": found.broken}
    moments = {"hit": dataclasses.asdict(found.hit), "clean": dataclasses.asdict(found.clean)}
    return json.dumps({"step": step, "redraws": counts | moments}) + "\n"


def read_redraws(run: Path) -> dict[int, Redraws]:
    """What each step of a run lost; lines that cannot be read (a torn last one) are left out."""
    found: dict[int, Redraws] = {}
    for line in bounded_lines(redraws_file(run), MAX_LINE):
        try:
            data = json.loads(line)
            found[int(data["step"])] = Redraws.of_data(data["redraws"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            continue
    return found


def _tail(k: int, n: int, p: float) -> float:
    """P(X >= k) for a binomial X of n draws with chance p."""
    if p <= 0:
        return 0.0
    if p >= 1 or k <= n * p:
        return 1.0  # not in the tail: half or so, which no caller tells from 1
    log_p, log_q = math.log(p), math.log1p(-p)
    total = 0.0
    for i in range(k, n + 1):  # beyond the mean, each term is less than the one before
        term = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q
        total += math.exp(term)
        if math.exp(term) < 1e-18:
            break
    return min(1.0, total)


EFFECTS = {HINT_FAULT: "it has no hint", SOLVED_FAULT: "it is not solved"}
"""What a fault means for its episode, if it is not that of a reward."""


@dataclass
class RedrawGuard:
    """Watches episodes as they end; stops a run that loses too many, or whose rewards keep raising.

    Args:
        redrawn_above: share of the latest episodes that may be lost; None: any.
        faults_above: share of the latest episodes in which the same reward (or the env) may raise; None: any.
        tell: called with the first fault of each name.
    """

    redrawn_above: float | None = None
    faults_above: float | None = None
    tell: Callable[[str], None] | None = None
    _ended: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=RECENT))
    _scored: deque[frozenset[str]] = field(default_factory=lambda: deque(maxlen=RECENT))
    _told: set[str] = field(default_factory=set)

    def ended(self, episode: Episode, playing: int = 0) -> None:
        """Count an episode, scored or lost.

        Args:
            episode: it ended.
            playing: episodes in flight. A lost episode often ends long before the others that began with it, so
                the share is over these, too.

        Raises:
            AgentRLError: too many are lost.
        """
        self._ended.append((task_name(episode.task), reason_of(episode.error or "")))
        limit = self.redrawn_above
        if episode.error is None or limit is None:
            return
        lost = [(task, reason) for task, reason in self._ended if reason]
        share = len(lost) / (len(self._ended) + playing)
        if len(lost) < AT_LEAST or share <= limit:
            return
        raise AgentRLError(
            f"{len(lost)} of the last {len(self._ended) + playing} episodes ({share:.0%}) were lost to the "
            "infrastructure, "
            f"more than rollout.redrawn_stop_above = {limit:g}: {_most(reason for _, reason in lost)}; tasks: "
            f"{_most(task for task, _ in lost)}. The remaining episodes would be a biased sample. Fix what fails, "
            f"or raise the limit if the loss has nothing to do with the policy. The last one: {episode.error}"
        )

    def scored(self, episodes: Sequence[Episode]) -> None:
        """Count the faults of a complete group.

        Raises:
            EnvError: the same reward, or the env, raised in too many episodes.
        """
        for episode in episodes:
            self._scored.append(frozenset(episode.faults))
            for name, text in episode.faults.items():
                if name not in self._told and self.tell is not None:
                    self._told.add(name)
                    effect = EFFECTS.get(name, "it counts 0")
                    self.tell(f"episode {episode.id}: {text}\n{effect}; more of {name!r} are only counted")
                self._check(name, text)

    def _check(self, name: str, text: str) -> None:
        faulty = sum(name in names for names in self._scored)
        limit = None if name == SANDBOX_FAULT else self.faults_above
        if limit is None or faulty < AT_LEAST or faulty <= limit * len(self._scored):
            return
        needed = "it returns text or None" if name == HINT_FAULT else "every outcome gets a score"
        raise EnvError(
            f"{name!r} failed in {faulty} of the last {len(self._scored)} episodes, more than "
            f"rollout.faults_stop_above = {limit:g}: fix it so that {needed}. "
            f"The last one: {text}"
        )


def _most(names: Iterable[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in Counter(names).most_common(3))


def fault_metrics(episodes: Sequence[Episode]) -> Mapping[str, float]:
    """`faults/NAME`: episodes in which this reward, or the env, raised."""
    counts = Counter(name for episode in episodes for name in episode.faults)
    return {f"faults/{name}": float(count) for name, count in sorted(counts.items())}
