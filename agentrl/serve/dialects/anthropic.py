"""POST /v1/messages and /v1/messages/count_tokens: content blocks in and out, as one object or as events.

Source: the Anthropic Messages API reference, version 2023-06-01.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from agentrl.engine.base import TokenLogprob
from agentrl.serve.api_errors import ApiError, invalid, unsupported
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
from agentrl.serve.dialects.wire_anthropic import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountRequest,
    MessagesRequest,
    TextBlock,
)
from agentrl.serve.dialects.wire_messages import one_incoming, tools_of
from agentrl.serve.grammar import AnswerFormat
from agentrl.serve.reader import ArgumentsDelta, CallBegun, ContentDelta, Delta
from agentrl.serve.service import Choice, GenerationRequest, Job, fresh_id

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def request_of(request: MessagesRequest) -> GenerationRequest:
    """Convert the request.

    Raises:
        ApiError: a parameter has an unknown or unsupported value.
    """
    counted = counted_of(request)
    choice, named = _choice(request.tool_choice)
    asked = request.output_format or (request.output_config and request.output_config.format)
    return GenerationRequest(
        messages=counted.messages,
        tools=counted.tools,
        choice=choice,  # type: ignore[arg-type]
        named=named,
        one_call=bool(request.tool_choice and request.tool_choice.disable_parallel_tool_use and counted.tools),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=nucleus(request.top_p),
        top_k=request.top_k or 0,
        limit=request.max_tokens,
        stops=tuple(request.stop_sequences or ()),
        format=AnswerFormat(asked.schema_) if asked else None,
        options=counted.options,
    )


def counted_of(request: CountRequest) -> GenerationRequest:
    """The part of a request that becomes its prompt.

    Raises:
        ApiError: a parameter has an unknown or unsupported value.
    """
    request.refuse_unsupported()
    if request.messages[-1].role == "assistant":
        where = f"messages[{len(request.messages) - 1}]"
        raise unsupported(where, "the last message must be the user's: a started answer is not continued here")
    system = request.system if isinstance(request.system, str | None) else _system(request.system)
    messages = [one_incoming(WireMessage(role="system", content=system), "system")] if system else []
    for number, message in enumerate(request.messages):
        where, blocks = f"messages[{number}]", message.content if isinstance(message.content, list) else ()
        inputs = [f"{where}.content[{n}].input" for n, block in enumerate(blocks) if block.type == "tool_use"]
        messages += [one_incoming(one, where, inputs) for one in _messages(message, where)]
    return GenerationRequest(
        messages=messages, tools=_tools(request.tools or ()), options=request.chat_template_kwargs or {}
    )


def _system(blocks: Sequence[TextBlock]) -> str:
    for number, block in enumerate(blocks):
        if block.type != "text":
            raise unsupported(
                f"system[{number}].type", f"{block.type!r} is not supported: this policy reads text only"
            )
    return "".join(block.text for block in blocks)


def _tools(tools: Sequence[AnthropicTool]) -> tuple[Json, ...]:
    wired = []
    for number, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise unsupported(f"tools[{number}].type", f"{tool.type!r}: only tools that the client runs are known")
        if tool.input_schema is None:
            raise invalid(f"tools[{number}].input_schema", "is required")
        function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
        wired.append(WireTool(type="function", function=function))
    try:
        return tools_of(wired)
    except ApiError as e:
        param = (e.param or "").replace("function.parameters", "input_schema").replace("function.", "")
        raise invalid(param, e.message.partition(": ")[2]) from None


def _choice(given: AnthropicToolChoice | None) -> tuple[str, str]:
    if given is None:
        return "auto", ""
    if given.type == "tool" and not given.name:
        raise invalid("tool_choice.name", "is required with type 'tool'")
    kinds = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
    return kinds[given.type], given.name or "" if given.type == "tool" else ""


def _messages(message: AnthropicMessage, where: str) -> Iterator[WireMessage]:
    """The messages of the chat format that one message stands for: each tool result is a separate one."""
    blocks = message.content
    if isinstance(blocks, str):
        yield WireMessage(role=message.role, content=blocks)
    elif message.role == "assistant":
        yield _assistant(blocks, where)
    else:
        texts: list[Part] = []
        for number, block in enumerate(blocks):
            if block.type == "tool_result":
                if texts:
                    yield WireMessage(role=message.role, content=texts)
                    texts = []
                yield _result(block, f"{where}.content[{number}]")
            else:
                texts.append(_text(block, f"{where}.content[{number}]"))
        if texts or not blocks:
            yield WireMessage(role=message.role, content=texts)


def _assistant(blocks: Sequence[Block], where: str) -> WireMessage:
    texts: list[Part] = []
    thoughts: list[str] = []
    calls: list[WireCall] = []
    for number, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.name or not block.id:
                raise invalid(f"{where}.content[{number}]", "a tool_use block needs its id and name")
            arguments = _raw(block.input or {})
            calls.append(WireCall(id=block.id, function=CalledFunction(name=block.name, arguments=arguments)))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            texts.append(_text(block, f"{where}.content[{number}]"))
    reasoning = "".join(thoughts) or None
    return WireMessage(role="assistant", content=texts, tool_calls=calls or None, reasoning_content=reasoning)


def _result(block: Block, where: str) -> WireMessage:
    if not block.tool_use_id:
        raise invalid(f"{where}.tool_use_id", "is required: it names the call that this is the result of")
    content = block.content
    if isinstance(content, list):
        parts = [_text(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
        return WireMessage(role="tool", content=parts, tool_call_id=block.tool_use_id)
    return WireMessage(role="tool", content=content or "", tool_call_id=block.tool_use_id)


def _text(block: Block, where: str) -> Part:
    if block.type != "text":
        raise unsupported(f"{where}.type", f"{block.type!r} is not supported: this policy reads text only")
    if block.text is None:
        raise invalid(f"{where}.text", "is required")
    return Part(type="text", text=block.text)


class MessagesWriter:
    """Write the answer to one request, whole or in events."""

    def __init__(self, request: MessagesRequest, job: Job) -> None:
        self._request, self._job, self._id = request, job, fresh_id("msg_")
        self._open: Json | None = None
        self._started = 0
        self._arguments = ""  # of the open call; sent when it is complete, because they may be malformed

    def whole(self, spoken: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        (one,) = spoken
        sent = one.sent.message
        content: list[Json] = []
        if sent.reasoning:
            content.append({"type": "thinking", "thinking": sent.reasoning, "signature": self._id})
        if sent.content:
            content.append({"type": "text", "text": sent.content})
        for call, raw in zip(sent.tool_calls, one.sent.raw_arguments, strict=True):
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(raw)})
        reason = {"stop_reason": self._reason(one), "stop_sequence": one.stopped_by}
        return {**self._head(), "content": content, **reason, "usage": self._usage(), **self._ids(one)}

    def opening(self) -> list[Json]:
        """Return the events that start the message."""
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": {**message, "usage": self._usage()}}, {"type": "ping"}]

    def chunks(self, index: int, deltas: Sequence[Delta], drawn: Sequence[TokenLogprob]) -> list[Json]:
        """Return the events for pieces of the turn."""
        return [event for delta in deltas for event in self._piece(delta)]

    def closing(self, spoken: Sequence[Choice]) -> list[Json]:
        """Return the events that end the message."""
        (one,) = spoken
        delta = {"stop_reason": self._reason(one), "stop_sequence": one.stopped_by}
        end = {"type": "message_delta", "delta": delta, "usage": self._usage(), **self._ids(one)}
        return [*self._close(), end, {"type": "message_stop"}]

    def _piece(self, delta: Delta) -> Iterator[Json]:
        if isinstance(delta, CallBegun):
            yield from self._begin({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
            return
        if isinstance(delta, ArgumentsDelta):
            self._arguments += delta.text
            return
        kind = "text" if isinstance(delta, ContentDelta) else "thinking"
        if self._open is None or self._open["type"] != kind:
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **signed})
        piece = {"type": f"{kind}_delta", kind: delta.text}
        yield {"type": "content_block_delta", "index": self._started - 1, "delta": piece}

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._open, self._started = block, self._started + 1
        yield {"type": "content_block_start", "index": self._started - 1, "content_block": block}

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            index = self._started - 1
            last: Json | None = None
            if self._open["type"] == "thinking":
                last = {"type": "signature_delta", "signature": self._id}
            elif self._open["type"] == "tool_use":
                sound = json.dumps(_input(self._arguments), ensure_ascii=False)
                last = {"type": "input_json_delta", "partial_json": sound}
            if last is not None:
                yield {"type": "content_block_delta", "index": index, "delta": last}
            self._open, self._arguments = None, ""
            yield {"type": "content_block_stop", "index": index}

    def _head(self) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}

    def _reason(self, one: Choice) -> str:
        return "stop_sequence" if one.stopped_by is not None else STOP_REASONS[one.finish]

    def _usage(self) -> Json:
        job = self._job
        return {
            "input_tokens": job.prompt_tokens - job.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": job.cached_tokens,
            "output_tokens": job.completion_tokens,
        }

    def _ids(self, one: Choice) -> Json:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._job.prompt.ids), "token_ids": list(one.turn.completion.ids)}


MALFORMED = "malformed_arguments"
"""The only key of a call's input whose arguments are not a JSON object; its value is their text."""


def _input(raw: str) -> Json:
    """The arguments of a call as the object that a block needs."""
    try:
        value = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {MALFORMED: raw}


def _raw(value: Json) -> str:
    """The text of a call's arguments, from what `_input` made of it."""
    malformed = value.get(MALFORMED)
    if isinstance(malformed, str) and len(value) == 1:
        return malformed
    return json.dumps(value, ensure_ascii=False)


def in_anthropic(path: str) -> bool:
    """Whether a request to this path expects this dialect's errors."""
    return path.endswith("/messages") or "/messages/" in path


_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> Json:
    """An error in this dialect's envelope."""
    text = error.message
    if error.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"  # the words by which agents recognize it
    return {
        "type": "error",
        "error": {"type": _ERRORS.get(error.status, "invalid_request_error"), "message": text},
    }


def model_body(name: str, created: str) -> Json:
    """One model in this dialect."""
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def models_body(names: Sequence[str], created: str) -> Json:
    """The list of models in this dialect."""
    data = [model_body(name, created) for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
