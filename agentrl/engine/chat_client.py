"""Chat with any OpenAI-compatible endpoint: what a policy is that we have no tokens of.

The client library retries what may pass (connection, 408, 409, 429 with Retry-After, 5xx). What is left is the
endpoint's trouble and never the policy's: an `EngineError`. A request that no repetition can mend (wrong key,
unknown model, a parameter that the model refuses) is the user's to mend: a `ConfigError`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.chat.messages import read_message, write_message
from agentrl.config.address import address_problem
from agentrl.errors import ConfigError, EngineError
from agentrl.types import Message

Tools = Sequence[Mapping[str, Any]]

_ECHOED = ("reasoning_content", "reasoning", "reasoning_details")
"""Fields beside the standard ones that endpoints want to see again in the next request."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model answers, and how it is asked.

    Attributes:
        base_url: for instance `http://127.0.0.1:8000/v1`.
        model: its name there.
        api_key_env: environment variable with the API key; none is sent where it is empty.
        timeout_s: limit of one attempt.
        retries: further attempts after one that failed and may pass.
        request: further fields of each request, such as {"reasoning_effort": "low"}.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 120.0
    retries: int = 5
    request: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problem := address_problem(self.base_url):
            raise ConfigError(
                f"--base-url {self.base_url}: {problem}; give an address such as http://127.0.0.1:8000/v1"
            )

    def key(self) -> str:
        """The API key. Raises ConfigError where the variable is not set."""
        if not self.api_key_env:
            return "none"
        if not os.environ.get(self.api_key_env):
            raise ConfigError(f"--api-key-env {self.api_key_env}: this environment variable is not set")
        return os.environ[self.api_key_env]


class ContextFullError(Exception):
    """The conversation does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: the message, why it ended, what it cost in tokens and seconds."""

    message: Message
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seconds: float


class ChatClient:
    """Asks one endpoint; for one event loop, and closed at its end."""

    def __init__(self, endpoint: Endpoint) -> None:
        import httpx
        from openai import AsyncOpenAI

        from agentrl.engine.servers.http import SDK_LIMITS, Transport

        self.endpoint = endpoint
        self._limit_field = "max_tokens"  # newer models of some endpoints want max_completion_tokens
        # The SDK names httpx2 and takes both.
        http = httpx.AsyncClient(transport=Transport(limits=SDK_LIMITS), follow_redirects=True)
        self._client = AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.key(),
            max_retries=endpoint.retries,
            timeout=endpoint.timeout_s,
            http_client=http,  # type: ignore[arg-type]
        )

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._client.close()

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, *, temperature: float, max_tokens: int
    ) -> tuple[dict[str, Any], Reply]:
        """The answer to a conversation in the wire's form, and the same as the message to send back next time.

        Raises:
            ContextFullError: the conversation is too long.
            EngineError: no answer after all attempts, or one that is none.
            ConfigError: the endpoint refuses what the user set.
        """
        import openai

        body: dict[str, Any] = {"model": self.endpoint.model, "messages": messages, "temperature": temperature}
        if tools:
            body["tools"] = list(tools)
        body |= {self._limit_field: max_tokens}
        extra = dict(self.endpoint.request)
        began = time.monotonic()
        try:
            answer = await self._client.chat.completions.create(**body, extra_body=extra or None)
        except openai.APIStatusError as e:
            if self._limit_field == "max_tokens" and "max_completion_tokens" in str(e):
                self._limit_field = "max_completion_tokens"
                return await self.ask(messages, tools, temperature=temperature, max_tokens=max_tokens)
            raise self._refused(e, temperature) from e
        except openai.APIConnectionError as e:  # timeouts among them
            raise EngineError(f"{self.endpoint.base_url}: {type(e).__name__}: {e.__cause__ or e}") from e
        except (openai.OpenAIError, ValueError) as e:
            raise EngineError(f"{self.endpoint.base_url}: {type(e).__name__}: {e}") from e
        return self._read(answer, time.monotonic() - began)

    def _refused(self, e: Any, temperature: float) -> Exception:
        """What an error status means: to the episode, to the endpoint or to the user."""
        where, text = f"{self.endpoint.base_url} ({self.endpoint.model})", _error_text(e)
        param = (e.body or {}).get("param") if isinstance(e.body, Mapping) else None
        if e.code == "context_length_exceeded" or "maximum context length" in text:
            return ContextFullError(text)
        if e.status_code in (401, 403):
            return ConfigError(f"{where}: {text}; name the variable that holds the API key: --api-key-env NAME")
        if e.status_code == 404:
            return ConfigError(
                f"{where}: {text}; give the base URL with its /v1, and --model as the endpoint has it"
            )
        if e.status_code == 400 and param == "temperature":
            return ConfigError(f"{where}: refuses temperature {temperature:g}: {text}; give another --temperature")
        if e.status_code == 400 and param in (*self.endpoint.request, "tools", "model"):
            return ConfigError(f"{where}: refuses `{param}`: {text}")
        return EngineError(f"{where}: status {e.status_code}: {text}")

    def _read(self, answer: Any, seconds: float) -> tuple[dict[str, Any], Reply]:
        choices = getattr(answer, "choices", None)
        if not choices or choices[0].message is None:
            said = getattr(answer, "error", None) or answer
            raise EngineError(f"{self.endpoint.base_url}: an answer without a message: {str(said)[:300]}")
        raw = choices[0].message
        wired = _wire_calls(raw.tool_calls or ())
        extra: dict[str, Any] = {k: v for k in _ECHOED if (v := getattr(raw, k, None)) is not None}
        content = raw.content if raw.content is not None else (getattr(raw, "refusal", None) or "")
        wire: dict[str, Any] = {"role": "assistant", "content": raw.content or (None if wired else content)}
        wire |= ({"tool_calls": wired} if wired else {}) | extra
        readable = {k: v for k, v in wire.items() if k not in _ECHOED or isinstance(v, str)}
        read = read_message(readable)
        calls = tuple(c for n, c in enumerate(read.message.tool_calls) if n not in read.malformed)
        errors = tuple(f"tool call {n}: {why}" for n, why in read.malformed.items())
        usage = answer.usage
        details = getattr(usage, "prompt_tokens_details", None)
        reply = Reply(
            replace(read.message, content=content, tool_calls=calls, parse_errors=errors),
            choices[0].finish_reason or "stop",
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            (getattr(details, "cached_tokens", None) or 0) if details else 0,
            seconds,
        )
        return wire, reply


