"""The reporter interface, and the summary of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from pydantic import TypeAdapter, ValidationError

from agentrl.clean import first_reason
from agentrl.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run; the keys of summary.json. Counts and seconds are over the whole run, resumes included."""

    run: str
    """The run folder."""
    steps: int
    """Steps of training done."""
    held_out_before: float | None = None
    """Fraction of held-out episodes that are solved, before training (after the cold start, if there was one)."""
    held_out_after: float | None = None
    """The same after training."""
    held_out_reward_before: float | None = None
    """Mean reward of the held-out tasks before training."""
    held_out_reward_after: float | None = None
    """The same after training."""
    warmup_seconds: float = 0.0
    """Time of the cold start."""
    train_seconds: float = 0.0
    """Time of the training steps, without start-up, cold start, evaluations and checkpoints; a fork's own."""
    wall_seconds: float = 0.0
    """Time from start to end; for a process that was killed, the time of the steps that it had logged."""
    episodes: int = 0
    """Training episodes played."""
    scored: int = 0
    """Those that count in the step's means: not set aside, greedy or failed. Where 0, it was not recorded."""
    sampled_tokens: int = 0
    """Tokens sampled in them."""
    malformed: int = 0
    """Scored episodes in which the policy wrote at least one call that could not be parsed or validated."""
    limits: int = 0
    """Scored episodes that were cut by a limit (turns, tokens, calls, context, time)."""
    infra_failures: int = 0
    """Training episodes that failed in the infrastructure; none of them trained."""
    env: str = ""
    """The env that was played."""
    redrawn: Mapping[str, int] = field(default_factory=dict)
    """Infrastructure failures that were replayed: counts by error class."""
    redrawn_examples: Mapping[str, str] = field(default_factory=dict)
    """The first line of one error of each of these classes."""
    redrawn_tasks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The same for the 20 tasks with most of them; `played` is how many episodes of the task there were."""
    biased: Sequence[str] = field(default_factory=list)
    """Signs that which episodes failed depended on what the policy did: the run trained on survivors."""
    problems: Sequence[str] = field(default_factory=list)
    """Other errors that `agentrl doctor` found at the end of the run."""
    sandbox_broken: int = 0
    """Training episodes that ended because the policy broke its sandbox; they are scored."""
    sandbox_broken_tasks: Mapping[str, int] = field(default_factory=dict)
    """The same for the 20 tasks with most of them."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Scored episodes in which a reward, by its name, or the env itself (`step`) raised; such a reward is 0."""
    finished: bool = True
    """False when the run was asked to stop before its last step."""

    def to_json(self) -> str:
        """The content of summary.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: the file has another format.
        """
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as e:
            raise CheckpointError(f"summary.json is damaged: {first_reason(e)}") from None


class Reporter(Protocol):
    """Shows the progress of a run. Calls are cheap and never raise.

    Metric names that a display knows: `step`; `solved` (0 to 1); `reward` and `reward/NAME` (means over the
    step's episodes); `loss`, `kl`, `lr`, `grad_norm`, `entropy`; `tokens_per_s`; `held_out` (0 to 1, after an
    evaluation). Others are shown only in metrics.jsonl.
    """

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        """A phase begins ("start", "warm-up", "train", "evaluate"): `total` units, of which `done` are past."""

    def within(self, doing: str, done: int = 0, total: int | None = None) -> None:
        """What is being done inside of the current unit, such as "episodes", and how far it is."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """One unit of the phase is done."""

    def late(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation in the background has ended, after the step that it belongs to."""

    def note(self, text: str) -> None:
        """Something the user should read now: a warning, a checkpoint, a resume."""

    def done(self, summary: Summary) -> None:
        """The run has ended."""


class Silent:
    """A reporter that shows nothing."""

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        """Nothing."""

    def within(self, doing: str, done: int = 0, total: int | None = None) -> None:
        """Nothing."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def done(self, summary: Summary) -> None:
        """Nothing."""
