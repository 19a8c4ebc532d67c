"""Request models for /v1/responses. Source: the OpenAI API reference."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from agentrl.serve.api_errors import invalid, unsupported
from agentrl.serve.dialects.unfollowed import check_unknown
from agentrl.serve.dialects.wire import Json, Part, StreamOptions, Tokens, Wire, check_stream_options

KINDS: list[JsonValue] = ["message", "function_call", "function_call_output", "reasoning", "item_reference"]

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class Item(Wire):
    """One item of the conversation: a message, a call, a call's result, a think block, or a reference to one."""

    id: str | None = None
    """Of an item of a stored response; a reference needs it."""
    type: Annotated[str, Field(json_schema_extra={"enum": KINDS})] | None = None
    """By default `message`, or `item_reference` if there is only an id."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """JSON text."""
    output: str | list[Part] | None = None


class FlatTool(Wire):
    """A tool offered to the model; only functions are supported."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["function"]})]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    """Accepted but without effect: the schema is part of the prompt either way."""


class TextFormat(Wire):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_in_its_place(self) -> Self:
        if self.schema_ is not None and self.type != "json_schema":
            raise invalid("text.format.schema", f"has no effect with type {self.type}")
        return self


class TextOptions(Wire):
    """Options for the answer's text."""

    format: TextFormat | None = None


class ResponsesRequest(Wire):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    """The first system message, for this response only: the next one provides its own."""
    previous_response_id: str | None = None
    """The response that `input` continues; its conversation is not sent again."""
    store: bool | None = None
    """False: no other response can continue from this one."""
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    """`none`, `auto`, `required`, or {"type": "function", "name": ...}."""
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_output_tokens: Tokens | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    """Other outputs than `message.output_text.logprobs` are accepted without effect."""
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    """Returned with the response."""
    chat_template_kwargs: Json | None = None
    """Extension of vLLM and SGLang: variables of the chat template, such as {"enable_thinking": false}."""
    return_token_ids: bool | None = None
    """Extension: the response has `prompt_token_ids` and `token_ids`."""

    def refuse_unsupported(self) -> None:
        """Raise for unsupported parameters that would change the answer."""
        if "message.output_text.logprobs" in (self.include or ()):
            raise unsupported("include", "'message.output_text.logprobs' is not supported here; leave it out")
        check_stream_options(self.stream_options, self.stream)
        check_unknown(self.model_extra, type(self).model_fields)
