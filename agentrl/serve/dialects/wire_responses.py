"""Request models for /v1/responses. Source: the OpenAI API reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from agentrl.serve.api_errors import unsupported
from agentrl.serve.dialects.wire import Json, Part, Tokens, Wire

KINDS: list[JsonValue] = ["message", "function_call", "function_call_output", "reasoning"]

Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


class Item(Wire):
    """One item of the conversation: a message, a call, a call's result, or a think block."""

    type: Annotated[str, Field(json_schema_extra={"enum": KINDS})] = "message"
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
    name: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    """Accepted but without effect: the schema is part of the prompt either way."""


class TextFormat(Wire):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Wire):
    """Options for the answer's text."""

    format: TextFormat | None = None


class ResponsesRequest(Wire):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[Item]
    instructions: str | None = None
    """The first system message, for this response only: the next one provides its own."""
    previous_response_id: str | None = None
    """The response that `input` continues; its conversation is not sent again."""
    store: bool | None = None
    """False: no other response can continue from this one."""
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    """`none`, `auto`, `required`, or {"type": "function", "name": ...}."""
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
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

    def refuse_unsupported(self) -> None:
        """Raise for unsupported parameters that would change the answer."""
        if "message.output_text.logprobs" in (self.include or ()):
            raise unsupported("include", "'message.output_text.logprobs' is not supported here; leave it out")
        for name, value in (self.model_extra or {}).items():
            if name in HARMLESS and value is not None and value not in HARMLESS[name]:
                raise unsupported(name, HARMLESS_WHY.get(name, "is not supported here; leave it out"))


HARMLESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Parameters that would change the answer, with the values (besides null) that have no effect."""
HARMLESS_WHY = {"conversation": "conversation objects are not supported; continue with `previous_response_id`"}
