"""Models that judge, simulate users or score: any OpenAI-compatible URL, with retries, a timeout and a cache.

A judge that cannot be reached or answers nonsense is an infrastructure failure of the episode, never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentrl.env.dispatch import within
from agentrl.env.observe import error_text, plain_text
from agentrl.env.threads import CallTimeout
from agentrl.errors import ConfigError, JudgeError
from agentrl.types import Message


@runtime_checkable
class ChatModel(Protocol):
    """Something that continues a conversation: a judge, a user simulator, or a branch of the policy."""

    async def chat(self, messages: Sequence[Message]) -> Message:
        """The next assistant message. Raises InfraError where there is none to be had."""


class PolicyModel(Protocol):
    """What `self.model` of an env is: a branch of the policy itself."""

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), train: bool = False
    ) -> Message:
        """The policy's answer in a conversation of its own; with `train` its tokens train with the episode."""


@dataclass
class Judge:
    """An OpenAI-compatible chat model.

    Args:
        url: base URL, e.g. `http://127.0.0.1:8000/v1`.
        model: the model's name there.
        key_env: environment variable with the API key; none is sent where it is empty.
        timeout_s: limit of one attempt.
        retries: further attempts after a failed one, with growing pauses.
        temperature: of the sampling; at 0 equal questions are answered from the cache.
        max_tokens: longest answer.
        max_concurrent: questions asked at the same time.
        cache: JSON-lines file that keeps answers between runs; in memory only where it is None.
        low: lowest number that `score` takes.
        high: highest one.
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
    asked: int = 0
    """Questions that went to the server, repeats after failures included."""
    _answers: dict[str, str] = field(default_factory=dict, repr=False)
    _client: Any = field(default=None, repr=False)
    _loop: Any = field(default=None, repr=False)
    _slots: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.key_env and self.key_env not in os.environ:
            raise ConfigError(f"judge {self.model}: environment variable {self.key_env} is not set")
        if self.cache is not None and self.cache.is_file():
            for line in self.cache.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._answers[entry["key"]] = entry["answer"]

    async def chat(self, messages: Sequence[Message]) -> Message:
        """The model's answer to a conversation.

        Raises:
            JudgeError: no answer after all attempts.
        """
        wire = [{"role": m.role, "content": plain_text(m.content)} for m in messages]
        key = self._key(wire)
        if self.temperature == 0 and key in self._answers:
            return Message("assistant", self._answers[key])
        text = await self._ask(wire)
        if self.temperature == 0:
            self._answers[key] = text
            if self.cache is not None:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                with self.cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "answer": text}) + "\n")
        return Message("assistant", text)

    async def ask(self, question: str, *, system: str = "") -> str:
        """The answer to one question."""
        messages = [Message("system", system)] if system else []
        return plain_text((await self.chat([*messages, Message("user", question)])).content)

    async def score(
        self, question: str, *, system: str = "", low: float | None = None, high: float | None = None
    ) -> float:
        """The last number of the answer to `question`, which must lie in [low, high] (by default the judge's own).

        Raises:
            JudgeError: the answer has no such number.
        """
        low, high = self.low if low is None else low, self.high if high is None else high
        text = await self.ask(question, system=system)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", text)
        if not numbers or not low <= float(numbers[-1]) <= high:
            raise JudgeError(
                f"judge {self.model}: no number from {low:g} to {high:g} in its answer {text[:200]!r}"
            )
        return float(numbers[-1])

    def _key(self, wire: list[dict[str, str]]) -> str:
        settings = [self.url, self.model, self.max_tokens, wire]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    async def _ask(self, wire: list[dict[str, str]]) -> str:
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the client's connections belong to one event loop
            key = os.environ[self.key_env] if self.key_env else "none"
            self._client = AsyncOpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=self.timeout_s)
            self._slots, self._loop = asyncio.Semaphore(self.max_concurrent), loop
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 10.0))
            try:
                async with self._slots:
                    self.asked += 1
                    request = self._client.chat.completions.create(
                        model=self.model,
                        messages=wire,
                        temperature=self.temperature,
                        max_tokens=self.max_tokens,
                    )
                    answer = await within(request, self.timeout_s)
                text = answer.choices[0].message.content
                if isinstance(text, str) and text:
                    return text
                problem = "an empty answer"
            except CallTimeout:
                problem = f"no answer after {self.timeout_s:g} s"
            except Exception as e:
                problem = error_text(e)
                if 400 <= getattr(e, "status_code", 0) < 500 and getattr(e, "status_code", 0) not in (
                    408,
                    409,
                    429,
                ):
                    break  # asking again will not help
        raise JudgeError(f"judge {self.model} at {self.url}: {problem[:300]}")


@dataclass
class RewardApi:
    """A reward server of LLaMA-Factory's shape: `{"model", "messages": [text, ...]}` -> `{"scores": [...]}`.

    Args:
        url: address of the endpoint.
        model: sent along.
        timeout_s: limit of one attempt.
        retries: further attempts after a failed one.
    """

    url: str
    model: str = "model"
    timeout_s: float = 60.0
    retries: int = 3

    async def score(self, texts: Sequence[str]) -> list[float]:
        """One score a text.

        Raises:
            JudgeError: no answer after all attempts, or one of another shape.
        """
        import httpx

        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 10.0))
            try:
                async with httpx.AsyncClient(timeout=self.timeout_s) as client:
                    request = client.post(self.url, json={"model": self.model, "messages": list(texts)})
                    answer = (await within(request, self.timeout_s)).raise_for_status().json()
                return self._read(answer, len(texts))
            except CallTimeout:
                problem = f"no answer after {self.timeout_s:g} s"
            except (httpx.HTTPError, ValueError) as e:
                problem = error_text(e)
        raise JudgeError(f"reward server {self.url}: {problem[:300]}")

    def _read(self, answer: Any, num: int) -> list[float]:
        scores = answer.get("scores") if isinstance(answer, Mapping) else None
        fits = isinstance(scores, list) and len(scores) == num
        if not fits or not all(isinstance(s, int | float) and not isinstance(s, bool) for s in scores or ()):
            raise JudgeError(
                f'reward server {self.url}: wanted {{"scores": [{num} numbers]}}, got {answer!r:.200}'
            )
        return [float(s) for s in scores or ()]
