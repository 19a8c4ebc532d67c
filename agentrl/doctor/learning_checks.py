"""Does the policy learn, and at the right pace? Signal, learning rate, KL, entropy, lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from agentrl.doctor.evidence import Evidence
from agentrl.doctor.finding import Finding
from agentrl.doctor.statistics import correlation, ends

FEW_STEPS = 3
SOME_STEPS = 8
ENOUGH_GROUPS = 80
"""With this many groups, a small share of them with a signal is not a coincidence."""
RECENT = 10
"""Steps that say how a run is doing now."""
RANDOM = 2.0
"""Entropy in nats per token of text that hardly depends on what was asked."""
MATTERS = 0.1
"""What a term has to add to the objective to compete with the reward."""
SHRINKS = 1e-3
"""Share of the weights that weight decay takes in a step, if it is far too high."""
CLIPPED = 1000
"""How often `optim.max_grad_norm` gradients are, if clipping leaves so little that Adam's epsilon stops it."""
LEAP = 0.1
"""KL to the start after two steps, of updates that are too large."""


def progress(evidence: Evidence) -> tuple[float, float]:
    """Mean reward in the first and the last quarter of the run, as shares of the best seen."""
    _, reward = evidence.series("reward")
    if not len(reward):
        return 0.0, 0.0
    low, high = ends(reward)
    return low, high


