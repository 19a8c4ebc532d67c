"""Which tokens a client's messages are: turns that were sampled here are recognised, and keep their ids.

A client sends the whole conversation again with every request, and every client library writes the assistant turn
back a little differently: arguments serialized again, reasoning dropped, white space added. `Conversations`
holds the turns that it sampled and finds the newest one that a request continues. What follows is appended to the
tokens of that turn, exactly as in training; nothing before it is rendered again.

    prompt = session.prompt(incoming, tools)          # a branch of the transcript tree, ready for its completion
    completion = await engine.generate(prompt.ids, sampling, session=prompt.conversation)
    turn = session.add(prompt, completion)            # from now on this turn is recognised; turn.sent goes out

A turn is recognised by the ids that were minted for its tool calls, then by the canonical form of the conversation
up to it, then by its tokens. A request that agrees with no turn of ours is a branch from an empty context: it is
rendered afresh, never merged, and `Prompt.drift` says what differed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.parsers.base import unsound
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.types import Completion, Message, ToolCall

Tools = Sequence[Mapping[str, Any]]


class Matched(StrEnum):
    """How the turn was recognised that a prompt goes on from."""

    OPENING = "opening"
    """There is no assistant turn in the request."""
    CALL_ID = "call_id"
    """By the ids minted for its tool calls, and the conversation before it is the one it was sampled after."""
    NAME = "name"
    """By the id of its response (`previous_response_id`), and the conversation before it is the same."""
    FORM = "form"
    """By the canonical form of the conversation up to it."""
    TOKENS = "tokens"
    """The request, rendered afresh, begins with the very tokens of that turn and its context."""
    FORK = "fork"
    """Not at all: the request is a new branch, rendered afresh."""


class DriftKind(StrEnum):
    """How a request differs from what was sampled here."""

    ECHO = "echo"
    """A turn of ours came back in other words of the same meaning; its ids are reused."""
    REWORDED = "reworded"
    """A turn of ours came back with other content, or other calls."""
    HISTORY = "history"
    """A turn of ours came back after other messages than it was sampled after."""
    TOOLS = "tools"
    """A turn of ours came back with other tools on offer."""
    FOREIGN = "foreign"
    """An assistant turn that was not sampled in this session."""


@dataclass(frozen=True, slots=True)
class EchoDifference:
    """One difference; `message` counts in the request, `turn` is the number of our turn where it is one."""

    kind: DriftKind
    message: int
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """One message as a client sent it.

    Attributes:
        message: what it says; tool calls carry the client's ids.
        raw_arguments: the text of each call's arguments as sent, where `message` is an assistant turn.
        problem: why it cannot be rendered afresh (arguments that are no JSON object); a recognised turn is not.
        turn: number of the turn of the session that this is, where the client named it; None finds out.
    """

    message: Message
    raw_arguments: tuple[str, ...] = ()
    problem: str = ""
    turn: int | None = None


class UnrenderableError(ValueError):
    """A message that must be rendered cannot be: `message` counts in the request."""

    def __init__(self, message: int, problem: str) -> None:
        super().__init__(problem)
        self.message = message


@dataclass(frozen=True, slots=True, eq=False)
class ServedTurn:
    """One completion that was sampled in this session.

    Attributes:
        number: counts the turns of the session.
        branch: the transcript that ends with this completion; fork it, never extend it.
        message: the assistant message as the renderer reads it, with the transcript's own call ids.
        sent: the same as the client gets it, with minted call ids.
        completion: ids, logprobs and versions.
        prompt_tokens: how many tokens the completion continues.
        parent: number of the turn that this one goes on from; None after an empty context.
        conversation: the engine session that computes it.
        matched: how `parent` was recognised.
        drift: what differed in the request.
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
    chain: bytes
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
        """What the engine continues."""
        return self.branch.ids


