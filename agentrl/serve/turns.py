"""The turns sampled for clients, and the keys by which they are recognized."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.transcript import Transcript
from agentrl.types import Completion, Message

Tools = Sequence[Mapping[str, Any]]


class Matched(StrEnum):
    """How the turn that a prompt continues was recognized."""

    OPENING = "opening"
    """There is no assistant turn in the request."""
    CALL_ID = "call_id"
    """By the ids minted for its tool calls; the conversation before it is the one it was sampled after."""
    NAME = "name"
    """By the id of its response (`previous_response_id`); the conversation before it is the same."""
    FORM = "form"
    """By the canonical form of the conversation up to it."""
    TOKENS = "tokens"
    """The request, rendered from scratch, starts with the exact tokens of that turn and its context."""
    FORK = "fork"
    """Not at all: the request is a new branch, rendered from scratch."""


class DriftKind(StrEnum):
    """How a request differs from what was sampled here."""

    ECHO = "echo"
    """A sampled turn came back reworded with the same meaning; its ids are reused."""
    REWORDED = "reworded"
    """A sampled turn came back with different content or calls."""
    HISTORY = "history"
    """A sampled turn came back after different messages than it was sampled after."""
    TOOLS = "tools"
    """A sampled turn came back with different tools offered, or with different template options."""
    FOREIGN = "foreign"
    """An assistant turn that was not sampled in this session."""


@dataclass(frozen=True, slots=True)
class EchoDifference:
    """One difference; `message` is an index in the request, `turn` the number of the sampled turn, if any."""

    kind: DriftKind
    message: int
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message as sent by a client.

    Attributes:
        message: its content; tool calls carry the client's ids.
        raw_arguments: the text of each call's arguments as sent, if `message` is an assistant turn.
        problem: why it cannot be rendered from scratch (arguments that are not a JSON object); recognized turns
        need not be.
        place: where the problem is in the request, for errors.
        turn: number of the session's turn that this is, if the client named it; None to find out.
    """

    message: Message
    raw_arguments: tuple[str, ...] = ()
    problem: str = ""
    place: str = field(default="", compare=False)
    turn: int | None = None


class UnrenderableError(ValueError):
    """A message that must be rendered cannot be; `place` says where it is in the request."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(problem)
        self.place = place


@dataclass(frozen=True, slots=True, eq=False)
class ServedTurn:
    """One completion sampled in this session.

    Attributes:
        number: index of the turn in the session.
        branch: the transcript that ends with this completion; fork it, never extend it.
        message: the assistant message as parsed by the renderer, with the transcript's call ids.
        sent: the same message as the client receives it, with minted call ids.
        completion: ids, logprobs and versions.
        prompt_tokens: number of tokens that the completion continues.
        parent: number of the turn that this one continues; None after an empty context.
        conversation: name of the engine session that computes it.
        matched: how `parent` was recognized.
        drift: what differed in the request.
        prompted: identifies the request's conversation: its messages and tools.
    """

    number: int
    branch: Transcript
    message: Message
    sent: Message
    completion: Completion
    prompt_tokens: int
    parent: int | None
    conversation: str
    matched: Matched
    drift: tuple[EchoDifference, ...]
    prompted: bytes
    chain: bytes
    form: bytes
    words: bytes
    tools: bytes
    raw_arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request as tokens: `branch` ends with the generation prompt. Several turns may be added to one prompt."""

    branch: Transcript
    parent: int | None
    conversation: str
    matched: Matched
    drift: tuple[EchoDifference, ...]
    chain: bytes
    tools: bytes

    @property
    def ids(self) -> Sequence[int]:
        """The ids that the engine continues."""
        return self.branch.ids


