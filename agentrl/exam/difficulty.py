"""Difficulty profile: how often a model solves each task in k episodes."""

from __future__ import annotations

from agentrl.config import RunConfig
from agentrl.eval.evaluate import EvalOptions, Subject, evaluate
from agentrl.eval.result import task_values
from agentrl.exam.marks import ExamResult, Level, Profile, TaskProfile
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_records, recorded_steps
from agentrl.scratch import ScratchFolder


def examine_difficulty(
    result: ExamResult, config: RunConfig, subject: Subject, *, attempts: int, tasks: int
) -> None:
    """Play the first training tasks `attempts` times with a model and add its profile to the result.

    Args:
        config: the view of the run with this env.

    Raises:
        AgentRLError: the model or its endpoint cannot be used.
    """
    options = EvalOptions(split="train", tasks=tasks, attempts=attempts, temperature=config.rollout.temperature)
    with ScratchFolder("exam") as scratch:
        played = scratch.path / "profile"
        evaluate(subject, config, options, folder=played, reporter=Silent())
        values = task_values(read_records(played, recorded_steps(played)[-1]))
    rewards, solved = values.get("reward", {}), values.get("solved", {})
    rows = [
        TaskProfile(task.id, len(got), int(sum(solved[task])) if task in solved else None, sum(got) / len(got))
        for task, got in rewards.items()
        if got
    ]
    result.profile = Profile(subject.name, attempts, rows)
    _judge(result, rows)


def _judge(result: ExamResult, rows: list[TaskProfile]) -> None:
    known = [row for row in rows if row.solved is not None]
    if not known:
        return
    never = [row for row in known if row.solved == 0]
    always = [row for row in known if row.solved == row.attempts]
    if len(never) + len(always) == len(known):
        text = (
            f"no task gives this model a learning signal: of {len(known)} tasks, it solves {len(always)} in every "
            f"episode and {len(never)} in none"
        )
        result.add("oracle", Level.NOTE, text)
