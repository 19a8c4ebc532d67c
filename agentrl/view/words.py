"""What the numbers and signs of the page mean, said where they stand; metrics are explained by their own table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentrl.reporting.metric_docs import describe

RUNS: Mapping[str, str] = {
    "Run": "The run's folder, its tags, and the run and step that it was forked from.",
    "Status": "Finished, running (its process is alive), or stopped: interrupted, crashed or killed.",
    "Step": "The last step that was logged, of the steps that the run is to make.",
    "Held out": "Share of the held-out tasks that were solved in the first evaluation and in the last one, or the "
    "mean reward if the env does not define what is solved. Percentages change by percentage points.",
    "Wall time": "Time from the start to the end of training; the time since the start while it runs.",
    "Model": "The model that the run began with, or width x layers of a tiny one.",
    "Env": "The environments that the run trains on.",
    "Estimator": "How rewards become advantages, and the loss that uses them.",
    "Updated": "When the run wrote its files last.",
    "Setting": "A setting that is not the same in all runs.",
}
"""Headings of the tables of runs."""
TASKS: Mapping[str, str] = {
    "Task": "A task that both the first and the last of the compared runs played.",
    "Before": "Mean reward of the task in the last five steps of the first run.",
    "After": "Mean reward of the task in the last five steps of the last run.",
    "Change": "After minus before.",
}
TOOLS: Mapping[str, str] = {
    "Tool": "A tool that was offered or called.",
    "Calls": "Calls in the chosen steps.",
    "OK": "Share of the calls that returned a result.",
    "Outcomes": "How the calls ended, most frequent first.",
    "p50": "Half of the calls took at most this long.",
    "p99": "99 of 100 calls took at most this long.",
    "Truncated": "Calls whose result was shortened before the policy saw it.",
    "Arguments": "Arguments of calls that did not return a result.",
    "Outcome": "How these calls ended.",
    "Count": "Calls with these arguments and this outcome.",
}
STEP: Mapping[str, str] = {
    "failed": "Lost to an infrastructure failure: it has no reward and does not train.",
    "set_aside": "Played, but left out of this step: its group had no signal or was refused by the group filter, "
    "and another group took its place.",
    "cut": "Ended at a limit on turns, tokens, calls, context or time.",
    "stale": "Some tokens were sampled with older weights than those that this step updates.",
    "no_signal": "All episodes of the group have the same reward, so none is better than the others. A KL penalty "
    "or a teacher trains them all the same.",
    "baseline": "Played without sampling, to compare the others with; it does not train.",
    "trained": "Episodes with tokens under the loss; where their tokens are not recorded (log.tokens), those "
    "with an advantage other than 0.",
    "solved": "Share of the scored episodes that meet what the env declares as solved.",
    "mean reward": "Over the scored episodes of the step, without those set aside.",
    "sampled tokens": "In episodes that did not fail, those of sub-agents included.",
}
_TOKEN: Mapping[str, str] = {
    "origin": "Who wrote the token: the prompt, the policy (sampled), a tool or env (observation), or the chat "
    "template between them (glue). Only sampled tokens train.",
    "advantage": "How much better than expected: above 0 the loss makes the token likelier, below 0 less likely.",
    "logprob": "Log-probability of the token when it was sampled; 0 is certain.",
    "learner_logprob": "Log-probability by the learner just before its update; should equal the sampler's.",
    "mismatch": "Learner's minus sampler's log-probability; 0 if both computed the same policy.",
    "ratio": "Learner's probability divided by the old policy's; the loss clips it.",
    "entropy": "How open the choice of the token was, in nats; 0 if the policy was certain.",
    "ref_logprob": "Log-probability by the frozen reference model or teacher.",
    "ref_kl": "Estimated distance to the reference or teacher at the token (k3), which the KL penalty punishes.",
    "weight": "Correction for tokens that another policy sampled; 1 changes nothing.",
    "flags": "Whether the token is under the loss, and what kept it from counting in full.",
    "version": "The step after which the weights that sampled the token were published.",
}
_CARD = {
    "sampler logprob": "logprob",
    "learner logprob": "learner_logprob",
    "reference logprob": "ref_logprob",
    "reference KL": "ref_kl",
    "loss": "flags",
}
"""Headings of the card of a token, where they are not the names of the columns."""
EPISODE: Mapping[str, str] = {**_TOKEN, **{heading: _TOKEN[name] for heading, name in _CARD.items()}}


def of_metrics(names: Iterable[str]) -> dict[str, str]:
    """What metrics mean and their units, by name; only those that are documented."""
    found = {name: doc for name in names if (doc := describe(name)) is not None}
    return {name: doc.description + (f" ({doc.unit})" if doc.unit else "") for name, doc in found.items()}
