"""Find the exact tokens of a client's messages: turns sampled here are recognized and keep their ids.

A client resends the whole conversation with every request, and every client library writes assistant turns back
slightly differently: arguments serialized again, reasoning dropped, white space added. `Conversations` stores the
turns that it sampled and finds the newest one that a request continues. The messages after it are appended to the
tokens of that turn, exactly as in training; nothing before it is re-rendered.

    prompt = session.prompt(incoming, tools)          # a branch of the transcript tree, ready for its completion
    completion = await engine.generate(prompt.ids, sampling, session=prompt.conversation)
    turn = session.add(prompt, completion)            # from now on this turn is recognized; send turn.sent

A turn is recognized by the ids minted for its tool calls, then by the canonical form of the conversation up to it,
then by its tokens. A request that matches no sampled turn becomes a branch from an empty context: it is rendered
from scratch, never merged, and `Prompt.drift` reports what differed.
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
    items_in,
)
from agentrl.types import Completion, Message, ToolCall

_sorted_json = json.JSONEncoder(
    sort_keys=True, ensure_ascii=False
).encode  # `json.dumps` makes a new encoder for each call


class Conversations:
    """The conversations of one or more clients with the policy.

    Not thread-safe: one `prompt` or `add` at a time. Code that runs one of them in a thread must hold `lock`.

    Args:
        renderer: converts messages to tokens, as in training.
        ledger: if given, every context of this session is a branch of this transcript's tree, and every turn is
        kept, as a recorder requires. Otherwise each conversation has a separate tree, so that old ones can be
        freed.
        max_tokens: maximum number of tokens in all remembered turns together; the least recently used turns are
        forgotten. Requests that continue them still work: their text is rendered from scratch.
        on_forgotten: called with the name of each conversation that has no remembered turns left.
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
        """The remembered turns; with a ledger, all turns in the order they were sampled."""
        return tuple(self._known.turns.values())

    def number(self) -> int:
        """Return a new number for a turn about to be sampled, so that its call ids are known in advance."""
        return next(self._numbers)

    def call_id(self, number: int, index: int) -> str:
        """Return the id for call `index` of turn `number`, unique across sessions and servers."""
        return f"call_{self.tag}{number:08x}{index:03x}"

    def prompt(self, incoming: Sequence[Incoming], tools: Tools = (), renderer: Renderer | None = None) -> Prompt:
        """Return the tokens of a request: those of its newest recognized turn, and of the messages after it.

        Args:
            incoming: the conversation.
            tools: the schemas offered.
            renderer: with the template options of the request; None for those of the run.

        Raises:
            TemplateError: the chat template refuses these messages.
            UnrenderableError: a message that is not recognized cannot be rendered.
        """
        renderer = renderer or self.renderer
        incoming = _in_call_order(incoming)
        offered = _digest(b"", _sorted_json(list(tools)))
        if renderer is not self.renderer:
            offered = _digest(offered, renderer.hash)
        forms = _forms(incoming)
        chains = list(itertools.accumulate(forms, _digest, initial=offered))[1:]  # of the messages up to each
        found, at, matched = self._find(incoming, chains)
        drift = self._drift(incoming, forms, offered, found, at)
        new = incoming[at + 1 :]
        if unsound := next((one for one in new if one.problem), None):
            raise UnrenderableError(unsound.place, unsound.problem)
        ours = {} if found is None else _renamed(incoming[at].message, found)
        messages = [self._with_own_ids(one.message, ours) for one in new]
        if found is not None:
            branch, conversation = found.branch.fork(), found.conversation
        else:
            conversation = f"{self.tag}/{next(self._openings)}"
            branch = (
                Transcript(renderer, tools)
                if self.ledger is None
                else self.ledger.fork(keep=0, tools=tools, renderer=renderer)
            )
        if found is not None or self.ledger is not None or not _rendered_whole(branch, messages):
            branch.extend(messages)
        if matched is Matched.FORK and (same := self._known.begins(branch.ids, offered)) is not None:
            self._known.turns.move_to_end(same.number)
            found, matched, drift, conversation = same, Matched.TOKENS, (), same.conversation
            last = max(n for n, one in enumerate(incoming) if one.message.role == "assistant")
            ids, thinking, branch = branch.ids, branch.thinking, same.branch.fork()
            branch.resume(ids, messages[last + 1 :] or messages[-1:], thinking=thinking)
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
        cut: bool = False,
    ) -> ServedTurn:
        """Remember a completion of `prompt`.

        Args:
            number: from `number()`, if the turn's call ids have already been sent.
            message: what the completion says, if that differs from its parsed tokens (because a stop text cut it).
            sent: what the client received, if that is not `message` with minted call ids.
            cut: a stop text cut it.

        Raises:
            ValueError: the completion's ids, logprobs and versions differ in length.
        """
        number = self.number() if number is None else number
        branch = prompt.branch.fork()
        prompt_tokens = len(branch.ids)
        message = branch.complete(completion, message=message, cut=cut)
        if sent is None:
            calls = tuple(replace(call, id=self.call_id(number, n)) for n, call in enumerate(message.tool_calls))
            sent = Incoming(replace(message, tool_calls=calls), tuple(arguments_text(call) for call in calls))
        form = _form(sent, {})
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
            prompt.chain,
            _digest(prompt.chain, form),
            _digest(b"", form),
            _digest(b"", _text(sent.message).strip()),
            prompt.tools,
            sent.raw_arguments,
        )
        self._known.add(turn)
        self._conversations[turn.conversation] += 1
        self._forget()
        return turn

    def keep(self, name: str, turn: ServedTurn, before: Sequence[Incoming], answer: Mapping[str, object]) -> None:
        """Allow a conversation to be continued by name for as long as its last turn is remembered.

        Args:
            name: must be unique.
            turn: its last turn.
            before: the messages before that turn.
            answer: what the client received.
        """
        if turn.number in self._known.turns:
            said = Incoming(turn.sent, turn.raw_arguments, turn=turn.number)
            self._known.by_name[name] = (*before, said)
            self._known.answers[name] = answer
            self._known.items |= items_in(answer)
            self._known.names.setdefault(turn.number, []).append(name)

    def kept(self, name: str) -> tuple[Incoming, ...] | None:
        """Return the conversation stored under a name; None if there is none or its last turn is forgotten."""
        return self._known.by_name.get(name)

    def answer(self, name: str) -> Mapping[str, object] | None:
        """The answer stored under a name, as the client received it."""
        return self._known.answers.get(name)

    def item(self, id: str) -> Mapping[str, object] | None:
        """An item of the stored answers, as the client received it."""
        return self._known.items.get(id)

    def remembers(self, conversation: str) -> bool:
        """Whether a turn of this conversation is remembered; once none is, `on_forgotten` is called."""
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

    def _find(
        self, incoming: Sequence[Incoming], chains: Sequence[bytes]
    ) -> tuple[ServedTurn | None, int, Matched]:
        """Return the newest sampled turn that the request continues, its position, and how it was recognized."""
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
        self, incoming: Sequence[Incoming], forms: Sequence[str], offered: bytes, found: ServedTurn | None, at: int
    ) -> tuple[EchoDifference, ...]:
        """Return what differs: the wording of the matched turn, and the origin of every assistant turn after
        it."""
        events = []
        if found is not None and _wording(incoming[at]) != _wording(Incoming(found.sent, found.raw_arguments)):
            events.append(EchoDifference(DriftKind.ECHO, at, found.number))
        for number, one in enumerate(incoming[at + 1 :], at + 1):
            if one.message.role != "assistant":
                continue
            form = _digest(b"", forms[number])
            words = _text(one.message).strip()
            alike = self._known.by_form.get(form, ()) if one.message.tool_calls or words else ()
            alike = alike or (self._known.by_words.get(_digest(b"", words), ()) if words else ())
            ours = self._known.of(one) or (alike[-1] if alike else None)
            if ours is None:
                events.append(EchoDifference(DriftKind.FOREIGN, number))
            elif form != ours.form:
                events.append(EchoDifference(DriftKind.REWORDED, number, ours.number))
            elif ours.tools != offered:
                events.append(EchoDifference(DriftKind.TOOLS, number, ours.number))
            else:
                events.append(EchoDifference(DriftKind.HISTORY, number, ours.number))
        return tuple(events)

    def _with_own_ids(self, message: Message, ours: Mapping[str, str]) -> Message:
        """Return the message with the client's call ids replaced by the transcript's."""

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


