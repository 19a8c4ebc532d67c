"""Request models for /v1/messages. Source: the Anthropic Messages API reference, version 2023-06-01."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator

from agentrl.serve.api_errors import invalid, unsupported
from agentrl.serve.dialects.unfollowed import check_unknown
from agentrl.serve.dialects.wire import Json, Tokens, Wire

KINDS: list[JsonValue] = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]


class Block(Wire):
    """One block of a message's content; each type has its own fields."""

    type: Annotated[str, Field(json_schema_extra={"enum": KINDS})]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    """Of a tool use; its result repeats it as `tool_use_id`."""
    name: str | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Field(fail_fast=True)] | None = None
    """Of a tool result."""
    is_error: bool | None = None


class TextBlock(Wire):
    """One block of the system prompt."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["text"]})]
    text: str


class AnthropicMessage(Wire):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class AnthropicTool(Wire):
    """A tool offered to the model; only tools that the client runs are supported."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["custom"]})] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: Json | None = None


class AnthropicToolChoice(Wire):
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class SchemaFormat(Wire):
    """The JSON schema that an answer must follow."""

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Wire):
    """Options for the answer; `effort` is accepted and has no effect."""

    format: SchemaFormat | None = None


class CountRequest(Wire):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Json | None = None
    """Accepted without effect: the chat template decides whether the model thinks."""
    chat_template_kwargs: Json | None = None
    """Extension of vLLM and SGLang: variables of the chat template, such as {"enable_thinking": false}."""

    def refuse_unsupported(self) -> None:
        """Raise for unsupported parameters that would change the answer."""
        unknown = dict(self.model_extra or {})
        _refuse_edits(unknown.pop("context_management", None))
        known = MessagesRequest.model_fields  # a client may count the very request that it is going to send
        check_unknown({name: value for name, value in unknown.items() if name not in known}, known)


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Tokens
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stop_sequences: list[str] | None = None
    metadata: Json | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    return_token_ids: bool | None = None
    """Extension: the answer has `prompt_token_ids` and `token_ids`."""

    @model_validator(mode="after")
    def _stop_texts(self) -> MessagesRequest:
        stops = self.stop_sequences or []
        if len(stops) > 16 or not all(stops):
            raise invalid("stop_sequences", "must be up to 16 texts, none of them empty")
        if self.output_format is not None and self.output_config is not None and self.output_config.format:
            raise invalid("output_format", "conflicts with output_config.format: give only one of them")
        return self


def _refuse_edits(given: Any) -> None:
    """Raise for edits of the history, except for those that keep all of it."""
    edits = given.get("edits") or [] if isinstance(given, dict) else [] if given is None else [given]
    for edit in edits if isinstance(edits, list) else [edits]:
        kept = edit.get("keep") if isinstance(edit, dict) else None
        if not (isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking") and kept == "all"):
            raise unsupported("context_management", "this server does not edit a history; send the edited one")
