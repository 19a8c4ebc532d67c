"""Models that judge, simulate users or score: any OpenAI-compatible URL, with retries, a timeout and a cache.

A judge that cannot be reached is an infrastructure failure of the episode. A judge whose answer is malformed, or
that refuses the question, may do so because of the policy's text: the score is 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.config.address import address_problem, hide_credentials, without_credentials
from agentrl.env.env import PolicyModel
from agentrl.env.judge_requests import ClientByLoop, Slots
from agentrl.env.judge_text import fenced, form_of, neutral, read_score, schema_of
from agentrl.env.toolenv.asked import found_unusable, waits_for
from agentrl.env.toolenv.dispatch import within
from agentrl.env.toolenv.observe import error_text, plain_text
from agentrl.env.toolenv.threads import CallTimeout
from agentrl.errors import ConfigError, JudgeAnswerError, JudgeError
from agentrl.retry_after import retry_after
from agentrl.types import Message

if TYPE_CHECKING:
    from ssl import SSLContext

    from openai import AsyncOpenAI

__all__ = ["Judge", "PolicyModel", "RewardApi", "fenced"]

_REFUSED = (400, 413, 422)
"""HTTP status codes of requests rejected for their content (too long, filtered), or for what is in every request;
another question tells which."""
_MODERATED = (403, 451)
"""HTTP status codes of moderated content, or of an endpoint that answers nobody."""
_FAILED = 500
"""HTTP status code of a server that raised: because of this question, if it answers others. An empty answer counts
as this status."""
_HARMLESS = [{"role": "user", "content": "Say OK."}]


@dataclass
class Judge:
    """An OpenAI-compatible chat model.

    Args:
        url: base URL, e.g. `http://127.0.0.1:8000/v1`.
        model: the model's name at that URL.
        key_env: environment variable with the API key; if empty, no key is sent.
        timeout_s: timeout of one attempt.
        retries: retries after a failed attempt, after increasing delays or when the endpoint asks for it.
        temperature: sampling temperature; at 0, repeated questions are answered from the cache.
        max_tokens: maximum answer length.
        max_concurrent: maximum concurrent requests.
        cache: JSON-lines file that stores answers across runs; None caches only in memory.
        low: lowest valid score.
        high: highest valid score.
        on_malformed: how to treat an answer without a score in [low, high]: "score" (0, or `low` if that is less),
            or "infra" (the episode is replayed; a policy can provoke this and may learn to).
    """

    url: str
    model: str
    key_env: str = ""
    timeout_s: float = 60.0
    retries: int = 3
    temperature: float = 0.0
    max_tokens: int = 512
    max_concurrent: int = 32
    cache: Path | None = None
    low: float = 0.0
    high: float = 1.0
    on_malformed: Literal["score", "infra"] = "score"
    asked: int = 0
    """Number of requests sent, including retries."""
    malformed: int = 0
    """Number of answers without a score."""
    _takes_form: bool | None = field(default=None, repr=False)
    _answers: dict[str, str] = field(default_factory=dict, repr=False)
    _clients: ClientByLoop = field(default_factory=ClientByLoop, repr=False)
    _slots: Slots = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if problem := address_problem(self.url):
            raise ConfigError(f"judge {self.model}: url {self.address}: {problem}")
        for name, least in (("max_concurrent", 1), ("max_tokens", 1), ("retries", 0)):
            if (number := getattr(self, name)) < least:
                raise ConfigError(f"judge {self.model}: {name}={number}: must be at least {least}")
        self._slots = Slots(self.max_concurrent)
        if self.key_env and self.key_env not in os.environ:
            raise ConfigError(f"judge {self.model}: environment variable {self.key_env} is not set")
        if self.cache is not None and self.cache.is_file():
            for line in self.cache.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut when the program was killed
                    entry = json.loads(line)
                    self._answers[entry["key"]] = entry["answer"]

    @property
    def address(self) -> str:
        """`url` without credentials, for messages and files."""
        return without_credentials(self.url)

    async def chat(self, messages: Sequence[Message]) -> Message:
        """The model's answer to a conversation. Control tokens of chat templates are sent as plain text.

        Raises:
            JudgeError: no answer after all attempts.
            JudgeAnswerError: it refuses, fails on or says nothing to this conversation, but answers others.
        """
        return Message("assistant", await self._answer(messages, None))

    async def _answer(self, messages: Sequence[Message], form: Mapping[str, Any] | None) -> str:
        wire = [{"role": m.role, "content": neutral(plain_text(m.content))} for m in messages]
        key = self._key(wire)
        if self.temperature == 0 and key in self._answers:
            return self._answers[key]
        with waits_for(f"judge {self.model} at {self.address}"):
            text = await self._ask(wire, form)
        if self.temperature == 0:
            self._answers[key] = text
            if self.cache is not None:
                self._store(self.cache, key, text)
        return text

    def _store(self, cache: Path, key: str, text: str) -> None:
        """Add an answer to the cache; a failure is a warning, because the answer itself is valid."""
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with cache.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"key": key, "answer": text}) + "\n")  # the last one may be cut
        except OSError as e:
            said = f"judge {self.model}: cache {cache}: {e.strerror}; this answer is only kept in memory"
            warnings.warn(said, stacklevel=2)

    async def ask(self, question: str, *, system: str = "") -> str:
        """The answer to one question."""
        messages = [Message("system", system)] if system else []
        return plain_text((await self.chat([*messages, Message("user", question)])).content)

    async def score(
        self, question: str, *, system: str = "", low: float | None = None, high: float | None = None
    ) -> float:
        """The judge's score for `question`, in [low, high] (by default the judge's limits).

        The judge is asked for JSON, with a schema if the endpoint supports one; see `read_score` for accepted
        answers. Wrap text written by the policy in `fenced`.

        Raises:
            JudgeError: no answer; with `on_malformed: infra`, also an answer without a score.
        """
        low, high = self.low if low is None else low, self.high if high is None else high
        asked = Message("user", f"{question}\n\n{form_of(low, high)}")
        messages = [Message("system", system), asked] if system else [asked]
        try:
            text = await self._answer(messages, schema_of(low, high))
            score = read_score(text, low, high)
            problem = f"judge {self.model}: no score from {low:g} to {high:g} in its answer {text[:200]!r}"
        except JudgeAnswerError as e:
            score, problem = None, str(e)
        if score is not None:
            return score
        self.malformed += 1
        if self.on_malformed == "infra":
            raise JudgeError(problem)
        found_unusable(problem)
        return min(low, 0.0)

    def _key(self, wire: list[dict[str, str]]) -> str:
        settings = [self.url, self.model, self.max_tokens, wire]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    async def _ask(self, wire: list[dict[str, str]], form: Mapping[str, Any] | None) -> str:
        problem, usable, attempt, wait_s, status, without = "", True, 0, 0.0, 0, False
        while attempt <= self.retries:
            if attempt:
                await asyncio.sleep(max(min(0.25 * 2**attempt, 10.0), wait_s))
            wait_s, status = 0.0, 0
            with_form = form is not None and self._takes_form is not False and not without
            try:
                text = await self._once(wire, form if with_form else None)
                if with_form:
                    self._takes_form = True
                elif without and self._takes_form is None:
                    self._takes_form = False  # the schema is what it refused
                if text:
                    return text
                problem, usable, status = "an empty answer", True, _FAILED
            except CallTimeout:
                problem, usable = f"no answer after {self.timeout_s:g} s", True
            except Exception as e:
                problem, usable, wait_s = error_text(e), True, retry_after(e)
                status = getattr(e, "status_code", 0)
                if with_form and self._takes_form is None and status in (*_REFUSED, 404, 501):
                    without = True  # older servers: retry without the schema
                    continue
                refused = status in (*_REFUSED, *_MODERATED)
                if refused and await self._answers_others():
                    usable = False
                    break
                if 400 <= status < 500 and not refused and status not in (408, 409, 429):
                    break  # retrying will not help
            attempt += 1
        if status == _FAILED and await self._answers_others():
            try:  # once more: it may have recovered in the meantime
                text = await self._once(wire, form if self._takes_form else None)
                if form is not None and self._takes_form is None:
                    self._takes_form = False  # the schema is what it failed on
                if text:
                    return text
                usable = False
            except Exception as e:
                usable = getattr(e, "status_code", 0) != _FAILED
        text = f"judge {self.model} at {self.address}: {problem[:300]}"
        raise JudgeError(text) if usable else JudgeAnswerError(text)

    async def _answers_others(self) -> bool:
        """Whether the judge answers a harmless question."""
        try:
            return bool(await self._once(_HARMLESS, None))
        except Exception:
            return False

    def _new_client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        key = os.environ[self.key_env] if self.key_env else "none"
        return AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=self.timeout_s)

    async def _once(self, wire: list[dict[str, str]], form: Mapping[str, Any] | None) -> str:
        extra = {} if form is None else {"response_format": form}
        client = await self._clients.get(self._new_client)
        async with self._slots.one():
            self.asked += 1
            request = client.chat.completions.create(
                model=self.model, messages=wire, temperature=self.temperature, max_tokens=self.max_tokens, **extra
            )
            answer = await within(request, self.timeout_s)
        text = answer.choices[0].message.content if answer.choices else None
        return text if isinstance(text, str) else ""


@dataclass
class RewardApi:
    """A reward server with LLaMA-Factory's API: `{"model", "messages": [text, ...]}` -> `{"scores": [...]}`.

    Args:
        url: address of the endpoint.
        model: model name in the request.
        timeout_s: timeout of one attempt.
        retries: further attempts after a failed one.
    """

    url: str
    model: str = "model"
    timeout_s: float = 60.0
    retries: int = 3

    @property
    def address(self) -> str:
        """`url` without credentials, for messages and files."""
        return without_credentials(self.url)

    async def score(self, texts: Sequence[str]) -> list[float]:
        """One score per text.

        Raises:
            JudgeError: no answer after all attempts, or a malformed one.
            JudgeAnswerError: it refuses these texts, fails on them or has no finite scores, but scores others.
        """
        import httpx

        where, text, wait_s, status = f"reward server {self.address}", "", 0.0, 0
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(max(min(0.25 * 2**attempt, 10.0), wait_s))
            wait_s, status = 0.0, 0
            try:
                return await self._once(texts)
            except JudgeAnswerError as e:
                if await self._answers_others():
                    raise
                text = f"{e}; it scores no other text either"
            except CallTimeout:
                text = f"{where}: no answer after {self.timeout_s:g} s"
            except (httpx.HTTPError, ValueError, RecursionError) as e:
                text, wait_s = f"{where}: {hide_credentials(error_text(e))[:300]}", retry_after(e)
                status = e.response.status_code if isinstance(e, httpx.HTTPStatusError) else 0
        if status == _FAILED and await self._answers_others():
            try:  # once more: it may have recovered in the meantime
                return await self._once(texts)
            except httpx.HTTPStatusError as e:
                if e.response.status_code == _FAILED:
                    raise JudgeAnswerError(text) from None
            except (CallTimeout, httpx.HTTPError, ValueError, RecursionError):
                pass
        raise JudgeError(text)

    async def _once(self, texts: Sequence[str]) -> list[float]:
        import httpx

        async with httpx.AsyncClient(timeout=self.timeout_s, verify=_certificates()) as client:
            request = client.post(self.url, json={"model": self.model, "messages": list(map(neutral, texts))})
            response = await within(request, self.timeout_s)
        if response.status_code in _REFUSED:
            raise JudgeAnswerError(f"reward server {self.address}: {response.status_code}, {response.text[:200]}")
        return self._read(response.raise_for_status().json(), len(texts))

    async def _answers_others(self) -> bool:
        """Whether the server scores a harmless text."""
        try:
            return bool(await self._once(["OK."]))
        except Exception:
            return False

    def _read(self, answer: Any, num: int) -> list[float]:
        scores = answer.get("scores") if isinstance(answer, Mapping) else None
        fits = isinstance(scores, list) and len(scores) == num
        if not fits or not all(isinstance(s, int | float) and not isinstance(s, bool) for s in scores or ()):
            raise JudgeError(
                f'reward server {self.address}: wanted {{"scores": [{num} numbers]}}, got {answer!r:.200}'
            )
        try:
            numbers = [float(s) for s in scores or ()]
        except OverflowError:
            numbers = [math.inf]
        if not all(map(math.isfinite, numbers)):
            raise JudgeAnswerError(f"reward server {self.address}: the scores {answer!r:.200} are not finite")
        return numbers


@cache
def _certificates() -> SSLContext:
    """Which servers to trust; a client that loads them itself uses 25 ms of CPU time for it, per request here."""
    import httpx

    return httpx.create_ssl_context()
