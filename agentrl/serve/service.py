"""Handle requests for the next assistant turn in any dialect: from messages to recorded turns."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from agentrl.async_tasks import spawn
from agentrl.chat.memo import Memo
from agentrl.chat.parsers.parser import unsound
from agentrl.chat.roundtrip import name_problem
from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine, Structure, StructureRefused, TokenLogprob
from agentrl.errors import TemplateError
from agentrl.serve.api_errors import ApiError, context_exceeded, invalid, overloaded, unsupported
from agentrl.serve.bounds import LONG_TEXT, tokens_above
from agentrl.serve.call_format import GrammarError
from agentrl.serve.conversations import Conversations
from agentrl.serve.generate import CompletionOptions, Sampled, generate
from agentrl.serve.grammar import AnswerFormat, Grammars, HeldTo
from agentrl.serve.prometheus import Metrics
from agentrl.serve.reader import Delta, MessageReader
from agentrl.serve.structure import structural_tag
from agentrl.serve.turns import Incoming, Prompt, ServedTurn, UnrenderableError
from agentrl.types import Sampling

COLDEST = 1e-3
"""Lower temperatures are greedy: logits divided by them would not be finite."""

MOST_VARIANTS = 8
"""Number of renderers with template options of clients to keep."""

Emit = Callable[[int, list[Delta], Sequence[TokenLogprob]], None]
"""Called with the pieces of choice `index` as they arrive, with their tokens."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request, independent of the dialect.

    Attributes:
        messages: the conversation.
        tools: the schemas offered, in the form of `Env.tools`.
        choice: whether a tool is called: "auto", "none", "required", or "named" (then `named` says which).
        one_call: the turn ends with its first call.
        n: number of turns to sample.
        temperature: 0 is greedy.
        top_k, min_p: 0 disables them.
        limit: maximum tokens per completion; None for as many as the context allows.
        stops: texts that end a completion.
        seed: makes sampling reproducible; None samples differently each time.
        top: number of alternatives to report per token.
        format: the required format of the answer.
        scored: the policy's log-probabilities are needed.
        options: variables of the chat template for this request (`chat_template_kwargs`).
        param: name of the parameter that holds the messages, for errors.
    """

    messages: Sequence[Incoming]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    named: str = ""
    one_call: bool = False
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    limit: int | None = None
    stops: tuple[str, ...] = ()
    seed: int | None = None
    top: int = 0
    format: AnswerFormat | None = None
    scored: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    param: str = "messages"

    @property
    def held(self) -> bool:
        """Whether the turn is held to a grammar: it must call, or answer in a format."""
        return self.format is not None or self.choice in ("required", "named")


@dataclass(frozen=True, slots=True)
class Client:
    """The client of a request: the session that remembers its turns, and overrides for its requests."""

    session: Conversations
    adjust: Callable[[GenerationRequest], GenerationRequest] = field(default=lambda ask: ask)

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools offered in requests that send none."""
        return ()

    def refused(self, error: ApiError) -> None:
        """Told of every error that the client gets instead of an answer."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice: `sent` is what the client received, `finish` as OpenAI names it, `stopped_by` the stop
    text that ended it."""

    turn: ServedTurn
    sent: Incoming
    finish: Literal["stop", "length", "tool_calls"]
    drawn: tuple[TokenLogprob, ...]
    stopped_by: str | None = None


@dataclass(slots=True)
class Gate:
    """Limits concurrency: up to `limit` completions at once; further requests are asked to retry."""

    limit: int
    running: int = 0

    def enter(self, count: int) -> None:
        """Reserve `count` places; return them with `leave`.

        Raises:
            ApiError: there are not enough free places.
        """
        if self.running and self.running + count > self.limit:
            raise overloaded(f"{self.running} completions are running already; at most {self.limit} may")
        self.running += count

    def leave(self, count: int) -> None:
        """Return `count` places."""
        self.running -= count