def _in_call_order(incoming: Sequence[Incoming]) -> list[Incoming]:
    """Put the results of parallel calls in the order of the calls, as the built-in loop does.

    Most chat templates write no call ids, so that only the order tells which result belongs to which call; clients
    send results in the order in which they came, too.
    """
    ordered = list(incoming)
    for at, one in enumerate(incoming):
        calls = {call.id: n for n, call in enumerate(one.message.tool_calls)}
        end = at + 1
        while len(calls) > 1 and end < len(incoming) and incoming[end].message.tool_call_id in calls:
            end += 1
        if end > at + 2:
            ordered[at + 1 : end] = sorted(
                incoming[at + 1 : end], key=lambda result: calls[result.message.tool_call_id or ""]
            )
    return ordered


def _rendered_whole(branch: Transcript, messages: Sequence[Message]) -> bool:
    """Put the first prompt into an empty branch as one piece; False if that requires `Transcript.extend`.

    The tokens are the same, but only those of the last message are attributed to their message. That is enough
    without a ledger; attributing all of them requires rendering the template once per message.

    Raises:
        TemplateError: the template refuses these messages.
    """
    renderer, vocabulary = branch.renderer, branch.renderer.vocabulary
    data = renderer.conversation(messages)
    prompt = renderer.render_data(data, branch.tools, generation_prompt=True)
    opening, closing = renderer.parser.think
    thinking = False
    if opening and opening in prompt:  # in the generation prompt, or only in a message?
        said = renderer.render_data(data, branch.tools)
        tail = prompt[len(said) :]
        if not prompt.startswith(said) or next((at for at, _, _ in vocabulary.split_control(tail)), -1) != 0:
            return False
        tail = vocabulary.unshield(tail)
        thinking = tail.rfind(opening) > tail.rfind(closing)
    branch.resume(vocabulary.encode(prompt), messages, thinking=thinking)
    return True


