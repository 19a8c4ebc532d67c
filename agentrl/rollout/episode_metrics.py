"""Metrics of the episodes of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from agentrl.algo.entries import SUM, Signal
from agentrl.env.curriculum import has_signal
from agentrl.env.solved import undeclared
from agentrl.run_folder.redraws import Redraws, fault_metrics
from agentrl.types import LIMITS, Episode, Group, StopReason

MALFORMED = ("parse_error", "unknown_tool", "invalid_args")
"""Mistakes that make an episode count as malformed: a call that cannot be read, or that is invalid."""
_OF_TURNS = "reward/"
"""What the names of parts of turns' rewards begin with among an episode's metrics."""


def is_malformed(episode: Episode) -> bool:
    """Whether the policy wrote a call that cannot be read, or one that is invalid.

    A turn that a limit cut, or that a program of the user's played, is looked at as well: no env has counted it.
    """
    return any(episode.metrics.get(name, 0.0) for name in MALFORMED) or any(
        turn.message.parse_errors or any(call.outcome in MALFORMED for call in turn.calls)
        for turn in episode.turns
    )


def solved(groups: Sequence[Group]) -> float | None:
    """The fraction of scored episodes that are solved, of envs that declare what that is; None if none does."""
    episodes = [e for g in _judged(groups) for e in g.episodes]
    if all(e.solved is None for e in episodes):
        return None
    return sum(e.solved is True for e in episodes) / len(episodes)


def _judged(groups: Sequence[Group]) -> list[Group]:
    """The groups without those of envs that declare nothing."""
    by_env: dict[str, list[Group]] = {}
    for group in groups:
        by_env.setdefault(group.task.env, []).append(group)
    return [group for of_env in by_env.values() if not undeclared(of_env) for group in of_env]


def passed(groups: Sequence[Group]) -> float:
    """The fraction of groups in which at least one episode is solved, see `solved`; 0 for none."""
    return _mean(float(any(e.solved for e in g.episodes)) for g in _judged(groups))


def pass_at(k: int, attempts: int, solved: int) -> float:
    """pass@k of one task: the chance that of k attempts, drawn from those made, at least one solved it.

    Source: Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def passed_at(k: int, groups: Sequence[Group]) -> float:
    """The mean pass@k over groups of at least k episodes, see `solved`."""
    return _mean(pass_at(k, len(g.episodes), sum(e.solved is True for e in g.episodes)) for g in _judged(groups))


def mean_reward(groups: Sequence[Group]) -> float:
    """The mean reward of the scored episodes; 0 for none."""
    return _mean(e.reward or 0.0 for g in groups for e in g.episodes)


def reward_parts(episode: Episode) -> dict[str, float]:
    """What the reward consists of, by name: rewards per episode and group, and the sums of those per turn."""
    parts = dict(episode.rewards)
    for name, value in episode.metrics.items():
        if name.startswith(_OF_TURNS):
            part = name.removeprefix(_OF_TURNS)
            parts[part] = parts.get(part, 0.0) + value
    return parts


def compared_parts(episode: Episode) -> dict[str, float]:
    """The parts of the reward that `gdpo` compares, with all rewards of turns as one of them; one that is missing
    counts as 0.

    If the env raised or the policy broke its sandbox, the reward is fixed and one part: what the turns had earned
    does not count.
    """
    if episode.stop_reason in (StopReason.SANDBOX_BROKEN, StopReason.FAULT):
        return {episode.stop_reason.value: episode.reward} if episode.reward else {}
    turns = sum(turn.reward for turn in episode.turns)
    return {**episode.rewards, **({"turns": turns} if turns else {})}


def group_has_signal(group: Group, signal: Signal = SUM) -> bool:
    """Whether the rewards of a group's episodes differ, or their named parts, or those of their turns."""
    parts = [compared_parts(episode) for episode in group.episodes]
    uncounted = [sum(own.get(name, 0.0) for name in signal.unweighted) for own in parts]
    if has_signal([(e.reward or 0.0) - own for e, own in zip(group.episodes, uncounted, strict=True)]):
        return True
    if signal.of == "parts":
        names = {name for own in parts for name in own} - signal.unweighted
        return any(has_signal([own.get(name, 0.0) for own in parts]) for name in names)
    turns = [[turn.reward for turn in episode.turns] for episode in group.episodes]
    return signal.of == "turns" and any(map(any, turns)) and any(one != turns[0] for one in turns)


