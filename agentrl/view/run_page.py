"""The API's view of runs: the table, one run's header and series, and comparisons."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError
from agentrl.reporting.loggers.hide_secrets import without_secrets
from agentrl.reporting.metric_docs import describe
from agentrl.run_folder.history import told_changes
from agentrl.run_folder.run_reader import Json, Metrics, RecordCache, RunReader, seconds_of
from agentrl.view.words import RUNS, TASKS

CURATED = (
    *("solved", "reward", "held_out", "held_out_reward", "entropy", "kl", "loss", "grad_norm"),
    *("drift/mean_abs", "staleness/mean", "clip_fraction", "sampled_tokens", "turns", "lr"),
    *("rollout_seconds", "update_seconds", "seconds"),
)
"""Series shown without a search; parts of the reward and tool errors join them."""
GROUPS = {
    "rewards": ("solved", "reward"),
    "held out": ("held_out",),
    "policy": ("entropy", "kl", "drift", "staleness", "clip", "policy_kl", "log_ratio", "correction"),
    "learner": ("loss", "observation_loss", "grad_norm", "lr", "critic"),
    "lengths": ("sampled_tokens", "turns", "trained_tokens", "learner_tokens", "tokens"),
    "tools": ("env/", "malformed"),
    "time": ("seconds", "_seconds", "tokens_per_s", "rank/", "server/"),
    "stop reasons": ("stop/",),
}


def run_id(reader: RunReader, taken: Mapping[str, object]) -> str:
    """A short id of a run that is safe in a URL: its folder's name, with a digest if that is taken."""
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in reader.path.name)[:80] or "run"
    if name not in taken:
        return name
    return f"{name}.{hashlib.blake2b(str(reader.path).encode(), digest_size=4).hexdigest()}"


def header(id: str, reader: RunReader, ids: Mapping[Path, str]) -> Json:
    """The row of a run in the table; `ids` are those of all runs by folder."""
    config, metrics, summary = reader.config, reader.metrics, reader.summary
    solved = "held_out" if "held_out" in metrics.values else "held_out_reward"
    algorithm = _section(config, "algorithm")
    step, started = (metrics.steps[-1] if metrics.steps else 0), reader.started
    return {
        "id": id,
        "name": reader.path.name,
        "path": str(reader.path),
        "status": reader.status,
        "tags": list(reader.tags),
        "forked_from": _origin(reader, ids),
        "step": step,
        "steps": _number(config.get("steps")),
        "started": started,
        "updated": reader.updated,
        "wall_seconds": _wall_seconds(summary, metrics, max(0.0, reader.updated - started)),
        "held_out_before": metrics.before(solved),
        "held_out_after": metrics.after(solved),
        "held_out_metric": solved,
        "model": _model(_section(config, "model")),
        "env": _name(_section(config, "env").get("use")) or ", ".join(map(str, _section(config, "envs"))),
        "estimator": _name(algorithm.get("advantage")),
        "loss": _name(algorithm.get("loss")),
    }


def _wall_seconds(summary: Json, metrics: Metrics, otherwise: float) -> float:
    """The time until a run last ended, and of its steps since then if it was resumed."""
    ended, done = _number(summary.get("wall_seconds")), _number(summary.get("steps"), math.inf)
    if ended is None or done is None:
        return otherwise
    seconds = zip(metrics.steps, metrics.values.get("seconds", ()), strict=False)
    since: float = sum(_number(value) or 0.0 for step, value in seconds if step > done)
    return ended + since


def _origin(reader: RunReader, ids: Mapping[Path, str]) -> Json | None:
    """The run and step that a run was forked from; `run` is None if that run is not among those shown."""
    lineage = reader.lineage
    if lineage is None:
        return None
    folder = Path(lineage.run)
    return {
        "run": ids.get(folder.resolve()),
        "name": folder.name,
        "step": lineage.step,
        "weights_only": lineage.weights_only,
    }