@dataclass(slots=True)
class _Known:
    """The turns that are remembered, by what they are recognised by."""

    turns: OrderedDict[int, ServedTurn] = field(default_factory=OrderedDict)  # least recently used first
    by_chain: dict[bytes, list[ServedTurn]] = field(default_factory=dict)
    by_tokens: dict[bytes, list[ServedTurn]] = field(default_factory=dict)
    by_call: dict[str, ServedTurn] = field(default_factory=dict)
    by_name: dict[str, tuple[Incoming, ...]] = field(default_factory=dict)  # conversations that end with a turn
    names: dict[int, list[str]] = field(default_factory=dict)
    ends: Counter[tuple[int, int]] = field(default_factory=Counter)  # (tokens, last id) of the turns
    tokens: int = 0

    def add(self, turn: ServedTurn) -> None:
        ids = np.asarray(turn.branch.ids)
        self.turns[turn.number] = turn
        self.by_chain.setdefault(turn.chain, []).append(turn)
        self.by_tokens.setdefault(_token_hash(turn.tools, ids).digest(), []).append(turn)
        for call in turn.sent.tool_calls:
            self.by_call[call.id] = turn
        self.ends[len(ids), int(ids[-1])] += 1
        self.tokens += len(ids)

    def drop_oldest(self) -> ServedTurn:
        _, turn = self.turns.popitem(last=False)
        ids = np.asarray(turn.branch.ids)
        _take_out(self.by_chain, turn.chain, turn)
        _take_out(self.by_tokens, _token_hash(turn.tools, ids).digest(), turn)
        for call in turn.sent.tool_calls:
            self.by_call.pop(call.id, None)
        for name in self.names.pop(turn.number, ()):
            del self.by_name[name]
        end = len(ids), int(ids[-1])
        self.ends[end] -= 1
        if not self.ends[end]:
            del self.ends[end]
        self.tokens -= len(ids)
        return turn

    def of(self, one: Incoming) -> ServedTurn | None:
        """The turn that an assistant message says it is, by its number or by the ids of its calls."""
        if one.turn is not None:
            return self.turns.get(one.turn)
        ids = [call.id for call in one.message.tool_calls]
        return next((self.by_call[id] for id in ids if id in self.by_call), None)

    def begins(self, ids: Sequence[int], offered: bytes) -> ServedTurn | None:
        """The turn with most tokens that `ids` begin with and go beyond; the newest of several."""
        array = np.asarray(ids)
        ends = [count for count, id in enumerate(array[:-1].tolist(), 1) if (count, id) in self.ends]
        found, hashed, at = None, _token_hash(offered, array[:0]), 0
        for end in ends:
            hashed.update(array[at:end].tobytes())
            found, at = self.by_tokens.get(hashed.digest(), [found])[-1], end
        return found


def _take_out(turns: dict[bytes, list[ServedTurn]], key: bytes, turn: ServedTurn) -> None:
    same = turns[key]
    same.remove(turn)
    if not same:
        del turns[key]


def _token_hash(tools: bytes, ids: NDArray[np.int64]) -> hashlib.blake2b:
    """Of tokens and the tools that were on offer; more tokens may be added to it."""
    hashed = hashlib.blake2b(tools, digest_size=16)
    hashed.update(ids.tobytes())
    return hashed