def sampled_tokens(episode: Episode) -> int:
    """Tokens that were sampled in an episode, those of sub-agents included."""
    recorded = sum(len(segment.ids) for segment in episode.segments if segment.origin == "sampled")
    counted = int(episode.metrics.get("usage/completion_tokens", 0.0))  # by an endpoint
    return recorded or counted or sum(turn.tokens for turn in episode.turns)


def episode_metrics(
    groups: Sequence[Group],
    aside: Sequence[Group] = (),
    signals: Mapping[str, Signal] = MappingProxyType({}),
) -> dict[str, float]:
    """Means and counts over the episodes of a step; failed ones are counted and enter no mean.

    Args:
        groups: what is trained.
        aside: groups that gave their places to others; only their episodes, failures and tokens are counted, as
            those of greedy episodes.
        signals: by env, what of the rewards has to differ for a signal; else their sums.
    """
    episodes = [e for g in groups for e in g.episodes]
    extra = [e for g in aside for e in g.episodes] + [g.greedy for g in (*groups, *aside) if g.greedy is not None]
    failed = sum(len(g.failed) for g in (*groups, *aside))
    turns = [t for e in episodes for t in e.turns]
    share = solved(groups)
    metrics: dict[str, float] = ({} if share is None else {"solved": share}) | {
        "reward": _mean(e.reward or 0.0 for e in episodes),
        "episodes": float(len(episodes) + len(extra) + failed),
        "infra_failures": float(failed),
        "malformed": float(sum(map(is_malformed, episodes))),
        "limits": float(sum(e.stop_reason in LIMITS for e in episodes)),
        "groups_with_signal": float(sum(group_has_signal(g, signals.get(g.task.env, SUM)) for g in groups)),
        "sampled_tokens": float(sum(map(sampled_tokens, (*episodes, *extra)))),
        "turns": _mean(len(e.turns) for e in episodes),
        "engine_seconds": _mean(t.engine_seconds for t in turns),
        "env_seconds": _mean(t.env_seconds for t in turns),
    }
    parts = [reward_parts(e) for e in episodes]
    for name in sorted({name for named in parts for name in named}):
        metrics[f"reward/{name}"] = _mean(named.get(name, 0.0) for named in parts)
    metrics |= fault_metrics(episodes)
    lost = Redraws.of([*groups, *aside]).reasons
    metrics |= {f"redrawn/{reason}": float(count) for reason, count in sorted(lost.items())}
    for reason, count in sorted(Counter(e.stop_reason.value for e in episodes).items()):
        metrics[f"stop/{reason}"] = float(count)
    for name in sorted({name for e in episodes for name in e.metrics if not name.startswith(_OF_TURNS)}):
        key = name if name.startswith("tokens/") else f"env/{name}"
        metrics[key] = sum(e.metrics.get(name, 0.0) for e in episodes)
    return metrics


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """By how many updates the weights that drew the tokens are behind those that are trained, `version`.

    `mean` is over sampled tokens, `max` the oldest of them; `episodes_mixed` were drawn with several versions.
    """
    episodes = [
        [v for s in e.segments if s.origin == "sampled" for v in s.versions] for g in groups for e in g.episodes
    ]
    tokens = sum(map(len, episodes))
    if not tokens:
        return {}
    return {
        "staleness/mean": version - sum(map(sum, episodes)) / tokens,
        "staleness/max": float(version - min(min(e) for e in episodes if e)),
        "staleness/episodes_mixed": float(sum(min(e) != max(e) for e in episodes if e)),
    }


def set_aside(aside: Sequence[Group]) -> dict[str, float]:
    """Metrics of groups that were replaced because all their episodes scored the same."""
    episodes = sum(len(group.episodes) + len(group.failed) for group in aside)
    return {"refilled_groups": float(len(aside)), "refilled_episodes": float(episodes)}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0
