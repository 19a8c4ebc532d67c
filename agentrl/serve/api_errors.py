"""Error answers of the endpoint: OpenAI's envelope, always with `param`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from agentrl.errors import AgentRLError

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(AgentRLError):
    """An error answer: HTTP status, message, offending parameter, and OpenAI's code if it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.status, self.message, self.param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _again(status: int, message: str, param: str | None, code: str | None, headers: Mapping[str, str]) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers)


def unsupported(param: str, why: str) -> ApiError:
    """An unsupported parameter that would change the meaning of the answer."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    """A parameter with an invalid value."""
    return ApiError(400, f"{param}: {why}", param=param, code="invalid_value")


def context_exceeded(param: str, tokens: int, limit: int, *, at_least: bool = False) -> ApiError:
    """A prompt that leaves no room for a completion; `at_least` if its tokens were not counted to the end."""
    text = (
        f"This model's maximum context length is {limit} tokens, and the prompt has "
        f"{'at least ' if at_least else ''}{tokens}: "
        "no room is left for a completion; shorten it"
    )
    return ApiError(400, text, param=param, code="context_length_exceeded")


def overloaded(why: str) -> ApiError:
    """The server is busy; the client should retry after a second."""
    return ApiError(429, why, code="rate_limit_exceeded", headers={"Retry-After": "1"})


def from_validation(error: ValidationError) -> ApiError:
    """Convert the first problem of a request body, under the name of its parameter."""
    first = max(error.errors(include_url=False), key=lambda found: len(_path(found["loc"])))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    param = _path(first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: is required", param=param, code="missing_required_parameter")
    given = "" if isinstance(first["input"], dict | list) else f", got {_shown(first['input'])}"
    name = f"{param}: " if param else ""
    return ApiError(400, f"{name}{text}{given}", param=param or None, code="invalid_value")


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(str(value)[:80])


def _path(loc: tuple[int | str, ...]) -> str:
    """Convert a pydantic location to the form messages[0].content, omitting the names of union members."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part == part.lower() and part not in _MEMBERS:
            path += f".{part}" if path else part
    return path


_MEMBERS = frozenset({"str", "int", "float", "bool", "none", "constrained_str", "dict", "list"})
