"""POST /v1/responses: items in, items out, as one object or as events with sequence numbers.

Source: the OpenAI API reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine.base import TokenLogprob
from agentrl.serve.api_errors import ApiError, invalid, unsupported
from agentrl.serve.conversations import Conversations
from agentrl.serve.dialects.wire import (
    CalledFunction,
    Function,
    Json,
    Part,
    WireCall,
    WireMessage,
    WireTool,
    nucleus,
)
from agentrl.serve.dialects.wire_messages import allowed_tools, one_incoming, tools_of
from agentrl.serve.dialects.wire_responses import Item, ResponsesRequest, TextOptions
from agentrl.serve.grammar import AnswerFormat
from agentrl.serve.reader import ArgumentsDelta, CallBegun, ContentDelta, Delta, ReasoningDelta
from agentrl.serve.service import Choice, GenerationRequest, Job, fresh_id, now
from agentrl.serve.turns import Incoming


def request_of(request: ResponsesRequest, session: Conversations) -> GenerationRequest:
    """Convert the request.

    Args:
        session: has the conversation that it continues, and the items that it refers to.

    Raises:
        ApiError: a parameter has an unknown or unsupported value.
    """
    request.refuse_unsupported()
    earlier, items = _earlier(request, session), _items(request, session)
    tools = tools_of([_tool(n, tool.type, tool) for n, tool in enumerate(request.tools or ())])
    tools, given = _allowed(tools, request.tool_choice)
    choice, named = _choice(given)
    answer = _format(request.text)
    return GenerationRequest(
        messages=_conversation(request, earlier, items),
        tools=tools,
        choice=choice,  # type: ignore[arg-type]
        named=named,
        one_call=request.parallel_tool_calls is False and bool(tools),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=nucleus(request.top_p),
        limit=request.max_output_tokens,
        format=answer,
        options=request.chat_template_kwargs or {},
        param="input",
    )


def _tool(number: int, kind: str, tool: Any) -> WireTool:
    if kind != "function":
        return WireTool(type=kind)
    if not tool.name:
        raise invalid(f"tools[{number}].name", "is required")
    return WireTool(
        type=kind, function=Function(name=tool.name, description=tool.description, parameters=tool.parameters)
    )


def _allowed(tools: tuple[Json, ...], given: str | Json | None) -> tuple[tuple[Json, ...], str | Json | None]:
    """The tools that may be called, and the choice among them."""
    if not isinstance(given, dict) or given.get("type") != "allowed_tools":
        return tools, given
    return allowed_tools(tools, given.get("tools"), given.get("mode", "auto"))


def _choice(given: str | Json | None) -> tuple[str, str]:
    if given is None or isinstance(given, str):
        return given or "auto", ""
    name = given.get("name")
    if given.get("type") != "function" or not isinstance(name, str):
        raise invalid(
            "tool_choice", "must be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": ...}"
        )
    return "named", name


def _format(text: TextOptions | None) -> AnswerFormat | None:
    format = None if text is None else text.format
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return AnswerFormat({})
    if format.schema_ is None:
        raise invalid("text.format.schema", "is required with type 'json_schema'")
    return AnswerFormat(format.schema_)


def _earlier(request: ResponsesRequest, session: Conversations) -> tuple[Incoming, ...]:
    """Return the conversation that the request continues; empty if it names none.

    Raises:
        ApiError: the response does not exist here.
    """
    id = request.previous_response_id
    if id is None:
        return ()
    found = session.kept(id)
    if found is None:
        raise ApiError(
            400,
            f"Previous response with id {id[:200]!r} not found: it is not of this server, was not stored, or is "
            "forgotten; send the whole conversation as `input`.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def not_found(id: str) -> ApiError:
    """No response is stored under this id."""
    text = f"Response with id {id[:200]!r} not found: it is not of this server, was not stored, or is forgotten."
    return ApiError(404, text, param="id", code="response_not_found")


def _items(request: ResponsesRequest, session: Conversations) -> list[Item]:
    """The input of a request, with items of stored responses in place of references to them.

    Raises:
        ApiError: there is no such item here.
    """
    if isinstance(request.input, str):
        return [Item(type="message", role="user", content=request.input)]
    found: list[Item] = []
    for number, item in enumerate(request.input):
        if item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None):
            stored = session.item(item.id or "")
            if stored is None:
                text = f"Item with id {(item.id or '')[:200]!r} not found: no response stored here has it"
                raise ApiError(400, f"{text}; send the item.", param=f"input[{number}]", code="item_not_found")
            item = Item.model_validate(stored)
        found.append(item)
    return found


def _conversation(request: ResponsesRequest, earlier: Sequence[Incoming], items: Sequence[Item]) -> list[Incoming]:
    text = request.instructions
    first = [one_incoming(WireMessage(role="system", content=text), "instructions")] if text else []
    return [*first, *earlier, *_new(items)]


SAID = frozenset({"output_text", "input_text", "text", "refusal", "reasoning_text", "summary_text"})
"""Types of the parts of an assistant message."""


def _new(items: Sequence[Item]) -> list[Incoming]:
    if not items:
        raise invalid("input", "is empty")
    found: list[Incoming] = []
    said: dict[str, Item] = {}  # the items of one assistant turn, by their places
    for n, item in enumerate(items):
        spoken = item.role == "assistant" and item.type in (None, "message")
        assistant = spoken or item.type in ("function_call", "reasoning")
        if item.type == "function_call" and not item.name:
            raise invalid(f"input[{n}].name", "is required: it names the function that was called")
        if assistant:
            for place, part in enumerate(item.content if isinstance(item.content, list) else ()):
                if part.type not in SAID:
                    where = f"input[{n}].content[{place}].type"
                    raise unsupported(where, f"{part.type!r} is not valid in an assistant message")
            said[f"input[{n}]"] = item
            continue
        found += _turn(said)
        said = {}
        found.append(one_incoming(_message(item, f"input[{n}]"), f"input[{n}]"))
    return [*found, *_turn(said)]


def _message(item: Item, where: str) -> WireMessage:
    if item.type in (None, "message"):
        if item.role is None:
            raise invalid(f"{where}.role", "is required")
        return WireMessage(role=item.role, content=item.content)
    if item.type == "function_call_output":
        if item.call_id is None:
            raise invalid(f"{where}.call_id", "is required: it names the call that this is the result of")
        if item.output is None:
            raise invalid(f"{where}.output", "is required")
        return WireMessage(role="tool", content=item.output, tool_call_id=item.call_id)
    raise unsupported(f"{where}.type", f"{item.type!r} is not known here")


def _turn(said: Mapping[str, Item]) -> list[Incoming]:
    """Combine the items of one assistant turn into one message."""
    if not said:
        return []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[WireCall] = []
    for item in said.values():
        if item.type == "function_call":
            function = CalledFunction(name=item.name or "", arguments=item.arguments or "{}")
            calls.append(WireCall(id=item.call_id or "", function=function))
        else:
            parts = (
                item.content if isinstance(item.content, list) else [Part(type="text", text=item.content or "")]
            )
            text = "".join(part.text or part.refusal or "" for part in parts)
            (thoughts if item.type == "reasoning" else texts).append(text)
    message = WireMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )
    arguments = [f"{place}.arguments" for place, item in said.items() if item.type == "function_call"]
    return [one_incoming(message, next(iter(said)), arguments)]


@dataclass(slots=True)
class _Open:
    """An output item in progress; `text` is its content so far."""

    kind: str
    id: str
    text: str = ""
    call_id: str = ""
    name: str = ""

    def item(self, status: str) -> Json:
        """Return the item as JSON."""
        if self.kind == "function_call":
            return {
                "id": self.id,
                "type": "function_call",
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
                "status": status,
            }
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": [self.part()], "status": status}
        content = [self.part()] if self.text or status != "in_progress" else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self) -> Json:
        """Return the content part as JSON."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ResponseWriter:
    """Write the answer to one request, whole or in events."""

    def __init__(self, request: ResponsesRequest, job: Job) -> None:
        self._request, self._job = request, job
        self._id, self._created = fresh_id("resp_"), now()
        self._items: list[_Open] = []
        self._number = 0

    def whole(self, spoken: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        (one,) = spoken
        self._absorb(one)
        body = self._response(self._status(one), one)
        self._keep(one, body)
        return body

    def _keep(self, one: Choice, body: Json) -> None:
        """Make the response available to later requests, before the client receives it and may refer to it."""
        if self._stored:
            before = self._job.ask.messages[bool(self._request.instructions) :]
            self._job.session.keep(self._id, one.turn, before, body)

    @property
    def _stored(self) -> bool:
        return self._request.store is not False

    def _absorb(self, one: Choice) -> None:
        """Take over the items of a turn that was not streamed."""
        sent = one.sent.message
        if sent.reasoning:
            self._items.append(_Open("reasoning", fresh_id("rs_"), sent.reasoning))
        if sent.content or not sent.tool_calls:
            assert isinstance(sent.content, str)
            self._items.append(_Open("message", fresh_id("msg_"), sent.content))
        for call, raw in zip(sent.tool_calls, one.sent.raw_arguments, strict=True):
            self._items.append(_Open("function_call", fresh_id("fc_"), raw, call.id, call.name))

    @staticmethod
    def _status(one: Choice) -> str:
        return "incomplete" if one.finish == "length" else "completed"

    def _response(self, status: str, one: Choice | None = None) -> Json:
        request, job = self._request, self._job
        format = request.text.format if request.text else None
        done = one is not None
        usage = {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": job.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": job.prompt_tokens + job.completion_tokens,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [item.item(status) for item in self._items] if done else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": self._stored,
            "temperature": job.ask.temperature,
            "text": {"format": {"type": "text"} if format is None else format.model_dump(by_alias=True)},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": job.ask.top_p,
            "truncation": "disabled",
            "usage": usage if done else None,
            **({} if one is None or not request.return_token_ids else self._ids(one)),
        }

    def _ids(self, one: Choice) -> Json:
        return {"prompt_token_ids": list(self._job.prompt.ids), "token_ids": list(one.turn.completion.ids)}

    # -- events ------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}

    def opening(self) -> list[Json]:
        """Return the events that announce the response."""
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def chunks(self, index: int, deltas: Sequence[Delta], drawn: Sequence[TokenLogprob]) -> list[Json]:
        """Return the events for pieces of the turn."""
        return [event for delta in deltas for event in self._piece(delta)]

    def _piece(self, delta: Delta) -> list[Json]:
        if isinstance(delta, CallBegun):
            return self._begin(_Open("function_call", fresh_id("fc_"), "", delta.id, delta.name))
        if isinstance(delta, ArgumentsDelta):
            calls = [n for n, item in enumerate(self._items) if item.kind == "function_call"]
            place, kind = calls[delta.index], "response.function_call_arguments.delta"
            events = []
        else:
            assert isinstance(delta, ContentDelta | ReasoningDelta)
            of = "message" if isinstance(delta, ContentDelta) else "reasoning"
            kind = "response.output_text.delta" if of == "message" else "response.reasoning_text.delta"
            found = [n for n, item in enumerate(self._items) if item.kind == of]
            prefix = "msg_" if of == "message" else "rs_"
            events = [] if found else self._begin(_Open(of, fresh_id(prefix)))
            place = found[0] if found else len(self._items) - 1
        item = self._items[place]
        item.text += delta.text
        where: Json = {"item_id": item.id, "output_index": place}
        if item.kind != "function_call":
            where["content_index"] = 0
        if item.kind == "message":
            where["logprobs"] = []
        return [*events, self._event(kind, **where, delta=delta.text)]

    def _begin(self, item: _Open) -> list[Json]:
        self._items.append(item)
        place = len(self._items) - 1
        events = [self._event("response.output_item.added", output_index=place, item=item.item("in_progress"))]
        if item.kind == "message":
            where = {"item_id": item.id, "output_index": place, "content_index": 0}
            events.append(self._event("response.content_part.added", **where, part=item.part()))
        return events

    def closing(self, spoken: Sequence[Choice]) -> list[Json]:
        """Return the events that complete every item and the response."""
        (one,) = spoken
        status = self._status(one)
        answered = any(item.kind != "reasoning" for item in self._items)
        events = [] if answered else self._begin(_Open("message", fresh_id("msg_")))
        for place, item in enumerate(self._items):
            where: Json = {"item_id": item.id, "output_index": place}
            if item.kind == "function_call":
                events.append(
                    self._event(
                        "response.function_call_arguments.done", **where, name=item.name, arguments=item.text
                    )
                )
            elif item.kind == "reasoning":
                events.append(
                    self._event("response.reasoning_text.done", **where, content_index=0, text=item.text)
                )
            else:
                where["content_index"] = 0
                events.append(self._event("response.output_text.done", **where, text=item.text, logprobs=[]))
                events.append(self._event("response.content_part.done", **where, part=item.part()))
            events.append(self._event("response.output_item.done", output_index=place, item=item.item(status)))
        body = self._response(status, one)
        self._keep(one, body)
        return [*events, self._event(f"response.{status}", response=body)]
