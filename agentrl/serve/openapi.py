"""The endpoint's OpenAPI 3.1 description, generated from the models that validate requests."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from agentrl.extras import DISTRIBUTION
from agentrl.serve.dialects.anthropic import in_anthropic
from agentrl.serve.dialects.wire import ChatRequest, CompletionRequest
from agentrl.serve.dialects.wire_anthropic import CountRequest, MessagesRequest
from agentrl.serve.dialects.wire_responses import ResponsesRequest

_REQUESTS = {
    "/v1/chat/completions": (ChatRequest, "The next assistant turn of a conversation."),
    "/v1/completions": (CompletionRequest, "What follows a text."),
    "/v1/responses": (ResponsesRequest, "The next items of a conversation."),
    "/v1/messages": (MessagesRequest, "The next assistant message, in Anthropic's format."),
    "/v1/messages/count_tokens": (CountRequest, "The number of tokens in a prompt, in Anthropic's format."),
}
_ERRORS = {
    "400": "The request is malformed or asks for an unsupported feature.",
    "401": "The key is missing or wrong.",
    "404": "No such model.",
    "408": "The request came too slowly.",
    "413": "The request is too large.",
    "429": "Too many concurrent requests; see Retry-After.",
    "503": "The engine is lost, or its servers are starting.",
}
_ENVELOPE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ENVELOPE = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


@cache
def describe() -> dict[str, Any]:
    """Return the complete description."""
    models = [(model, "validation") for model, _ in _REQUESTS.values()]
    found, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    names: dict[Any, dict[str, Any]] = {model: schema for (model, _), schema in found.items()}
    paths: dict[str, Any] = {}
    for path, (model, summary) in _REQUESTS.items():
        schema = names[model]
        paths[path] = {
            "post": {
                "operationId": path.removeprefix("/v1/").replace("/", "_"),
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {
                    "200": _streamed("The answer, or its events."),
                    **_errors(*_ERRORS, envelope="AnthropicError" if in_anthropic(path) else "Error"),
                },
            }
        }
    paths["/v1/models"] = {"get": _get("models", "The models that are served.", "401")}
    paths["/v1/models/{model}"] = {
        "get": {
            **_get("model", "One model.", "401", "404"),
            "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
        }
    }
    paths["/health"] = {"get": _get("health", "Whether requests are answered.", "503")}
    schemas = {**definitions["$defs"], "Error": _ENVELOPE, "AnthropicError": _ANTHROPIC_ENVELOPE}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrl", "version": version(DISTRIBUTION)},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _get(name: str, summary: str, *errors: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": {"description": "OK", "content": content}, **_errors(*errors)},
    }


def _streamed(text: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }


def _errors(*statuses: str, envelope: str = "Error") -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{envelope}"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}