class ChatService:
    """Everything needed to answer requests: engine, renderer, grammars, counters."""

    def __init__(self, engine: Engine, renderer: Renderer, *, gate: Gate, metrics: Metrics) -> None:
        self.engine, self.renderer, self.gate, self.metrics = engine, renderer, gate, metrics
        self.grammars = Grammars(renderer)
        self._variants: OrderedDict[str, tuple[Renderer, Grammars]] = OrderedDict()
        self._name_problems: Memo[str] = Memo()
        self._releasing: set[asyncio.Task[None]] = set()

    def open_session(self, max_tokens: int) -> Conversations:
        """Create a session for many conversations; conversations it forgets are dropped by the engine too."""

        def forgotten(conversation: str) -> None:
            spawn(self._releasing, self.engine.release(conversation))

        return Conversations(self.renderer, max_tokens=max_tokens, on_forgotten=forgotten)

    async def prepare(self, ask: GenerationRequest, client: Client) -> Job:
        """Validate and render a request; all client errors are found here.

        Raises:
            ApiError: the request cannot be answered.
        """
        ask = client.adjust(ask)
        self._check(ask)
        if ask.tools and ask.choice != "none":
            await asyncio.to_thread(self._check_names, ask.tools)
        renderer, grammars = await self._variant(ask.options)
        prompt = await self._prompt(ask, client.session, renderer)
        room = self.engine.max_context - len(prompt.ids) - self._scored_apart(ask)
        if room < 1:
            raise context_exceeded(ask.param, len(prompt.ids), self.engine.max_context)
        self.metrics.matched.labels(prompt.matched.value).inc()
        for event in prompt.drift:
            self.metrics.drift.labels(event.kind.value).inc()
        return Job(self, ask, client.session, prompt, min(room, ask.limit or room), grammars)

    async def count(self, ask: GenerationRequest, client: Client) -> int:
        """Number of tokens in the prompt of a request, rendered from scratch; nothing is remembered.

        Raises:
            ApiError: the messages cannot be rendered.
        """
        renderer, _ = await self._variant(ask.options)
        ask = replace(ask, tools=ask.tools or client.offered)
        return len((await self._prompt(ask, Conversations(self.renderer), renderer)).ids)

    async def _variant(self, options: Mapping[str, object]) -> tuple[Renderer, Grammars]:
        """The renderer with these template options, and its grammars; the most recent ones are kept.

        Raises:
            ApiError: the template does not know an option, or refuses its value.
        """
        if not options:
            return self.renderer, self.grammars
        known, param = self.renderer.options, "chat_template_kwargs"
        if unknown := [name for name in options if name not in known]:
            reads = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
            raise unsupported(param, f"the chat template of this model never reads {unknown[0][:80]!r}; {reads}")
        if problem := unsound(dict(options)):
            raise invalid(param, problem)
        key = json.dumps(options, sort_keys=True)
        if key not in self._variants:
            try:
                found = await asyncio.to_thread(self.renderer.with_options, options)
            except TemplateError as e:
                raise invalid(param, f"the chat template does not work with this: {e}") from None
            self._variants[key] = found, Grammars(found, self.grammars)
            if len(self._variants) > MOST_VARIANTS:
                self._variants.popitem(last=False)
        self._variants.move_to_end(key)
        return self._variants[key]

    def _check(self, ask: GenerationRequest) -> None:
        names = [tool["function"]["name"] for tool in ask.tools]
        if ask.choice == "named" and ask.named not in names:
            raise invalid("tool_choice", f"{ask.named!r} is not among the tools")
        if ask.choice == "required" and not names:
            raise invalid("tool_choice", "a call is required, and the request has no tools")
        if ask.top and not self.engine.capabilities.streaming:
            raise unsupported("top_logprobs", "this engine does not report alternatives")
        able = self.engine.capabilities
        if not ask.held or able.masks:
            return
        param = "response_format" if ask.format else "tool_choice"
        if not able.structures:
            why = (
                "this engine has no grammars: set engine.server.grammars (servers in engine.server.urls: start "
                "them without --skip-tokenizer-init), or use engine.kind local"
            )
            raise unsupported(param, why)
        if ask.scored and not (ask.temperature == 1 or ask.temperature < COLDEST):
            why = "a server's grammar reports log-probabilities at temperature 1 only; use engine.kind local"
            raise unsupported(param, why)

    def _check_names(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Refuse tools whose calls would come back as text; a format of which no call can be read is reported at
        the start."""
        if not self.renderer.round_trip.readable:
            return
        for tool in tools:
            key = json.dumps(tool, sort_keys=True)
            if found := self._name_problems(key, len(key), partial(name_problem, self.renderer, tool)):
                raise invalid("tools", found)

    def _scored_apart(self, ask: GenerationRequest) -> bool:
        """Whether a server scores the completion after it was sampled, which needs room for one more token."""
        return ask.held and ask.scored and not self.engine.capabilities.masks

    async def _prompt(self, ask: GenerationRequest, session: Conversations, renderer: Renderer) -> Prompt:
        if (count := len(ask.messages)) > self.engine.max_context:  # each takes a token or more
            raise context_exceeded(ask.param, count, self.engine.max_context, at_least=True)
        texts = [text for one in ask.messages for text in _texts(one)]
        texts += [str(tool) for tool in ask.tools]
        size, limit = sum(map(len, texts)), self.engine.max_context
        if (tokens := await tokens_above(self.renderer.vocabulary, texts, limit)) is not None:
            raise context_exceeded(ask.param, tokens, limit, at_least=True)
        try:
            async with session.lock:
                if size < LONG_TEXT:
                    return session.prompt(ask.messages, ask.tools, renderer)
                return await asyncio.to_thread(session.prompt, ask.messages, ask.tools, renderer)
        except UnrenderableError as e:
            raise invalid(e.place, str(e)) from None
        except TemplateError as e:
            raise ApiError(400, f"{ask.param}: {e}", param=ask.param, code="invalid_value") from None


@dataclass(slots=True)
class Job:
    """A request that is ready to be sampled: `prompt` has its tokens, `limit` the maximum per completion."""

    service: ChatService
    ask: GenerationRequest
    session: Conversations
    prompt: Prompt
    limit: int
    grammars: Grammars
    spoken: list[Choice] = field(default_factory=list)

    async def run(self, emit: Emit | None = None) -> list[Choice]:
        """Sample every choice and remember the turns.

        Raises:
            EngineError: the engine has failed permanently.
            ApiError: a grammar cannot be created.
        """
        metrics = self.service.metrics
        if self.ask.n == 1:
            self.spoken = [await self._choice(0, emit)]
        else:
            async with asyncio.TaskGroup() as group:
                choices = [group.create_task(self._choice(index, emit)) for index in range(self.ask.n)]
            self.spoken = [choice.result() for choice in choices]
        metrics.prompt_tokens.inc(self.prompt_tokens)
        metrics.cached_tokens.inc(self.cached_tokens)
        metrics.sampled_tokens.inc(self.completion_tokens)
        metrics.version.set(self.service.engine.policy_version)
        return self.spoken

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompt."""
        return len(self.prompt.ids)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens in all choices together."""
        return sum(len(spoken.turn.completion.ids) for spoken in self.spoken)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that were not recomputed."""
        return max((spoken.turn.completion.cached_tokens for spoken in self.spoken), default=0)

    async def _choice(self, index: int, emit: Emit | None) -> Choice:
        ask, session, service = self.ask, self.session, self.service
        number = session.number()
        reader = MessageReader(
            self.prompt.branch.renderer,
            tools=ask.tools,
            thinking=self.prompt.branch.thinking,
            stops=ask.stops,
            read_calls=bool(ask.tools) and ask.choice != "none",
            one_call=ask.one_call or ask.choice == "named",
            call_id=lambda call: session.call_id(number, call),
        )
        # The first choice continues the conversation's state, the others run in parallel.
        name = self.prompt.conversation if index == 0 else f"{self.prompt.conversation}#{index}"
        on_deltas = None if emit is None else lambda deltas, drawn: emit(index, deltas, drawn)
        order = await self._order(index)
        try:
            sampled = await generate(
                service.engine, self.prompt.ids, order, reader, session=name, on_deltas=on_deltas
            )
            async with session.lock:
                return self._remember(number, reader, sampled)
        except StructureRefused as e:
            param = "response_format" if ask.format else "tool_choice"
            raise unsupported(param, f"the inference server cannot use its grammar: {e}") from None
        finally:
            if index or not session.remembers(name):  # then it will never be forgotten, so nothing else frees it
                await service.engine.release(name)

    async def _order(self, index: int) -> CompletionOptions:
        ask = self.ask
        seed = None if ask.seed is None else _seed(ask.seed, index)
        sampling = Sampling(
            temperature=ask.temperature if ask.temperature >= COLDEST else 0.0,
            top_p=ask.top_p,
            top_k=ask.top_k,
            min_p=ask.min_p,
            max_tokens=self.limit,
            stop_ids=self.prompt.branch.renderer.stop_ids,
            seed=seed,
        )
        if not ask.held:
            return CompletionOptions(sampling, ask.top)
        wanted: HeldTo = {
            "tools": () if ask.choice == "none" else ask.tools,
            "forced": ask.choice in ("required", "named"),
            "named": ask.named or None,
            "one_call": ask.one_call,
            "thinking": self.prompt.branch.thinking,
        }
        try:
            if self.service.engine.capabilities.masks:
                return CompletionOptions(sampling, ask.top, await self.grammars.mask(ask.format, **wanted))
            tag = await asyncio.to_thread(structural_tag, self.prompt.branch.renderer, ask.format, **wanted)
        except GrammarError as e:
            raise unsupported(e.param, str(e)) from None
        return CompletionOptions(sampling, ask.top, None, None if tag is None else Structure(tag, ask.scored))

    def _remember(self, number: int, reader: MessageReader, sampled: Sampled) -> Choice:
        sent = reader.sent()
        turn = self.session.add(
            self.prompt,
            sampled.completion,
            number=number,
            message=reader.message(len(self.prompt.branch.messages)),
            sent=sent,
            cut=reader.stopped_by is not None,
        )
        finish: Literal["stop", "length", "tool_calls"] = "stop"
        if sampled.completion.finish == "length":
            finish = "length"
        elif sent.message.tool_calls:
            finish = "tool_calls"
        return Choice(turn, sent, finish, sampled.drawn, reader.stopped_by)


def _seed(seed: int, index: int) -> int:
    """Return a reproducible, distinct seed for each choice; the first is the client's own."""
    if index == 0:
        return seed % 2**63
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def fresh_id(prefix: str) -> str:
    """Return an id for an answer."""
    return f"{prefix}{secrets.token_hex(12)}"


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


def _texts(one: Incoming) -> Iterator[str]:
    """Everything of a message that a template may write."""
    yield str(one.message.content)
    yield one.message.reasoning or ""
    yield one.message.name or ""
    yield from one.raw_arguments
    yield from (call.name for call in one.message.tool_calls)