class Conversations:
    """The conversations that one or many clients have with the policy.

    Not safe across threads: one `prompt` or `add` at a time. Who runs one of them in a thread holds `lock`.

    Args:
        renderer: turns messages into tokens, the same as in training.
        ledger: where given, every context of this session is a branch of this transcript's tree, and every turn is
            kept: what a recorder needs. Otherwise each conversation has a tree of its own, so that old ones go.
        max_tokens: bound on the tokens of all remembered turns together; the turns not used for longest are
            forgotten. They are still understood then: their text is rendered afresh.
        on_forgotten: told the name of each conversation that nothing is remembered of any more.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        ledger: Transcript | None = None,
        max_tokens: int | None = None,
        on_forgotten: Callable[[str], None] | None = None,
    ) -> None:
        if ledger is not None and max_tokens is not None:
            raise ValueError("a session with a ledger keeps every turn: max_tokens has no effect there")
        self.renderer = renderer
        self.ledger = ledger
        self.tag = secrets.token_hex(5)
        self.lock = asyncio.Lock()
        self.drift: Counter[DriftKind] = Counter()
        self._max_tokens, self._on_forgotten = max_tokens, on_forgotten
        self._known = _Known()
        self._numbers, self._openings = itertools.count(), itertools.count()
        self._conversations: Counter[str] = Counter()

    @property
    def turns(self) -> tuple[ServedTurn, ...]:
        """The turns that are remembered; with a ledger, all of them in the order in which they were sampled."""
        return tuple(self._known.turns.values())

    def number(self) -> int:
        """A fresh number for a turn that is about to be sampled: its call ids are known before it is complete."""
        return next(self._numbers)

    def call_id(self, number: int, index: int) -> str:
        """The id minted for call `index` of turn `number`; no other session or server mints the same."""
        return f"call_{self.tag}{number:08x}{index:03x}"

    def prompt(self, incoming: Sequence[Incoming], tools: Tools = ()) -> Prompt:
        """The tokens of a request: those of the newest turn of ours in it, and what came after it.

        Raises:
            TemplateError: the chat template refuses these messages.
            UnrenderableError: a message that is not recognised cannot be rendered.
        """
        offered = _digest(b"", json.dumps(list(tools), sort_keys=True, ensure_ascii=False))
        chains = self._chains(incoming, offered)
        found, at, matched = self._find(incoming, chains)
        drift = self._drift(incoming, offered, found, at)
        new = incoming[at + 1 :]
        if problem := next(((at + 1 + n, one.problem) for n, one in enumerate(new) if one.problem), None):
            raise UnrenderableError(*problem)
        ours = {} if found is None else _renamed(incoming[at].message, found)
        messages = [self._with_own_ids(one.message, ours) for one in new]
        if found is not None:
            branch, conversation = found.branch.fork(), found.conversation
        else:
            conversation = f"{self.tag}/{next(self._openings)}"
            branch = (
                Transcript(self.renderer, tools) if self.ledger is None else self.ledger.fork(keep=0, tools=tools)
            )
        if found is not None or self.ledger is not None or not _rendered_whole(branch, messages):
            branch.extend(messages)
        if matched is Matched.FORK and (same := self._known.begins(branch.ids, offered)) is not None:
            self._known.turns.move_to_end(same.number)
            found, matched, drift, conversation = same, Matched.TOKENS, (), same.conversation
            last = max(n for n, one in enumerate(incoming) if one.message.role == "assistant")
            ids, branch = branch.ids, same.branch.fork()
            branch.resume(ids, messages[last + 1 :] or messages[-1:])
        self.drift.update(event.kind for event in drift)
        parent = None if found is None else found.number
        return Prompt(branch, parent, conversation, matched, drift, chains[-1] if chains else offered, offered)

    def add(
        self,
        prompt: Prompt,
        completion: Completion,
        *,
        number: int | None = None,
        message: Message | None = None,
        sent: Incoming | None = None,
    ) -> ServedTurn:
        """Remember a completion of `prompt`.

        Args:
            number: from `number()`, where the turn's call ids have been told already.
            message: what the completion says, where that is not what its tokens read as (cut by a stop text).
            sent: what the client got, where that is not `message` with minted call ids.

        Raises:
            ValueError: the completion's ids, logprobs and versions differ in length.
        """
        number = self.number() if number is None else number
        branch = prompt.branch.fork()
        prompt_tokens = len(branch.ids)
        message = branch.complete(completion, message=message)
        if sent is None:
            calls = tuple(replace(call, id=self.call_id(number, n)) for n, call in enumerate(message.tool_calls))
            sent = Incoming(replace(message, tool_calls=calls), tuple(arguments_text(call) for call in calls))
        turn = ServedTurn(
            number,
            branch,
            message,
            sent.message,
            completion,
            prompt_tokens,
            prompt.parent,
            prompt.conversation,
            prompt.matched,
            prompt.drift,
            _digest(prompt.chain, _form(sent, {})),
            prompt.tools,
            sent.raw_arguments,
        )
        self._known.add(turn)
        self._conversations[turn.conversation] += 1
        self._forget()
        return turn

    def keep(self, name: str, turn: ServedTurn, before: Sequence[Incoming]) -> None:
        """Let a conversation be gone on from by name for as long as its last turn is remembered.

        Args:
            name: of no other conversation.
            turn: what it ends with.
            before: what it says before that.
        """
        if turn.number in self._known.turns:
            said = Incoming(turn.sent, turn.raw_arguments, turn=turn.number)
            self._known.by_name[name] = (*before, said)
            self._known.names.setdefault(turn.number, []).append(name)

    def kept(self, name: str) -> tuple[Incoming, ...] | None:
        """The conversation that was kept under a name; None where none was, or its last turn is forgotten."""
        return self._known.by_name.get(name)

    def remembers(self, conversation: str) -> bool:
        """Whether a turn of this conversation is remembered; `on_forgotten` is told of it only then."""
        return self._conversations[conversation] > 0

    def _forget(self) -> None:
        if self._max_tokens is not None:
            while self._known.tokens > self._max_tokens and len(self._known.turns) > 1:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        name = self._known.drop_oldest().conversation
        self._conversations[name] -= 1
        if not self._conversations[name]:
            del self._conversations[name]
            if self._on_forgotten is not None:
                self._on_forgotten(name)

    # -- recognition -------------------------------------------------------------------------------------------

    def _chains(self, incoming: Sequence[Incoming], offered: bytes) -> list[bytes]:
        """A digest of the canonical conversation up to each message."""
        chains, chain = [], offered
        places: dict[str, str] = {}
        for number, one in enumerate(incoming):
            chain = _digest(chain, _form(one, places))
            chains.append(chain)
            if one.message.role == "assistant":  # results name calls by their place: some clients rename the ids
                places |= {call.id: f"{number}/{n}" for n, call in enumerate(one.message.tool_calls)}
        return chains

    def _find(
        self, incoming: Sequence[Incoming], chains: Sequence[bytes]
    ) -> tuple[ServedTurn | None, int, Matched]:
        """The newest turn of ours that the request goes on from, its place, and how it was recognised."""
        assistants = [n for n, one in enumerate(incoming) if one.message.role == "assistant"]
        for at in reversed(assistants):
            candidates = self._known.by_chain.get(chains[at])
            if not candidates:
                continue
            named = self._known.of(incoming[at])
            found = named if named in candidates else candidates[-1]
            self._known.turns.move_to_end(found.number)
            if named is not found:
                return found, at, Matched.FORM
            return found, at, Matched.CALL_ID if incoming[at].turn is None else Matched.NAME
        return None, -1, Matched.FORK if assistants else Matched.OPENING

    def _drift(
        self, incoming: Sequence[Incoming], offered: bytes, found: ServedTurn | None, at: int
    ) -> tuple[EchoDifference, ...]:
        """What differs: the turn that was found in its wording, every assistant turn after it in its origin."""
        events = []
        if found is not None and _wording(incoming[at]) != _wording(Incoming(found.sent, found.raw_arguments)):
            events.append(EchoDifference(DriftKind.ECHO, at, found.number))
        for number, one in enumerate(incoming[at + 1 :], at + 1):
            if one.message.role != "assistant":
                continue
            ours = self._known.of(one)
            if ours is None:
                events.append(EchoDifference(DriftKind.FOREIGN, number))
            elif _form(one, {}) != _form(Incoming(ours.sent, ours.raw_arguments), {}):
                events.append(EchoDifference(DriftKind.REWORDED, number, ours.number))
            elif ours.tools != offered:
                events.append(EchoDifference(DriftKind.TOOLS, number, ours.number))
            else:
                events.append(EchoDifference(DriftKind.HISTORY, number, ours.number))
        return tuple(events)

    def _with_own_ids(self, message: Message, ours: Mapping[str, str]) -> Message:
        """The message with the transcript's call ids where the client's stand for them."""

        def own(id: str) -> str:
            if id in ours:
                return ours[id]
            turn = self._known.by_call.get(id)
            return id if turn is None else _renamed(turn.sent, turn).get(id, id)

        if message.tool_call_id is not None:
            return replace(message, tool_call_id=own(message.tool_call_id))
        if message.tool_calls:
            return replace(
                message, tool_calls=tuple(replace(call, id=own(call.id)) for call in message.tool_calls)
            )
        return message


def _rendered_whole(branch: Transcript, messages: Sequence[Message]) -> bool:
    """Put the first prompt into an empty branch as one piece; False where only `Transcript.extend` can say it.

    The tokens are the same. Which of them are whose message is known of the last one only, which is enough where
    no ledger is kept; to tell them all apart the template must be rendered once for each message.

    Raises:
        TemplateError: the template refuses these messages.
    """
    renderer, vocabulary = branch.renderer, branch.renderer.vocabulary
    data = [renderer.data(message) for message in messages]
    prompt = renderer.render_data(data, branch.tools, generation_prompt=True)
    opening, closing = renderer.parser.think
    thinking = False
    if opening and opening in vocabulary.unshield(prompt):  # in the generation prompt, or only in a message?
        said = renderer.render_data(data, branch.tools)
        tail = prompt[len(said) :]
        if not prompt.startswith(said) or next((at for at, _, _ in vocabulary.split_control(tail)), -1) != 0:
            return False
        tail = vocabulary.unshield(tail)
        thinking = tail.rfind(opening) > tail.rfind(closing)
    branch.resume(vocabulary.encode(prompt), messages, thinking=thinking)
    return True


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as JSON text."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _renamed(theirs: Message, turn: ServedTurn) -> dict[str, str]:
    """The transcript's id of each call of a turn, by the id in `theirs`; calls correspond by their order.

    A call that was told and turned out malformed is none of the transcript's.
    """
    sound = [isinstance(_canonical(raw), dict) for raw in turn.raw_arguments]
    told = [call.id for call, keep in zip(theirs.tool_calls, sound, strict=False) if keep]
    return {id: call.id for id, call in zip(told, turn.message.tool_calls, strict=False)}


def _text(message: Message) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def _canonical(text: str) -> Any:
    """JSON text as what it says; other text as it is, white space around it aside."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    return text.strip() if unsound(value) else value


def _form(one: Incoming, places: Mapping[str, str]) -> str:
    """What a message is recognised by: the same for every way in which client libraries write it.

    Assistant turns: content without the white space around it, calls by name and parsed arguments; reasoning and
    ids do not count. Tool results name their call by its place. All other messages count as they are.
    """
    message = one.message
    if message.role == "assistant":
        raw = one.raw_arguments or tuple(arguments_text(call) for call in message.tool_calls)
        calls = [[call.name, _canonical(text)] for call, text in zip(message.tool_calls, raw, strict=True)]
        parts: list[Any] = ["assistant", _text(message).strip(), calls]
    elif message.role == "tool":
        id = message.tool_call_id or ""
        parts = ["tool", places.get(id, id), _text(message)]
    else:
        parts = [message.role, message.name, _text(message)]
    return json.dumps(parts, sort_keys=True, ensure_ascii=False)


def _wording(one: Incoming) -> tuple[Any, ...]:
    """An assistant turn letter by letter."""
    message = one.message
    ids: Iterable[str] = (call.id for call in message.tool_calls)
    return _text(message), message.reasoning or "", tuple(ids), one.raw_arguments


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
