"""The run folders that `bench/view.py` looks at: written with the code that writes them in a run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from agentrl.models.tiny import make_tokenizer
from agentrl.run_folder.records import EpisodeRecord, compress, episodes_file
from agentrl.run_folder.token_records import TokenColumns, encode_tokens, tokens_file
from agentrl.types import CallRecord, Episode, Message, Origin, Segment, StopReason, Task, ToolCall, Turn
from agentrl.view.run_page import CURATED

WORDS = [
    f"{a}{b}" for a in ("run", "tool", "sum", "file", "search", "error") for b in ("", "s", "ning", "-2", "ful")
]
TURN = (1_500, 500)
"""Sampled and observed tokens of a turn of the long episode."""
PER_FILE = 1_000


def write_run(run: Path, *, steps: int, tokens: int) -> None:
    """A run of some steps whose step 5 has 1,000 episodes, the first of them with `tokens` tokens."""
    rng = random.Random(0)
    text = [" ".join(rng.choices(WORDS, k=30)) + ".\n" for _ in range(200)]
    make_tokenizer(run / "start", text, vocab=600, max_context=tokens)
    long, columns = _long(Tokenizer.from_file(str(run / "start" / "tokenizer.json")), text, tokens)
    small = [short(rng, 5, n) for n in range(PER_FILE - 1)]
    _write(run, 5, [_record(5, 0, long), *(_record(5, 1 + n // 8, e) for n, e in enumerate(small))])
    tokens_file(run, 5).parent.mkdir()
    tokens_file(run, 5).write_bytes(encode_tokens({long.id: columns}))
    for step in (n for n in range(1, steps + 1) if n != 5):
        _write(run, step, [_record(step, 0, short(rng, step, n)) for n in range(4)])
    _about(run, steps, rng)


def write_folder(folder: Path, episodes: int) -> None:
    """Runs with that many episodes in all, 10,000 in each."""
    rng = random.Random(1)
    for number in range(0, episodes, 10 * PER_FILE):
        run = folder / f"sweep-{number // (10 * PER_FILE)}"
        for step in range(1, 11):
            _write(run, step, [_record(step, n // 8, short(rng, step, n)) for n in range(PER_FILE)])
        _about(run, 10, rng)


def _about(run: Path, steps: int, rng: random.Random) -> None:
    (run / "config.yaml").write_text(json.dumps({"name": run.name, "steps": steps, "env": {"use": "bench:Env"}}))
    lines = ({"step": step, **{name: rng.random() for name in CURATED}} for step in range(1, steps + 1))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.log").write_text("2026-11-01T10:00:00Z created\n")
    (run / "summary.json").write_text(json.dumps({"finished": True, "wall_seconds": 300.0}))


def _write(run: Path, step: int, records: list[EpisodeRecord]) -> None:
    file = episodes_file(run, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(compress(records))


def _record(step: int, group: int, episode: Episode) -> EpisodeRecord:
    sampled = sum(segment.origin == "sampled" for segment in episode.segments)
    return EpisodeRecord(step, group, episode, (0.5,) * sampled)


def short(rng: random.Random, step: int, number: int) -> Episode:
    """An episode of two turns and some hundred words."""
    failed = number % 9 == 0
    call = ToolCall("c0", "search" if number % 2 else "calculator", {"query": " ".join(rng.choices(WORDS, k=4))})
    result = "HTTP 503: upstream connect error" if failed else " ".join(rng.choices(WORDS, k=80))
    messages = (
        Message("system", "Use the tools."),
        Message("user", f"Task {number}: {' '.join(rng.choices(WORDS, k=60))}"),
        Message("assistant", " ".join(rng.choices(WORDS, k=30)), (call,)),
        Message("tool", result, tool_call_id="c0", name=call.name),
        Message("assistant", " ".join(rng.choices(WORDS, k=20))),
    )
    record = CallRecord(call, result, "tool_exception" if failed else "ok", 0.25)
    turns = (
        Turn(messages[2], (messages[3],), 0.0, "stop", 12, 1.0, 0.5, (record,)),
        Turn(messages[4], (), 0.0, "stop", 6, 0.5, 0.0),
    )
    segments = (
        Segment(tuple(range(20, 40)), "prompt", -1, 1),
        Segment(tuple(range(40, 52)), "sampled", 0, 2, (-0.5,) * 12, (step - 1,) * 12),
        Segment(tuple(range(52, 60)), "observation", 1, 3),
        Segment(tuple(range(60, 66)), "sampled", 2, 4, (-0.25,) * 6, (step - 1,) * 6),
    )
    reward = 0.0 if failed else rng.random()
    return Episode(
        *(f"s{step}/g{number // 8}/e{number}", Task(f"t{number}"), messages, turns, segments),
        *(StopReason.MAX_TURNS if failed else StopReason.ANSWERED, reward, {"solved": reward}),
        seconds=2.0,
    )


def _long(tokenizer: Tokenizer, text: list[str], tokens: int) -> tuple[Episode, TokenColumns]:
    """An episode of `tokens` tokens: a question, then turns with calls and results, with the learner's columns."""
    words = _stream(tokenizer, text)
    segments: list[Segment] = []
    messages: list[Message] = []
    turns: list[Turn] = []

    def take(count: int, origin: Origin) -> str:
        ids = tuple(next(words) for _ in range(count))
        extra = ((-0.5,) * count, (4,) * count) if origin == "sampled" else ()
        segments.append(Segment(ids, origin, len(segments) - 1, len(messages), *extra))
        return str(tokenizer.decode(list(ids)))

    messages.append(Message("user", take(200, "prompt")))
    while sum(len(segment.ids) for segment in segments) < tokens:
        call = ToolCall(f"c{len(turns)}", "search", {"query": "sum"})
        messages.append(said := Message("assistant", take(TURN[0], "sampled"), (call,)))
        messages.append(seen := Message("tool", take(TURN[1], "observation"), tool_call_id=call.id, name="search"))
        record = CallRecord(call, str(seen.content), "ok", 0.1)
        turns.append(Turn(said, (seen,), 0.0, "stop", TURN[0], 1.0, 0.1, (record,)))
    sampled = TURN[0] * len(turns)
    value = np.linspace(-1.0, 1.0, sampled)
    columns = TokenColumns(learner_logprobs=value - 2.0, advantages=value, flags=np.ones(sampled, dtype=np.int64))
    episode = replace(short(random.Random(2), 5, 0), id="long", messages=tuple(messages))
    return replace(episode, turns=tuple(turns), segments=tuple(segments)), columns


def _stream(tokenizer: Tokenizer, text: list[str]) -> Iterator[int]:
    while True:
        for line in text:
            yield from tokenizer.encode(line).ids
