"""The progress of a run: one live screen on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import itertools
import shlex
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.clean import visible
from agentrl.plural import plural
from agentrl.reporting.notes import Notes
from agentrl.reporting.report import Reporter, Summary
from agentrl.reporting.safe_console import RunConsole
from agentrl.reporting.terminal import TerminalGuard


class Display(Reporter):
    """A reporter that is open while the run goes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal."""


def make_display(name: str, *, again: str, console: Console | None = None) -> Display:
    """The live screen if there is a terminal, plain lines elsewhere.

    Args:
        name: name of the run, shown on the screen.
        again: the command line that resumes the run.
        console: where to; standard output by default.
    """
    if console is None:
        notebook = RunConsole().is_jupyter  # whose outputs are no terminal, and would be one for each line
        console = RunConsole(force_jupyter=False, force_terminal=False) if notebook else RunConsole()
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(name, console, again=again) if live else PlainDisplay(console, again=again)


# --- what both know --------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """The progress of the current phase. Times are of `clock`, in seconds."""

    clock: Callable[[], float] = time.monotonic
    name: str = ""
    total: int | None = None
    done: int = 0
    started: float = 0.0
    latest: float = 0.0
    """When the latest unit finished."""
    before: int = 0
    """Units done before this process began the phase (a resumed run)."""
    doing: str = ""
    """What is being done inside of the current unit."""
    part: tuple[int, int | None] = (0, None)
    """How much of that is done, and of how much."""
    metrics: dict[str, float] = field(default_factory=dict)
    solved: list[float] = field(default_factory=list)
    held_out: float | None = None

    def begin(self, name: str, total: int | None, done: int) -> None:
        """Start a phase."""
        self.name, self.total, self.done, self.before = name, total, done, done
        self.started, self.metrics, self.solved = self.clock(), {}, []
        self.doing, self.part = "", (0, None)

    def within(self, doing: str, done: int, total: int | None) -> None:
        """Note what is being done inside of the current unit."""
        self.doing, self.part = doing, (done, total)

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Count one unit; metrics that are not given keep their last value."""
        self.done += 1
        self.doing, self.part = "", (0, None)
        self.latest = self.clock()
        self.metrics.update(metrics)
        if "solved" in metrics:
            self.solved.append(metrics["solved"])
        self.held_out = metrics.get("held_out", self.held_out)

    def seconds_left(self) -> float | None:
        """Estimated from the mean of the units so far, None before the first."""
        new = self.done - self.before
        if self.total is None or new < 1:
            return None
        left = (self.latest - self.started) / new * (self.total - self.done)
        return max(left - (self.clock() - self.latest), 0.0)

    def count(self) -> str:
        """`12/120`, `12` where the end is open, nothing in a phase that has no units."""
        if self.total is None:
            return f"{self.done}" if self.done else ""
        return f"{self.done}/{self.total}"

    def now(self) -> str:
        """`episodes 12/64`: what is being done inside of the current unit."""
        done, total = self.part
        return self.doing + ("" if total is None else f" {done}/{total}")

    def rewards(self) -> dict[str, float]:
        """The mean of each reward, by its name; empty if the only one is the whole reward."""
        found = {key[len("reward/") :]: value for key, value in self.metrics.items() if key.startswith("reward/")}
        return {} if list(found.values()) == [self.metrics.get("reward")] else found


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `3:05:09`."""
    whole = max(round(seconds), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


NONE = 1e-9
"""Fractions below this are 0 but for rounding."""


def percent(fraction: float | None) -> str:
    """`96.5 %`, or a dash for what was not measured; 0.0 % is none and 100.0 % is all."""
    if fraction is None:
        return "–"
    if NONE < fraction < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= fraction < 1 - NONE:
        return "> 99.9 %"
    return f"{fraction:.1%}".replace("%", " %")


def sparkline(values: list[float], width: int) -> str:
    """The last values between 0 and 1 as a row of blocks; more values than room are averaged."""
    if not values:
        return ""
    bins = min(len(values), width)
    edges = [i * len(values) // bins for i in range(bins + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join("▁▂▃▄▅▆▇█"[min(int(max(mean, 0.0) * 8), 7)] for mean in means)


# --- plain lines -----------------------------------------------------------------------------------------------


SHOWN = ("loss", "kl", "lr", "grad_norm", "entropy")
"""Metrics of the update that are shown, in this order."""


def update_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """What the update reported, by its name."""
    return [(name.replace("_", " "), f"{metrics[name]:.3g}") for name in SHOWN if name in metrics]


def late_text(step: int, metrics: Mapping[str, float]) -> str:
    """The result of an evaluation that ended after its step."""
    return f"evaluation after step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())


LINE_EVERY_S = 5.0
"""Units other than training steps, such as those of a warmup, get a line at most this often."""
QUIET_S = 30.0
"""After this time without output, a line reports the current activity."""


class PlainDisplay(Display):
    """One line for each step that has something to say; no color, no cursor movement."""

    def __init__(self, console: Console, *, again: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.again = console, again
        self.progress = Progress(clock)
        self._said = clock()
        self._notes = Notes()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="agentrl-display", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End with the notes that came more than once."""
        self._ended.set()
        self._count_notes()

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        """Announce the phase, unless it is the current one."""
        continued = name == self.progress.name and total is None
        self.progress.begin(name, total, done)
        if continued:
            return
        if done:
            self._line(f"{name}: resumes after {self.progress.count()}")
        else:
            self._line(f"{name}: begins" + (f", {total} to do" if total is not None else ""))

    def within(self, doing: str, done: int = 0, total: int | None = None) -> None:
        """Write the activity of a phase without units; otherwise only if it takes long."""
        news = doing != self.progress.doing
        self.progress.within(doing, done, total)
        if self.progress.total is None and not done and news:
            self._line(f"{self.progress.name}: {doing}")

    def remind(self) -> None:
        """Write the current activity, if nothing was written for a while."""
        progress = self.progress
        if progress.clock() - self._said >= QUIET_S and progress.name:
            parts = [f"{progress.name} {progress.count()}".strip(), progress.now()]
            so_far = f"{duration(progress.clock() - max(progress.latest, progress.started))} so far"
            self._line(": ".join(part for part in parts if part) + f", {so_far}")

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            self.remind()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Write the line of a step; other units share one."""
        progress = self.progress
        progress.advance(metrics)
        last, waited = progress.done == progress.total, progress.latest - self._said >= LINE_EVERY_S
        news = not metrics.keys().isdisjoint(("reward", "solved", "held_out"))
        if waited or news or (last and metrics):
            self._line(self.line(metrics))

    def line(self, metrics: Mapping[str, float]) -> str:
        """What is said about one step."""
        parts = [f"{self.progress.name} {self.progress.count()}"]
        if "solved" in metrics:
            parts.append(f"solved {percent(metrics['solved'])}")
        if "held_out" in metrics:
            parts.append(f"held out {percent(metrics['held_out'])}")
        if "reward" in metrics:
            parts.append(f"reward {metrics['reward']:.3f}")
        parts += [f"{name} {value:.3f}" for name, value in self.progress.rewards().items()]
        parts += [f"{name} {value}" for name, value in update_metrics(metrics)]
        if "tokens_per_s" in metrics:
            parts.append(f"{metrics['tokens_per_s']:,.0f} tokens/s")
        left = self.progress.seconds_left()
        if left is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the result on its own line."""
        self._line(late_text(step, metrics))

    def note(self, text: str) -> None:
        """Write the note on its own line, the first time."""
        if self._notes.add(text):
            self._line(f"note: {text}")

    def done(self, summary: Summary) -> None:
        """Write the summary."""
        self._count_notes()
        self.console.print(summary_text(summary, again=self.again, columns=self.console.width), soft_wrap=True)

    def _count_notes(self) -> None:
        for text in self._notes.untold():
            self._line(f"note: {text}")

    def _line(self, text: str) -> None:
        self._said = self.progress.clock()
        self.console.print(Text(visible(text)), soft_wrap=True)


