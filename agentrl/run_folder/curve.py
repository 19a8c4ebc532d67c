"""The reward curve of a run as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.run_folder.files import write_atomic
from agentrl.run_folder.records import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLE = 1.0
"""The height of a title in its panel; matplotlib measures every label to find it."""


def write_curve(run: Path) -> Path | None:
    """Draw `reward_curve.png` from the metrics of a run folder.

    The upper panel shows the share of training episodes solved at each step and the held-out evaluations, the
    lower one the mean of each reward by its name, where it differs.

    Returns:
        The file, or None if there is nothing to draw yet or matplotlib is not installed.
    """
    lines = read_metrics(run)
    names = _reward_names(lines)
    has_solved = any(key in line for line in lines for key in ("solved", "held_out"))
    if not (has_solved or names):
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None

    num_panels = has_solved + bool(names)
    height = 1.2 + 2.4 * num_panels
    figure = Figure(figsize=(7.0, height), dpi=120)
    # Labels have the same size in every run, and a layout engine would draw everything twice.
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.5 / height, top=1 - 0.35 / height, hspace=0.15)
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0])
    if has_solved:
        _draw_solved(axes[0], lines)
    for name in names:
        steps, values = _series(lines, name)
        axes[-1].plot(steps, values, label=name.removeprefix("reward/") if name != "reward" else "total", lw=1.4)
    if names:
        axes[-1].set_title("mean reward", loc="left", y=_TITLE, fontsize=9)
        axes[-1].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("step")
    axes[0].set_title(run.name, y=_TITLE)
    for panel in axes:
        panel.grid(alpha=0.25)

    out = io.BytesIO()
    figure.savefig(out, format="png")
    path = run / "reward_curve.png"
    write_atomic(path, out.getvalue())
    return path


def _reward_names(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """The total and the rewards by name, without those whose curve is drawn already."""
    names = sorted({key for line in lines for key in line if key == "reward" or key.startswith("reward/")})
    drawn, kept = [_series(lines, "solved")], []
    for name in reversed(names):  # the total comes last: the name of the only reward says more
        if (series := _series(lines, name)) not in drawn:
            drawn.append(series)
            kept.append(name)
    return kept[::-1]


def _draw_solved(panel: Axes, lines: Sequence[Mapping[str, float]]) -> None:
    steps, values = _series(lines, "solved")
    if steps:
        panel.plot(steps, values, color="tab:green", alpha=0.35, lw=1, label="training episodes, sampled")
        panel.plot(steps, smooth(values), color="tab:green", lw=1.8, label="their running mean")
    steps, values = _series(lines, "held_out")
    if steps:
        panel.plot(steps, values, "o--", color="tab:blue", lw=1, ms=5, label="held-out tasks")
    panel.set_ylim(-0.02, 1.02)
    panel.set_title("solved", loc="left", y=_TITLE, fontsize=9)
    panel.legend(frameon=False, fontsize=8, loc="lower right")


def _series(lines: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], span: int = 10) -> list[float]:
    """The mean of each value and the up to `span - 1` before it."""
    windows = (values[max(0, i - span + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
