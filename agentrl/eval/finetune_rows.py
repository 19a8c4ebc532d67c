"""Episodes as rows for supervised fine-tuning: export the episodes of a run or an evaluation.

`openai` is the chat format of OpenAI's fine-tuning files (also what `warmup.demonstrations` reads): one JSON
object per line with `messages` and `tools`. `hf` is a parquet file of the same rows for `datasets` and TRL; there
arguments and tools are JSON text, because Arrow would give every call the arguments of all. `tokens` is a parquet
file of the exact tokens of the run, which needs no chat template: `input_ids`, and `labels` that are -100 on every
token that the policy did not sample. `jsonl` is the whole record: ids, log-probabilities, rewards, timings
(`agentrl.run_folder.records`).
"""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.chat.messages import write_message
from agentrl.chat.transcript import rows_of
from agentrl.env.solved import NOT_DECLARED, reaches
from agentrl.errors import ConfigError
from agentrl.rollout.episode_metrics import is_malformed
from agentrl.run_folder.records import EpisodeRecord, encode, iter_records, recorded_steps
from agentrl.types import Episode, Message

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["openai", "hf", "tokens", "jsonl"]
UNDECLARED = "without a definition of solved"
NOT_TRAINED = -100
"""The label of a token without a loss, as PyTorch's cross-entropy has it."""
IMAGES = "--format {}: an episode holds parts (images); export it with --format openai or jsonl"


@dataclass
class Selection:
    """Which episodes are exported; `left_out` counts the others by reason while they pass.

    Args:
        steps: (first, last) step; None if that end is open.
        min_reward: minimum reward.
        solved: only solved ones.
        malformed: also those in which the policy wrote a call that cannot be read or is invalid.
        baselines: also the greedy episodes that `advantage: remax` compares with.
    """

    steps: tuple[int | None, int | None] = (None, None)
    min_reward: float | None = None
    solved: bool = False
    malformed: bool = False
    baselines: bool = False
    left_out: Counter[str] = field(default_factory=Counter)

    def records(self, run: Path) -> Iterator[EpisodeRecord]:
        """The chosen records of a run folder, in its order; infrastructure failures never.

        Raises:
            ConfigError: there are no such steps, or solved ones are wanted and nothing declares what that is.
            CheckpointError: a file is damaged.
        """
        first, last = self.steps
        if not run.is_dir():
            raise ConfigError(f"{run}: no such folder; give a run folder")
        recorded = recorded_steps(run)
        steps = [s for s in recorded if (first is None or s >= first) and (last is None or s <= last)]
        if not steps:
            have = f"it has steps {recorded[0]} to {recorded[-1]}" if recorded else "it holds no episodes"
            raise ConfigError(f"{run}: {have}, and the chosen range includes none of them")
        chosen = False
        for step in steps:
            for record in iter_records(run, step):
                reason = self._reason(record)
                if reason:
                    self.left_out[reason] += 1
                else:
                    chosen = True
                    yield record
        if self.left_out[UNDECLARED] and not chosen and not self.left_out["not solved"]:
            raise ConfigError(
                f"{run}: --solved: `solved` is {NOT_DECLARED}, or was not when these episodes were "
                "recorded; choose with --min-reward instead"
            )

    def _reason(self, record: EpisodeRecord) -> str:
        """Why an episode is left out; empty if it is not."""
        episode = record.episode
        if record.baseline and not self.baselines:
            return "greedy baselines"
        if episode.error is not None:
            return "failed in the infrastructure"
        if self.solved and episode.solved is None:
            return UNDECLARED
        if self.solved and not episode.solved:
            return "not solved"
        if self.min_reward is not None and not reaches(episode.reward or 0.0, self.min_reward):
            return f"reward below {self.min_reward:g}"
        if not self.malformed and is_malformed(episode):
            return "with a malformed call"
        return ""


def conversations(episode: Episode) -> list[tuple[Message, ...]]:
    """The conversations of an episode: one, and one more for each branch in which the policy spoke as well."""
    orders = _spoken_orders(episode)
    if len(orders) < 2:
        return [episode.messages] if episode.turns else []
    return [tuple(episode.messages[i] for i in order) for order in orders]


