"""The supervisor's report of a program, as the result that callers see."""

from __future__ import annotations

from typing import Any

from agentrl.sandbox.contract import CUT, ExecResult


def result_of(answer: dict[str, Any], output: bytes) -> ExecResult:
    """The supervisor's report as an ExecResult. What it leaves out is nothing: zero, None, False.

    `sizes` are the bytes of stdout and stderr, both whole; where something was left out, `totals` says how much
    there was of each, and `sizes` are the beginnings and ends: stdout, stdout, stderr, stderr.
    """
    get = answer.get
    sizes, totals = answer["sizes"], get("totals")
    if totals is None:
        out_total, err_total = sizes
        stdout, stderr = output[:out_total], output[out_total:]
    else:
        out_total, err_total = totals
        out_end = sizes[0] + sizes[1]
        stdout = _joined(output[: sizes[0]], output[sizes[0] : out_end], out_total)
        stderr = _joined(output[out_end : out_end + sizes[2]], output[out_end + sizes[2] :], err_total)
    return ExecResult(
        get("outcome", "exit"),
        get("exit_code"),
        get("signal"),
        stdout,
        stderr,
        out_total,
        err_total,
        answer["wall_s"],
        get("cpu_s", 0.0),
        get("max_rss_kb", 0),
        get("oom_kills", 0),
        get("reaped", 0),
        totals is not None,
        get("lost", False),
    )


def _joined(begin: bytes, end: bytes, total: int) -> bytes:
    return begin + (CUT if len(begin) + len(end) < total else b"") + end