@dataclass(slots=True)
class KnownTurns:
    """The remembered turns, indexed by the keys for recognizing them."""

    turns: OrderedDict[int, ServedTurn] = field(default_factory=OrderedDict)  # least recently used first
    by_chain: dict[bytes, list[ServedTurn]] = field(default_factory=dict)
    by_tokens: dict[bytes, list[ServedTurn]] = field(default_factory=dict)
    by_call: dict[str, ServedTurn] = field(default_factory=dict)
    by_form: dict[bytes, list[ServedTurn]] = field(default_factory=dict)  # the turn alone, wherever it comes back
    by_words: dict[bytes, list[ServedTurn]] = field(default_factory=dict)  # its text, without its calls
    by_name: dict[str, tuple[Incoming, ...]] = field(default_factory=dict)  # conversations that end with a turn
    answers: dict[str, Mapping[str, object]] = field(default_factory=dict)  # what clients received, by name
    items: dict[str, Mapping[str, object]] = field(default_factory=dict)  # what their answers consist of, by id
    names: dict[int, list[str]] = field(default_factory=dict)
    ends: dict[int, Counter[int]] = field(default_factory=dict)  # the last ids of the turns, by number of tokens
    tokens: int = 0

    def add(self, turn: ServedTurn) -> None:
        """Remember a turn."""
        ids = np.asarray(turn.branch.ids)
        self.turns[turn.number] = turn
        self.by_chain.setdefault(turn.chain, []).append(turn)
        self.by_tokens.setdefault(token_hash(turn.tools, ids).digest(), []).append(turn)
        self.by_form.setdefault(turn.form, []).append(turn)
        self.by_words.setdefault(turn.words, []).append(turn)
        for call in turn.sent.tool_calls:
            self.by_call[call.id] = turn
        self.ends.setdefault(len(ids), Counter())[int(ids[-1])] += 1
        self.tokens += len(ids)

    def drop_oldest(self) -> ServedTurn:
        """Forget the least recently used turn."""
        _, turn = self.turns.popitem(last=False)
        ids = np.asarray(turn.branch.ids)
        _take_out(self.by_chain, turn.chain, turn)
        _take_out(self.by_form, turn.form, turn)
        _take_out(self.by_words, turn.words, turn)
        _take_out(self.by_tokens, token_hash(turn.tools, ids).digest(), turn)
        for call in turn.sent.tool_calls:
            self.by_call.pop(call.id, None)
        for name in self.names.pop(turn.number, ()):
            for item in items_in(self.answers.pop(name)):
                del self.items[item]
            del self.by_name[name]
        last = self.ends[len(ids)]
        last[int(ids[-1])] -= 1
        if not last[int(ids[-1])]:
            del last[int(ids[-1])]
        if not last:
            del self.ends[len(ids)]
        self.tokens -= len(ids)
        return turn

    def of(self, one: Incoming) -> ServedTurn | None:
        """Return the turn that an assistant message claims to be, by its number or by the ids of its calls."""
        if one.turn is not None:
            return self.turns.get(one.turn)
        ids = [call.id for call in one.message.tool_calls]
        return next((self.by_call[id] for id in ids if id in self.by_call), None)

    def begins(self, ids: Sequence[int], offered: bytes) -> ServedTurn | None:
        """Return the longest turn whose tokens are a proper prefix of `ids`; the newest if there are several."""
        array = np.asarray(ids)
        counts = sorted(self.ends) if len(self.ends) < len(array) else range(1, len(array))
        ends = [count for count in counts if count < len(array) and array[count - 1] in self.ends.get(count, ())]
        found, hashed, at = None, token_hash(offered, array[:0]), 0
        for end in ends:
            hashed.update(array[at:end].tobytes())
            found, at = self.by_tokens.get(hashed.digest(), [found])[-1], end
        return found


def items_in(answer: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """The output items of an answer, by id."""
    output = answer.get("output")
    return {item["id"]: item for item in output} if isinstance(output, list) else {}


def _take_out(turns: dict[bytes, list[ServedTurn]], key: bytes, turn: ServedTurn) -> None:
    same = turns[key]
    same.remove(turn)
    if not same:
        del turns[key]


def token_hash(tools: bytes, ids: NDArray[np.int64]) -> hashlib.blake2b:
    """Hash tokens and the tools offered; more tokens may be added to it."""
    hashed = hashlib.blake2b(tools, digest_size=16)
    hashed.update(ids.tobytes())
    return hashed
