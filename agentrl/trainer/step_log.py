"""Log each step: metrics, episodes, notes, and drift of the sampler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from agentrl.algo.correction import DriftGate
from agentrl.algo.entries import Signal
from agentrl.config.run import RunConfig
from agentrl.env.toolenv.rewards import weight_of_nothing
from agentrl.errors import AgentRLError
from agentrl.learner.split import StepResult
from agentrl.reporting.loggers.log_feed import LogFeed
from agentrl.reporting.report import Reporter
from agentrl.rollout.admission import Batch
from agentrl.rollout.episode_metrics import episode_metrics, reward_parts, set_aside, staleness
from agentrl.run_folder.curve import write_curve
from agentrl.run_folder.records import EpisodeRecord
from agentrl.run_folder.redraws import Redraws
from agentrl.run_folder.store import RunStore
from agentrl.trainer.examiner import Examiner, Found
from agentrl.trainer.rewardless import RewardWatch
from agentrl.trainer.samples import TrainingRows, to_records
from agentrl.trainer.token_log import token_columns
from agentrl.types import Episode, Group

DRAW_EVERY_S = 60.0
SAMPLED_GROUPS = 8
"""With `log.tokens: sample`, every eighth group is recorded."""


@dataclass
class StepLog:
    """Writes to the run folder and tells the reporter.

    Args:
        rewards: watches the rewards of each env that learns from them.
        redraws: of the steps before, if the run was resumed.
        disk_thread: where tokens are written and the curve is drawn.
        examiner: the doctor.
        loggers: get the metrics and episodes as well.
    """

    config: RunConfig
    store: RunStore
    reporter: Reporter
    rewards: Mapping[str, RewardWatch]
    redraws: Redraws
    disk_thread: Executor
    examiner: Examiner
    loggers: LogFeed
    _warned: set[str] = field(default_factory=set)
    _drawn: float = field(default_factory=time.monotonic)

    def metrics(self, batch: Batch, update: StepResult, timing: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step; `timing` has its `seconds`."""
        signals = {name: view.algorithm.signal for name, view in self.config.by_env.items()}
        found = episode_metrics(batch.groups, batch.aside, signals) | staleness(batch.groups, batch.step - 1)
        found |= {**update.metrics, **batch.metrics, **timing}
        found |= {
            "trained_tokens": float(update.trained),
            "learner_tokens": float(update.tokens),
            "tokens_per_s": found["sampled_tokens"] / found["seconds"],
        }
        if any(view.rollout.refill_zero_signal for view in self.config.by_env.values()):
            found |= set_aside(batch.aside)
        if self.config.rollout.group_filter is not None:
            found["refused_groups"] = float(batch.refused)
        for name in self.config.envs:
            found |= _metrics_of_env(name, batch, signals)
        return found

    def episodes(self, batch: Batch, rows: TrainingRows) -> None:
        """Write the episodes of a step, and report problems with them.

        Raises:
            ConfigError: the first steps had no reward at all.
        """
        step = batch.step
        records = to_records(batch.groups, rows.by_segment, step=step, hints=rows.hints)
        self.store.write_episodes(step, [*records, *_records_aside(batch)])
        self.loggers.episodes(step, [episode for group in batch.groups for episode in group.episodes])
        self._note_redraws(batch)
        for name, view in self.config.by_env.items():
            played = [episode for group in _of_env(name, batch.groups) for episode in group.episodes]
            if not played:
                continue
            if step == 1 and (nothing := _weight_of_nothing(view, played)):
                self.reporter.note(f"step 1: {nothing}")
            if name in self.rewards:
                self.rewards[name].see(step, played)

    def tokens(self, batch: Batch, rows: TrainingRows, update: StepResult) -> None:
        """Write the learner's values of each token, in the background."""
        if self.config.log.tokens != "none":
            every = SAMPLED_GROUPS if self.config.log.tokens == "sample" else 1
            self.disk_thread.submit(self._write_tokens, batch, rows, update, every)

    def _write_tokens(self, batch: Batch, rows: TrainingRows, update: StepResult, every: int) -> None:
        try:
            self.store.write_tokens(batch.step, token_columns(batch.groups[::every], rows, update.values))
        except Exception as e:  # a record of a step must not end the run
            if "tokens" not in self._warned:
                self._warned.add("tokens")
                self.reporter.note(f"step {batch.step}: its tokens are not recorded: {type(e).__name__}: {e}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step and show them."""
        compares = any(view.algorithm.compares for view in self.config.by_env.values())
        if metrics["groups_with_signal"] == 0 and compares:
            self.reporter.note(
                f"step {step}: all episodes of every group scored the same; no reward to learn from"
            )
        if left_out := metrics.get("env/images_left_out"):
            self.reporter.note(
                f"step {step}: {left_out:g} tool results had images, which the policy cannot read; "
                "it saw a note instead"
            )
        if metrics.get("hinted_episodes") == 0 and metrics["trained_tokens"] > 0:
            self.reporter.note(f"step {step}: {_nothing_hinted(metrics)}; the teacher trained nothing")
        trains = metrics["trained_tokens"] > 0 and "loss" in metrics
        if self.config.algorithm.observation_coef and trains and "observation_loss" not in metrics:
            self.reporter.note(
                f"step {step}: no turn read an answer of the env; the observation loss trained nothing"
            )
        if metrics["trained_tokens"] == 0:
            self.reporter.note(f"step {step}: {self._nothing_trained(metrics)}; the policy is unchanged")
        self.store.log_metrics(step, metrics)
        self.loggers.metrics(step, metrics)
        self.reporter.step({"step": step, **metrics})

    def _nothing_trained(self, metrics: Mapping[str, float]) -> str:
        """Why a step had no token under the loss."""
        if metrics.get("rejected/tokens"):  # measured on what is left when groups were dropped
            return "every token was rejected (algorithm.correction: reject or veto)"
        if dropped := metrics.get("dropped_groups"):
            return f"all {dropped:g} groups were dropped (algorithm.drop_zero_signal_groups)"
        return "no token is left to train: every episode was masked (rollout.overlong) or failed the token check"

    def examine(self, step: int) -> None:
        """Run the doctor in the background after some steps, and note new findings."""
        self.disk_thread.submit(self.examiner.after, step, self._examined)  # behind the tokens of the step

    def _examined(self, step: int, found: Found) -> None:
        if isinstance(found, str):
            self.store.event(f"step {step}: the run could not be examined: {found}")
            return
        for finding in found:
            if finding.severity != "hint" and finding.name not in self._warned:
                self._warned.add(finding.name)
                self.reporter.note(finding.line())
                self.store.event(f"step {step}: {finding.line()}")

    def draw(self) -> None:
        """Draw the curve in the background, every `DRAW_EVERY_S` at most; the end of the run draws it too."""
        now = time.monotonic()
        if now - self._drawn >= DRAW_EVERY_S:
            self._drawn = now
            self.disk_thread.submit(write_curve, self.store.path)

    def _note_redraws(self, batch: Batch) -> None:
        """Record the step's lost episodes, and warn if the losses depend on the policy."""
        found = Redraws.of([*batch.groups, *batch.aside])
        self.store.log_redraws(batch.step, found)
        self.redraws += found
        for kind, text in self.redraws.findings().items() if found.redrawn else ():
            if kind not in self._warned:
                self._warned.add(kind)
                self.reporter.note(f"step {batch.step}: {text}")
                self.store.event(text)


def check_drift(config: RunConfig, step: int, metrics: Mapping[str, float]) -> None:
    """Stop if sampler and learner disagree; a step with stale tokens cannot tell, because its policy has moved.

    Raises:
        AgentRLError: they disagree by more than `algorithm.drift_gate` allows.
    """
    if metrics.get("staleness/max", 0.0) > 0:
        return
    measured = {k.removeprefix("drift/"): v for k, v in metrics.items() if k.startswith("drift/")}
    passed = DriftGate(**config.algorithm.drift_gate.model_dump()).exceeded(measured)
    if passed:
        raise AgentRLError(
            f"step {step}: sampler and learner disagree too much: {passed} (algorithm.drift_gate). The "
            "policy would be trained with other probabilities than it was sampled with; check "
            f"{_suspects(config)}, or raise the limit if this is expected"
        )


def _suspects(config: RunConfig) -> str:
    if config.engine.kind == "vllm" and config.engine.server.urls and config.rollout.temperature != 1:
        return "that the servers were started with --logprobs-mode processed_logprobs, and engine.dtype"
    return "engine.dtype"


def _of_env(name: str, groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.task.env == name]


def _metrics_of_env(name: str, batch: Batch, signals: Mapping[str, Signal]) -> dict[str, float]:
    """The metrics of one of several envs in a step, as `env/NAME/...`; only the counts if it had no group."""
    groups, aside = _of_env(name, batch.groups), _of_env(name, batch.aside)
    found = {"groups": float(len(groups))}
    if groups or aside:
        found |= episode_metrics(groups, aside, signals) | set_aside(aside)
    return {f"env/{name}/{key.removeprefix('env/')}": value for key, value in found.items()}


def _weight_of_nothing(config: RunConfig, episodes: Iterable[Episode]) -> str:
    """The warning about weights of reward parts that none of these episodes had; else empty."""
    given = {part for episode in episodes for part in reward_parts(episode)}
    return weight_of_nothing(config.sole_env.reward_weights, given)


def _nothing_hinted(metrics: Mapping[str, float]) -> str:
    """Why the teacher read no episode."""
    if metrics["hints_too_long"]:
        return (
            f"with their hints, {metrics['hints_too_long']:g} episodes do not fit the teacher's context or "
            "learner.tokens_per_micro_batch"
        )
    if metrics["hints_misplaced"]:
        return f"{metrics['hints_misplaced']:g} episodes do not begin with the opening, where their hints belong"
    return "no episode has a hint"


def _records_aside(batch: Batch) -> list[EpisodeRecord]:
    """The episodes of groups that were set aside, and the failed ones among them, numbered after the batch's."""
    return [
        EpisodeRecord(batch.step, number, episode, set_aside=True)
        for number, group in enumerate(batch.aside, len(batch.groups))
        for episode in (*group.episodes, *group.failed)
    ]
