"""Every metric of a run: what it measures, its unit, and whether it is one of the few to look at first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

MetricGroup = Literal[
    "reward",
    "evaluation",
    "objective",
    "sampler and learner",
    "correction",
    "critic",
    "staleness",
    "episodes",
    "tools",
    "tokens",
    "agents",
    "time",
]


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """One line of the table.

    Args:
        name: the key in metrics.jsonl; `{...}` stands for any text.
        unit: what a value counts; empty for a plain number.
        curated: whether loggers get it and pages show it by default.
    """

    name: str
    unit: str
    group: MetricGroup
    description: str
    curated: bool = False

    def matches(self, key: str) -> bool:
        """Whether this line describes the key."""
        return _pattern(self.name).fullmatch(key) is not None


def describe(key: str) -> MetricDoc | None:
    """The line that describes a key of metrics.jsonl; an exact name goes before a pattern, the first one wins."""
    exact = _exact().get(key)
    return exact or next((doc for doc in METRICS if "{" in doc.name and doc.matches(key)), None)


def curated(keys: Iterable[str]) -> list[str]:
    """Those of the keys that are worth looking at first, in the order of the table."""
    found = [(place, key) for key in keys if (doc := describe(key)) and doc.curated for place in [_place(doc)]]
    return [key for _, key in sorted(found)]


def _place(doc: MetricDoc) -> int:
    return METRICS.index(doc)


@cache
def _exact() -> dict[str, MetricDoc]:
    return {doc.name: doc for doc in METRICS if "{" not in doc.name}


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{[^}]*\}", name)
    return re.compile(".+".join(map(re.escape, parts)), re.DOTALL)


def _docs(group: MetricGroup, *rows: tuple[str, str, str]) -> tuple[MetricDoc, ...]:
    """Lines of a group; a `*` before the name marks a curated one."""
    return tuple(
        MetricDoc(name.removeprefix("*"), unit, group, text, name.startswith("*")) for name, unit, text in rows
    )


METRICS: tuple[MetricDoc, ...] = (
    *_docs(
        "reward",
        ("*reward", "", "Mean reward of the step's scored episodes."),
        (
            "*solved",
            "fraction",
            "Fraction of scored episodes that are solved; only if the env declares what that is.",
        ),
        ("*reward/{name}", "", "Mean of one part of the reward, weight included; 0 for an episode without it."),
        (
            "*groups_with_signal",
            "groups",
            "Groups whose episodes did not all earn the same reward, or the same in each part (`gdpo`) or turn "
            "(`turn_level`, `optimal_token_baseline`).",
        ),
        (
            "episodes_without_advantage",
            "episodes",
            "Episodes whose tokens all have advantage 0. If no penalty, bonus or critic needs them, the update "
            "skips them, and means over trained tokens (`entropy`, `drift/mean_abs`, ...) leave them out.",
        ),
        ("dropped_groups", "groups", "Groups without any advantage that `drop_zero_signal_groups` left out."),
        (
            "refilled_groups",
            "groups",
            "Groups without signal, or refused by `group_filter`, that were replaced by new ones.",
        ),
        ("refilled_episodes", "episodes", "Episodes in the groups that were replaced."),
        (
            "refused_groups",
            "groups",
            "Groups that `group_filter` refused and that train because `refill_zero_signal` replaces no more.",
        ),
        (
            "faults/{name}",
            "episodes",
            "Episodes in which this reward, or the env itself (`step`), raised or returned no usable number; "
            "`faults/solved_at`: those that lack a reward named by `solved_at`.",
        ),
    ),
    *_docs(
        "evaluation",
        ("*held_out", "fraction", "Fraction of held-out episodes that are solved."),
        ("*held_out_reward", "", "Mean reward of the held-out episodes."),
        ("*env/{env}/held_out", "fraction", "The same for one of several envs."),
        ("*env/{env}/held_out_reward", "", "The same for one of several envs."),
        ("held_out_pass", "fraction", "Fraction of held-out tasks solved at least once; with several attempts."),
        ("held_out_pass@{k}", "fraction", "Estimated chance that at least one of k attempts solves a task."),
        ("*held_out/{set}", "fraction", "Fraction of the episodes of one of `eval.sets` that are solved."),
        ("*held_out_reward/{set}", "", "Mean reward of the episodes of one of `eval.sets`."),
        ("held_out_pass/{set}", "fraction", "Fraction of its tasks solved at least once; with several attempts."),
        (
            "held_out_pass@{k}/{set}",
            "fraction",
            "Estimated chance that one of k attempts solves a task.",
        ),
        (
            "pass@{k}",
            "fraction",
            "`agentrl eval`: estimated chance that at least one of k attempts solves a task.",
        ),
        ("pass^{k}", "fraction", "`agentrl eval`: estimated chance that all of k attempts solve a task."),
        (
            "lost",
            "tasks",
            "`agentrl eval`: tasks that could not be played, because the infrastructure kept failing.",
        ),
        ("prompt_tokens", "tokens", "`agentrl eval`: tokens in all prompts."),
    ),
    *_docs(
        "objective",
        ("*loss", "", "The policy loss with its penalties, averaged over the step's optimizer updates."),
        ("*entropy", "nats", "Mean entropy of the policy at trained tokens."),
        (
            "*kl",
            "nats",
            "Mean KL to the reference or teacher per trained token (penalty in the loss); with "
            "`algorithm.kl.jsd_beta` that divergence.",
        ),
        (
            "env/{env}/kl",
            "nats",
            "Mean log-ratio of the sampler to the reference or teacher at the trained tokens of one of several "
            "envs, if the reference is evaluated before the update (as with `algorithm.kl.kind: centered`).",
        ),
        (
            "*kl_in_reward",
            "nats",
            "Mean KL estimate to the reference or teacher per token (penalty in the reward).",
        ),
        (
            "*observation_loss",
            "nats",
            "Mean cross-entropy of the env's answers per token (`algorithm.observation_coef`).",
        ),
        ("kl_coef", "", "Weight of the KL penalty in this step, if it is adaptive."),
        ("hinted_episodes", "episodes", "Episodes that the teacher reads with a hint (`teacher.hint`)."),
        ("hints_too_long", "episodes", "Episodes that are too long with their hint, which the teacher skips."),
        ("hints_misplaced", "episodes", "Episodes that do not begin as their messages do, which it skips."),
        ("*grad_norm", "", "Gradient norm before clipping; the largest of the step's updates."),
        ("*lr", "", "Learning rate of the step's last update."),
        ("*clip_fraction", "fraction", "Fraction of trained tokens at which the loss's clip or mask was active."),
        ("dual_clip_fraction", "fraction", "Fraction of trained tokens at which the dual clip was active."),
        ("policy_kl", "nats", "Mean of the old minus the new log-probability of trained tokens, within the step."),
        ("policy_kl_k3", "nats", "The same distance by the k3 estimator, which is never negative."),
        ("log_ratio_max", "nats", "Largest absolute log-ratio of the new to the old policy at any trained token."),
        ("selected_fraction", "fraction", "Fraction of tokens that the Clip-Cov or KL-Cov loss selected."),
        ("gradient_weight", "", "Mean weight that the VESPO loss gives to a token's gradient."),
        ("importance_weight", "", "Mean importance weight in the REINFORCE loss."),
        ("high_entropy_fraction", "fraction", "Fraction of tokens kept by `entropy_top`."),
        ("update/{number}/{name}", "", "A metric of one optimizer update, if the step has several."),
    ),
    *_docs(
        "sampler and learner",
        (
            "*drift/mean_abs",
            "nats",
            "Mean absolute difference between learner and sampler log-probability before the step; with "
            "`algorithm.old_logprobs: sampler` and several updates, of the tokens of the first one.",
        ),
        ("drift/max_abs", "nats", "The largest such difference."),
        ("*drift/kl", "nats", "Mean of the sampler's minus the learner's log-probability."),
        ("drift/k3", "nats", "The same distance by the k3 estimator."),
        ("drift/chi2", "", "Chi-squared distance: mean of the squared ratio minus 1."),
        ("drift/ess", "fraction", "Effective sample size of the token ratios, as a share of the tokens."),
        ("drift/log_ppl_diff", "nats", "Mean over sequences of the difference in log perplexity."),
        ("drift/log_ppl_abs_diff", "nats", "Mean over sequences of its absolute value."),
        ("drift/ppl_ratio", "", "Mean over sequences of learner perplexity divided by sampler perplexity."),
        (
            "routes/replayed",
            "fraction",
            "With `learner.replay_routes`: fraction of tokens whose experts were recorded.",
        ),
        ("routes/tokens_differ", "fraction", "Fraction of these for which a router of the learner chose others."),
        ("routes/experts_differ", "fraction", "Fraction of all recorded experts that the learner did not choose."),
        ("sync_gap", "nats", "Largest log-probability difference after the engine received the weights."),
    ),
    *_docs(
        "correction",
        ("importance/mean", "", "Mean importance weight of trained tokens."),
        ("importance/max", "", "Largest importance weight."),
        ("importance/min", "", "Smallest importance weight."),
        ("importance/above", "fraction", "Fraction of weights above the upper limit before truncation."),
        ("importance/below", "fraction", "Fraction of weights below the lower limit."),
        ("rejected/tokens", "fraction", "Fraction of tokens rejected by any rule."),
        ("rejected/sequences_touched", "fraction", "Fraction of sequences with at least one rejected token."),
        ("rejected/veto", "fraction", "Fraction of tokens in sequences that the veto rejected."),
        ("rejected/{statistic}", "fraction", "Fraction of tokens rejected by the rule on this statistic."),
        (
            "ratio_veto",
            "fraction",
            "Fraction of tokens in sequences that `ratio_veto` left out of the policy loss and of its metrics "
            "(`clip_fraction`, `policy_kl`, `log_ratio_max`, ...).",
        ),
        (
            "off_policy_masked",
            "fraction",
            "Fraction of tokens masked as off-policy, which these metrics leave out as well.",
        ),
    ),
    *_docs(
        "critic",
        (
            "*critic/explained_variance",
            "",
            "How much of the returns' variance the critic explains; 1 is all of it. Left out if they do not vary.",
        ),
        ("critic/value_error", "", "Mean absolute difference between value and return."),
        ("critic/value", "", "Mean value."),
        ("critic/return", "", "Mean return."),
        ("critic/value_clip_fraction", "fraction", "Fraction of tokens at which the value clip was active."),
        ("critic/grad_norm", "", "The critic's gradient norm before clipping; the largest of the step's updates."),
    ),
    *_docs(
        "staleness",
        ("*staleness/mean", "updates", "Mean age of the weights that sampled the tokens."),
        ("staleness/max", "updates", "Age of the oldest sampled token."),
        ("staleness/episodes_mixed", "episodes", "Episodes whose tokens were sampled with several versions."),
        ("in_flight/episodes", "episodes", "Episodes still playing when the batch was complete."),
        ("in_flight/complete_groups", "groups", "Groups that were complete and waited for the next step."),
        ("in_flight/oldest_seconds", "s", "Age of the oldest episode in flight."),
    ),
    *_docs(
        "episodes",
        ("episodes", "episodes", "Episodes played for the step: scored, set aside, greedy and failed ones."),
        ("*turns", "turns", "Mean number of turns of a scored episode."),
        ("*limits", "episodes", "Scored episodes cut by a limit on turns, tokens, calls, context or time."),
        ("*infra_failures", "episodes", "Episodes lost to infrastructure failures; they do not train."),
        ("stop/{reason}", "episodes", "Scored episodes that ended for this reason."),
        ("redrawn/{reason}", "episodes", "Failed episodes that were replayed, by error class."),
    ),
    *_docs(
        "tools",
        (
            "*malformed",
            "episodes",
            "Scored episodes with at least one call that could not be parsed or validated.",
        ),
        ("*env/parse_error", "calls", "Calls that could not be parsed."),
        ("env/unknown_tool", "calls", "Calls of a tool that does not exist."),
        ("env/invalid_args", "calls", "Calls whose arguments do not match the tool's schema."),
        ("*env/tool_exception", "calls", "Calls in which the tool raised."),
        ("env/tool_timeout", "calls", "Calls that ran past the tool's time limit."),
        ("env/too_many_calls", "calls", "Calls beyond what one turn may make."),
        ("env/output_truncated", "calls", "Tool results cut to the observation limit."),
        ("env/images_left_out", "calls", "Tool results whose images were replaced by a note."),
        ("env/stuck_calls", "calls", "Tool calls still running when their episode continued without them."),
        ("env/sandbox_broken", "episodes", "Episodes that ended because the policy broke its sandbox."),
        ("*env/compact/times", "compactions", "Times that an episode continued in a shorter branch."),
        ("env/compact/tokens_before", "tokens", "Tokens of context before compactions, summed."),
        ("env/compact/tokens_after", "tokens", "Tokens of context after compactions, summed."),
        ("env/compact/summary_tokens", "tokens", "Tokens of summaries, summed."),
        ("env/compact/empty", "summaries", "Summaries without text, or with a call only."),
        ("env/compact/cut", "summaries", "Summaries cut by their token limit."),
        ("env/compact/in_vain", "episodes", "Contexts that could not be made shorter."),
        ("env/usage/{tokens}", "tokens", "Tokens that an endpoint reported: prompt, completion, cached."),
        ("env/usage/unreported", "requests", "Requests for which it reported no tokens."),
    ),
    *_docs(
        "agents",
        ("env/agent/crashed", "episodes", "Episodes in which the agent program raised or exited with an error."),
        ("env/agent/forks", "requests", "Requests that continued an earlier point of the conversation."),
        ("env/agent/cut", "requests", "Completions cut by the token limit."),
        ("env/agent/retries", "requests", "Requests that repeated an earlier one."),
        ("env/agent/drift_{kind}", "requests", "Requests whose messages differ from the recorded ones, by kind."),
        ("env/agent/branch_{reason}", "branches", "Branches after the first, by reason."),
        ("env/agent/unanswered", "requests", "Requests whose client left before the answer."),
        (
            "env/agent/rerendered_tokens",
            "tokens",
            "Prompt tokens of these branches, after the turn where they begin.",
        ),
        ("env/{env}/{metric}", "", "With several envs, a metric of one of them."),
        ("env/{name}", "", "Sum over the step's episodes of a count that the env, a tool or an agent reports."),
    ),
    *_docs(
        "tokens",
        ("sampled_tokens", "tokens", "Tokens sampled for the step, in episodes that did not fail."),
        ("trained_tokens", "tokens", "Tokens under the loss."),
        (
            "learner_tokens",
            "tokens",
            "Tokens of all rows that the learner trained on, prompts and epochs included.",
        ),
        ("*tokens_per_s", "tokens/s", "Sampled tokens divided by the seconds of the step."),
        ("tokens/failed", "episodes", "Episodes that the tokenization check kept out of training."),
        ("tokens/{kind}", "windows", "Windows that differ in this way from a fresh rendering."),
    ),
    *_docs(
        "time",
        ("*seconds", "s", "Wall time of the step, without evaluations and checkpoints."),
        ("*rollout_seconds", "s", "Time that the learner waited for the step's episodes."),
        ("*update_seconds", "s", "Time of the update: annotation, advantages, loss, optimizer."),
        ("update_began_seconds", "s", "When the update began, in seconds since 1970."),
        ("publish_seconds", "s", "Time to hand the weights to the engine."),
        ("engine_seconds", "s", "Mean time of the engine per turn."),
        ("env_seconds", "s", "Mean time of the env per turn."),
        (
            "rank/{rank}/forward_seconds",
            "s",
            "Time in the layers' forward passes of the update on this learner rank, without waiting for others.",
        ),
        ("rank/{rank}/tokens", "tokens", "Tokens of the rows that this learner rank trained on."),
        (
            "server/{server}/busy_seconds",
            "s",
            "Time since the step before in which this inference server had a request.",
        ),
        ("server/{server}/tokens", "tokens", "Tokens that this server sampled since the step before."),
        (
            "server/{server}/token_seconds",
            "s",
            "Mean time of this server per sampled token of a request, prompt included.",
        ),
        ("warmup_seconds", "s", "Time of the cold start; only in the line of step 0."),
    ),
)
"""All metrics. docs/metrics.md is made from it."""


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines: list[str] = []
    group = ""
    for doc in METRICS:
        if doc.group != group:
            group = doc.group
            lines += [
                "",
                f"## {group[0].upper()}{group[1:]}",
                "",
                "| key | unit | what it measures |",
                "|---|---|---|",
            ]
        name = f"**`{doc.name}`**" if doc.curated else f"`{doc.name}`"
        lines.append(f"| {name} | {doc.unit} | {doc.description} |")
    return "\n".join(lines).lstrip("\n") + "\n"