def _spoken_orders(episode: Episode) -> list[tuple[int, ...]]:
    """The messages of each branch up to the policy's last one, without those that another branch continues."""
    inner = {segment.parent for segment in episode.segments}
    found: dict[tuple[int, ...], None] = {}
    for leaf in range(len(episode.segments)):
        path, node = [], leaf
        while node >= 0 and leaf not in inner:
            path.append(episode.segments[node])
            node = path[-1].parent
        if any(segment.origin == "sampled" for segment in path):
            order = list(dict.fromkeys(s.message for s in reversed(path) if s.message is not None))
            while order and episode.messages[order[-1]].role != "assistant":
                order.pop()
            found[tuple(order)] = None
    return [one for one in found if not any(one != other and one == other[: len(one)] for other in found)]


def openai_rows(records: Iterable[EpisodeRecord]) -> Iterator[dict[str, Any]]:
    """One row for each conversation that ends with the policy: `messages`, and `tools` if there are any."""
    for record in records:
        for messages in conversations(record.episode):
            said = max((n for n, m in enumerate(messages) if m.role == "assistant"), default=-1)
            if said >= 0:
                row: dict[str, Any] = {"messages": [write_message(m, extended=True) for m in messages[: said + 1]]}
                yield row | ({"tools": list(record.episode.tools)} if record.episode.tools else {})


def export(records: Iterable[EpisodeRecord], format: Format) -> Iterator[bytes]:
    """The content of the file, in pieces.

    Raises:
        ConfigError: `hf` and `tokens` need pyarrow and cannot hold images.
    """
    if format == "jsonl":
        return (encode(record) + b"\n" for record in records)
    if format == "tokens":
        return _parquet(token_rows(records), format)
    rows = openai_rows(records)
    if format == "openai":
        return (json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n" for row in rows)
    return _parquet((_hf_row(row) for row in rows), format)


def token_rows(records: Iterable[EpisodeRecord]) -> Iterator[dict[str, list[int]]]:
    """One row for each context of an episode: its `input_ids`, and `labels` of the same length.

    Each sampled token has a label in exactly one row, as in training: a branch repeats what came before it as
    context.

    Raises:
        ConfigError: a message holds an image, which the tokens alone do not say, or there are no tokens: an
            endpoint played the episode.
    """
    for record in records:
        if any(not isinstance(message.content, str) for message in record.episode.messages):
            raise ConfigError(IMAGES.format("tokens"))
        if record.episode.turns and not record.episode.segments:
            raise ConfigError(
                f"--format tokens: episode {record.episode.id} has no tokens, as those that an endpoint plays; "
                "export it with --format openai or hf"
            )
        for row in rows_of(record.episode.segments):
            labels = [i if trained else NOT_TRAINED for i, trained in zip(row.ids, row.loss_mask, strict=True)]
            yield {"input_ids": list(row.ids), "labels": labels}


def _hf_row(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
    messages = [{name: message.get(name) for name in names} for message in row["messages"]]
    if any(isinstance(message["content"], list) for message in messages):
        raise ConfigError(IMAGES.format("hf"))
    return {"messages": messages, "tools": json.dumps(row.get("tools", []), ensure_ascii=False)}


def _parquet(rows: Iterable[Mapping[str, Any]], format: Format) -> Iterator[bytes]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise ConfigError(f"--format {format} needs pyarrow: pip install 'agentrl-train[parquet]'") from e
    schema = _token_schema() if format == "tokens" else _chat_schema()
    sink, waiting = _Sink(), iter(rows)
    with pq.ParquetWriter(sink, schema) as writer:
        while some := list(itertools.islice(waiting, ROW_GROUP)):
            writer.write_table(pa.Table.from_pylist(some, schema=schema))
            yield sink.taken()
    yield sink.taken()


def _chat_schema() -> pa.Schema:
    import pyarrow as pa

    text = pa.string()
    call = pa.struct(
        [("id", text), ("type", text), ("function", pa.struct([("name", text), ("arguments", text)]))]
    )
    message = pa.struct(
        [
            ("role", text),
            ("content", text),
            ("tool_calls", pa.list_(call)),
            ("tool_call_id", text),
            ("name", text),
            ("reasoning_content", text),
        ]
    )
    return pa.schema([("messages", pa.list_(message)), ("tools", text)])


def _token_schema() -> pa.Schema:
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    return pa.schema([("input_ids", ids), ("labels", ids)])


ROW_GROUP = 1000
"""Rows of parquet that are made at once."""


class _Sink(io.RawIOBase):
    """A file that is written at its end only, and hands over what was written."""

    def __init__(self) -> None:
        self._at, self._pieces = 0, list[bytes]()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any, /) -> int:
        piece = bytes(data)
        self._at += len(piece)
        self._pieces.append(piece)
        return len(piece)

    def taken(self) -> bytes:
        """What was written since the last call."""
        data, self._pieces = b"".join(self._pieces), []
        return data