# --- the live screen -------------------------------------------------------------------------------------------


class LiveDisplay(Display):
    """A few lines that stay in place; notes scroll above them."""

    def __init__(
        self, name: str, console: Console, *, again: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self.console, self.again = name, console, again
        self.progress = Progress(clock)
        self.began = clock()
        self._live: Live | None = None
        self._notes = Notes()
        self._guard = TerminalGuard(self._from_others)
        self._own: IO[str] | None = None
        self._printing = threading.RLock()
        """Held while a line is printed, and while the screen is taken down: one printed then would tear it."""

    def __enter__(self) -> Self:
        if self.console.file in (sys.stdout, sys.stderr) and (terminal := self._guard.start()) is not None:
            self._own, self.console.file = self.console.file, terminal
        self._live = Live(self, console=self.console, refresh_per_second=4, transient=True)
        self._live.start()
        self.console.show_cursor()  # a run that is killed, or suspended with Ctrl-Z, cannot give it back
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the screen's lines and give the cursor and the terminal back."""
        if self._live is not None:
            with self._printing:
                self._live.stop()
                self._live = None
            self._guard.stop()
            if self._own is not None:
                with suppress(OSError):  # the terminal was closed
                    self.console.file.close()
                self.console.file, self._own = self._own, None
            for text in self._notes.untold():
                self._note(text)

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        """Restart the progress bar; the last line of the previous phase stays above."""
        if self.progress.metrics:
            self._print(Text(self._left_behind(), style="dim"))
        self.progress.begin(name, total, done)

    def within(self, doing: str, done: int = 0, total: int | None = None) -> None:
        """Show it below the bar."""
        self.progress.within(doing, done, total)

    def step(self, metrics: Mapping[str, float]) -> None:
        """Move the bar and show the metrics."""
        self.progress.advance(metrics)

    def late(self, step: int, metrics: Mapping[str, float]) -> None:
        """Scroll the result past above the screen, which shows the newest."""
        self.progress.held_out = metrics.get("held_out", self.progress.held_out)
        self._print(Text(visible(late_text(step, metrics))))

    def note(self, text: str) -> None:
        """Scroll the note past above the screen, the first time; then its count is on the screen."""
        if self._notes.add(text):
            self._note(text)

    def _note(self, text: str) -> None:
        self._print(Text("note: ", style="yellow").append(visible(text), style="default"))

    def done(self, summary: Summary) -> None:
        """Close the screen and print the summary."""
        self.__exit__(None, None, None)
        self.console.print(summary_text(summary, again=self.again, columns=self.console.width), soft_wrap=True)

    def _from_others(self, line: str) -> None:
        """What child processes and libraries print scrolls past as well."""
        self._print(Text.from_ansi(line, style="dim"), soft_wrap=True)

    def _print(self, text: Text, *, soft_wrap: bool = False) -> None:
        with self._printing:
            self.console.print(text, soft_wrap=soft_wrap)

    def _left_behind(self) -> str:
        solved = self.progress.metrics.get("solved", self.progress.metrics.get("held_out"))
        ending = f", solved {percent(solved)}" if solved is not None else ""
        seconds = self.progress.clock() - self.progress.started
        return f"{self.progress.name}: {self.progress.count()} in {duration(seconds)}{ending}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the screen; rich calls this a few times a second."""
        yield self.screen(options.max_width)

    def screen(self, width: int) -> RenderableType:
        """The lines of this moment."""
        progress = self.progress
        left = progress.seconds_left()
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.name, style="bold", no_wrap=True, overflow="ellipsis"),
            Text(f"{progress.name} {progress.count()}".strip(), no_wrap=True),
            ProgressBar(total=progress.total, completed=progress.done, width=max(min(width - 60, 40), 8))
            if progress.total is not None
            else Text(""),
            Text(f"{duration(left)} left" if left is not None else "", style="cyan", no_wrap=True),
            Text(f"{duration(progress.clock() - self.began)} so far", style="dim", no_wrap=True),
        )
        body = Table.grid(padding=(0, 2))
        for row in self._rows(width):
            body.add_row(*row)
        repeated = [
            Text(f"  {text}", style="yellow", no_wrap=True, overflow="ellipsis") for text in self._notes.repeated()
        ]
        return Group(head, body, *repeated[-3:])

    def _rows(self, width: int) -> list[tuple[Text, Text, Text]]:
        progress, metrics = self.progress, self.progress.metrics
        rows = [(Text("  now"), Text(progress.now()), Text(""))] if progress.doing else []
        if "solved" in metrics:
            curve = Text(sparkline(progress.solved, max(min(width - 40, 60), 8)), style="green")
            rows.append((Text("  solved"), Text(percent(metrics["solved"]), style="bold green"), curve))
        if progress.held_out is not None:
            rows.append((Text("  held out"), Text(percent(progress.held_out), style="green"), Text("")))
        if "reward" in metrics:
            rows.append((Text("  reward"), Text(f"{metrics['reward']:.3f}"), Text("")))
        rows += [(Text(f"    {n}"), Text(f"{v:.3f}"), Text("")) for n, v in progress.rewards().items()]
        rows += [(Text(f"  {name}"), Text(value), Text("")) for name, value in update_metrics(metrics)]
        if "tokens_per_s" in metrics:
            rows.append((Text("  tokens/s"), Text(f"{metrics['tokens_per_s']:,.0f}"), Text("")))
        return rows


