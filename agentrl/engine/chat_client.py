"""Chat with any OpenAI-compatible endpoint, for policies whose tokens are not available.

Temporary failures (connection, 408, 409, 429, 5xx) are retried, after `Retry-After` if the endpoint sends it and
asks for ten minutes at most. Remaining failures are the endpoint's fault, never the policy's: an `EngineError`. A
request that cannot succeed on retry (wrong key, unknown model, a parameter that the model refuses) is for the user
to fix: a `ConfigError`.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.chat.messages import MessageFormatError, read_message, write_message
from agentrl.config.address import address_problem, without_credentials
from agentrl.errors import ConfigError, EngineError
from agentrl.retry_after import LONGEST_S, asked_wait
from agentrl.types import Message

Tools = Sequence[Mapping[str, object]]

_ECHOED = ("reasoning_content", "reasoning", "reasoning_details")
"""Non-standard fields that endpoints expect to receive again in the next request."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model's endpoint and request settings.

    Attributes:
        base_url: for example `http://127.0.0.1:8000/v1`.
        model: its name at the endpoint.
        api_key_env: environment variable with the API key; if empty, no key is sent.
        timeout_s: time limit of one attempt.
        retries: further attempts after a temporary failure.
        request: additional fields of each request, such as {"reasoning_effort": "low"}.
    """

    base_url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 120.0
    retries: int = 5
    request: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if problem := address_problem(self.base_url):
            raise ConfigError(
                f"--base-url {self.address}: {problem}; give an address such as http://127.0.0.1:8000/v1"
            )

    @property
    def address(self) -> str:
        """The base URL without credentials, for messages and files."""
        return without_credentials(self.base_url)

    def key(self) -> str:
        """The API key. Raises ConfigError if the variable is not set."""
        if not self.api_key_env:
            return "none"
        if not os.environ.get(self.api_key_env):
            raise ConfigError(f"--api-key-env {self.api_key_env}: this environment variable is not set")
        return os.environ[self.api_key_env]


class ContextFullError(Exception):
    """The conversation does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: the message, why it ended, and its cost in tokens and seconds."""

    message: Message
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    seconds: float


class ChatClient:
    """Send requests to one endpoint. Use from a single event loop and close at its end."""

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
            max_retries=0,  # versions of the library differ in the waits that they obey
            timeout=endpoint.timeout_s,
            http_client=http,  # type: ignore[arg-type]
        )

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._client.close()

    async def ask(
        self, messages: Sequence[Mapping[str, object]], tools: Tools, *, temperature: float, max_tokens: int
    ) -> tuple[dict[str, Any], Reply]:
        """Send a conversation in wire format; return the answer and the message to send back next time.

        Raises:
            ContextFullError: the conversation is too long.
            EngineError: no answer after all attempts, or an invalid one.
            ConfigError: the endpoint refuses the user's settings.
        """
        import openai

        body: dict[str, Any] = {"model": self.endpoint.model, "messages": messages, "temperature": temperature}
        if tools:
            body["tools"] = list(tools)
        body |= {self._limit_field: max_tokens}
        extra = dict(self.endpoint.request)
        began = time.monotonic()
        try:
            answer = await self._create(body | {"extra_body": extra or None})
        except openai.APIStatusError as e:
            if self._limit_field == "max_tokens" and "max_completion_tokens" in str(e):
                self._limit_field = "max_completion_tokens"
                return await self.ask(messages, tools, temperature=temperature, max_tokens=max_tokens)
            raise self._refused(e, temperature) from e
        except openai.APIConnectionError as e:  # includes timeouts
            raise EngineError(f"{self.endpoint.address}: {type(e).__name__}: {e.__cause__ or e}") from e
        except (openai.OpenAIError, ValueError) as e:
            raise EngineError(f"{self.endpoint.address}: {type(e).__name__}: {e}") from e
        return self._read(answer, time.monotonic() - began)

    async def _create(self, body: Mapping[str, Any]) -> Any:
        """Send a request, again after a temporary failure."""
        import openai

        for attempt in range(self.endpoint.retries + 1):
            try:
                return await self._client.chat.completions.create(**body)
            except openai.APIError as e:
                wait_s = asked_wait(e)
                if attempt == self.endpoint.retries or not _temporary(e) or wait_s > LONGEST_S:
                    raise
                await asyncio.sleep(wait_s or 0.5 * 2 ** min(attempt, 4) * random.uniform(0.75, 1.0))
        raise AssertionError

    def _refused(self, e: Any, temperature: float) -> Exception:
        """Convert an error status to an exception that blames the episode, the endpoint or the user."""
        where, text = f"{self.endpoint.address} ({self.endpoint.model})", _error_text(e)
        param = (e.body or {}).get("param") if isinstance(e.body, Mapping) else None
        if e.code == "context_length_exceeded" or "maximum context length" in text:
            return ContextFullError(text)
        if e.status_code == 402 or e.code == "insufficient_quota":
            return ConfigError(f"{where}: {text}; the account needs credit")
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

    def _read(self, answer: Any, seconds: float) -> tuple[dict[str, object], Reply]:
        choices = getattr(answer, "choices", None)
        if not choices or choices[0].message is None:
            said = getattr(answer, "error", None) or answer
            raise EngineError(f"{self.endpoint.address}: an answer without a message: {str(said)[:300]}")
        raw = choices[0].message
        wired = _wire_calls(raw.tool_calls or ())
        extra: dict[str, object] = {k: v for k in _ECHOED if (v := getattr(raw, k, None)) is not None}
        content = raw.content if raw.content is not None else (getattr(raw, "refusal", None) or "")
        wire: dict[str, object] = {"role": "assistant", "content": raw.content or (None if wired else content)}
        wire |= ({"tool_calls": wired} if wired else {}) | extra
        readable = {k: v for k, v in wire.items() if k not in _ECHOED or isinstance(v, str)}
        try:
            read = read_message(readable)
        except MessageFormatError as e:
            raise EngineError(f"{self.endpoint.address}: an answer that is not a chat message: {e}") from e
        calls = tuple(c for n, c in enumerate(read.message.tool_calls) if n not in read.malformed)
        errors = tuple(f"tool call {n}: {why}" for n, why in read.malformed.items())
        usage = answer.usage
        details = getattr(usage, "prompt_tokens_details", None)
        prompt = _count(usage, "prompt_tokens")
        said = content if raw.content is None else read.message.content  # which may have been sent in parts
        reply = Reply(
            replace(read.message, content=said, tool_calls=calls, parse_errors=errors),
            choices[0].finish_reason or "stop",
            prompt,
            _count(usage, "completion_tokens"),
            min(_count(details, "cached_tokens"), prompt),  # some endpoints report more
            seconds,
        )
        return wire, reply


class Conversation:
    """One conversation with an endpoint, kept in wire format: turns are sent back exactly as received.

    A call with unreadable arguments never reaches the env, which answers it with a message without an id; on the
    wire, that message answers the call, because endpoints require an answer to every call.
    """

    def __init__(self, client: ChatClient, tools: Tools = ()) -> None:
        self._client, self._tools = client, tools
        self._wire: list[dict[str, object]] = []
        self._malformed: list[str] = []  # ids of unreadable calls that await their answer

    def extend(self, messages: Sequence[Message]) -> None:
        """Add the messages after the last answer."""
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
        """Request the next message and add it to the conversation; raises like `ChatClient.ask`."""
        wire, reply = await self._client.ask(
            self._wire, self._tools, temperature=temperature, max_tokens=max_tokens
        )
        self._wire.append(wire)
        readable = {call.id for call in reply.message.tool_calls}
        self._malformed = [call["id"] for call in wire.get("tool_calls", ()) if call["id"] not in readable]
        return reply


def _wire_calls(raw: Sequence[Any]) -> list[dict[str, object]]:
    """Return the calls of an answer in wire format, with unique ids."""
    wired: list[dict[str, object]] = []
    seen: set[str] = set()
    for number, call in enumerate(raw):
        function = getattr(call, "function", None)
        name, text = getattr(function, "name", None) or "", getattr(function, "arguments", None) or ""
        id = call.id if call.id and call.id not in seen else f"call_{number}_{len(seen)}"
        seen.add(id)
        wired.append({"id": id, "type": "function", "function": {"name": name, "arguments": text}})
    return wired


def _count(usage: object, name: str) -> int:
    """A number of tokens; 0 if the endpoint does not report it."""
    value = getattr(usage, name, None)
    return value if isinstance(value, int) and value > 0 else 0


def _temporary(e: Exception) -> bool:
    """Whether the same request may succeed later."""
    import openai

    if isinstance(e, openai.APIStatusError):
        told = e.response.headers.get("x-should-retry")  # of OpenAI's servers
        return told == "true" or (told != "false" and (e.status_code in (408, 409, 429) or e.status_code >= 500))
    return isinstance(e, openai.APIConnectionError)  # includes timeouts


def _error_text(e: Any) -> str:
    """Extract the endpoint's error message from any known envelope; without a final period, because more
    follows."""
    body = e.body
    if isinstance(body, Mapping):
        found = body.get("message") or body.get("detail") or body
        return str(found)[:300].rstrip(". ")
    return str(e)[:300].rstrip(". ")