def arguments_text(call: ToolCall) -> str:
    """Return a call's arguments as JSON text."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _renamed(theirs: Message, turn: ServedTurn) -> dict[str, str]:
    """Map the client's call ids in `theirs` to the transcript's ids; calls correspond by their order.

    A call that was announced and turned out malformed is not in the transcript.
    """
    sound = [isinstance(_canonical(raw), dict) for raw in turn.raw_arguments]
    told = [call.id for call, keep in zip(theirs.tool_calls, sound, strict=False) if keep]
    return {id: call.id for id, call in zip(told, turn.message.tool_calls, strict=False)}


def _text(message: Message) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def _canonical(text: str) -> Any:
    """Parse JSON text; return other text without surrounding white space."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()
    return text.strip() if unsound(value) else value


def _forms(incoming: Sequence[Incoming]) -> list[str]:
    """Return the key of each message of a conversation."""
    forms = []
    places: dict[str, str] = {}
    for number, one in enumerate(incoming):
        forms.append(_form(one, places))
        if one.message.role == "assistant":  # results refer to calls by position: some clients rename the ids
            places |= {call.id: f"{number}/{n}" for n, call in enumerate(one.message.tool_calls)}
    return forms


def _form(one: Incoming, places: Mapping[str, str]) -> str:
    """Return the key by which a message is recognized: the same however client libraries write it.

    Assistant turns: content without surrounding white space, and calls by name and parsed arguments; reasoning and
    ids are ignored. Tool results refer to their call by position. All other messages are compared as they are.
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
    return _sorted_json(parts)


def _wording(one: Incoming) -> tuple[Any, ...]:
    """Return the exact text of an assistant turn."""
    message = one.message
    ids: Iterable[str] = (call.id for call in message.tool_calls)
    return _text(message), message.reasoning or "", tuple(ids), one.raw_arguments


def _digest(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
