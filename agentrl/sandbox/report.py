"""The supervisor's report of a program, as the result that callers see."""

from __future__ import annotations

from typing import Any

from agentrl.sandbox.contract import CUT, ExecResult


def result_of(answer: dict[str, Any], output: bytes) -> ExecResult:
    """The supervisor's report as an ExecResult."""
    parts, begin = [], 0
    for size in answer["sizes"]:
        parts.append(output[begin : begin + size])
        begin += size
    out_total, err_total = answer["stdout_total"], answer["stderr_total"]
    out_cut, err_cut = len(parts[0]) + len(parts[1]) < out_total, len(parts[2]) + len(parts[3]) < err_total
    return ExecResult(
        outcome=answer["outcome"],
        exit_code=answer["exit_code"],
        signal=answer["signal"],
        stdout=parts[0] + (CUT if out_cut else b"") + parts[1],
        stderr=parts[2] + (CUT if err_cut else b"") + parts[3],
        stdout_total=out_total,
        stderr_total=err_total,
        wall_s=answer["wall_s"],
        cpu_s=answer["cpu_s"],
        max_rss_kb=answer["max_rss_kb"],
        oom_kills=answer["oom_kills"],
        reaped=answer["reaped"],
        truncated=out_cut or err_cut,
        session_lost=bool(answer["lost"]),
    )
