"""Compare two evaluations, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import CheckpointError, ConfigError
from agentrl.eval.result import EvalResult, mean_of, task_values
from agentrl.eval.stats import Paired, paired
from agentrl.run_folder.records import read_records, recorded_steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations on the tasks that both have.

    Attributes:
        a: the first one.
        b: the second one.
        tasks: how many both have; `only_a` and `only_b` how many only one has.
        values: by name of the value (`solved`, `reward`, ...), B against A.
        worst: tasks on which B solves less often than A, those with the greatest loss first.
        notes: what else differs between the two, and may be what made the difference.
    """

    a: EvalResult
    b: EvalResult
    tasks: int
    only_a: int
    only_b: int
    values: Mapping[str, Paired]
    worst: Sequence[str]
    notes: Sequence[str]


def _last_step(folder: Path) -> int:
    if steps := recorded_steps(folder):
        return steps[-1]
    raise CheckpointError(f"{folder}: holds no episodes; give the folder of an evaluation")


def compare(a: Path, b: Path) -> Comparison:
    """Compare evaluation B with evaluation A, paired by task.

    Raises:
        CheckpointError: a folder holds no evaluation.
        ConfigError: they have no task in common.
    """
    results = EvalResult.read(a), EvalResult.read(b)
    in_a, in_b = (task_values(read_records(folder, _last_step(folder))) for folder in (a, b))
    compared = "solved" if "solved" in in_a and "solved" in in_b else "reward"
    tasks_a, tasks_b = in_a.get(compared, {}), in_b.get(compared, {})
    common = [task for task in tasks_a if task in tasks_b]
    if not common:
        raise ConfigError(
            f"{a} and {b} have no task in common: compare evaluations of the same env, split and data "
            f"({results[0].spec.env} {results[0].spec.split}, {results[1].spec.env} {results[1].spec.split})"
        )
    values = {
        name: paired([mean_of(in_a[name][t]) for t in common], [mean_of(in_b[name][t]) for t in common])
        for name in in_a
        if name in in_b
    }
    loss = {t: mean_of(tasks_b[t]) - mean_of(tasks_a[t]) for t in common}
    return Comparison(
        *results,
        len(common),
        len(tasks_a) - len(common),
        len(tasks_b) - len(common),
        values,
        sorted((t for t in common if loss[t] < 0), key=lambda t: loss[t]),
        [
            f"{name}: {old} and {new}"
            for name in ("env", "split", "attempts", "temperature", "seed")
            if (old := getattr(results[0].spec, name)) != (new := getattr(results[1].spec, name))
        ]
        + [f"definition of solved: {old} and {new}" for old, new in [(r.solved for r in results)] if old != new],
    )
