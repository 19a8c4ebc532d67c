"""The prefix proof: conversations of every shape, rendered turn by turn and compared token by token.

For each assistant turn, the transcript's context must equal the template's own rendering of the conversation so
far. If it does not, either the template rewrites earlier turns (the user chooses how to handle that), or what it
appends cannot be derived (the template cannot be used as it stands).
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from agentrl.chat.demonstrate import completion_of, with_ids
from agentrl.chat.parsers import parser_names
from agentrl.chat.roundtrip import REQUIRED, RoundTrip
from agentrl.chat.template import Renderer, same_meaning
from agentrl.chat.token_check import TokenDrift, check_tokens
from agentrl.chat.transcript import Transcript
from agentrl.errors import TemplateError
from agentrl.types import Completion, Message, ToolCall

if TYPE_CHECKING:
    from agentrl.chat.template import Renderer

Kind = Literal["rewrite", "append", "refused"]

TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "limit": {"type": "integer", "description": "How many."},
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "terms": {"type": "array", "items": {"type": "number"}, "description": "Numbers."},
                },
            },
        },
    },
)

_WORDS = (
    "plain",
    "naïve café",
    "日本語のテキスト",
    "👩‍🔬🎉",
    "a\nb\n\nc",
    "  spaces  ",
    "x = {'k': [1]}",
    "<b>tag</b>",
    "\\n",
)


@dataclass(frozen=True, slots=True)
class ProbeConversation:
    """A named, generated conversation."""

    shape: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TemplateFinding:
    """The first place where a transcript and the template's rendering of the conversation differ.

    `kind` is "rewrite" (the template renders an earlier message differently than when it was the newest), "append"
    (what it appends was derived incorrectly) or "refused" (it does not render this conversation).
    """

    kind: Kind
    shape: str
    message: int
    role: str
    token: int
    was: str
    became: str
    tools: bool = False
    """Whether the conversation offers tools."""

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"{self.shape}: refused: {self.became}"
        did = "rewrites" if self.kind == "rewrite" else "appends otherwise than derived at"
        return (
            f"{self.shape}: the template {did} message {self.message} ({self.role}) from token {self.token} on: "
            f"{self.was!r} became {self.became!r}"
        )


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the proof: how many conversations and turns were compared, and every finding."""

    conversations: int
    turns: int
    findings: tuple[TemplateFinding, ...]
    shows_tools: bool = True
    """Whether a prompt changes when tools are offered."""
    called: int = 0
    """Conversations with a tool call, its result, and an answer that used it."""
    round_trip: RoundTrip = field(default_factory=lambda: RoundTrip(True))
    """Which calls parse back as they were written."""
    written_by: str = ""
    """The parser, and how it was chosen."""
    rendered: frozenset[bool] = frozenset((True, False))
    """Whether tools were offered in the conversations of which a turn was rendered."""
    one_of_two: bool = False
    """Tools choose between two templates, so what is wrong with the other one does not matter."""

    @property
    def rewrites(self) -> tuple[TemplateFinding, ...]:
        """Conversations in which the template rewrites earlier turns."""
        return tuple(f for f in self.findings if f.kind == "rewrite")

    @property
    def wrong(self) -> tuple[TemplateFinding, ...]:
        """Conversations in which the appended text was derived incorrectly."""
        return tuple(f for f in self.findings if f.kind == "append")

    @property
    def refused(self) -> tuple[TemplateFinding, ...]:
        """Conversations that the template refuses to render."""
        return tuple(f for f in self.findings if f.kind == "refused")

    def require(self, *, tools: bool = False) -> None:
        """Raise unless every context that the template accepts can be built by appending.

        Args:
            tools: the run offers tools, so the template must show them.

        Raises:
            TemplateError: a derived delta is wrong, or no conversation could be rendered. With tools, also: the
            template does not show them, no conversation that calls one could be rendered, or the parser does not
            read what the template writes.
        """
        if tools and not self.shows_tools:
            raise TemplateError(
                "the chat template ignores tools: the policy would never see which it may call; use a template "
                "that lists them (model.chat_template: chatml is one), or describe them in the system prompt"
            )
        if self.turns == 0 or (self.one_of_two and tools not in self.rendered):
            refused = [f for f in self.refused if f.tools == tools] or self.refused
            why = f": {refused[0].became}" if refused else ""
            raise TemplateError(f"the chat template cannot render any of the test conversations{why}")
        if tools:
            self._require_calls()
        wrong = [f for f in self.wrong if f.tools == tools or not self.one_of_two]
        if wrong:
            raise TemplateError(
                f"what this chat template appends cannot be derived: {wrong[0]}; "
                "use a template that only appends (model.chat_template: chatml is one)"
            )

    def _require_calls(self) -> None:
        found = self.round_trip
        if not found.readable:
            misread = next((m for m in found.misread if m.shape in REQUIRED), None)
            if misread is None:
                raise TemplateError(
                    f"the chat template writes no tool call that a policy could sample: {found.refused[0]}; use a "
                    "template that does (model.chat_template: chatml is one)"
                )
            names = ", ".join(parser_names())
            raise TemplateError(
                f"{self.written_by} does not read the tool calls of this chat template, so no tool would run: "
                f"{misread}; set model.parser to the format of this model ({names}), or to a parser of your own "
                "(module:Name)"
            )
        if not self.called:
            refused = [f for f in self.refused if "tool" in f.shape or "calls" in f.shape]
            why = f": {refused[0]}" if refused else ""
            raise TemplateError(
                f"the chat template renders no conversation in which a tool is called and answered{why}; use a "
                "template that does (model.chat_template: chatml is one)"
            )

    def summary(self) -> str:
        """Return a summary of a few lines."""
        lines = [f"{self.turns} turns of {self.conversations} conversations compared token by token"]
        if not self.findings:
            lines[0] += ": the template only appends"
        if not self.shows_tools:
            lines.append("the template ignores tools")
        for kind, what in (("wrong", "derived wrongly"), ("rewrites", "rewritten"), ("refused", "refused")):
            found: tuple[TemplateFinding, ...] = getattr(self, kind)
            if found:
                lines.append(f"{len(found)} {what}; the first: {found[0]}")
        if self.round_trip.readable and self.round_trip.misread:
            first = self.round_trip.misread[0]
            lines.append(
                f"tool calls are read by {self.written_by}; written ones with {', '.join(self.round_trip.lost)} "
                f"do not come back as they were (sampled ones are kept as sampled); {first}"
            )
        if self.rewrites:
            lines.append(
                "history: keep trains each completion in the context in which it was sampled; history: fork "
                "continues in the template's own rendering, with each rewritten context as a separate sample"
            )
        return "\n".join(lines)