def about(
    id: str, reader: RunReader, ids: Mapping[Path, str], findings: Sequence[Json], *, tokenizer: bool
) -> Json:
    """A run: its header, configuration, notes, evaluations and the list of its series."""
    metrics = reader.metrics
    held_out = {name: column for name, column in metrics.values.items() if name.startswith("held_out")}
    evaluations = [
        {"step": step, "name": "held_out", "metrics": values}
        for index, step in enumerate(metrics.steps)
        if (values := {name: c[index] for name, c in held_out.items() if c[index] is not None})
    ]
    marks = [
        {"step": e["step"], "time": None, "kind": "evaluation", "text": _said(e), "severity": "info"}
        for e in evaluations
    ]
    found = [{"kind": "finding", "time": None, **finding} for finding in findings]
    notes = sorted([*_notes(reader), *_changes(reader), *marks, *found], key=lambda note: note["step"] or 0)
    return {
        **header(id, reader, ids),
        "config": without_secrets(reader.config),
        "notes": notes,
        "evaluations": evaluations,
        "findings": list(found),
        "series": list(series_list(metrics)),
        "tokenizer": tokenizer,
        "summary": reader.summary,
    }


def _said(evaluation: Json) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in evaluation["metrics"].items())


def series_list(metrics: Metrics) -> Iterator[Json]:
    """Every series with its group; curated ones first, in their order."""
    order = {name: place for place, name in enumerate(CURATED)}
    names = [name for name in metrics.values if any(value is not None for value in metrics.values[name])]
    for name in sorted(names, key=lambda name: (order.get(name, len(order)), name)):
        shown = name in order or (name.startswith("reward/") and sum(n.startswith("reward/") for n in names) > 1)
        shown = shown or name in ("env/parse_error", "env/tool_exception", "env/tool_error")
        doc = describe(name)
        yield {
            "name": name,
            "description": doc.description if doc else "",
            "unit": doc.unit if doc else _unit(name),
            "group": _group(name),
            "curated": shown,
        }


def _group(name: str) -> str:
    for group, starts in GROUPS.items():
        if any(name.endswith(start) if start.startswith("_") else name.startswith(start) for start in starts):
            return group
    return "other"


def _unit(name: str) -> str:
    return "s" if name.endswith("seconds") else "tokens" if name.endswith("_tokens") else ""


def series(reader: RunReader, names: Sequence[str] | None, after: int) -> Json:
    """Some series as columns, from the first step after `after`."""
    metrics = reader.metrics
    start = next((index for index, step in enumerate(metrics.steps) if step > after), len(metrics.steps))
    wanted = (
        metrics.values
        if names is None
        else {name: metrics.values[name] for name in names if name in metrics.values}
    )
    return {"steps": metrics.steps[start:], "values": {name: column[start:] for name, column in wanted.items()}}


def steps(reader: RunReader) -> Json:
    """The recorded steps with a number or two of each."""
    metrics = reader.metrics
    places = {step: index for index, step in enumerate(metrics.steps)}

    def value(name: str, step: int) -> float | None:
        return metrics.values[name][places[step]] if name in metrics.values and step in places else None

    return {
        "steps": [
            {
                "step": step,
                "episodes": value("episodes", step),
                "reward_mean": value("reward", step),
                "solved": value("solved", step),
            }
            for step in reader.steps
        ]
    }


_OF_STEP = re.compile(r"(checkpoint step-|step )([0-9]{1,18})\b")


def _notes(reader: RunReader) -> Iterator[Json]:
    """The lines of the event log; each belongs to the step that it names, or to the last one named before it."""
    step = 0
    for when, text in reader.events:
        kind, severity = "event", "info"
        if named := _OF_STEP.match(text):
            step = int(named[2])
            kind, severity = ("note", "warning") if named[1] == "step " else ("checkpoint", "info")
        yield {"step": step, "time": seconds_of(when), "kind": kind, "text": text, "severity": severity}


