"""The exam of `agentrl check --exam`: examine environments, print and write the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.errors import ConfigError
from agentrl.exam.marks import CHECKS, Level
from agentrl.plural import plural

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.config import RunConfig
    from agentrl.eval.evaluate import Subject
    from agentrl.exam.marks import ExamResult

Exam = Annotated[
    bool, typer.Option("--exam", help="Examine the env instead: reward hacks, determinism, leaks, bad rows.")
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="DIR", help="With --exam: folder for exam.json and exam.html.", show_default=False
    ),
]
FailOn = Annotated[
    Level | None,
    typer.Option("--fail-on", help="With --exam: exit with 1 at this level or above. [default: error]",
                 show_default=False),
]  # fmt: skip
NumTasks = Annotated[
    int | None,
    typer.Option("--tasks", min=1, help="With --exam: tasks to examine. [default: 64, or all of up to 256]",
                 show_default=False),
]  # fmt: skip
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint", metavar="URL", show_default=False,
        help="With --exam: profile the difficulty for the model behind this OpenAI-compatible endpoint.",
    ),
]  # fmt: skip
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME|DIR", show_default=False,
        help="With --exam: the model's name at --endpoint, or the checkpoint or model directory to profile.",
    ),
]  # fmt: skip
Attempts = Annotated[
    int | None,
    typer.Option("-k", min=1, help="With --endpoint or --model: episodes per task. [default: 4]",
                 show_default=False),
]  # fmt: skip
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--api-key-env", metavar="NAME", help="Environment variable with the endpoint's API key.",
        show_default=False,
    ),
]  # fmt: skip
PROFILED_TASKS = 32


@dataclass(frozen=True, slots=True)
class ExamOptions:
    """The options of `check` that `--exam` takes."""

    report: Path | None = None
    fail_on: Level | None = None
    tasks: int | None = None
    endpoint: str | None = None
    model: str | None = None
    attempts: int | None = None
    api_key_env: str | None = None

    def refuse(self) -> None:
        """Raises ConfigError if an option was given without --exam."""
        given = {
            "--report": self.report, "--fail-on": self.fail_on, "--tasks": self.tasks, "--endpoint": self.endpoint,
            "--model": self.model, "-k": self.attempts, "--api-key-env": self.api_key_env,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} has no effect without --exam")


def run_exam(target: str, overrides: list[str], options: ExamOptions, *, play: bool) -> None:
    """Examine the envs of a run, or one env by name; exits with 1 if there are findings."""
    from agentrl.exam.difficulty import examine_difficulty
    from agentrl.exam.sheet import write_report
    from agentrl.exam.sitting import examine
    from agentrl.reporting.safe_console import SafeConsole

    config = examined_config(target, overrides)
    subject = _subject(options)
    if options.report is not None and options.report.is_file():
        raise ConfigError(f"--report {options.report}: is a file; name a folder")
    fail_on = options.fail_on or Level.ERROR
    console, progress = SafeConsole(), SafeConsole(stderr=True)
    with progress.status("exam") as status:

        def say(text: str) -> None:
            status.update(text)
            if not progress.is_terminal:  # where a status shows nothing
                progress.print(f"exam: {text}", highlight=False)

        results = examine(config, tasks=options.tasks, play_outside=play, say=say)
        for result in results if subject else ():
            assert subject is not None
            say("difficulty")
            examine_difficulty(
                result, config.by_env[result.name], subject,
                attempts=options.attempts or 4, tasks=options.tasks or PROFILED_TASKS,
            )  # fmt: skip
    for result in results:
        _print(console, result)
    if options.report is not None:
        for path in write_report(options.report, results, fail_on):
            console.print(f"wrote {path}", highlight=False, soft_wrap=True, markup=False)
    if any(result.at_least(fail_on) for result in results):
        raise typer.Exit(1)


def examined_config(target: str, overrides: list[str]) -> RunConfig:
    """The configuration of a YAML file, or of an env named as `module:Class`, `file.py:Class` or `SCHEME:REST`.

    Raises:
        ConfigError: it is neither.
    """
    from agentrl.config import load_config
    from agentrl.config.load import make_config

    if Path(target).is_file() or ":" not in target or target.endswith((".yaml", ".yml")):
        return load_config(Path(target), overrides, check_paths=False)
    changes = [f"env.use={target}", *overrides]
    return make_config({"name": "exam", "model": {"path": "."}}, changes, target, check_paths=False)


def _subject(options: ExamOptions) -> Subject | None:
    """The model of the difficulty profile. Raises ConfigError if the options do not fit together."""
    from agentrl.engine.chat_client import Endpoint
    from agentrl.eval.evaluate import Subject
    from agentrl.rollout.policy_folder import policy_folder
    from agentrl.run_folder.store import find_checkpoint

    if options.endpoint is not None:
        if options.model is None:
            raise ConfigError(f"--endpoint {options.endpoint}: name the model there: --model NAME")
        endpoint = Endpoint(options.endpoint, options.model, options.api_key_env or "")
        endpoint.key()
        return Subject(endpoint=endpoint)
    if options.api_key_env is not None:
        raise ConfigError("--api-key-env has no effect without --endpoint")
    if options.model is None:
        if options.attempts is not None:
            raise ConfigError("-k has no effect without --endpoint or --model")
        return None
    folder = policy_folder(Path(options.model))
    if (folder / "config.json").is_file():
        return Subject(checkpoint=folder)
    found = find_checkpoint(folder, hold=True)
    return Subject(checkpoint=found.path, step=found.step)


_STYLES = {"ok": "green", "error": "bold red", "warning": "bold yellow", "note": "cyan", "not examined": "dim"}


def _print(console: Console, result: ExamResult) -> None:
    from rich.text import Text

    name = f"envs.{result.name}: {result.use}" if result.name else result.use
    console.rule(Text(name), style="bold")
    for check, about in CHECKS.items():
        state = result.state(check)
        console.print(
            Text(f"{check:<13}").append(f"{state:<14}", _STYLES[state]).append(about, "dim"), soft_wrap=True
        )
        for finding in result.of(check):
            where = f"  [{', '.join(finding.tasks[:3])}{', ...' if len(finding.tasks) > 3 else ''}]"
            line = (
                Text("    ").append(finding.level.value, _STYLES[finding.level.value]).append(f": {finding.text}")
            )
            console.print(line.append(where if finding.tasks else "", "dim"), soft_wrap=True)
        if check in result.not_examined:
            console.print(Text(f"    {result.not_examined[check]}", "dim"), soft_wrap=True)
    _print_policies(console, result)


def _print_policies(console: Console, result: ExamResult) -> None:
    from rich.text import Text

    for policy in result.policies:
        solved = "" if policy.solved is None else f", solves {policy.solved:.0%}"
        episodes = plural(policy.episodes, "episode")
        line = f"{policy.name:<13}earns {policy.reward:.3g} on average in {episodes}{solved}"
        console.print(Text(line, "dim"), soft_wrap=True)
    if result.profile is not None:
        rows = [row for row in result.profile.tasks if row.solved is not None]
        never = sum(row.solved == 0 for row in rows)
        always = sum(row.solved == row.attempts for row in rows)
        text = (
            f"{result.profile.policy}: of {plural(len(rows), 'task')}, {never} never solved, {always} always, "
            f"{len(rows) - never - always} sometimes, in {plural(result.profile.attempts, 'episode')} each"
        )
        console.print(Text(text), soft_wrap=True)
    slowest = max(result.calls, key=lambda call: call.median_s, default=None)
    calls = f"; slowest call: {slowest.name}, {slowest.median_s:.3f} s" if slowest else ""
    tasks, episodes = plural(result.num_examined, "task"), plural(result.episodes, "episode")
    facts = f"{tasks}, {episodes} in {result.seconds:.1f} s{calls}"
    console.print(Text(facts, "dim"), soft_wrap=True)