def prove(renderer: Renderer, conversations: Iterable[ProbeConversation] | None = None) -> Proof:
    """Compare transcript and template over `conversations` (by default one of every shape, with two seeds).

    By default, also set `renderer.appends_only`, and reuse the proof of an equal renderer of this process.
    """
    if conversations is not None:
        return _compare_all(renderer, conversations)
    identity = renderer.identity
    proof = _proofs.get(identity) or _compare_all(renderer)
    if identity is not None:
        _proofs[identity] = proof
    renderer.appends_only = not proof.rewrites
    return proof


_proofs: dict[Hashable, Proof] = {}


def _compare_all(renderer: Renderer, conversations: Iterable[ProbeConversation] | None = None) -> Proof:
    given = list(conversations) if conversations is not None else [*shapes(0), *shapes(1)]
    if conversations is None and renderer.one_of_two:  # the plain ones show each of the two
        given += [
            replace(plain, shape=f"{plain.shape}, tools offered", tools=TOOLS)
            for plain in given
            if not plain.tools
        ]
    findings, rendered = [], set()
    turns = called = 0
    for conversation in given:
        conversation = replace(conversation, messages=tuple(with_ids(renderer, conversation.messages)))
        done, finding = _prove_one(renderer, conversation)
        turns += done
        rendered |= {bool(conversation.tools)} if done else set()
        called += done >= 2 and any(message.tool_calls for message in conversation.messages[:2])
        if finding is not None:
            findings.append(replace(finding, tools=bool(conversation.tools)))
    shows_tools = renderer.habits.needs_tools or _shows_tools(renderer)
    by = f"the parser {renderer.parser.name}" + (" (model.parser)" if renderer.chosen else " (model.parser: auto)")
    return Proof(
        len(given),
        turns,
        tuple(findings),
        shows_tools,
        called,
        renderer.round_trip,
        by,
        frozenset(rendered),
        renderer.one_of_two,
    )


def _shows_tools(renderer: Renderer) -> bool:
    """Whether a prompt changes with the tools that are offered."""
    asked, other = [Message("user", "u")], TOOLS[:1] if renderer.one_of_two else ()
    without = renderer.render(asked, other)
    try:
        return renderer.render(asked, TOOLS) != without
    except TemplateError:  # it reads them; that it refuses them is among the findings
        return True


