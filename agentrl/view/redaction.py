"""Redact the page's data: only what is listed here stays."""

from __future__ import annotations

import re
from typing import Any

NUMBERS = frozenset(
    {
        *("step", "steps", "started", "updated", "wall_seconds", "held_out_before", "held_out_after", "time"),
        *("reward", "reward_mean", "solved", "turns", "tokens", "seconds", "advantage", "advantages", "versions"),
        *("trained", "no_signal", "cut", "failed", "set_aside", "baseline", "stale", "mistakes", "delta"),
        *("start_s", "end_s", "p50_ms", "p99_ms", "truncated", "never_called", "curated", "tokenizer"),
        *("turn", "value", "weight", "total", "message", "observation", "engine_seconds", "env_seconds"),
        *("token_seconds", "weights_only"),
    }
)
"""Numbers, truths, and lists of them."""
TEXTS = frozenset(
    {
        *("id", "run", "name", "status", "estimator", "loss", "kind", "severity", "description", "unit", "group"),
        *("series", "series_common", "stop_reason", "episode", "siblings", "role", "finish", "outcome"),
        *("tool_call_id", "held_out_metric"),
    }
)
"""Texts that agentrl writes, ids, and the names of runs, tools, rewards and metrics."""
NAMED = frozenset({"metrics", "parts", "values", "outcomes", "calls", "rewards"})
"""Numbers by the name of a metric, a reward or a tool."""
OBJECTS = frozenset(
    {
        *("runs", "notes", "evaluations", "findings", "series", "tools", "by_step", "steps", "groups", "episodes"),
        *("episode", "timings", "phases", "messages", "turns", "calls", "rewards", "parts", "tool_calls"),
        "forked_from",
    }
)
"""Objects, and lists of them, whose keys are looked up here in turn."""
_TOOLS = ("tools", "calls", "tool_calls")
_TOOL = re.compile(r"[\w.:/-]{1,64}")
"""The name of a tool; the policy may have called something else."""
_KEPT = NUMBERS | TEXTS | NAMED | OBJECTS


def redacted(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer in which unlisted texts are replaced by their lengths, and anything else is left out."""
    return {key: _shown(key, value) for key, value in answer.items()}


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        if key == "words":  # explanations of ours
            return value
        if key in NAMED:
            return {_tool(name) if key in _TOOLS else name: _of_name(name, inner) for name, inner in value.items()}
        return redacted(value) if key in OBJECTS else {}
    if isinstance(value, list):
        if key == "content":
            return [_hidden(part) if isinstance(part, str) else "[an image]" for part in value]
        return [_in_list(key, inner) for inner in value] if key in _KEPT else []
    if isinstance(value, str):
        own = key in ("estimator", "loss") and not value.isidentifier()  # the path of a file
        return value if key in TEXTS and not own else _hidden(value)
    return value if key in _KEPT else None


def _in_list(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        found = redacted(value) if key in OBJECTS else {}
        return {**found, "name": _tool(found["name"])} if key in _TOOLS and "name" in found else found
    return _shown(key, value)


def _tool(name: Any) -> Any:
    return _hidden(name) if isinstance(name, str) and not _TOOL.fullmatch(name) else name


def _of_name(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_of_name(name, inner) for inner in value] if name not in OBJECTS else _shown(name, value)
    return value if isinstance(value, int | float | None) else None


def _hidden(text: str) -> str:
    return f"[{len(text)} characters]"
