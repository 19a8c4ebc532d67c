"""The renderer: messages to token ids and back, for any Hugging Face chat template, at the cost of the new
messages.

A turn is rendered after a stand-in for the preceding conversation: a short user message and an assistant message
whose text is a sentinel. The text that the template writes after the sentinel is what it would write after the
sampled completion: the end of the assistant turn, the new messages, and the prompt for the next completion. How
the template ends an assistant turn, which tokens stop a completion, and which format it expects for tool arguments
and reasoning are determined once, by probing (`agentrl.chat.probe`). See docs/design/append-only-templates.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.chat.jinja import Fixed, assigned_by, compile_template, variables_of
from agentrl.chat.memo import Memo
from agentrl.chat.model_folder import CHATML_TEMPLATE, eos_ids, is_one_of_two, num_embeddings, template_source
from agentrl.chat.parsers import Parsed, Parser, choose_parser
from agentrl.chat.parsers.markers import Plain
from agentrl.chat.vocabulary import SENTINEL, Vocabulary
from agentrl.errors import ConfigError, TemplateError
from agentrl.suggest import did_you_mean
from agentrl.types import Message, ToolCall

if TYPE_CHECKING:
    from agentrl.chat.roundtrip import RoundTrip

__all__ = ["CHATML_TEMPLATE", "Addition", "Habits", "Piece", "Renderer"]

History = Literal["keep", "fork"]
Tools = Sequence[Mapping[str, object]]

_SYSTEM = "\u2060system\u2060"
STAND_IN_USER = Message("user", "u")
STAND_IN_SYSTEM = Message("system", _SYSTEM)
TOLD_APART = 64
"""With more new messages than this, their tokens are attributed to the first: each takes another rendering."""
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to append: `message` is an index into the given messages, None for tokens of no message (glue)."""

    ids: tuple[int, ...]
    message: int | None


@dataclass(frozen=True, slots=True)
class Addition:
    """What to append to a context; `thinking` says whether it ends inside an open think block."""

    pieces: tuple[Piece, ...]
    thinking: bool


@dataclass(frozen=True, slots=True)
class Habits:
    """What probing determined about a template.

    Attributes:
        json_arguments: tool arguments are passed as JSON text instead of an object.
        inline_think: there is no reasoning field, so a think block is placed before the content.
        inline_think_calls: the same, for messages with tool calls.
        closers: ids that end an assistant turn inside a conversation.
        stop_ids: ids that a completion may end with.
        closes_itself: an assistant turn ends with a dedicated token instead of the first token of the next turn.
        thinks: the generation prompt has already opened a think block.
        drops_tools: the text after a completion is the same whether or not tools are offered.
        shows_calls: the template writes the tool calls of an assistant message.
        inline_calls: the parser writes calls after the content, because the template does not write them.
        needs_tools: the template renders nothing unless tools are offered.
        numbers_calls: the template numbers the tool calls of a conversation, in what it writes of their results.
    """

    json_arguments: bool = False
    inline_think: bool = False
    inline_think_calls: bool = False
    closers: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    closes_itself: bool = True
    thinks: bool = False
    drops_tools: bool = False
    shows_calls: bool = True
    inline_calls: bool = False
    needs_tools: bool = False
    numbers_calls: bool = False