def _prove_one(renderer: Renderer, conversation: ProbeConversation) -> tuple[int, TemplateFinding | None]:
    """Return the number of turns that agreed, and the first finding."""

    messages, tools = conversation.messages, conversation.tools
    transcript = Transcript(renderer, tools, history="keep")
    turns, start = 0, 0
    found: TemplateFinding | None = None
    for n, message in enumerate(messages):
        if message.role != "assistant":
            continue
        try:
            fresh = renderer.encode([*transcript.context, *messages[start:n]], tools, generation_prompt=True)
            before = len(transcript.ids)
            transcript.extend(messages[start:n])
            new = transcript.ids[before:]
            if found is None:
                found = _compare(transcript, fresh, conversation)
            elif not renderer.decode(fresh).endswith(renderer.decode(new)) and not _only_rewritten(transcript):
                return turns, _finding("append", transcript, fresh, conversation, before)
            if found is not None and found.kind == "append":
                return turns, found
            completion = completion_of(renderer, message, tools, after=transcript)
            transcript.complete(completion, message=_as_read(transcript, completion, message))
        except TemplateError as e:
            return turns, found or TemplateFinding("refused", conversation.shape, n, message.role, 0, "", str(e))
        turns, start = turns + 1, n + 1
    return turns, found or _at_end(transcript, conversation)


def _as_read(transcript: Transcript, completion: Completion, message: Message) -> Message:
    """Return what an episode would keep of the completion: a template may omit parts of `message`."""
    read = transcript.renderer.parse(completion.ids, tools=transcript.tools, thinking=transcript.thinking)
    if same_meaning(read, message):
        return message
    if [call.name for call in read.tool_calls] != [call.name for call in message.tool_calls]:
        return message
    calls = zip(read.tool_calls, message.tool_calls, strict=True)
    return replace(read, tool_calls=tuple(replace(call, id=given.id) for call, given in calls))


def _only_rewritten(transcript: Transcript) -> bool:
    """Whether all differences from a fresh rendering are text that the template now writes differently."""
    grave = {TokenDrift.CONTENT, TokenDrift.BOUNDARY}
    return all(difference.drift not in grave for difference in check_tokens(transcript).differences)


def _at_end(transcript: Transcript, conversation: ProbeConversation) -> TemplateFinding | None:
    """Return what the check of a finished episode would report, if it is more than a rewording."""
    for difference in check_tokens(transcript).differences:
        if difference.drift in (TokenDrift.HISTORY_REWRITE, TokenDrift.CONTENT):
            kind: Kind = "rewrite" if difference.drift is TokenDrift.HISTORY_REWRITE else "append"
            at = len(conversation.messages) - 1 if difference.message is None else difference.message
            role = conversation.messages[at].role
            was, became = difference.ledger[:60], difference.fresh[:60]
            return TemplateFinding(kind, conversation.shape, at, role, difference.at, was, became)
    return None


def _compare(
    transcript: Transcript, fresh: Sequence[int], conversation: ProbeConversation
) -> TemplateFinding | None:
    renderer, ledger = transcript.renderer, transcript.ids
    if _agree(renderer, ledger, fresh):
        return None
    at = next((n for n, (a, b) in enumerate(zip(ledger, fresh, strict=False)) if a != b), None)
    at = min(len(ledger), len(fresh)) if at is None else at
    kind: Kind = "rewrite" if _rewritten(transcript) or _only_rewritten(transcript) else "append"
    return _finding(kind, transcript, fresh, conversation, at)


def _agree(renderer: Renderer, ledger: Sequence[int], fresh: Sequence[int]) -> bool:
    """Whether the ids are equal, or the text is equal with the same control tokens.

    The latter happens at the boundary between generation prompt and completion if there is no control token: the
    prompt is encoded without the completion, as the engine receives it.
    """
    if tuple(ledger) == tuple(fresh):
        return True
    token = renderer.vocabulary.token
    controls = [[id for id in ids if token(id) is not None] for ids in (ledger, fresh)]
    return controls[0] == controls[1] and renderer.decode(ledger) == renderer.decode(fresh)


def _finding(
    kind: Kind, transcript: Transcript, fresh: Sequence[int], conversation: ProbeConversation, at: int
) -> TemplateFinding:
    branch = transcript.branch
    ends = accumulate(len(segment.ids) for segment in branch)
    place = next((n for n, end in enumerate(ends) if end > at), len(branch))
    named = [s.message for s in branch[place:] if s.message is not None]  # glue belongs to what follows it
    message = named[0] if named else len(transcript.messages)
    decode = transcript.renderer.decode
    was, became = decode(transcript.ids[at : at + 12]), decode(fresh[at : at + 12])
    return TemplateFinding(kind, conversation.shape, message, conversation.messages[message].role, at, was, became)


def _rewritten(transcript: Transcript) -> bool:
    """Whether the template's own earlier renderings are not prefixes of its rendering of the whole."""
    renderer, messages, tools = transcript.renderer, transcript.context, transcript.tools
    now = renderer.render(messages, tools, generation_prompt=True)
    for n in range(1, len(messages)):
        if messages[n - 1].role != "assistant" and messages[n].role == "assistant":
            then = renderer.render(messages[:n], tools, generation_prompt=True)
            whole = renderer.render(messages[: n + 1], tools)
            if not now.startswith(then) or not now.startswith(whole):
                return True
    return False


