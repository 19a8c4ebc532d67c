"""What a policy is shown of a program: how it ended, what it printed, cut so that both ends stay readable."""

from __future__ import annotations

from agentrl.sandbox import ExecResult

MAX_CHARS = 8000
SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def shorten(text: str, max_chars: int = MAX_CHARS) -> str:
    """The text, or its beginning and end at line ends, with a line between them that says what is missing."""
    if len(text) <= max_chars:
        return text
    head, tail = text[: max_chars * 2 // 3], text[-(max_chars // 3) :]
    if "\n" in head[len(head) // 2 :]:
        head = head[: head.rindex("\n") + 1]
    if "\n" in tail[: len(tail) // 2]:
        tail = tail[tail.index("\n") + 1 :]
    missing = text[len(head) : len(text) - len(tail)]
    lines = missing.count("\n")
    what = f"{lines} lines" if lines else f"{len(missing)} characters"
    return f"{head.rstrip()}\n[... {what} left out ...]\n{tail}"


def ending(result: ExecResult) -> str:
    """How the program ended, in words; empty when it just ended."""
    if result.outcome == "timeout":
        words = f"stopped after {result.wall_s:.1f} s: it took too long"
    elif result.outcome == "oom":
        words = "stopped: out of memory"
    elif result.outcome == "output_limit":
        words = "stopped: it printed too much"
    elif result.outcome == "signal":
        words = f"ended by {SIGNAL_NAMES.get(result.signal or 0, f'signal {result.signal}')}"
    elif result.outcome == "cancelled":
        words = "cancelled"
    else:
        words = f"exit code {result.exit_code}" if result.exit_code else ""
    if result.session_lost:
        words = f"{words}; the session was lost and has been restarted".lstrip("; ")
    return words


def observation(result: ExecResult, *, max_chars: int = MAX_CHARS) -> str:
    """What the policy reads: stdout, stderr, and the ending in brackets."""
    parts = [shorten(result.text(), max_chars).rstrip("\n")]
    errors = shorten(result.error_text(), max_chars // 2).rstrip("\n")
    if errors:
        parts.append(errors)
    words = ending(result)
    if words:
        parts.append(f"[{words}]")
    return "\n".join(part for part in parts if part) or "[no output]"
