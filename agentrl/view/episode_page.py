"""The API's view of one episode: messages, calls, rewards, token segments and their columns, images."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from agentrl.run_folder.run_reader import Json
from agentrl.run_folder.token_records import NOTHING_RECORDED, TokenColumns
from agentrl.view.pieces import Decode, span_pieces
from agentrl.view.step_page import truncated
from agentrl.view.words import EPISODE

ORIGINS = ("prompt", "sampled", "observation", "glue")
IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
"""Types that a browser shows without running anything; SVG is not among them."""
DIGITS = 5


def episode(record: Json, run: str, siblings: Sequence[str], renderer: str | None) -> Json:
    """One episode, without its tokens."""
    said = record["episode"]
    segments = list(_segments(said))
    turns = list(_turns(said))
    return {
        "id": said["id"],
        "run": run,
        "step": record["step"],
        "group": record["group"],
        "task": said["task"]["id"],
        "env": said["task"].get("env") or "",
        "row": said["task"].get("row", {}),
        "seed": said["task"].get("seed"),
        "messages": [_message(message) for message in said.get("messages", ())],
        "turns": turns,
        "calls": list(_calls(said, turns)),
        "rewards": {"total": said.get("reward"), "parts": list(_rewards(said))},
        "advantages": record.get("advantages") or [],
        "solved": said.get("solved"),
        "segments": segments,
        "branches": list(_branches(said, segments, turns)),
        "siblings": list(siblings),
        "stop_reason": said.get("stop_reason"),
        "metrics": said.get("metrics", {}),
        "seconds": said.get("seconds"),
        "tools": said.get("tools", []),
        "faults": said.get("faults", {}),
        "crash": said.get("crash", ""),
        "hint": record.get("hint"),
        "error": said.get("error"),
        "set_aside": bool(record.get("set_aside")),
        "baseline": bool(record.get("baseline")),
        "renderer": renderer,
        "words": dict(EPISODE),
    }


def _message(message: Json) -> Json:
    content = message.get("content")
    if isinstance(content, list):
        content = [
            {"image": number, "mime_type": part.get("mime_type"), "bytes": _size(part)}
            if isinstance(part, dict)
            else part
            for number, part in enumerate(content)
        ]
    return {**message, "content": content}


def _size(part: Json) -> int:
    data = str(part.get("data", ""))
    return len(data) * 3 // 4 - data[-2:].count("=")


def _segments(said: Json) -> Iterator[Json]:
    start = 0
    for index, segment in enumerate(said.get("segments", ())):
        versions = segment.get("versions") or [None]
        yield {
            "index": index,
            "origin": segment["origin"],
            "start": start,
            "count": len(segment["ids"]),
            "message": segment.get("message"),
            "parent": segment.get("parent", -1),
            "version": versions[-1],
            "turn": None,
        }
        start += len(segment["ids"])


def _turns(said: Json) -> Iterator[Json]:
    """The turns, each with the places of its message and of the answers to it; None for one in another branch."""
    messages, at = said.get("messages", ()), 0
    for turn in said.get("turns", ()):
        place = turn.get("place")
        if place is None:  # records of earlier versions: the next that says the same
            place = _find(messages, turn["message"], at)
        observed = list[int]()
        if place is not None:
            at = place + 1
            for message in turn.get("observation", ()):  # other branches may come between
                if (found := _find(messages, message, at)) is not None:
                    observed.append(found)
                    at = found + 1
        rest = ("reward", "rewards", "finish", "tokens", "engine_seconds", "env_seconds")
        yield {"message": place, "observation": observed, **{key: turn.get(key) for key in rest}}


def _find(messages: Sequence[Json], message: Json, start: int) -> int | None:
    return next((n for n in range(start, len(messages)) if messages[n] == message), None)


def _calls(said: Json, turns: Sequence[Json]) -> Iterator[Json]:
    messages = said.get("messages", ())
    for number, (turn, placed) in enumerate(zip(said.get("turns", ()), turns, strict=True)):
        answers = {messages[n].get("tool_call_id"): n for n in placed["observation"]}
        for record in turn.get("calls", ()):
            call = record["call"]
            yield {
                "id": call["id"],
                "turn": number,
                "message": answers.get(call["id"]),
                "name": call["name"],
                "arguments": call["arguments"],
                "result": record["result"],
                "outcome": record["outcome"],
                "seconds": record["seconds"],
                "truncated": truncated(record["result"]),
            }


def _rewards(said: Json) -> Iterator[Json]:
    """The parts of the reward, as they add up: of the episode by name, then of each turn. Weights are included."""
    for name, value in (said.get("rewards") or {}).items():
        yield {"name": name, "turn": None, "value": value, "weight": 1.0}
    named = [name.removeprefix("reward/") for name in said.get("metrics", {}) if name.startswith("reward/")]
    other = named[0] if len(named) == 1 else "turn reward" + (f" ({', '.join(named)})" if named else "")
    for number, turn in enumerate(said.get("turns", ())):
        found = (turn.get("rewards") or {}).items()  # records of older runs have none
        by_name = {name: value for name, value in found if isinstance(value, int | float)}
        for name, value in by_name.items():
            yield {"name": name, "turn": number, "value": value, "weight": 1.0}
        rest = (turn.get("reward") or 0.0) - sum(by_name.values())
        if abs(rest) > 1e-9:
            name = "turn reward" if by_name else other
            yield {"name": name, "turn": number, "value": rest, "weight": 1.0}


def _branches(said: Json, segments: Sequence[Json], turns: Sequence[Json]) -> Iterator[Json]:
    """Where the token tree begins and splits: the first child of a segment continues it, the others branch off."""
    continued: set[int] = set()
    members: dict[int, list[Json]] = {}  # by the first segment of a branch
    branch_of: dict[int, int] = {}
    for segment in segments:
        index, parent = segment["index"], segment["parent"]
        begins = parent == -1 or parent in continued or parent not in branch_of
        continued.add(parent)
        branch_of[index] = index if begins else branch_of[parent]
        members.setdefault(branch_of[index], []).append(segment)
    messages = said.get("messages", ())
    systems = [m.get("content") for m in messages if m.get("role") == "system"]
    recorded: dict[int | None, str | None] = {}  # why a turn began from scratch, by the place of its message
    for turn, placed in zip(said.get("turns", ()), turns, strict=True):
        recorded.setdefault(placed["message"], turn.get("branch"))
    otherwise = "unanswered" if "agent/unanswered" in said.get("metrics", {}) else None
    for number, (start, inside) in enumerate(members.items()):
        parent = segments[start]["parent"]
        message = next((s["message"] for s in inside if s["message"] is not None), None)
        kind = _kind(number, parent, inside, messages, systems)
        own = next((s["message"] for s in inside if s["origin"] == "sampled"), None)
        why = otherwise if (found := recorded.get(own)) is None else found
        yield {
            "segment": start,
            "parent": parent,
            "kind": kind,
            "reason": None if number == 0 else _reason(said, parent, kind, why),
            "tokens": sum(s["count"] for s in inside),
            "message": message,
        }


def _kind(
    number: int, parent: int, inside: Sequence[Json], messages: Sequence[Json], systems: Sequence[object]
) -> str:
    if number == 0:
        return "root"
    return "sub_agent" if parent < 0 and _other_system(inside, messages, systems) else "fork"


def _other_system(inside: Sequence[Json], messages: Sequence[Json], systems: Sequence[object]) -> bool:
    mine = {s["message"] for s in inside if s["message"] is not None}
    own = [messages[n].get("content") for n in mine if n < len(messages) and messages[n].get("role") == "system"]
    return bool(mine) and own[:1] != systems[:1]


_REASONS = {
    "sub_agent": "a conversation with another system prompt, or without one",
    "opening": "a conversation with another opening",
    "repeat": "the client sent the request of another branch again",
    "unanswered": "of the two requests behind this turn, one got no answer, because its client had left",
    "rewind": "the client went back to an earlier turn",
}


def _reason(said: Json, parent: int, kind: str, recorded: str | None) -> str:
    if recorded is not None:
        return _REASONS.get(recorded, f"the client's history differed: {recorded}")
    if kind == "sub_agent":
        return _REASONS[kind]
    metrics: Mapping[str, float] = said.get("metrics", {})
    drift = [name.removeprefix("agent/drift_") for name in metrics if name.startswith("agent/drift_")]
    if drift:
        return f"the client's history differed: {', '.join(sorted(drift))}"
    if times := metrics.get("compact/times"):
        before, after = metrics.get("compact/tokens_before", 0), metrics.get("compact/tokens_after", 0)
        sizes = f": {before:.0f} tokens became {after:.0f}" if times == 1 else ""
        return f"compacted: rollout.compact shortened the context{sizes}"
    if parent < 0:
        return "a conversation with another opening"
    return "the next prompt was rendered again: the template or the client rewrote the history after this point"


COLUMNS = ("learner_logprobs", "ref_logprobs", "entropy", "ratio", "advantages", "weights", "flags")
NAMES = {
    "learner_logprobs": "learner_logprob",
    "ref_logprobs": "ref_logprob",
    "advantages": "advantage",
    "weights": "weight",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Which tokens of an episode to show."""

    start: int = 0
    count: int | None = None


