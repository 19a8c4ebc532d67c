"""The configuration of evaluation during a run."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from agentrl.config.facts import Advanced, DataFiles, NeverWhen, NeverWith, UnusedBy
from agentrl.config.section import COLDEST, HOTTEST, Count, Positive, Section


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0, which is greedy, or at least {COLDEST}, got {temperature:g}")
    return temperature


EvalTemperature = Annotated[float, Field(ge=0, le=HOTTEST), AfterValidator(_greedy_or_warm)]


class EvalSetConfig(Section):
    """Another set of held-out tasks, or the same tasks sampled in another way. Keys not set here are taken
    from the `eval` around it."""

    data: Annotated[str | list[str] | None, DataFiles("held_out")] = None
    """Rows of the tasks, in the same form as `data.held_out`; by default the held-out tasks of the run."""
    options: Annotated[dict[str, Any], NeverWith("data")] = Field(default_factory=dict)
    """Keyword arguments for the env's `tasks` generator that differ from `data.options`."""
    every: Count | None = None
    """Steps between evaluations on this set; 0 evaluates only before and after training."""
    tasks: Positive | None = None
    """Number of its tasks."""
    before_training: bool | None = None
    """Also evaluate before the first step."""
    attempts: Annotated[int, Field(gt=0, le=65_536)] | None = None
    """Episodes per task."""
    temperature: EvalTemperature | None = None
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling; 1 disables it."""
    top_k: Count | None = None
    """Sample from this many of the most likely tokens; 0 disables it."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sample from tokens with at least this fraction of the largest probability; 0 disables it."""

    @property
    def changes(self) -> dict[str, object]:
        """The settings of `eval` that it changes."""
        return {key: value for key, value in self if key not in ("data", "options") and value is not None}


class EvalConfig(Section):
    """Evaluation on held-out tasks: greedy by default, or sampled as a deployment would."""

    every: Annotated[Count, UnusedBy("eval")] = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
    tasks: Positive = 200
    """Number of held-out tasks."""
    before_training: Annotated[bool, UnusedBy("eval")] = True
    """Also evaluate before the first step."""
    attempts: Annotated[int, Field(gt=0, le=65_536), UnusedBy("eval")] = 1
    """Episodes per held-out task. With more than one, `held_out` is the mean over all of them, `held_out_pass` the
    share of tasks solved at least once (pass@n), and `held_out_pass@k` the estimate for k = 2, 4, ... below n."""
    temperature: Annotated[EvalTemperature, UnusedBy("eval")] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1), NeverWhen("temperature", 0), UnusedBy("eval")] = 1.0
    """Nucleus sampling: keep the most likely tokens up to this cumulative probability; 1 disables it."""
    top_k: Annotated[Count, NeverWhen("temperature", 0), UnusedBy("eval")] = 0
    """Sample from this many of the most likely tokens; 0 disables it."""
    min_p: Annotated[float, Field(ge=0, lt=1), NeverWhen("temperature", 0), UnusedBy("eval")] = 0.0
    """Sample from tokens with at least this fraction of the largest probability; 0 disables it."""
    background: Annotated[bool, UnusedBy("eval", "serve"), Advanced()] = False
    """Evaluate while training continues: a second engine keeps the weights of the evaluated step. Needs memory for
    another copy of the policy (with servers, one more server)."""
    sets: Annotated[dict[str, EvalSetConfig], UnusedBy("eval", "serve"), Advanced()] = Field(default_factory=dict)
    """More held-out sets by name, each with its tasks, interval and sampling, logged as `held_out/NAME`."""

    @model_validator(mode="after")
    def _attempts_differ(self) -> Self:
        if self.temperature == 0 and self.attempts > 1:
            raise ValueError(
                f"eval.attempts is {self.attempts}, and greedy episodes of one task are all the same: set "
                "eval.temperature above 0, or remove eval.attempts"
            )
        return self

    @model_validator(mode="after")
    def _sets_fit(self) -> Self:
        for name, each in self.sets.items():
            where = f"eval.sets.{name}"
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
                raise ValueError(f"eval.sets.{name!r}: a name has up to 64 letters, digits, '_' and '-'")
            for key, value in each.changes.items():
                if value == getattr(self, key):
                    raise ValueError(f"{where}.{key} has no effect: it equals eval.{key} ({value}); remove it")
            if not each.changes and each.data is None and not each.options:
                raise ValueError(f"{where} is the same as eval: give it `data`, `options`, or other sampling")
            try:
                found = self._of(each)
            except ValidationError as e:
                said = str(e.errors()[0]["msg"]).removeprefix("Value error, ")
                raise ValueError(f"{where}: {said}") from None
            if found.temperature == 0 and (
                filters := [k for k in ("top_p", "top_k", "min_p") if k in each.changes]
            ):
                raise ValueError(f"{where}.{filters[0]} has no effect on greedy episodes: set a temperature")
        return self

    def _of(self, each: EvalSetConfig) -> EvalConfig:
        found = dict(self) | {"sets": {}, "background": False} | each.changes
        if found["temperature"] == 0:  # filters of the run's own, sampled set
            found |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return EvalConfig.model_validate(found)

    @property
    def by_set(self) -> dict[str, EvalConfig]:
        """The settings of each set by name; those of the held-out tasks themselves under ''."""
        return {"": self} | {name: self._of(each) for name, each in self.sets.items()}
