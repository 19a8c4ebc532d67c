"""The supervisor's reports on finished calls."""

from __future__ import annotations

import os
import signal
import time

from . import frames
from .program import ProgramCall


def report(call: ProgramCall, status: int | None, lost: bool, oom_kills: int, reaped: int) -> bytes:
    """Encode the result of a call, with its output, as a frame."""
    assert status is not None
    wall_s, usage, verdict = time.monotonic() - call.started, call.program.rusage, call.verdict
    cpu_s, max_rss_kb = 0.0, 0
    if usage is not None:
        cpu_s, max_rss_kb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss
    signalled = os.WIFSIGNALED(status)
    code, flags = (os.WTERMSIG(status), frames.SIGNAL) if signalled else (os.WEXITSTATUS(status), 0)
    if verdict is None and signalled and code == signal.SIGXCPU:
        verdict = "timeout"
    if verdict in (None, "oom") and oom_kills:
        verdict = "oom"
    outcome = frames.OUTCOMES.index(verdict or ("signal" if signalled else "exit"))
    if verdict in ("timeout", "cancelled", "output_limit") and (call.session or (signalled and code in (9, 24))):
        code, flags = 0, frames.NO_CODE  # our own doing, not the program's
    out, err, cuts = call.out, call.err, b""
    if out.is_cut or err.is_cut:
        parts = (*out.parts(), *err.parts())
        flags |= frames.CUT
        cuts, output = frames.CUTS.pack(*map(len, parts)), b"".join(parts)
    else:
        output = out.whole() + err.whole()
    if lost:
        flags |= frames.LOST
    report = frames.REPORT.pack(
        call.id, outcome, flags, code, out.total, err.total, wall_s, cpu_s, max_rss_kb, oom_kills, reaped
    )
    return frames.pack_raw(report + cuts, output)