class Renderer:
    """One tokenizer, chat template and parser, shared by training, checks, evaluation and the endpoint.

    Attributes:
        hash: of everything that determines the ids of a conversation; stored in checkpoints.
        stop_ids: ids that end a completion.
        unread_ids: those of them that are no part of what is parsed; others also end the completion's tool calls.
        history: how a transcript handles templates that rewrite earlier turns.
        template: source of the chat template.
        one_of_two: it joins two templates, one for conversations with tools and one for those without.
        parser: the tool-call parser in use.
        chosen: whether the parser was named explicitly instead of detected.
        appends_only: the template is known to leave earlier turns unchanged, so that a transcript with `history:
        fork` need not check; set by `agentrl.chat.proof.prove`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: str,
        *,
        parser: str | Parser = "auto",
        history: History = "keep",
        variables: Mapping[str, object] | None = None,
        eos_ids: Iterable[int] = (),
        tokenizer_digest: str = "",
    ) -> None:
        if history not in ("keep", "fork"):
            raise ConfigError(f"history must be 'keep' or 'fork', got {history!r}")
        self.vocabulary = vocabulary
        self.template = template
        self.one_of_two = is_one_of_two(template)
        self.history: History = history
        self._variables = {**vocabulary.special_tokens, **(variables or {})}
        self._given, self._eos_ids, self._digest = dict(variables or {}), frozenset(eos_ids), tokenizer_digest
        _known_variables(template, variables or {}, vocabulary.special_tokens)
        self._render = compile_template(template)
        self._tools: Memo[list[Fixed]] = Memo()
        self._rendered: Memo[str] = Memo()
        self._openings: Memo[Addition] = Memo()
        self.parser: Parser = Plain()
        self.habits = Habits()
        self.chosen = parser != "auto"
        self.stop_ids = self.unread_ids = frozenset[int]()
        self._settle(parser, self._eos_ids)
        self.appends_only = False
        parts = [
            tokenizer_digest,
            template,
            sorted((variables or {}).items()),
            sorted(vocabulary.special_tokens.items()),
            self.parser.name,
            *(["inline"] if self.habits.inline_calls else []),
            False,  # a removed setting; the hash is stored in checkpoints
            history,
            sorted(self.stop_ids),
        ]
        self.hash = hashlib.sha256(json.dumps(parts, ensure_ascii=False, default=str).encode()).hexdigest()[:16]

    def _settle(self, parser: str | Parser, eos_ids: frozenset[int]) -> None:
        """Use the named parser, or the first that reads what the template writes; probe the template.

        If the template writes no calls, or none that any parser reads, a parser whose signs it shows writes them.
        """
        from agentrl.chat.probe import probe
        from agentrl.chat.roundtrip import candidates, reads_calls

        signs, others = candidates(self.template, self.vocabulary.control)
        named = {sign.name for sign in signs}
        if isinstance(parser, str) and parser != "auto":
            parser = choose_parser(parser)
        if isinstance(parser, Parser):
            signs, others = [parser], []

        def takes(parser: Parser, inline: bool) -> bool:
            self.parser, self.habits = parser, Habits(inline_calls=inline)
            self.habits = probe(self, eos_ids)
            self.stop_ids = self.habits.stop_ids
            self.unread_ids = frozenset(
                id for id in self.stop_ids if self.vocabulary.token(id) not in parser.closings
            )
            return self.habits.shows_calls and reads_calls(self)

        def writes(parser: Parser) -> bool:
            known = parser.misspelt and parser.name in named
            return parser.write([]) is not None and (known or not self.habits.shows_calls)

        if any(takes(sign, inline=False) for sign in signs):
            return
        if any(writes(sign) and takes(sign, inline=True) for sign in signs):
            return
        if any(takes(other, inline=False) for other in others):
            return
        takes(signs[0] if signs else Plain(), inline=False)

    @cached_property
    def options(self) -> frozenset[str]:
        """The variables of the template that its user may set, such as `enable_thinking`."""
        return variables_of(self.template) - _OURS - frozenset(self.vocabulary.special_tokens)

    @property
    def identity(self) -> Hashable | None:
        """Equal for renderers that do the same; None if the tokenizer has no file, or the parser is the user's."""
        if not self._digest or not type(self.parser).__module__.startswith("agentrl."):
            return None
        return self.hash, self.chosen, tuple(self.vocabulary.control.items()), self._eos_ids

    def with_options(self, options: Mapping[str, object]) -> Renderer:
        """Return a renderer that differs in these variables; control tokens in their text are shielded.

        Raises:
            ConfigError: the template never reads one of them.
            TemplateError: the template refuses their values.
        """
        return Renderer(
            self.vocabulary,
            self.template,
            parser=self.parser,
            history=self.history,
            variables={**self._given, **self.vocabulary.shield(dict(options))},
            eos_ids=self._eos_ids,
            tokenizer_digest=self._digest,
        )

    @cached_property
    def round_trip(self) -> RoundTrip:
        """Return which tool calls parse back as they were written (see `agentrl.chat.roundtrip`)."""
        from agentrl.chat.roundtrip import round_trip

        return round_trip(self)

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        template: str | None = None,
        parser: str | Parser = "auto",
        history: History = "keep",
        variables: Mapping[str, object] | None = None,
    ) -> Renderer:
        """Load the tokenizer and template of a Hugging Face model directory.

        Args:
            template: None uses the directory's template; "chatml" is the built-in one; otherwise a file of Jinja
            source.
            parser: "auto" selects the first parser that reads what the template writes; otherwise a name from
            `agentrl.chat.parsers`, or a parser.
            history: what to do if the template rewrites earlier turns ("keep" or "fork").
            variables: additional template variables, such as {"enable_thinking": False}.

        Raises:
            ConfigError: the directory or an argument cannot be used.
            TemplateError: the template cannot be rendered, or what it appends cannot be derived.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such directory; give a Hugging Face model directory")
        source = template_source(folder, template)
        vocabulary = Vocabulary.from_directory(folder, source)
        if (size := num_embeddings(folder)) is not None:
            vocabulary.refuse_beyond(size, source, str(folder))
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        return cls(
            vocabulary,
            source,
            parser=parser,
            history=history,
            variables=variables,
            eos_ids=eos_ids(folder, vocabulary),
            tokenizer_digest=digest,
        )

    # Text and ids

    def decode(self, ids: Iterable[int]) -> str:
        """Decode `ids`, control tokens included."""
        return self.vocabulary.decode(ids)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text: control tokens in it are encoded as plain text."""
        return self.vocabulary.encode(self.vocabulary.shield(text))

    def encode(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of a conversation rendered from scratch."""
        return self.vocabulary.encode(self.render(messages, tools, generation_prompt=generation_prompt))

    def text(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False) -> str:
        """Render the conversation with the template."""
        return self.vocabulary.unshield(self.render(messages, tools, generation_prompt=generation_prompt))

    def render(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False) -> str:
        """Render, with control tokens in the messages' own text still shielded.

        Raises:
            TemplateError: the template refuses these messages.
        """
        return self.render_data(self.conversation(messages), tools, generation_prompt=generation_prompt)

    def render_data(
        self, data: Sequence[Mapping[str, Any]], tools: Tools = (), *, generation_prompt: bool = False
    ) -> str:
        """Render messages that are already in the template's format.

        Renderings are cached: those of prompts recur with every episode of a group, those of stand-ins with every
        turn.
        """
        said, offered = repr(data), repr(tools) if tools else ""

        def render() -> str:
            return self._render(
                messages=list(data),
                tools=self._shielded(tools, offered) or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )

        try:
            return self._rendered((said, offered, generation_prompt), 2 * len(said) + len(offered), render)
        except Exception as e:  # templates are third-party code: whatever they raise is a TemplateError
            roles = " ".join(message["role"] for message in data)
            raise TemplateError(
                f"the chat template cannot render a conversation of [{roles}]: {type(e).__name__}: {e}"
            ) from e

    def _shielded(self, tools: Tools, written: str) -> list[Fixed]:
        """Return the schemas with control tokens in their text shielded; `written` is their cache key."""
        return self._tools(written, len(written), lambda: [Fixed(self.vocabulary.shield(tool)) for tool in tools])

    def conversation(self, messages: Iterable[Message], after: Sequence[ToolCall] = ()) -> list[dict[str, object]]:
        """Convert messages as `data` does; a tool's result without a name gets that of its call.

        Args:
            after: the tool calls before the messages.
        """
        found, names = [], {call.id: call.name for call in after}
        for message in messages:
            if message.role == "assistant":
                names = {call.id: call.name for call in message.tool_calls}
            elif message.role == "tool" and message.name is None:
                message = replace(message, name=names.get(message.tool_call_id or "") or None)
            found.append(self.data(message))
        return found

    def data(self, message: Message) -> dict[str, object]:
        """Convert a message to the format chat templates read, with control tokens in its text shielded."""
        shield = self.vocabulary.shield
        content = shield(_content(message))
        data: dict[str, Any] = {"role": message.role, "content": content}
        if message.name is not None:
            data["name"] = shield(message.name)
        if message.tool_call_id is not None:
            data["tool_call_id"] = shield(message.tool_call_id)
        if message.reasoning is not None:
            reasoning = shield(message.reasoning)
            opening, closing = self.parser.think
            inline = self.habits.inline_think_calls if message.tool_calls else self.habits.inline_think
            if inline and opening:
                data["content"] = f"{opening}\n{reasoning}\n{closing}\n\n{content}"
            else:
                data |= {"reasoning_content": reasoning, "thinking": reasoning, "reasoning": reasoning}
        if message.tool_calls and self.habits.inline_calls:
            said = [(shield(call.name), shield(dict(call.arguments))) for call in message.tool_calls]
            data["content"] += self.parser.write(said) or ""
        elif message.tool_calls:
            data["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return data

    def _call(self, call: ToolCall) -> dict[str, Any]:
        shield = self.vocabulary.shield
        arguments = shield(dict(call.arguments))
        if self.habits.json_arguments:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": shield(call.id),
            "type": "function",
            "function": {"name": shield(call.name), "arguments": arguments},
        }

    # What a transcript appends

    def opening(self, messages: Sequence[Message], tools: Tools = ()) -> Addition:
        """Return the tokens of the first prompt, including the generation prompt."""
        data = self.conversation(messages)

        def make() -> Addition:
            prompt = self.render_data(data, tools, generation_prompt=True)
            ends = [
                self._prefix(data[:n], tools, prompt) if _is_told_apart(n, len(data)) else None
                for n in range(1, len(data) + 1)
            ]
            return self._addition(self._pieces(prompt, 0, ends))

        said, offered = repr(data), repr(tools)
        return self._openings((said, offered), 2 * len(said) + len(offered), make)

    def following(
        self,
        last: Message,
        stopped: int | None,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        system: bool = False,
        calls: int = 0,
    ) -> Addition:
        """Return the tokens between two completions: the end of the turn, `messages`, the generation prompt.

        Args:
            last: the assistant message that the completion was parsed as.
            stopped: the stop id that ended the completion; None if it was truncated.
            messages: the messages after it.
            system: whether the conversation starts with a system message.
            calls: number of tool calls before the completion.
        """
        if self.habits.drops_tools:
            tools = ()
        base = [self.data(STAND_IN_USER), *self.earlier(calls), self.stand_in(last, messages)]
        data = [*base, *self.conversation(messages, last.tool_calls)]
        if system:  # a few templates count their messages; others repeat the system prompt if it is missing
            with_system = [self.data(STAND_IN_SYSTEM), *data]
            shown = self._attempt(with_system, tools)
            if shown is not None and _SYSTEM not in shown[max(shown.rfind(SENTINEL), 0) :]:
                base, data = [with_system[0], *base], with_system
        rendered = self.render_data(data, tools, generation_prompt=True)
        start, closer = self.after_sentinel(rendered)
        tail = rendered[start:]
        skip = len(closer[0])
        stands = stopped is not None and (
            stopped == closer[1] or (self.habits.closes_itself and stopped in self.stop_ids)
        )
        new = len(data) - len(base)
        ends = [
            self._match(data[: len(base) + n], tools, tail) if _is_told_apart(n, new) else None
            for n in range(new + 1)
        ]
        cut = skip if stands else 0
        glue = max(ends[0] or 0, skip) if self.habits.closes_itself or not messages else cut
        pieces = self._pieces(tail, cut, [glue, *ends[1:]])
        if messages and pieces and pieces[0].message == 0 and (len(pieces) == 1 or pieces[1].message != 1):
            pieces[0] = Piece(pieces[0].ids, 1)  # no control token comes before the first message
        return self._addition([Piece(p.ids, p.message - 1 if p.message else None) for p in pieces])

    def _attempt(self, data: Sequence[Mapping[str, object]], tools: Tools) -> str | None:
        """Return the prompt after these messages; None if the template refuses them."""
        try:
            return self.render_data(data, tools, generation_prompt=True)
        except TemplateError:
            return None

    def _addition(self, pieces: Sequence[Piece]) -> Addition:
        """Return the pieces, and whether the generation prompt among them opens a think block."""
        if not pieces or pieces[-1].message is not None:
            return Addition(tuple(pieces), self.habits.thinks and bool(pieces))
        opening, closing = self.parser.think
        prompt = self.decode(pieces[-1].ids)
        return Addition(tuple(pieces), bool(opening) and prompt.rfind(opening) > prompt.rfind(closing))

    def after_sentinel(self, rendered: str) -> tuple[int, tuple[str, int]]:
        """Return where the end of the stand-in's turn starts in `rendered`, and (text, id) of the token that ends
        it.

        Raises:
            TemplateError: the template dropped the stand-in's text, or ends its turn without a control token.
        """
        at = rendered.rfind(SENTINEL)
        if at < 0:
            raise TemplateError(
                "the chat template does not show an assistant message's text; what it appends cannot be derived"
            )
        for start, end, id in self.vocabulary.split_control(rendered[at:]):
            if id in self.habits.closers or not self.habits.closers:
                return at + start, (rendered[at + start : at + end], id)
        raise TemplateError(
            "the chat template does not end an assistant turn with a control token "
            f"(it writes {self.vocabulary.unshield(rendered[at : at + 60])!r}); "
            "use a template whose turns end with a special token of the tokenizer"
        )

    def stand_in(self, last: Message, messages: Sequence[Message]) -> dict[str, object]:
        """Return a short assistant message that ends like `last`, with its text replaced by the sentinel."""
        if self.habits.inline_calls or not messages or messages[0].role != "tool":
            return {"role": "assistant", "content": SENTINEL}
        calls = last.tool_calls or (
            ToolCall(messages[0].tool_call_id or "call00000", messages[0].name or "tool", {}),
        )
        shown = []
        for call in calls:
            data = self._call(ToolCall(call.id, call.name, {}))
            arguments: object = {"x": SENTINEL}
            data["function"]["arguments"] = (
                json.dumps(arguments, ensure_ascii=False) if self.habits.json_arguments else arguments
            )
            shown.append(data)
        return {"role": "assistant", "content": "", "tool_calls": shown}

    def earlier(self, calls: int) -> list[dict[str, object]]:
        """Return stand-ins for so many earlier tool calls, with results, if the template numbers them."""
        if not calls or not self.habits.numbers_calls:
            return []
        given = [ToolCall(f"past{n:05d}", "tool", {}) for n in range(calls)]
        results = [Message("tool", "t", tool_call_id=call.id, name=call.name) for call in given]
        made = [self._call(call) for call in given]
        called: dict[str, object] = {"role": "assistant", "content": "", "tool_calls": made}
        return [called, *(self.data(result) for result in results)]

    def _prefix(self, data: Sequence[Mapping[str, object]], tools: Tools, prompt: str) -> int | None:
        """Return where `data`, rendered alone, ends in `prompt`; None if it is not a prefix of it."""
        try:
            part = self.render_data(data, tools)
        except TemplateError:  # the template may refuse half a conversation
            return None
        return len(part) if prompt.startswith(part) else None

    def _match(self, data: Sequence[Mapping[str, object]], tools: Tools, tail: str) -> int | None:
        """Return where `data` ends in `tail`, both measured from the end of the stand-in's turn; None as in
        `_prefix`."""
        try:
            part = self.render_data(data, tools)
            start, _ = self.after_sentinel(part)
        except TemplateError:
            return None
        return len(part) - start if tail.startswith(part[start:]) else None

    def _pieces(self, text: str, start: int, ends: Sequence[int | None]) -> list[Piece]:
        """Split `text` after each message with a known end that a control token follows; encode the parts."""
        control = {at for at, _, _ in self.vocabulary.split_control(text)} | {len(text)}
        pieces: list[Piece] = []
        at, first = start, 0
        for n, end in enumerate(ends):
            if end is not None and (end == at or (end > at and end in control)):
                if end > at:
                    pieces.append(Piece(tuple(self.vocabulary.encode(text[at:end])), first))
                at, first = end, n + 1
        if at < len(text):
            message = None if first == len(ends) else first
            pieces.append(Piece(tuple(self.vocabulary.encode(text[at:])), message))
        return pieces

    def completion_ids(
        self, message: Message, tools: Tools = (), *, thinking: bool | None = None, calls: int = 0
    ) -> list[int]:
        """Return the ids of an assistant message as a completion: what a demonstration would have sampled.

        Args:
            thinking: whether the prompt has already opened a think block; None means the template's default.
            calls: number of tool calls before it in the conversation.

        Raises:
            TemplateError: the template does not write this message after its own generation prompt.
        """
        from agentrl.chat.written import completion_ids

        return completion_ids(self, message, tools, thinking=thinking, calls=calls)

    # Reading completions

    def parse(
        self, ids: Sequence[int], *, tools: Tools = (), thinking: bool | None = None, number: int = 0
    ) -> Message:
        """Parse a completion as an assistant message; never raises: problems are in `parse_errors`.

        Args:
            tools: the schemas offered (needed for formats whose text does not show types).
            thinking: whether the prompt has already opened a think block; None means the template's default.
            number: index of the message in its conversation; call ids are derived from it.
        """
        return to_message(self.read(ids, tools=tools, thinking=thinking), number)

    def read(self, ids: Sequence[int], *, tools: Tools = (), thinking: bool | None = None) -> Parsed:
        """Like `parse`, with the spans of calls and errors in the completion's text."""
        thinking = self.habits.thinks if thinking is None else thinking
        said = ids[:-1] if ids and ids[-1] in self.unread_ids else ids
        return self.parser.parse(self.decode(said), tools=tools, thinking=thinking)

    def read_text(self, text: str, *, tools: Tools = ()) -> Message:
        """Like `parse`, for the text of a completion, with or without its stop token."""
        for id in self.unread_ids:
            text = text.removesuffix(self.vocabulary.token(id) or "")
        return to_message(self.parser.parse(text, tools=tools, thinking=self.habits.thinks), 0)

    def unstopped(self, ids: Sequence[int]) -> Sequence[int]:
        """Return `ids` without the stop token at their end."""
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids


def _known_variables(template: str, variables: Mapping[str, object], special: Mapping[str, str]) -> None:
    """Reject variables that the template never reads or that the renderer sets itself."""
    reads = variables_of(template) if variables else frozenset()
    for name in variables:
        if name in _OURS or name in special:
            raise ConfigError(f"model.template_options.{name}: is set by the renderer; remove it")
        if name not in reads and name in assigned_by(template):
            raise ConfigError(
                f"model.template_options.{name}: has no effect, because the chat template sets this variable "
                "before it reads it; remove it"
            )
        if name not in reads:
            known = sorted(reads - _OURS - set(special))
            hint = did_you_mean(name, known, otherwise=f"it reads {', '.join(known) or 'none'}")
            raise ConfigError(f"model.template_options.{name}: the chat template never reads this; {hint}")


def to_message(parsed: Parsed, number: int) -> Message:
    """Return the assistant message for a parsed completion; calls get ids of nine letters and digits."""
    seen: set[str] = set()
    calls = []
    for n, call in enumerate(parsed.calls):
        id = call.id if call.id and call.id not in seen else f"c{number % 100000:05d}{n % 1000:03d}"
        seen.add(id)
        calls.append(ToolCall(id, call.name, call.arguments))
    return Message(
        "assistant",
        parsed.content,
        tool_calls=tuple(calls),
        reasoning=parsed.reasoning,
        parse_errors=tuple(error.message for error in parsed.errors),
    )


def same_meaning(a: Message, b: Message) -> bool:
    """Whether two parses of a completion mean the same: white space around parts and call ids are ignored."""

    def parts(message: Message) -> tuple[object, ...]:
        calls = [(call.name, dict(call.arguments)) for call in message.tool_calls]
        return _content(message).split(), (message.reasoning or "").split(), calls

    return parts(a) == parts(b)


def _is_told_apart(number: int, count: int) -> bool:
    """Whether the end of message `number` of `count` is looked for; 0 is what comes before them."""
    return count <= TOLD_APART or number in (0, count)


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    texts = [part for part in message.content if isinstance(part, str)]
    if len(texts) < len(message.content):
        raise TemplateError(
            f"a {message.role} message holds an image, and the chat template of this model takes text only: "
            "return text from the tool (or from setup), or leave the image out of what the policy sees"
        )
    return "".join(texts)