def no_signal(evidence: Evidence) -> Iterator[Finding]:
    """Nearly all groups score the same."""
    steps, signal = evidence.series("groups_with_signal")
    groups = evidence.number("rollout.groups_per_step", 0)
    if len(signal) < FEW_STEPS or groups <= 0 or evidence.number("rollout.group_size", 1) < 2:
        return
    if not (graded := _graded(evidence)):
        return  # equal rewards teach as much as others
    half = max(FEW_STEPS, len(signal) // 2)
    recent = min(half, max(RECENT, math.ceil(ENOUGH_GROUPS / groups)))
    share = float(signal[-recent:].mean()) / groups
    if len(graded) < len(evidence.setting("envs") or [""]):
        loud, played = (
            sum(float(evidence.series(f"env/{name}/{what}")[1][-half:].sum()) for name in graded)
            for what in ("groups_with_signal", "groups")
        )
        share = loud / max(played, 1)
    if share > 0.1:
        return
    rewards = [played.reward or 0.0 for played in evidence.of_steps(evidence.steps[-3:])]
    solved = sum(played.raw.get("solved") is True for played in evidence.of_steps(evidence.steps[-3:]))
    if rewards and (solved > 0.9 * len(rewards)):
        text = f"nearly every group is solved by all its episodes: {share:.0%} of the groups still have a signal"
        yield Finding("all-solved", "hint", text, "harder tasks (data), or stop here", int(steps[-1]))
        return
    _, every = evidence.series("reward")
    if _never_solved(evidence):
        return  # the next check says it better
    yield Finding(
        "no-signal",
        "warning",
        f"only {share:.0%} of the groups have episodes with different rewards; the others teach nothing "
        f"(mean reward {every[-1]:.2f})",
        "rollout.group_size (larger), tasks of middle difficulty (data.sampler.order: weighted), "
        "rollout.refill_zero_signal, rollout.temperature",
        step=int(steps[-1]),
        series=("groups_with_signal", "reward"),
    )


def _graded(evidence: Evidence) -> list[str]:
    """The envs that teach nothing without rewards; '' stands for the only one.

    A teacher that needs attempts that solved the task does not replace rewards.
    """
    envs = list(evidence.setting("envs") or [""])
    of_run, teacher = evidence.setting("algorithm.advantage"), evidence.setting("teacher") is not None
    if evidence.setting("teacher.hint") == "solved":
        return envs

    def without_rewards(name: str) -> bool:
        own = evidence.setting(f"envs.{name}.algorithm.advantage") or of_run
        taught = teacher and evidence.setting(f"envs.{name}.algorithm.kl_coef") != 0
        taught = taught or evidence.setting(f"envs.{name}.teacher") is not None
        return taught or (own.get("name") if isinstance(own, dict) else own) == "none"

    return [name for name in envs if not without_rewards(name)]


def _never_solved(evidence: Evidence) -> bool:
    scored = evidence.scored
    if len(scored) < 16:
        return False
    if any(played.raw.get("solved") is not None for played in scored):
        return not any(played.raw.get("solved") for played in scored)
    rewards = {round(played.reward or 0.0, 9) for played in scored}
    return len(rewards) == 1


def never_solved(evidence: Evidence) -> Iterator[Finding]:
    """Nothing has ever been solved: there is nothing to reinforce."""
    steps, _ = evidence.series("reward")
    if len(steps) < FEW_STEPS or not _graded(evidence) or not _never_solved(evidence):
        return
    _, signal = evidence.series("groups_with_signal")
    if len(signal) and float(signal.mean()) > 0.25 * evidence.number("rollout.groups_per_step", 1):
        return  # other parts of the reward teach something
    cold = evidence.setting("warmup") is None
    worst = evidence.scored[0]
    yield Finding(
        "never-solved",
        "error",
        f"no episode of {len(evidence.scored)} was solved: there is nothing to reinforce"
        + (", and the run has no cold start" if cold else ""),
        "warmup (oracle or demonstrations)" if cold else "warmup.num and warmup.max_epochs (more), easier tasks",
        step=worst.step,
        episode=worst.id,
        series=("solved", "reward"),
    )


def too_fast(evidence: Evidence) -> Iterator[Finding]:
    """Updates so large that training diverges."""
    steps, reward = evidence.series("reward")
    _, entropy = evidence.series("entropy")
    _, kl = evidence.series("kl")
    if len(steps) < FEW_STEPS:
        return
    if next(iter(wrong_sign(evidence)), None) is not None:
        return
    best, last = float(reward.max()), float(reward[-max(1, len(reward) // 4) :].mean())
    early = float(reward[: max(2, len(reward) // 4)].max())
    fell = early - last > 0.5 * max(float(np.ptp(reward)), 1e-9) and best - last > 0.15
    at = int(np.argmax(reward))
    torn = len(kl) > 0 and float(kl.max()) > 1.0
    jumps = np.abs(np.diff(np.log(np.maximum(entropy, 1e-6))))
    jumped = len(entropy) == len(steps) and float(jumps.max()) > 1.6
    gone = _gone(evidence) and next(iter(entropy_collapse(evidence)), None) is None
    if (torn and (fell or jumped)) or (fell and jumped) or gone:
        yield Finding(
            "learning-rate-too-high",
            "error",
            f"the policy breaks: the reward falls from {best:.2f} to {last:.2f}"
            + (f", KL reaches {kl.max():.2g}" if torn else "")
            + (", entropy jumps from step to step" if jumped else "")
            + (", all of it within two steps" if gone else ""),
            f"optim.lr (now {evidence.number('optim.lr', 0):g}: divide by 10), optim.max_grad_norm, "
            "algorithm.kl.coef",
            step=int(steps[min(at + 1, len(steps) - 1)]),
            series=("reward", "kl", "entropy", "grad_norm"),
            why="a single bad step would recover; this does not",
        )


def _gone(evidence: Evidence) -> bool:
    """Whether two updates took nearly all of the reward for good, with a leap in KL if that is measured."""
    steps, reward = evidence.series("reward")
    lowest = min((played.reward for played in evidence.scored if played.reward is not None), default=0.0)
    gains, kl = reward - lowest, dict(zip(*evidence.series("kl"), strict=True))
    for at in range(len(gains) - 4):
        after = gains[at + 2 :]
        leaped = not kl or max(kl.get(step, 0.0) for step in steps[at + 1 : at + 3]) > LEAP
        if leaped and gains[at] > 0.15 and float(after.max()) < 0.2 * gains[at]:
            return True
    return False


def too_much_decay(evidence: Evidence) -> Iterator[Finding]:
    """Weight decay that undoes what the policy knew."""
    (_, rate), (_, reward) = evidence.series("lr"), evidence.series("reward")
    decay = evidence.number("optim.weight_decay", 0)
    if len(rate) < FEW_STEPS or decay * float(rate.mean()) < SHRINKS:
        return
    before, after = progress(evidence)
    lost = 1 - math.exp(-decay * float(rate.sum()))
    if lost > MATTERS and before - after > 0.5 * float(np.ptp(reward)) > 0:
        yield Finding(
            "weight-decay-too-high",
            "error",
            f"weight decay took {lost:.0%} of the weights in {len(rate)} steps, and the reward went from "
            f"{before:.2f} to {after:.2f}",
            f"optim.weight_decay (now {decay:g}: 0.1 or less)",
            step=evidence.steps[-1],
            series=("reward", "entropy", "lr"),
        )


def too_slow(evidence: Evidence) -> Iterator[Finding]:
    """Signal is there, and the policy does not move."""
    steps, reward = evidence.series("reward")
    _, signal = evidence.series("groups_with_signal")
    groups = evidence.number("rollout.groups_per_step", 0)
    if len(steps) < SOME_STEPS or groups <= 0 or len(signal) < SOME_STEPS or float(signal.mean()) < 0.2 * groups:
        return
    _, kl = evidence.series("kl")
    _, entropy = evidence.series("entropy")
    still = len(kl) == len(steps) and float(kl[-3:].mean()) < 2e-4
    if not len(kl) and len(entropy) >= SOME_STEPS:
        low, high = ends(entropy)
        still = abs(high - low) < 0.02 * max(low, 1e-9)
    low, high = progress(evidence)
    if still and high - low < 0.05 * max(abs(low), float(np.ptp(reward)), 0.1):
        rate = evidence.number("optim.lr", 0)
        moved = f"KL to the start is {kl[-1]:.1g}" if len(kl) else "its entropy does not change"
        _, norm = evidence.series("grad_norm")
        bound = evidence.number("optim.max_grad_norm", 1.0)
        clipped = len(norm) > 0 and float(np.median(norm)) > CLIPPED * bound
        yield Finding(
            "learning-rate-too-low",
            "warning",
            f"after {len(steps)} steps with signal the policy has barely changed: {moved}, and the "
            "reward does not rise",
            f"optim.max_grad_norm (now {bound:g}, and gradients have a norm of {np.median(norm):.1g}: set it to 1)"
            if clipped
            else f"optim.lr (now {rate:g}: multiply by 10)",
            step=int(steps[-1]),
            series=("kl", "entropy", "reward"),
        )


def wrong_sign(evidence: Evidence) -> Iterator[Finding]:
    """The KL penalty rewards the distance that it should punish: the loss falls as KL rises."""
    steps, kl = evidence.series("kl")
    _, loss = evidence.series("loss")
    coef = evidence.number("algorithm.kl.coef", 0)
    if len(steps) < FEW_STEPS or len(loss) != len(kl) or coef <= 0:
        return
    share = coef * kl
    if float(share.max()) < 0.02 or float(kl.max()) < 0.3:
        return
    explained = correlation(share, loss)
    rest_minus, rest_plus = float(np.std(loss + share)), float(np.std(loss - share))
    alike = explained < -0.6 and rest_minus < 0.5 * rest_plus
    below = explained < 0 and float(loss[-1]) < -0.5 * float(share[-1])
    if alike or below:
        yield Finding(
            "kl-sign",
            "error",
            f"KL rises to {kl.max():.2g} and the loss falls with it (correlation {explained:.2f}): "
            "the penalty has the "
            "wrong sign",
            "algorithm.kl (kind, coef, a custom loss or reward that handles KL): the penalty must be "
            "added to the loss",
            step=int(steps[int(np.argmax(kl))]),
            series=("kl", "loss"),
            why="with the right sign the loss contains +coef * KL",
        )


def entropy_collapse(evidence: Evidence) -> Iterator[Finding]:
    """The policy stops to explore before it has learned the tasks."""
    steps, entropy = evidence.series("entropy")
    if len(steps) < 4:
        return
    first, last = (
        float(entropy[: max(1, len(entropy) // 8)].mean()),
        float(entropy[-max(1, len(entropy) // 8) :].mean()),
    )
    recent = evidence.of_steps(evidence.steps[-3:])
    solved = [played.raw.get("solved") for played in recent if played.raw.get("solved") is not None]
    low, high = progress(evidence)
    done = (sum(bool(s) for s in solved) > 0.75 * len(solved)) if solved else high > low + 0.1
    if last < 0.05 * first and last < 0.05 and not done:
        yield Finding(
            "entropy-collapse",
            "warning",
            f"entropy fell from {first:.2g} to {last:.2g} nats while the tasks are not learned",
            "algorithm.kl.coef (higher), optim.lr (lower), algorithm.loss.clip_high (higher), "
            "algorithm.entropy_coef, "
            "rollout.temperature",
            step=int(steps[-1]),
            series=("entropy", "groups_with_signal"),
        )


def too_random(evidence: Evidence) -> Iterator[Finding]:
    """A temperature at which the policy samples nearly any token, from the first step on."""
    _, entropy = evidence.series("entropy")
    temperature = evidence.number("rollout.temperature", 1.0)
    if len(entropy) and temperature > 1.2 and entropy[0] > RANDOM and _never_solved(evidence):
        yield Finding(
            "temperature-too-high",
            "error",
            f"at temperature {temperature:g} the policy samples nearly at random: its entropy in the first step "
            f"is {entropy[0]:.2g} nats per token, and nothing is solved",
            f"rollout.temperature (now {temperature:g}: 1.0 or lower)",
            step=evidence.first_step,
            episode=evidence.scored[0].id,
            series=("entropy",),
        )


def entropy_explosion(evidence: Evidence) -> Iterator[Finding]:
    """An entropy bonus that outweighs the reward."""
    steps, entropy = evidence.series("entropy")
    bonus = evidence.number("algorithm.entropy_coef", 0.0)
    if len(steps) < 4 or bonus <= 0:
        return
    first, last = float(entropy[0]), ends(entropy)[1]
    before, after = progress(evidence)
    if last > max(3 * first, RANDOM) and bonus * (last - first) > MATTERS and after <= before:
        yield Finding(
            "entropy-explosion",
            "error",
            f"entropy rose from {first:.2g} to {last:.2g} nats and the reward went from {before:.2f} to "
            f"{after:.2f}: the entropy bonus outweighs the reward",
            f"algorithm.entropy_coef (now {bonus:g}: divide by 10, or 0), then optim.lr",
            step=int(steps[int(np.argmax(entropy > (first + last) / 2))]),
            series=("entropy", "reward"),
            why=f"the bonus adds {bonus * (last - first):.2g} to the objective",
        )


def length_explosion(evidence: Evidence) -> Iterator[Finding]:
    """Completions grow and grow."""
    steps, tokens = evidence.series("sampled_tokens")
    (_, episodes), (_, lost) = evidence.series("episodes"), evidence.series("infra_failures")
    if len(steps) < 4 or len(episodes) != len(tokens):
        return
    if len(lost) == len(episodes):
        episodes = episodes - lost  # their tokens are not among those that were sampled
    lengths = tokens / np.maximum(episodes, 1)
    low, high = float(lengths[:2].min()), ends(lengths)[1]
    before, after = progress(evidence)
    cut = [
        p
        for p in evidence.of_steps(evidence.steps[-2:])
        if p.raw.get("stop_reason") in ("max_tokens", "token_budget", "context_full")
    ]
    recent = max(1, len(evidence.of_steps(evidence.steps[-2:])))
    if high > 2.5 * max(low, 4.0) and (len(cut) > 0.2 * recent or after <= before + 0.05):
        yield Finding(
            "length-explosion",
            "warning",
            f"episodes grew from {low:.0f} to {high:.0f} sampled tokens; {len(cut) / recent:.0%} of "
            "the last ones are cut",
            "rollout.overlong: mask (or penalise), the rewards of the env, algorithm.aggregation, "
            "rollout.max_tokens",
            step=int(steps[-1]),
            episode=cut[0].id if cut else "",
            series=("sampled_tokens", "stop/max_tokens"),
        )


CHECKS = (
    *(no_signal, never_solved, too_fast, too_much_decay, too_slow, wrong_sign, too_random),
    *(entropy_collapse, entropy_explosion, length_explosion),
)
