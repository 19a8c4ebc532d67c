"""Request models for chat and text completions. Types are strict; unknown fields are ignored, harmful ones
rejected.

Source: the OpenAI API reference; additional fields have the names that vLLM and SGLang use.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.serve.api_errors import invalid
from agentrl.serve.dialects.unfollowed import check_unknown

Json = dict[str, Any]
"""A JSON object."""

Tokens = Annotated[int, Field(ge=1, le=1 << 31)]


def nucleus(top_p: float | None) -> float:
    """The value of `top_p`: 0, which OpenAI allows, keeps only the likeliest token."""
    return 1.0 if top_p is None else max(top_p, 1e-6)


def usage(prompt: int, completion: int, cached: int) -> Json:
    """The number of tokens that a request took, as OpenAI writes it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Wire(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Part(Wire):
    """One part of a message's content; only text is supported."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "input_text", "output_text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Wire):
    """The function to call, and its arguments."""

    name: str
    arguments: str = "{}"
    """JSON text."""


class WireCall(Wire):
    """A tool call in an assistant message."""

    id: str = ""
    type: str | None = "function"
    function: CalledFunction


class WireMessage(Wire):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    """What an assistant turn says instead of `content`."""
    tool_calls: list[WireCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """The think block of an assistant turn, in the format this server sends."""
    reasoning: str | None = None
    function_call: Any = None
    """Refused: the predecessor of `tool_calls`."""


class Function(Wire):
    """The function of a tool."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    """Accepted but without effect: the schema is part of the prompt either way."""


class WireTool(Wire):
    """A tool offered to the model; only functions are supported."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["function"]})]
    function: Function | None = None


class JsonSchema(Wire):
    """The schema that an answer must follow."""

    name: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    """Refused: where other servers have the schema."""

    @model_validator(mode="after")
    def _schema_in_its_place(self) -> Self:
        if self.schema_ is not None:
            raise invalid(
                "response_format.schema", 'belongs in "json_schema": {"schema": ...} of type json_schema'
            )
        if self.json_schema is not None and self.type != "json_schema":
            raise invalid("response_format.json_schema", f"has no effect with type {self.type}")
        return self


class StreamOptions(Wire):
    """Streaming options."""

    include_usage: bool | None = None


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    """Raise ApiError for options of a stream in a request for a whole answer."""
    if options is not None and not stream:
        raise invalid("stream_options", "has no effect without stream: true")


class WireRequest(Wire):
    """Fields common to all requests."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Extension of vLLM and SGLang: only tokens with at least this share of the largest probability."""
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Tokens | None = None
    return_token_ids: bool | None = None
    """Extension of vLLM: the answer has `prompt_token_ids`, and each choice `token_ids`."""

    @model_validator(mode="after")
    def _stop_texts(self) -> Self:
        if len(self.stops) > 16 or not all(self.stops):
            raise invalid("stop", "must be a text or up to 16 texts, none of them empty")
        check_stream_options(self.stream_options, self.stream)
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether a stream reports its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Raise for unsupported parameters that would change the answer."""
        check_unknown(self.model_extra, type(self).model_fields)


class ChatRequest(WireRequest):
    """POST /v1/chat/completions."""

    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    messages: Annotated[list[WireMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[WireTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    """`none`, `auto`, `required`, or {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool | None = None
    """False: the completion ends with its first call."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Tokens | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: Json | None = None
    """Extension of vLLM and SGLang: variables of the chat template, such as {"enable_thinking": false}."""

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens per completion."""
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens", "conflicts with max_completion_tokens: give only one of them")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "has no effect without logprobs: true")
        return self


class CompletionRequest(WireRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Number of alternatives to return per token."""
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = 16
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
