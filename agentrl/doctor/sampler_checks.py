"""Do sampler and learner mean the same policy? Weights, temperature, masks and staleness."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agentrl.doctor.evidence import Evidence, Floats
from agentrl.doctor.finding import Finding
from agentrl.doctor.statistics import correlation, slope
from agentrl.run_folder.token_records import REJECTED

SMALL = 2e-3
"""Mean |difference| of log-probabilities that arithmetic alone explains, also in bfloat16 with a server."""
LARGE = 0.02
TILT = 0.07
"""How far from 1 the slope between both sides is no accident."""
TOKENS = 100
"""Tokens that a comparison needs."""


def both_sides(evidence: Evidence, step: int, *, fresh: bool = False) -> tuple[Floats, Floats]:
    """Log-probabilities of the same tokens: the sampler's, and the learner's before its update.

    Args:
        fresh: only tokens that were sampled with the weights that the step trains.
    """
    columns = evidence.tokens(step)
    sampler, learner = [], []
    for played in evidence.of_steps([step]):
        own = columns.get(played.id)
        if (
            own is not None
            and own.learner_logprobs is not None
            and len(own.learner_logprobs) == len(played.logprobs)
        ):
            known = np.isfinite(own.learner_logprobs) & np.isfinite(played.logprobs)
            if fresh:
                known &= played.versions == step - 1
            sampler.append(played.logprobs[known])
            learner.append(own.learner_logprobs[known])
    return (np.concatenate(sampler), np.concatenate(learner)) if sampler else (np.zeros(0), np.zeros(0))


def disagreement(evidence: Evidence) -> Iterator[Finding]:
    """Where the two disagree although the sampler had the newest weights, and which fault explains it."""
    steps, drift = _fresh_drift(evidence)
    if not len(steps):
        return
    first, worst = float(drift[0]), int(np.argmax(drift))
    if steps[0] == evidence.first_step and (first > LARGE or (first > SMALL and _tilted(evidence, int(steps[0])))):
        yield from _at_once(evidence, int(steps[0]), first)
        return
    start = first if steps[0] == evidence.first_step else SMALL
    if len(steps) > 1 and float(drift[worst]) > max(50 * start, SMALL) and _grows(drift, start):
        late = float(drift[max(1, len(drift) // 2) :].mean())
        yield Finding(
            "weights-not-reaching-sampler",
            "error",
            "the learner's log-probabilities agree with the sampler's in the first step "
            f"({start:.1g}) and differ later ({late:.2g} in the second half of the run): updates do not reach the "
            "sampler" + (", or reach it late" if late < 0.1 else ""),
            "engine.sync, and for adapters learner.lora with engine.sync: full; check that the server loads them",
            step=int(steps[worst]),
            series=("drift/mean_abs", "sync_gap"),
            why="only tokens that are reported as sampled with the newest weights are compared, so staleness "
            "cannot explain it",
        )


def _tilted(evidence: Evidence, step: int) -> bool:
    """Whether one side's log-probabilities are a multiple of the other's, which no rounding makes of them."""
    sampler, learner = both_sides(evidence, step)
    related, steep = correlation(sampler, learner), slope(sampler, learner)
    return len(sampler) >= TOKENS and related > 0.9 and abs(steep - 1) > TILT


def _fresh_drift(evidence: Evidence) -> tuple[Floats, Floats]:
    """Steps, and mean |difference| of the tokens that were sampled with the weights that the step trains."""
    _, stale = evidence.series("staleness/max")
    steps, drift = evidence.series("drift/mean_abs")
    if not len(stale) or float(stale.max()) <= 0:
        return steps, drift
    found = []
    for step in evidence.steps:
        sampler, learner = both_sides(evidence, step, fresh=True)
        if len(sampler) >= TOKENS:
            found.append((float(step), float(np.abs(sampler - learner).mean())))
    table = np.asarray(found, dtype=float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _grows(drift: Floats, start: float) -> bool:
    late = drift[max(1, len(drift) // 2) :]
    return float(np.median(late)) > max(10 * start, 0.5 * SMALL)


def _at_once(evidence: Evidence, step: int, drift: float) -> Iterator[Finding]:
    """Before any update both are the same policy: another temperature, other tokens, or another model."""
    sampler, learner = both_sides(evidence, step)
    series = ("drift/mean_abs",)
    if len(sampler) < TOKENS:
        text = f"sampler and learner differ by {drift:.2g} in the first step already"
        yield Finding("sampler-learner-mismatch", "error", text, "engine.dtype", step=step, series=series)
        return
    related, steep = correlation(sampler, learner), slope(sampler, learner)
    if related < 0.5:
        yield Finding(
            "tokens-shifted",
            "error",
            "the learner scores other tokens than the sampler drew: their log-probabilities differ "
            f"by {drift:.2g} and "
            f"hardly correlate ({related:.2f}); the loss mask or the rows are shifted",
            "the code that makes rows and loss masks (a custom engine or learner); model.path and "
            "tokenizer must match",
            step=step,
            series=series,
            why="another temperature or precision would leave the correlation near 1",
        )
        return
    scaled = "higher" if steep < 1 else "lower"
    yield Finding(
        "temperature-mismatch",
        "error",
        f"before any update, log-probabilities differ by {drift:.2g} although they correlate "
        f"({related:.2f}): learner "
        f"and sampler use different temperatures (the learner's is {scaled}), filters or precisions",
        "rollout.temperature (the sampler must report log-probabilities at it), then engine.dtype",
        step=step,
        series=series,
        why="a shift of the tokens would destroy the correlation",
    )


def left_out(evidence: Evidence) -> Iterator[Finding]:
    """Sampled tokens that do not train although nothing rejects them: the loss mask has moved."""
    correction = evidence.setting("algorithm.correction")
    correction = correction if isinstance(correction, dict) else {}
    if correction.get("reject") or correction.get("veto") is not None or correction.get("off_policy") is not None:
        return
    for step in evidence.steps[:3]:
        columns = evidence.tokens(step)
        flags = [(id, one.flags) for id, one in columns.items() if one.flags is not None]
        lost = [(id, int((found & REJECTED > 0).sum())) for id, found in flags if (found & REJECTED).any()]
        if len(lost) >= max(2, 0.1 * len(flags)):
            yield Finding(
                "tokens-shifted",
                "error",
                f"{sum(count for _, count in lost)} sampled tokens of {len(lost)} episodes are not trained, "
                "and no correction is configured that rejects tokens: the loss mask does not fit the tokens",
                "the code that makes rows and loss masks",
                step=step,
                episode=lost[0][0],
                series=("trained_tokens", "sampled_tokens"),
                why="each token's flags say whether it trained",
            )
            return


def staleness(evidence: Evidence) -> Iterator[Finding]:
    """Tokens older than the run allows."""
    allowed = int(evidence.number("rollout.max_staleness", 0))
    ages = [
        (played.step - 1 - oldest, played)
        for played in evidence.scored
        if (oldest := played.oldest_version) is not None
    ]
    late = [(age, played) for age, played in ages if age > allowed]
    if len(late) >= max(3, 0.05 * len(ages)):
        age, played = max(late, key=lambda found: found[0])
        yield Finding(
            "stale-weights",
            "error",
            f"{len(late)} of {len(ages)} episodes were sampled with weights up to {age} steps old; "
            f"rollout.max_staleness allows {allowed}",
            "rollout.max_staleness and rollout.groups_ahead (what may wait), then engine.sync: weights must be "
            "published after every step",
            step=played.step,
            episode=played.id,
            series=("staleness/max",),
            why="every token carries the version that sampled it",
        )


CHECKS = (disagreement, left_out, staleness)
