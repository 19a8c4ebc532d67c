"""Convert the supervisor's report on a program to the result that callers see."""

from __future__ import annotations

from typing import Any, cast

from agentrl.sandbox.contract import CUT, ExecResult, Outcome
from agentrl.sandbox.inside import frames


def result_of(answer: dict[str, Any], output: bytes) -> ExecResult:
    """Convert the supervisor's report (see `frames.REPORT`) to an ExecResult."""
    head = answer["report"]
    _, outcome, flags, code, out, err, wall_s, cpu_s, max_rss_kb, oom_kills, reaped = frames.REPORT.unpack_from(
        head
    )
    exit_code = signal = None
    if flags & frames.SIGNAL:
        signal = code
    elif not flags & frames.NO_CODE:
        exit_code = code
    if flags & frames.CUT:
        stdout, stderr = _with_cuts(frames.CUTS.unpack_from(head, frames.REPORT.size), output, out, err)
    else:
        stdout, stderr = output[:out], output[out:]
    return ExecResult(
        cast(Outcome, frames.OUTCOMES[outcome]),
        exit_code,
        signal,
        stdout,
        stderr,
        out,
        err,
        wall_s,
        cpu_s,
        max_rss_kb,
        oom_kills,
        reaped,
        bool(flags & frames.CUT),
        bool(flags & frames.LOST),
    )


def _with_cuts(sizes: tuple[int, ...], output: bytes, out_total: int, err_total: int) -> tuple[bytes, bytes]:
    """Return stdout and stderr, each as its beginning and end with a mark where output was dropped."""
    parts, begin = [], 0
    for size in sizes:
        parts.append(output[begin : begin + size])
        begin += size
    out_cut = len(parts[0]) + len(parts[1]) < out_total
    err_cut = len(parts[2]) + len(parts[3]) < err_total
    return (parts[0] + (CUT if out_cut else b"") + parts[1], parts[2] + (CUT if err_cut else b"") + parts[3])