class Conversation:
    """One conversation with an endpoint, kept in the wire's form: turns go back as they came.

    A call whose arguments cannot be read is no call to the env, which answers it with a message without an id; on
    the wire that message answers the call, because endpoints want every call answered.
    """

    def __init__(self, client: ChatClient, tools: Tools = ()) -> None:
        self._client, self._tools = client, tools
        self._wire: list[dict[str, Any]] = []
        self._malformed: list[str] = []  # ids of calls that could not be read and wait for their answer

    def extend(self, messages: Sequence[Message]) -> None:
        """Add what came after the last answer."""
        for message in messages:
            data = write_message(message)
            if message.role == "tool" and message.tool_call_id is None:
                data = (
                    data | {"tool_call_id": self._malformed.pop(0)}
                    if self._malformed
                    else {"role": "user", "content": data["content"]}
                )
            self._wire.append(data)
        for id in self._malformed:
            text = "Error: the arguments are not a JSON object"
            self._wire.append({"role": "tool", "tool_call_id": id, "content": text})
        self._malformed = []

    async def answer(self, *, temperature: float, max_tokens: int) -> Reply:
        """The next message, which joins the conversation; raises as `ChatClient.ask`."""
        wire, reply = await self._client.ask(
            self._wire, self._tools, temperature=temperature, max_tokens=max_tokens
        )
        self._wire.append(wire)
        readable = {call.id for call in reply.message.tool_calls}
        self._malformed = [call["id"] for call in wire.get("tool_calls", ()) if call["id"] not in readable]
        return reply


def _wire_calls(raw: Sequence[Any]) -> list[dict[str, Any]]:
    """The calls of an answer in the wire's form, with unique ids."""
    wired: list[dict[str, Any]] = []
    seen: set[str] = set()
    for number, call in enumerate(raw):
        function = getattr(call, "function", None)
        name, text = getattr(function, "name", None) or "", getattr(function, "arguments", None) or ""
        id = call.id if call.id and call.id not in seen else f"call_{number}_{len(seen)}"
        seen.add(id)
        wired.append({"id": id, "type": "function", "function": {"name": name, "arguments": text}})
    return wired


def _error_text(e: Any) -> str:
    """What the endpoint says, whichever envelope it uses; without a stop, because more follows."""
    body = e.body
    if isinstance(body, Mapping):
        found = body.get("message") or body.get("detail") or body
        return str(found)[:300].rstrip(". ")
    return str(e)[:300].rstrip(". ")
