"""Compare two evaluations, task by task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentrl.config.changes import changes_of
from agentrl.config.load import load_sampling_config
from agentrl.errors import CheckpointError, ConfigError
from agentrl.eval.result import EvalResult, TaskKey, are_shares, mean_of, task_values
from agentrl.eval.stats import Paired, differences_of, paired
from agentrl.eval.tables import comparison_text
from agentrl.run_folder.records import read_records, recorded_steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations on the tasks that both have.

    Attributes:
        a: the first one.
        b: the second one.
        tasks: how many both have; `only_a` and `only_b` how many only one has.
        values: by name of the value (`solved`, `reward`, ...), B against A.
        worst: ids of tasks on which B solves less often than A, those with the greatest loss first.
        notes: what else differs between the two, and may be what made the difference.
        changed: tasks of both whose rows differ; they are among those that only one has.
    """

    a: EvalResult
    b: EvalResult
    tasks: int
    only_a: int
    only_b: int
    values: Mapping[str, Paired]
    worst: Sequence[str]
    notes: Sequence[str]
    changed: int = 0

    def __str__(self) -> str:
        return comparison_text(self).plain


DECISIVE = (
    *("env.", "agent", "data.held_out", "data.columns", "data.options", "data.overlong_prompts"),
    *("rollout.max_", "rollout.token_budget", "rollout.timeout_s", "rollout.compact"),
)
"""Settings on which the result of an episode depends."""


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
    pairs = _pairs(tasks_a, tasks_b)
    if not pairs:
        raise ConfigError(
            f"{a} and {b} have no task in common: compare evaluations of the same env, split and data "
            f"({results[0].spec.env} {results[0].spec.split}, {results[1].spec.env} {results[1].spec.split})"
        )
    means = {
        name: ([mean_of(in_a[name][t]) for t in pairs], [mean_of(in_b[name][t]) for t in pairs.values()])
        for name in in_a
        if name in in_b
    }
    changes = differences_of(*map(np.asarray, means[compared]))
    ids_b = {task.id for task in tasks_b}
    return Comparison(
        *results,
        len(pairs),
        len(tasks_a) - len(pairs),
        len(tasks_b) - len(pairs),
        {
            name: paired(of_a, of_b, shares=are_shares(in_a[name]) and are_shares(in_b[name]))
            for name, (of_a, of_b) in means.items()
        },
        [list(pairs)[place].id for place in np.argsort(changes, kind="stable") if changes[place] < 0],
        _differences(*results, a, b),
        sum(task.id in ids_b for task in tasks_a if task not in pairs),
    )


def _pairs(a: Collection[TaskKey], b: Collection[TaskKey]) -> dict[TaskKey, TaskKey]:
    """The tasks of A that B has, too: of the same row and id, or of the same row if one is left over in each.

    Rows of a file are numbered by their lines, so that a line more changes the ids of those below it.
    """
    found = {task: task for task in a if task in b}
    rest_a, rest_b = ({t.digest: t for t in of if t not in found} for of in (a, b))
    times_a, times_b = (Counter(t.digest for t in of if t not in found) for of in (a, b))
    return found | {
        task: rest_b[digest] for digest, task in rest_a.items() if times_a[digest] == times_b[digest] == 1
    }


def _differences(a: EvalResult, b: EvalResult, folder_a: Path, folder_b: Path) -> list[str]:
    """What else differs between two evaluations, in words."""
    found = [
        f"{name}: {old} and {new}"
        for name in ("env", "split", "attempts", "temperature", "top_p", "top_k", "min_p", "seed")
        if (old := getattr(a.spec, name)) != (new := getattr(b.spec, name))
    ]
    if a.solved != b.solved:
        found.append(f"definition of solved: {a.solved} and {b.solved}")
    try:
        configs = [
            load_sampling_config(folder / "config.yaml", check_paths=False) for folder in (folder_a, folder_b)
        ]
    except (ConfigError, OSError):  # of a version that knew other keys
        return found
    return found + [
        f"{change.key}: {change.old} and {change.new}"
        for change in changes_of(*configs)
        if change.key.startswith(DECISIVE) and change.key != "env.use"
    ]