def tokens(record: Json, span: Span, decode: Decode | None, columns: TokenColumns = NOTHING_RECORDED) -> Json:
    """The tokens of an episode as columns; None where a value does not exist."""
    said = record["episode"]
    total = sum(len(segment["ids"]) for segment in said.get("segments", ()))
    end = total if span.count is None else min(total, span.start + span.count)
    out: dict[str, list[Any]] = {name: [] for name in ("ids", "pieces", "origin", "segment", "logprob", "version")}
    out |= {NAMES.get(name, name): [] for name in COLUMNS}
    advantages = iter(record.get("advantages") or ())
    at = sampled = 0
    for index, segment in enumerate(said.get("segments", ())):
        count, is_sampled = len(segment["ids"]), segment["origin"] == "sampled"
        advantage = next(advantages, None) if is_sampled else None
        low, high = max(span.start, at) - at, min(end, at + count) - at
        if low < high:
            ids = segment["ids"][low:high]
            out["ids"] += ids
            parent = segment.get("parent", -1)
            before = said["segments"][parent]["ids"] if 0 <= parent < index else ()
            whole = segment["ids"]
            out["pieces"] += span_pieces(whole, low, high, decode, before) if decode else [""] * len(ids)
            out["origin"] += [ORIGINS.index(segment["origin"])] * len(ids)
            out["segment"] += [index] * len(ids)
            if is_sampled:
                _sampled(out, segment, columns, slice(low, high), sampled, advantage)
            else:
                for name in ("logprob", "version", *(NAMES.get(n, n) for n in COLUMNS)):
                    out[name] += [None] * len(ids)
        at += count
        sampled += count if is_sampled else 0
    return {"total": total, "from": span.start, **out}