def _changes(reader: RunReader) -> Iterator[Json]:
    """What was changed on resuming, or by a fork."""
    for entry in reader.history:
        step, changes = entry.get("step"), entry["changes"]
        where = {"step": step if isinstance(step, int) else 0, "time": seconds_of(str(entry.get("time")))}
        for text in told_changes(without_secrets(changes)) if isinstance(changes, dict) else ():
            yield {**where, "kind": "change", "text": text, "severity": "info"}


def compare(runs: Mapping[str, RunReader], cache: RecordCache, ids: Mapping[Path, str]) -> Json:
    """Several runs: headers, configuration keys that differ, common series, tasks of the first and the last."""
    flat = {id: dict(_leaves(without_secrets(reader.config))) for id, reader in runs.items()}
    keys = dict.fromkeys(key for leaves in flat.values() for key in leaves)
    different = [
        {"key": key, "values": {id: leaves.get(key) for id, leaves in flat.items()}}
        for key in keys
        if len({repr(leaves.get(key)) for leaves in flat.values()}) > 1
    ]
    named = [set(reader.metrics.values) for reader in runs.values()]
    tasks = _tasks(list(runs.values()), cache) if len(runs) > 1 else []
    return {
        "runs": [header(id, reader, ids) for id, reader in runs.items()],
        "config_diff": different,
        "tasks": tasks,
        "regressions": [task for task in tasks if task["delta"] < 0],
        "series_common": sorted(set.intersection(*named)) if named else [],
        "words": {**RUNS, **TASKS},
    }


LAST_STEPS = 5
"""Steps at the end of a run over which a task's reward is averaged."""


def _tasks(readers: Sequence[RunReader], cache: RecordCache) -> list[Json]:
    """Mean rewards of the tasks that the first and the last run both played near their ends.

    Tasks of one id are the same only if their rows are: ids of rows in a file are line numbers.
    """
    before, after = _task_means(readers[0], cache), _task_means(readers[-1], cache)
    both = [
        {"task": task[0], "before": before[task], "after": after[task], "delta": after[task] - before[task]}
        for task in before
        if task in after
    ]
    return sorted(both, key=lambda task: (task["delta"], task["task"]))


def _task_means(reader: RunReader, cache: RecordCache) -> dict[tuple[str, str], float]:
    """The mean reward of each task, by its name and row, without greedy baselines."""
    rewards: dict[tuple[str, str], list[float]] = {}
    for step in reader.steps[-LAST_STEPS:]:
        try:
            records = cache.records(reader, step)
        except CheckpointError:
            continue
        for record in records:
            if record.get("baseline"):
                continue
            try:
                played, reward = record["episode"]["task"], record["episode"].get("reward")
                name = f"{played['env']}: {played['id']}" if played.get("env") else str(played["id"])
                row = json.dumps(played.get("row"), sort_keys=True)
            except (KeyError, TypeError, AttributeError):  # what no run wrote
                continue
            if isinstance(reward, int | float):
                rewards.setdefault((name, row), []).append(float(reward))
    return {task: sum(values) / len(values) for task, values in rewards.items()}


def _leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict) and data:
        for name, value in data.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif key:  # not a configuration that is empty as a whole
        yield key, data


def _number(value: Any, otherwise: float | None = None) -> float | None:
    known = isinstance(value, int | float) and abs(value) < 1e300  # neither infinite nor nan
    return value if known else otherwise


def _section(config: Json, name: str) -> Json:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _model(model: Json) -> str:
    if model.get("path"):
        return str(model["path"])
    tiny = model.get("tiny")
    return f"tiny {tiny.get('hidden')}x{tiny.get('layers')}" if isinstance(tiny, dict) else ""


def _name(choice: Any) -> str:
    if isinstance(choice, dict):
        return str(choice.get("name") or choice.get("use") or "")
    return str(choice or "")
