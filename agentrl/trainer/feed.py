"""The tasks of a run, and their position in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.choice import is_own
from agentrl.config.run import RunConfig
from agentrl.env.curriculum import TaskSampler
from agentrl.env.mixture import MixedSampler, TaskSource
from agentrl.env.own_sampler import OwnSampler
from agentrl.errors import CheckpointError
from agentrl.rollout.admission import Admission
from agentrl.rollout.content import Content, require_solved
from agentrl.rollout.group_filter import load_filter
from agentrl.run_folder.files import write_atomic
from agentrl.types import Task

SAMPLER_FILE = "sampler.json"
"""File in a checkpoint with the state of the task sampler and the groups in flight."""


def make_admission(
    config: RunConfig, tasks: Sequence[Task] | Mapping[str, Sequence[Task]], *, done: int = 0
) -> Admission:
    """The groups of a configuration after `done` steps; `load_feed` restores the position in the tasks.

    Args:
        tasks: the training tasks; with several envs, those of each by name.
    """
    rollout, views = config.rollout, config.by_env
    by_env = tasks if isinstance(tasks, Mapping) else {"": tasks}
    samplers = {name: _sampler(config, name, by_env[name]) for name in views}
    source: TaskSource = (
        samplers[""]
        if not config.envs
        else MixedSampler(
            samplers,
            {name: env.share for name, env in config.envs.items()},
            by_solve_rate=rollout.env_shares == "solve_rate",
        )
    )
    return Admission(
        source,
        groups_per_step=rollout.groups_per_step,
        first_step=done + 1,
        last_step=config.steps,
        max_staleness=rollout.max_staleness,
        groups_ahead=rollout.groups_ahead,
        refill={name: view.rollout.refill_zero_signal for name, view in views.items()},
        signals={name: view.algorithm.signal for name, view in views.items()},
        group_filter=None if rollout.group_filter is None else load_filter(rollout.group_filter),
    )


def _sampler(config: RunConfig, name: str, tasks: Sequence[Task]) -> TaskSampler | OwnSampler:
    """The order of the tasks of one env; its name is empty if it is the only one."""
    data = config.by_env[name].data.sampler
    if is_own(data.order):
        key = f"envs.{name}.data.sampler.order" if name else "data.sampler.order"
        return OwnSampler(data.order, tasks, config.seed, data.options, key)
    return TaskSampler(tasks, config.seed, data.order, data.window, data.floor)


def check_feed(config: RunConfig, content: Content) -> None:
    """Check what chooses tasks and groups, before a run depends on it; an order of the user's is tried out.

    Raises:
        ConfigError: it cannot be loaded, needs to know what is solved, chooses tasks that do not exist, or would
            choose others after a resume.
    """
    for name, part in content.by_env.items():
        if config.by_env[name].data.sampler.order == "weighted":
            where = f"envs.{name}: " if name else ""
            require_solved(part, f"{where}data.sampler.order: weighted")
        sampler = _sampler(config, name, part.train_tasks)
        if isinstance(sampler, OwnSampler):
            sampler.try_out(max(1, _chosen_before_reports(config, name, sampler)))
    if config.rollout.group_filter is not None:
        load_filter(config.rollout.group_filter)
    if config.rollout.env_shares == "solve_rate":
        require_solved(content, "rollout.env_shares: solve_rate")


def _chosen_before_reports(config: RunConfig, name: str, sampler: OwnSampler) -> int:
    """How many tasks of an env the run chooses at least before it reports the first group."""
    num = config.rollout.groups_per_step * (1 if sampler.rated else config.steps)
    if not name:
        return num
    return int(num * config.envs[name].share / sum(env.share for env in config.envs.values()))


def save_feed(admission: Admission, folder: Path) -> None:
    """Save the position in the tasks to a checkpoint folder. Groups in flight are replayed from it: no task is
    lost, and sampling uses the same seeds with the checkpoint's weights."""
    write_atomic(folder / SAMPLER_FILE, json.dumps(admission.state()).encode())


def load_feed(admission: Admission, folder: Path) -> list[str]:
    """Resume from the state of `save_feed`.

    A checkpoint that has no such file was written by a version that took the tasks in order.

    Returns:
        Notes: envs with another number of tasks than in the checkpoint, or another class that orders them.

    Raises:
        CheckpointError: the file is damaged, or missing although the order is not sequential.
    """
    file = folder / SAMPLER_FILE
    sampler = admission.sampler
    if not file.exists() and isinstance(sampler, TaskSampler) and sampler.order == "sequential":
        done = (admission.next_step - 1) * admission.groups_per_step
        admission.restore({"drawn": done, "results": {}})
        return []
    try:
        state = json.loads(file.read_text())
        admission.restore(state)
        if isinstance(sampler, MixedSampler):
            saved = {name: state["envs"][name]["sampler"] for name in sampler.samplers}
            return [note for name, each in sampler.samplers.items() for note in _changed(name, each, saved[name])]
        return _changed("", sampler, state) if isinstance(sampler, TaskSampler | OwnSampler) else []
    except OSError as e:
        raise CheckpointError(f"{file}: cannot read where the tasks stood: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file}: damaged: {e}") from None


def _changed(name: str, sampler: TaskSampler | OwnSampler, saved: Mapping[str, Any]) -> list[str]:
    """A note if the tasks are not those of a saved state, or it belongs to another class."""
    now = len(sampler.tasks)
    before = saved.get("size", now)
    where = f"envs.{name}: " if name else ""
    if isinstance(sampler, OwnSampler):
        effect = f"{sampler.kind} starts from its initial state"
        kind = saved.get("own", {}).get("class", sampler.kind)
        if kind != sampler.kind:
            return [f"{where}the checkpoint has the state of the order {kind}: {effect}"]
    elif sampler.rated:
        effect = "solve rates of tasks are measured from scratch"
    else:
        effect = "their order changes, so this pass may repeat or skip some"
    if before == now:
        return []
    return [f"{where}{now:,} training tasks, {before:,} when the checkpoint was saved: {effect}"]
