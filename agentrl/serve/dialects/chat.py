"""POST /v1/chat/completions: the request as a `GenerationRequest`, the answer as JSON or as chunks.

Source: the OpenAI API reference. Extensions: `reasoning_content` (the name used by vLLM, SGLang and DeepSeek), and
with `return_token_ids` the ids of prompt and choices (vLLM).
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.template import Renderer
from agentrl.engine.base import TokenLogprob
from agentrl.serve.api_errors import invalid
from agentrl.serve.dialects.wire import ChatRequest, Json, ResponseFormat, nucleus, usage
from agentrl.serve.dialects.wire_messages import allowed_tools, one_incoming, tools_of
from agentrl.serve.grammar import AnswerFormat
from agentrl.serve.reader import ArgumentsDelta, CallBegun, ContentDelta, Delta, ReasoningDelta
from agentrl.serve.service import Choice, GenerationRequest, Job, fresh_id, now


def request_of(request: ChatRequest) -> GenerationRequest:
    """Convert the request.

    Raises:
        ApiError: a parameter has an unknown or unsupported value.
    """
    request.refuse_unsupported()
    tools = tools_of(request.tools)
    tools, given = _allowed(tools, request.tool_choice)
    choice, named = _choice(given)
    return GenerationRequest(
        messages=[one_incoming(message, f"messages[{n}]") for n, message in enumerate(request.messages)],
        tools=tools,
        choice=choice,  # type: ignore[arg-type]
        named=named,
        one_call=request.parallel_tool_calls is False and bool(tools),
        n=request.n or 1,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=nucleus(request.top_p),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        limit=request.limit,
        stops=request.stops,
        seed=request.seed,
        top=request.top_logprobs or 0,
        format=format_of(request.response_format),
        scored=bool(request.logprobs),
        options=request.chat_template_kwargs or {},
    )


def _allowed(tools: tuple[Json, ...], given: str | Json | None) -> tuple[tuple[Json, ...], str | Json | None]:
    """The tools that may be called, and the choice among them."""
    listed = given.get("allowed_tools") if isinstance(given, dict) else None
    if not isinstance(listed, dict):
        return tools, given
    return allowed_tools(tools, listed.get("tools"), listed.get("mode", "auto"))


def _choice(given: str | Json | None) -> tuple[str, str]:
    if given is None or isinstance(given, str):
        return given or "auto", ""
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type") != "function" or not isinstance(name, str):
        raise invalid(
            "tool_choice",
            'must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}',
        )
    return "named", name


def format_of(given: ResponseFormat | None) -> AnswerFormat | None:
    """Return the grammar of an answer, or None for free text."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return AnswerFormat({})
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise invalid("response_format.json_schema.schema", "is required with type 'json_schema'")
    return AnswerFormat(given.json_schema.schema_)


class ChatWriter:
    """Write the answer to one request, whole or in chunks."""

    def __init__(self, request: ChatRequest, job: Job, *, fingerprint: str, renderer: Renderer) -> None:
        self._request, self._job, self._renderer = request, job, renderer
        self._logprobs = bool(request.logprobs)
        self._head = {
            "id": fresh_id("chatcmpl-"),
            "created": now(),
            "model": request.model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, spoken: Sequence[Choice]) -> Json:
        """Return the answer as one object."""
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, one) for index, one in enumerate(spoken)],
            "usage": self._usage(),
        }
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._job.prompt.ids)
        return body

    def _choice(self, index: int, one: Choice) -> Json:
        sent = one.sent.message
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": raw}}
            for call, raw in zip(sent.tool_calls, one.sent.raw_arguments, strict=True)
        ]
        message: Json = {
            "role": "assistant",
            "content": sent.content or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        if sent.reasoning is not None:
            message["reasoning_content"] = sent.reasoning
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs_of(self._shown(one.drawn)) if self._logprobs else None,
            "finish_reason": one.finish,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = list(one.turn.completion.ids)
        return choice

    def _shown(self, drawn: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        return [token for token in drawn if token.id not in self._renderer.stop_ids]

    def _usage(self) -> Json:
        return usage(self._job.prompt_tokens, self._job.completion_tokens, self._job.cached_tokens)

    # -- chunks ------------------------------------------------------------------------------------------------

    def chunks(self, index: int, deltas: Sequence[Delta], drawn: Sequence[TokenLogprob]) -> list[Json]:
        """Return pieces of choice `index`; the tokens are sent with the last of them."""
        bodies = [self._delta(delta) for delta in deltas]
        tokens = self._shown(drawn)
        if not bodies and ((tokens and self._logprobs) or (drawn and self._request.return_token_ids)):
            bodies = [{}]
        chunks = [self._chunk(index, body) for body in bodies]
        if chunks and self._logprobs and tokens:
            chunks[-1]["choices"][0]["logprobs"] = self._logprobs_of(tokens)
        if chunks and self._request.return_token_ids:
            chunks[-1]["choices"][0]["token_ids"] = [token.id for token in drawn]
        return chunks

    def opening(self) -> list[Json]:
        """Return the chunks that start each choice with its role."""
        chunks = [
            self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
            for index in range(self._job.ask.n)
        ]
        if self._request.return_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._job.prompt.ids)
        return chunks

    def closing(self, spoken: Sequence[Choice]) -> list[Json]:
        """Return the chunks with each choice's finish reason, and the usage if requested."""
        chunks = [self._chunk(index, {}, one.finish) for index, one in enumerate(spoken)]
        if self._request.wants_usage:
            chunks.append({**self._chunk(0, {}), "choices": [], "usage": self._usage()})
        return chunks

    def _chunk(self, index: int, delta: Json, finish: str | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return {**chunk, "usage": None} if self._request.wants_usage else chunk

    @staticmethod
    def _delta(delta: Delta) -> Json:
        if isinstance(delta, ContentDelta):
            return {"content": delta.text}
        if isinstance(delta, ReasoningDelta):
            return {"reasoning_content": delta.text}
        if isinstance(delta, CallBegun):
            function = {"name": delta.name, "arguments": ""}
            return {
                "tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]
            }
        assert isinstance(delta, ArgumentsDelta)
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}

    def _logprobs_of(self, drawn: Sequence[TokenLogprob]) -> Json:
        def entry(id: int, logprob: float) -> Json:
            raw = self._renderer.vocabulary.token_bytes(id)
            return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

        content = [
            {**entry(token.id, token.logprob), "top_logprobs": [entry(id, logprob) for id, logprob in token.top]}
            for token in drawn
        ]
        return {"content": content, "refusal": None}