def shapes(seed: int) -> Iterator[ProbeConversation]:
    """Generate one conversation of every shape that can occur in a run; texts and lengths vary with `seed`."""
    rng = random.Random(seed)
    make = _Maker(rng)
    system, user, say, call, tool = make.system, make.user, make.say, make.call, make.tool
    one = call("look_up")
    two = call("look_up", "add")
    plain = call("add", content="")
    yield ProbeConversation("no system", (user(), say(), user(), say()))
    yield ProbeConversation("system", (system(), user(), say(), user(), say()))
    yield ProbeConversation("tools", (system(), user(), one, *tool(one), say()), TOOLS)
    yield ProbeConversation("tools without system", (user(), one, *tool(one), say()), TOOLS)
    yield ProbeConversation("parallel calls", (user(), two, *tool(two), say()), TOOLS)
    yield ProbeConversation(
        "several tool turns", (user(), one, *tool(one), two, *tool(two), plain, *tool(plain), say()), TOOLS
    )
    yield ProbeConversation(
        "tools, then the user again", (user(), one, *tool(one), say(), user(), say(), user(), say()), TOOLS
    )
    yield ProbeConversation(
        "tool error", (user(), one, *tool(one, "Error: ValueError: no such row"), say()), TOOLS
    )
    yield ProbeConversation("long tool text", (user(), one, *tool(one, make.text(400)), say()), TOOLS)
    yield ProbeConversation("empty tool text", (user(), one, *tool(one, ""), say()), TOOLS)
    yield ProbeConversation("empty content", (user(""), say(""), user(), say()))
    yield ProbeConversation("unicode", (user("Grüße 👩‍🔬 日本語 ﷽"), say("🎉 naïve"), user(), say()))
    yield ProbeConversation("consecutive users", (user(), user(), say(), user(), user(), say()))
    thought = make.say(reasoning=make.text(8))
    yield ProbeConversation("thinking", (user(), thought))
    thinking = call("look_up", reasoning=make.text(6))
    yield ProbeConversation(
        "thinking and tools", (user(), thinking, *tool(thinking), make.say(reasoning="so")), TOOLS
    )
    yield ProbeConversation(
        "thinking, then the user again", (user(), thought, user(), make.say(reasoning="and"), user(), say())
    )
    yield ProbeConversation("system and tools", (system(), user(), one, *tool(one), say(), user(), say()), TOOLS)
    yield ProbeConversation("system and parallel calls", (system(), user(), two, *tool(two), say()), TOOLS)
    empty = make.say(reasoning="")
    yield ProbeConversation("empty thinking", (user(), empty, user(), make.say(reasoning="")))
    hasty = call("look_up", reasoning="")
    yield ProbeConversation(
        "empty thinking and tools", (user(), hasty, *tool(hasty), make.say(reasoning="")), TOOLS
    )
    silent = call("look_up", content="")
    yield ProbeConversation("a call without text", (user(), silent, *tool(silent), say()), TOOLS)
    asked = user("Again?")
    yield ProbeConversation("the same user turn twice", (asked, thought, asked, make.say(reasoning="and")))


class _Maker:
    """Generate random messages."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count = 0

    def text(self, words: int) -> str:
        return " ".join(self.rng.choice(_WORDS) for _ in range(words)).strip()

    def system(self) -> Message:
        return Message("system", self.text(4))

    def user(self, text: str | None = None) -> Message:
        return Message("user", self.text(self.rng.randint(1, 6)) if text is None else text)

    def say(self, text: str | None = None, *, reasoning: str | None = None) -> Message:
        text = self.text(self.rng.randint(1, 6)) if text is None else text
        return Message("assistant", text, reasoning=reasoning)

    def call(self, *names: str, content: str | None = None, reasoning: str | None = None) -> Message:
        calls = []
        for name in names:
            arguments: dict[str, Any] = (
                {"query": self.text(3), "limit": self.rng.randint(1, 9)}
                if name == "look_up"
                else {"terms": [self.rng.randint(-5, 5), 0.5]}
            )
            calls.append(ToolCall(f"call{self.count:05d}", name, arguments))
            self.count += 1
        content = self.text(2) if content is None else content
        return Message("assistant", content, tool_calls=tuple(calls), reasoning=reasoning)

    def tool(self, message: Message, text: str | None = None) -> tuple[Message, ...]:
        return tuple(
            Message("tool", self.text(3) if text is None else text, tool_call_id=call.id, name=call.name)
            for call in message.tool_calls
        )