# --- the end ---------------------------------------------------------------------------------------------------


def _before_and_after(summary: Summary) -> list[tuple[str, str, str, str]]:
    """The result on the held-out tasks: the share that is solved, or their reward where that is not declared."""
    name, before, after = "solved", percent(summary.held_out_before), percent(summary.held_out_after)
    if summary.held_out_after is None and summary.held_out_reward_after is not None:
        name, after = "reward", f"{summary.held_out_reward_after:.3f}"
        before = "-" if summary.held_out_reward_before is None else f"{summary.held_out_reward_before:.3f}"
    return [
        (f"{name} before", before, "held-out tasks", ""),
        (f"{name} after", after, "", "bold green"),
    ]


def summary_text(summary: Summary, *, again: str, columns: int = 100) -> Text:
    """The final summary: results, counts of problems, the run folder, and next commands.

    Remarks are wrapped at `columns`; commands are not.
    """
    run = _short(summary.run)
    phases = [f"training {duration(summary.train_seconds)}"]
    if summary.warmup_seconds >= 0.5:
        phases.insert(0, f"cold start {duration(summary.warmup_seconds)}")
    steps = plural(summary.steps, "step")
    title, resumes = "done", "resumes where this run stopped"
    if not summary.finished and summary.steps:
        title = f"stopped by request after {steps}; everything is saved"
    elif not summary.finished:
        title, resumes = "stopped by request before the first step", "starts it again"
    rows = [
        *_before_and_after(summary),
        ("wall time", duration(summary.wall_seconds), ", ".join(phases), ""),
        ("episodes", f"{summary.episodes:,}", f"{plural(summary.sampled_tokens, 'token')} in {steps}", ""),
    ]
    scored = summary.scored or summary.episodes
    for name, count, of, remark in (
        ("malformed", summary.malformed, scored, "wrote a call that could not be read, or was invalid"),
        ("limits", summary.limits, scored, "cut by a limit: turns, tokens, calls, context, time"),
        ("infra failures", summary.infra_failures, summary.episodes, _why_lost(summary)),
        *[
            (
                "sandbox broken",
                summary.sandbox_broken,
                summary.episodes,
                f"by the policy; most on {_counts(worst)}",
            )
            for worst in [dict(list(summary.sandbox_broken_tasks.items())[:2])]
            if worst
        ],
        # one episode may have several faults, so they are no share of the episodes
        *[("faults", sum(summary.faults.values()), 0, _counts(summary.faults)) for _ in summary.faults][:1],
    ):
        share = f"{count:,} ({percent(count / of)})" if count and of else f"{count:,}"
        rows.append((name, share, remark, "yellow" if count else ""))
    rows.append(("run folder", run, "", ""))

    lines = [Text("\n").append(title, style="bold")]
    problems = [("warning", "yellow", text) for text in summary.biased]
    problems += [("error", "red", text) for text in summary.problems]  # as `agentrl doctor` says them
    for severity, style, text in problems:
        said = textwrap.wrap(f"{severity}: {visible(text)}", max(columns - 3, 40))
        lines.append(Text("  " + "\n    ".join(said), style=style))
    width = max(len(value) for name, value, remark, _ in rows if remark)
    for name, value, remark, style in rows:
        line = Text(f"  {name:<16}").append(value, style=style)
        if remark:
            indent = " " * (len(line) + width + 2 - len(value))
            wrapped = textwrap.wrap(remark, max(columns - len(indent) - 1, 20))
            line.append(" " * (width + 2 - len(value))).append(f"\n{indent}".join(wrapped), style="dim")
        lines.append(line)

    named = shlex.quote(run)
    commands = [(f"agentrl show {named} --worst", "read its worst episodes")] if summary.steps else []
    if not summary.finished:
        commands.insert(0, (again, resumes))
    elif summary.held_out_after is not None:
        commands.insert(0, (f"agentrl eval {named}", "play its held-out tasks"))
    if summary.biased or summary.problems:
        commands.insert(0, (f"agentrl doctor {named}", "what is wrong with it, and what to change"))
    width = max(len(command) for command, _ in commands)
    beside = 7 + width + 2 + max(len(remark) for _, remark in commands) < columns
    for lead, (command, remark) in zip(("\nnext:  ", *["       "] * 2), commands, strict=False):
        line = Text(lead).append(f"{command:<{width}}" if beside else command, style="bold")
        lines.append(line.append(f"  {remark}" if beside else f"\n         {remark}", style="dim"))
    return Text("\n").join(lines)


def _why_lost(summary: Summary) -> str:
    """Why episodes were lost to the infrastructure, and on which tasks most."""
    if not summary.redrawn:
        return "not the policy's fault; excluded from training"
    worst = [
        f"{visible(name)} ({sum(counts.values()) - counts['played']} of {counts['played']})"
        for name, counts in list(summary.redrawn_tasks.items())[:2]
    ]
    examples = summary.redrawn_examples
    named = {
        f"{name} ({examples[name]})" if examples.get(name) else name: n for name, n in summary.redrawn.items()
    }
    return f"{_counts(named)}; most on {', '.join(worst)}; none trained"


def _counts(by_name: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {visible(name)}" for name, count in list(by_name.items())[:4])


def _short(run: str) -> str:
    """The run folder as the user would type it from here."""
    path, here = Path(run), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else run


def quiet_transformers() -> None:
    """No progress bars of transformers across ours: they would tear the display.

    In a notebook, the first import of tqdm also asks for the widgets that its bars need.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")
        from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
