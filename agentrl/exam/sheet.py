"""The report of an exam: JSON, and a self-contained page."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.exam.marks import CHECKS, ExamResult, Level, Profile
from agentrl.plural import plural

JSON_FILE, PAGE_FILE = "exam.json", "exam.html"

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --error: #c0392b; --warning: #b9770e; --ok: #1e8449; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { margin-top: 2.5rem; font-size: 1.2rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
td.n, th.n { text-align: right; }
.error { color: var(--error); font-weight: 600; }
.warning { color: var(--warning); font-weight: 600; }
.ok { color: var(--ok); }
.note, .not-examined, small { opacity: .75; }
.bar { display: inline-block; height: .7rem; background: #2e86c1; min-width: 1px; }
"""


def exam_json(results: Sequence[ExamResult], fail_on: Level) -> dict[str, object]:
    """The report as plain data."""
    return {
        "format": 1,
        "passed": not any(result.at_least(fail_on) for result in results),
        "fail_on": fail_on.value,
        "envs": [_env(result) for result in results],
    }


def _env(result: ExamResult) -> dict[str, object]:
    plain = asdict(result)
    checks = [{"name": c, "about": CHECKS[c], "state": result.state(c)} for c in CHECKS]
    return {"name": plain.pop("name"), "use": plain.pop("use"), "checks": checks, **plain}


def write_report(folder: Path, results: Sequence[ExamResult], fail_on: Level) -> list[Path]:
    """Write the JSON and the page; returns their paths.

    Raises:
        ConfigError: the folder cannot be written.
    """
    page = exam_page(results, fail_on)
    data = json.dumps(_plain(exam_json(results, fail_on)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    paths = [folder / JSON_FILE, folder / PAGE_FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, (data, page), strict=True):
            path.write_text(text.encode("utf-8", "replace").decode(), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"--report {folder}: {e.strerror or e}") from e
    return paths


def _plain(value: object) -> object:
    """JSON has no NaN: numbers that are not finite become text."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def exam_page(results: Sequence[ExamResult], fail_on: Level) -> str:
    """The page."""
    found = sum(len(result.at_least(fail_on)) for result in results)
    verdict = "passed" if not found else f"failed: {found} finding" + "s" * (found > 1)
    body = "".join(_section(result) for result in results)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Environment exam</title><style>{_STYLE}</style></head><body><h1>Environment exam: "
        f'<span class="{"error" if found else "ok"}">{verdict}</span></h1>{body}</body></html>\n'
    )


def _section(result: ExamResult) -> str:
    name = f"{result.name}: {result.use}" if result.name else result.use
    oracle = "with an oracle" if result.oracle else "without an oracle"
    facts = (
        f"{plural(result.num_examined, 'task')}, of {plural(result.num_tasks, 'training task')} and the held-out "
        f"ones, {oracle}; "
        f"{plural(result.episodes, 'episode')} in {result.seconds:.1f} s"
    )
    parts = [f"<h2>{html.escape(name)}</h2><p>{facts}</p>", "<h3>Checks</h3>", _checks(result)]
    if result.policies:
        rows = [
            (p.name, f"{p.episodes:,}", f"{p.reward:.3g}", "" if p.solved is None else f"{p.solved:.0%}")
            for p in result.policies
        ]
        parts += ["<h3>Policies</h3>", _table(("policy", "episodes", "mean reward", "solved"), rows)]
    if result.calls:
        times = [(c.name, f"{c.calls:,}", f"{c.median_s:.4f}", f"{c.max_s:.3f}") for c in result.calls]
        parts += ["<h3>Time per call</h3>", _table(("call", "calls", "median (s)", "longest (s)"), times)]
    if result.profile is not None:
        parts += ["<h3>Difficulty</h3>", _profile(result.profile)]
    return "".join(parts)


def _checks(result: ExamResult) -> str:
    rows = []
    for check, about in CHECKS.items():
        state = result.state(check)
        said = [
            f'<div><span class="{f.level}">{f.level}</span> {html.escape(f.text)}{_tasks(f.tasks)}</div>'
            for f in result.of(check)
        ]
        if check in result.not_examined:
            said.append(f'<div class="not-examined">{html.escape(result.not_examined[check])}</div>')
        rows.append(
            f'<tr><td>{check}</td><td class="{state.replace(" ", "-")}">{state}</td>'
            f"<td><small>{html.escape(about)}</small>{''.join(said)}</td></tr>"
        )
    return f"<table><tr><th>check</th><th>result</th><th>findings</th></tr>{''.join(rows)}</table>"


def _tasks(tasks: Sequence[str]) -> str:
    if not tasks:
        return ""
    more = f" and {len(tasks) - 8} more" if len(tasks) > 8 else ""
    return f"<br><small>tasks: {html.escape(', '.join(tasks[:8]))}{more}</small>"


def _profile(profile: Profile) -> str:
    known = [row for row in profile.tasks if row.solved is not None]
    played = f"{plural(profile.attempts, 'episode')} of each of {plural(len(profile.tasks), 'task')}"
    head = f"<p>{html.escape(profile.policy)}, {played}</p>"
    if not known:
        return head + _table(("task", "mean reward"), [(row.task, f"{row.reward:.3g}") for row in profile.tasks])
    counts = Counter(row.solved for row in known)
    bars = "".join(
        f'<tr><td>{solved} of {profile.attempts}</td><td class="n">{counts[solved]}</td>'
        f'<td><span class="bar" style="width:{30 * counts[solved] / len(known):.2f}rem"></span></td></tr>'
        for solved in range(profile.attempts + 1)
    )
    hardest = sorted(known, key=lambda row: row.solved or 0)
    rows = [(row.task, f"{row.solved} of {row.attempts}", f"{row.reward:.3g}") for row in hardest]
    return (
        f'{head}<table><tr><th>episodes solved</th><th class="n">tasks</th><th></th></tr>{bars}</table><details>'
        f"<summary>Tasks</summary>{_table(('task', 'solved', 'mean reward'), rows)}</details>"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if number else ''}>{html.escape(cell)}</{tag}>"
            for number, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return f"<table><tr>{row(head, 'th')}</tr>{body}</table>"
