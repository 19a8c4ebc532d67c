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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.chat.parsers.parser import unsound
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.serve.turns import (
    DriftKind,
    EchoDifference,
    Incoming,
    KnownTurns,
    Matched,
    Prompt,
    ServedTurn,
    Tools,
    UnrenderableError,
)
from agentrl.types import Completion, Message, ToolCall


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
        self._known = KnownTurns()
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
