"""The API's view of a step: groups and episodes as a matrix, timings, and the calls of all tools."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import CheckpointError
from agentrl.run_folder.run_reader import Json, Metrics, RecordCache, RunReader
from agentrl.run_folder.token_records import TRAINED, read_tokens
from agentrl.types import LIMITS
from agentrl.view.words import STEP, TOOLS, of_metrics

FAILING = 8
"""Argument sets shown for a tool that fails."""
MAX_ARGUMENTS = 2_000
"""Characters of the arguments shown."""


def step(reader: RunReader, number: int, cache: RecordCache) -> Json:
    """The groups of a step. Raises CheckpointError if there are none."""
    groups: dict[int, list[Json]] = {}
    for record in cache.records(reader, number):
        groups.setdefault(int(record["group"]), []).append(record)
    metrics, trained = reader.metrics, _trained(reader, number)
    values: Json = {}
    if number in metrics.steps:
        index = metrics.steps.index(number)
        values = {name: column[index] for name, column in metrics.values.items() if column[index] is not None}
    return {
        "step": number,
        "groups": [_group(group, records, number, trained) for group, records in sorted(groups.items())],
        "timings": with_phases(timings(groups.values()), metrics, number),
        "metrics": {"step": number, **values},
        "words": {**STEP, **of_metrics(values)},
    }


def _trained(reader: RunReader, step: int) -> Mapping[str, bool]:
    """Whether any token of an episode is in the loss, by its id; only of episodes whose tokens are recorded."""
    try:
        columns = read_tokens(reader.path, step, ("flags",))
    except CheckpointError:
        return {}
    return {id: bool((one.flags & TRAINED).any()) for id, one in columns.items() if one.flags is not None}


def _group(number: int, records: Sequence[Json], step: int, trained: Mapping[str, bool]) -> Json:
    scored = [
        r["episode"]["reward"] for r in records if r["episode"].get("reward") is not None and not r.get("baseline")
    ]
    # With a critic or rewards per turn, episodes of the same reward have advantages all the same.
    alike = len(scored) > 1 and len(set(scored)) == 1 and not any(record.get("advantages") for record in records)
    return {
        "group": number,
        "task": records[0]["episode"]["task"]["id"],
        "env": records[0]["episode"]["task"].get("env") or "",
        "set_aside": any(record.get("set_aside") for record in records),
        "episodes": [_cell(record, step, alike, trained) for record in records],
    }


def _cell(record: Json, step: int, alike: bool, trained: Mapping[str, bool]) -> Json:
    episode = record["episode"]
    advantages = record.get("advantages") or []
    versions = [
        v
        for s in episode.get("segments", ())
        if s["origin"] == "sampled" and s["versions"]
        for v in (s["versions"][0], s["versions"][-1])
    ]
    failed = episode.get("reward") is None
    return {
        "id": episode["id"],
        "reward": _finite(episode.get("reward")),
        "parts": parts(episode),
        "solved": episode.get("solved"),
        "stop_reason": episode.get("stop_reason"),
        "turns": len(episode.get("turns", ())),
        "tokens": tokens(episode),
        "seconds": episode.get("seconds", 0.0),
        "advantage": [min(advantages), max(advantages)] if advantages else None,
        "trained": trained.get(episode["id"], bool(advantages)),
        "no_signal": alike and not failed,
        "cut": episode.get("stop_reason") in LIMITS,
        "failed": failed,
        "set_aside": bool(record.get("set_aside")),
        "baseline": bool(record.get("baseline")),
        "stale": bool(versions) and min(versions) < step - 1,
        "versions": [min(versions), max(versions)] if versions else None,
        "mistakes": sum(outcome != "ok" for outcome in outcomes(episode)),
    }


def parts(episode: Json) -> Json:
    """The parts of the reward by name: rewards per episode and group, and the sums of those per turn."""
    found = {name: _finite(value) for name, value in (episode.get("rewards") or {}).items()}
    for key, value in (episode.get("metrics") or {}).items():
        if key.startswith("reward/") and isinstance(value, int | float):
            name = key.removeprefix("reward/")
            found[name] = (found.get(name) or 0.0) + value
    return found


def tokens(episode: Json) -> int:
    """The number of sampled tokens."""
    sampled = sum(len(s["ids"]) for s in episode.get("segments", ()) if s["origin"] == "sampled")
    return sampled or sum(turn.get("tokens", 0) for turn in episode.get("turns", ()))


def outcomes(episode: Json) -> Iterator[str]:
    """The outcome of each call."""
    for turn in episode.get("turns", ()):
        for call in turn.get("calls", ()):
            yield call.get("outcome", "")


def timings(groups: Iterable[Sequence[Json]]) -> Json | None:
    """The spans of the episodes: the engine, tools, the rest of the env, and waiting between turns.

    Seconds since 1970 if every episode says when it began. Episodes of older runs do not; they are taken to begin
    together at 0.
    """
    episodes = [record["episode"] for records in groups for record in records]
    found = [(_seconds(episode, "start_s"), list(_spans(episode))) for episode in episodes]
    found = [(start, spans) for start, spans in found if spans]
    timed = all(start > 0 for start, _ in found)
    all_spans = [
        {**span, "start_s": start + span["start_s"], "end_s": start + span["end_s"]} if timed else span
        for start, spans in found
        for span in spans
    ]
    return {"phases": [], "episodes": all_spans} if all_spans else None


def _spans(episode: Json) -> Iterator[Json]:
    """What an episode did, in seconds from its start. Setup and rewards belong to the env.

    Turns of an agent may overlap: its sub-agents work side by side.
    """
    turns = episode.get("turns", ())
    timed = any(_seconds(turn, "start_s") for turn in turns)
    at, gap = 0.0, "env"

    def span(kind: str, start: float, end: float) -> Json:
        return {"episode": episode["id"], "kind": kind, "start_s": start, "end_s": end}

    for turn in sorted(turns, key=lambda turn: _seconds(turn, "start_s")) if timed else turns:
        called = sum(_seconds(call, "seconds") for call in turn.get("calls", ()))
        parts = [("engine", _seconds(turn, "engine_seconds")), ("tool", called)]
        parts.append(("env", max(0.0, _seconds(turn, "env_seconds") - called)))
        here = _seconds(turn, "start_s") if timed else at
        if here > at:
            yield span(gap, at, here)
        for kind, seconds in parts:
            if seconds > 0:
                yield span(kind, here, here + seconds)
                here += seconds
        at, gap = max(at, here), "wait"
    if timed and (end := _seconds(episode, "seconds")) > at:
        yield span("env", at, end)


def _seconds(holder: Json, key: str) -> float:
    found = holder.get(key)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else 0.0


def with_phases(found: Json | None, metrics: Metrics, number: int) -> Json:
    """Add the phases of a step, earlier updates during its episodes, and its ranks and servers (`parts`).

    All are in seconds from the first.
    """
    spans, rows = (found or {"episodes": []})["episodes"], _rows(metrics, number)
    row = rows.get(number, {})
    own = list(_phases(row))
    parts = list(_parts(row, own))
    timed = not spans or all(span["start_s"] > MIN_CLOCK for span in spans)
    dated = all(phase["start_s"] > MIN_CLOCK for phase in own)
    if not timed or not dated:  # on separate clocks: they are assumed to begin together
        zero = _first(own)
        return {"episodes": _from(spans, _first(spans)), "phases": _from(own, zero), "parts": _from(parts, zero)}
    zero = min(_first(spans), _first(own)) if spans and own else _first([*spans, *own])
    earlier = [
        {**phase, "step": step}
        for step, row in rows.items()
        for phase in _phases(row)
        if step != number and phase["name"] != "generate" and phase["end_s"] > zero
    ]
    return {
        "episodes": _from(spans, zero),
        "phases": _from([*own, *earlier], zero),
        "parts": _from(parts, zero),
    }


MIN_CLOCK = 1e9
"""Seconds since 1970 are more than this; those from the start of a step are less."""
OVERLAP = 16
"""Steps before a step whose updates may overlap with its episodes."""


def _rows(metrics: Metrics, number: int) -> dict[int, Json]:
    """The values of a step and of those right before it."""
    if number not in metrics.steps:
        return {}
    place = metrics.steps.index(number)
    return {
        metrics.steps[at]: {name: column[at] for name, column in metrics.values.items() if column[at] is not None}
        for at in range(place, max(-1, place - OVERLAP - 1), -1)
    }


def _phases(row: Json) -> Iterator[Json]:
    """The phases of a step, in seconds since 1970 where its metrics say when the update began."""
    began, waited = _seconds(row, "update_began_seconds"), _seconds(row, "rollout_seconds")
    at = began - waited if began else 0.0
    for name, key in (
        ("generate", "rollout_seconds"),
        ("update", "update_seconds"),
        ("publish", "publish_seconds"),
    ):
        if isinstance(row.get(key), int | float):
            yield {"name": name, "start_s": at, "end_s": at + _seconds(row, key)}
            at += _seconds(row, key)


_PART = re.compile(r"(rank)/(\d+)/forward_seconds|(server)/(\d+)/busy_seconds")


def _parts(row: Json, phases: Sequence[Json]) -> Iterator[Json]:
    """How long each learner rank computed in the update, and each server had a request before the end of the step.

    Only the lengths are measured: ranks are taken to begin with the update, servers with the step.
    """
    end = max((phase["end_s"] for phase in phases), default=0.0)
    begin = {"rank": next((phase["start_s"] for phase in phases if phase["name"] == "update"), 0.0)}
    begin["server"] = max(_first(phases), end - _seconds(row, "seconds"))
    for key, seconds in row.items():
        if (found := _PART.fullmatch(key)) and isinstance(seconds, int | float):
            kind, number = (part for part in found.groups() if part)
            tokens = _seconds(row, f"{kind}/{number}/tokens")
            per_token = row.get(f"server/{number}/token_seconds")
            per_token = seconds / tokens if kind == "rank" and tokens else per_token
            at = begin[kind]
            span = {"name": f"{kind} {number}", "kind": kind, "start_s": at, "end_s": at + _seconds(row, key)}
            yield {**span, "tokens": int(tokens), "token_seconds": per_token}


def _first(spans: Sequence[Json]) -> float:
    return min((span["start_s"] for span in spans), default=0.0)


def _from(spans: Sequence[Json], zero: float) -> list[Json]:
    return [
        {**s, "start_s": round(max(0.0, s["start_s"] - zero), 6), "end_s": round(s["end_s"] - zero, 6)}
        for s in spans
    ]


@dataclass
class _Tool:
    seconds: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    failing: dict[tuple[str, str], Json] = field(default_factory=dict)


def tools(reader: RunReader, cache: RecordCache, steps: Sequence[int]) -> Json:
    """The calls of every tool over some steps; tools that were offered and never called are there too."""
    found: dict[str, _Tool] = {}
    by_step = []
    for number in steps:
        try:
            records = cache.records(reader, number)
        except CheckpointError:
            continue
        calls: Counter[str] = Counter()
        for record in records:
            calls.update(_count(record, number, found))
        by_step.append({"step": number, "calls": dict(calls)})
    return {
        "tools": [
            _tool(name, tool) for name, tool in sorted(found.items(), key=lambda item: -len(item[1].seconds))
        ],
        "by_step": by_step,
        "steps": list(steps),
        "words": dict(TOOLS),
    }


def _count(record: Json, step: int, found: dict[str, _Tool]) -> Iterator[str]:
    episode = record["episode"]
    for schema in episode.get("tools", ()):
        function = schema.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            found.setdefault(name, _Tool())
    for turn in episode.get("turns", ()):
        for call in turn.get("calls", ()):
            name, outcome = call["call"]["name"], call["outcome"]
            yield name
            tool = found.setdefault(name, _Tool())
            tool.seconds.append(call["seconds"])
            tool.outcomes[outcome] += 1
            tool.truncated += truncated(call["result"])
            if outcome != "ok":
                key = (
                    json.dumps(call["call"]["arguments"], sort_keys=True, ensure_ascii=False)[:MAX_ARGUMENTS],
                    outcome,
                )
                if key not in tool.failing:
                    example = {"step": step, "episode": episode["id"]}
                    tool.failing[key] = {
                        "arguments": call["call"]["arguments"],
                        "count": 0,
                        "outcome": outcome,
                        "example": example,
                    }
                tool.failing[key]["count"] += 1


def _tool(name: str, tool: _Tool) -> Json:
    seconds = sorted(tool.seconds)
    failing = sorted(tool.failing.values(), key=lambda found: -found["count"])[:FAILING]
    return {
        "name": name,
        "calls": len(seconds),
        "outcomes": dict(tool.outcomes.most_common()),
        "p50_ms": _percentile(seconds, 0.5),
        "p99_ms": _percentile(seconds, 0.99),
        "truncated": tool.truncated,
        "never_called": not seconds,
        "failing": failing,
    }


def _percentile(seconds: Sequence[float], share: float) -> float | None:
    """The least of the sorted times that this share of them does not exceed, in milliseconds."""
    return round(1000 * seconds[math.ceil(share * len(seconds)) - 1], 3) if seconds else None


def truncated(result: str) -> bool:
    """Whether a tool's result was shortened before the policy saw it."""
    return " characters left out ...]" in result


def _finite(value: Any) -> Any:
    if isinstance(value, str):  # how records write what JSON cannot
        return None if value in ("NaN", "Infinity", "-Infinity") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
