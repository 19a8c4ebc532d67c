"""`agentrl check`: validate a run without loading its model."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli import exam as exams
from agentrl.cli.options import Overrides
from agentrl.extras import require
from agentrl.plural import plural

if TYPE_CHECKING:
    from rich.text import Text

    from agentrl.preflight.dry_run import Rehearsal


Target = Annotated[
    str,
    typer.Argument(
        metavar="TOOLS.YAML", help="The YAML file of a run; with --exam also an env by name.", show_default=False
    ),
]


def check(
    target: Target,
    overrides: Overrides = [],  # noqa: B006
    play: Annotated[
        bool, typer.Option("--play", help="Also call tools of MCP servers and HTTP, with generated arguments.")
    ] = False,
    exam: exams.Exam = False,
    report: exams.Report = None,
    fail_on: exams.FailOn = None,
    tasks: exams.NumTasks = None,
    endpoint: exams.EndpointUrl = None,
    model: exams.ModelName = None,
    attempts: exams.Attempts = None,
    api_key_env: exams.ApiKeyEnv = None,
) -> None:
    """Validate a run without loading its model; no weights or GPU needed.

    Reads the YAML, imports the env, runs episodes to validate its tools, tasks and rewards, verifies the chat
    template, and prints the tokens of one episode (prompt, sampled, observation) with their advantages.

    With `--exam`, looks for bugs of the env that would spoil training: rewards for policies that solve nothing,
    episodes that cannot be repeated, leaked answers, rows without a solution.
    """
    options = exams.ExamOptions(report, fail_on, tasks, endpoint, model, attempts, api_key_env)
    if exam:
        exams.run_exam(target, overrides, options, play=play)
        return
    options.refuse()
    _rehearse(Path(target), overrides, play=play)


def _rehearse(path: Path, overrides: list[str], *, play: bool) -> None:
    from rich.markup import escape
    from rich.text import Text

    from agentrl.config import load_config
    from agentrl.reporting.loggers.make import make_loggers
    from agentrl.reporting.safe_console import SafeConsole

    config = load_config(path, overrides)
    require("train", "agentrl check")
    make_loggers(config.loggers, own_metrics=config.algorithm.own_metrics)

    from agentrl.preflight.dry_run import rehearsals
    from agentrl.view.episode_text import episode_text
    from agentrl.view.tokens import tokens_text

    say = partial(SafeConsole(stderr=True).print, style="dim", soft_wrap=True)
    found = rehearsals(config, play_outside=play, say=say)
    console = SafeConsole()
    for name, rehearsal in found.items():
        if name:
            console.rule(f"envs.{name}", style="bold")
        scripted = rehearsal.episodes[0]
        console.print(_overview(rehearsal), soft_wrap=True)
        console.rule(f"one episode, played by {rehearsal.played_by}", style="dim")
        console.print(episode_text(scripted))
        console.rule("its tokens", style="dim")
        tokens = tokens_text(
            scripted.episode.segments,
            rehearsal.decode,
            scripted.advantages,
            observed=rehearsal.config.algorithm.observation_coef > 0,
        )
        console.print(tokens, soft_wrap=True)
        console.print(_group_line(rehearsal), soft_wrap=True)
        for note in rehearsal.notes:
            console.print(Text.assemble(("note: ", "bold yellow"), note), soft_wrap=True)
        for finding in rehearsal.findings:
            console.print(Text.assemble(("problem: ", "bold red"), finding), soft_wrap=True)
    if any(rehearsal.findings for rehearsal in found.values()):
        raise typer.Exit(2)
    again = escape(shlex.join(["agentrl", "train", str(path), *(w for o in overrides for w in ("--set", o))]))
    console.print(f"\n[bold green]good[/bold green]  next: [bold]{again}[/bold]", highlight=False, soft_wrap=True)


def _overview(rehearsal: Rehearsal) -> Text:
    from rich.text import Text

    config, rollout = rehearsal.config, rehearsal.config.rollout
    context = f", the model takes {rehearsal.max_context:,}" if rehearsal.max_context else ""
    per_step = rollout.groups_per_step * rollout.group_size
    rows = [
        ("run", f"{config.name}: {plural(config.steps, 'step')} of {plural(per_step, 'episode')}"),
        ("env", config.sole_env.shown),
        *[("tool" if number == 0 else "", line) for number, line in enumerate(rehearsal.tools)],
        ("rewards", ", ".join(rehearsal.rewards) or "none"),
        ("solved", rehearsal.solved),
        ("tasks", f"{rehearsal.num_train:,} to train on, {rehearsal.num_held_out:,} held out"),
        ("prompts", f"up to {rehearsal.prompt_tokens:,} tokens{context}"),
    ]
    if rehearsal.demonstration_tokens is not None:
        count, longest = rehearsal.num_demonstrations, rehearsal.demonstration_tokens
        rows.append(("demonstrations", f"{count:,}, up to {longest:,} tokens"))
    for number, line in enumerate(rehearsal.proof.summary().splitlines()):
        rows.append(("chat template" if number == 0 else "", line))
    return Text("\n").join(
        Text(f"{name:<16}", style="bold").append(value, style="not bold") for name, value in rows
    )


def _group_line(rehearsal: Rehearsal) -> str:
    """Why the advantages above are what they are."""
    scripted, silent = (record.episode.reward or 0.0 for record in rehearsal.episodes)
    size = rehearsal.config.rollout.group_size
    algorithm = rehearsal.config.algorithm
    if algorithm.advantage.name == "none":
        given = {"its teacher": rehearsal.config.teacher, "the answers of the env": algorithm.observation_coef}
        taught = " and ".join(name for name, there in given.items() if there)
        return f"Rewards give no advantages (algorithm.advantage: none): the policy learns from {taught} alone."
    if scripted == silent:
        return (
            f"An episode whose policy only says 'done' scores the same ({silent:g}), "
            "so these two provide no training signal: every advantage is 0."
        )
    return (
        f"Advantages are those of a group of {size} in which half score {scripted:g} like this one "
        f"and half {silent:g} (a policy that only says 'done')."
    )