def _sampled(
    out: dict[str, list[Any]],
    segment: Json,
    columns: TokenColumns,
    part: slice,
    before: int,
    advantage: float | None,
) -> None:
    count = part.stop - part.start
    out["logprob"] += [_rounded(_number(value)) for value in segment["logprobs"][part]]
    out["version"] += segment["versions"][part]
    for name in COLUMNS:
        values = getattr(columns, name)
        if values is not None:
            out[NAMES.get(name, name)] += [
                _rounded(v) for v in values[before + part.start : before + part.stop].tolist()
            ]
        elif name == "advantages":
            out["advantage"] += [_rounded(advantage)] * count
        elif name == "flags":
            out["flags"] += [1 if advantage is not None else 0] * count
        else:
            out[NAMES.get(name, name)] += [None] * count


def _number(value: Any) -> float | None:
    return None if isinstance(value, str) else value


def _rounded(value: float | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    return None if value != value or value in (float("inf"), float("-inf")) else float(f"{value:.{DIGITS}g}")


def image(record: Json, message: int, part: int) -> tuple[bytes, str] | None:
    """The bytes and type of an image in a message; None if there is none that a browser may show."""
    messages = record["episode"].get("messages", ())
    content = messages[message].get("content") if 0 <= message < len(messages) else None
    found = content[part] if isinstance(content, list) and 0 <= part < len(content) else None
    if not isinstance(found, dict) or found.get("mime_type") not in IMAGE_TYPES:
        return None
    try:
        return base64.urlsafe_b64decode(found.get("data", "").replace("+", "-").replace("/", "_")), found[
            "mime_type"
        ]
    except (ValueError, binascii.Error):
        return None


def image_path(run: str, step: int, id: str, message: int, part: int) -> str:
    """The path of an image in the API."""
    return f"/api/image/{quote(run, safe='')}/{quote(id, safe='/')}?step={step}&message={message}&part={part}"
