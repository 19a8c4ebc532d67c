"""POST /v1/completions: text or ids in, text out; no chat template and no turn recognition.

Source: the OpenAI API reference (legacy completions).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.chat.template import Renderer
from agentrl.engine.base import Engine, TokenLogprob
from agentrl.serve.api_errors import context_exceeded, invalid, unsupported
from agentrl.serve.dialects.wire import CompletionRequest, Json, nucleus, usage
from agentrl.serve.generate import CompletionOptions, Sampled, generate
from agentrl.serve.reader import ContentDelta, Delta, TextReader
from agentrl.serve.service import COLDEST, fresh_id, now
from agentrl.types import Completion, Sampling

MAX_CHOICES = 2048
"""Maximum number of completions in one request, over all its prompts."""

Emit = Callable[[int, list[Delta], Sequence[TokenLogprob]], None]


@dataclass(frozen=True, slots=True)
class Continued:
    """One finished choice: its prompt, with logprobs if requested, and the completion."""

    prompt: tuple[int, ...]
    scored: tuple[TokenLogprob, ...]
    sampled: Sampled
    text: str


class TextJob:
    """Convert a completion request so that it can be sampled.

    Raises:
        ApiError: it cannot be answered.
    """

    def __init__(self, engine: Engine, renderer: Renderer, request: CompletionRequest) -> None:
        request.refuse_unsupported()
        self._engine, self._renderer, self.request = engine, renderer, request
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise unsupported("best_of", "must equal n: completions are not ranked here")
        if request.logprobs and not engine.capabilities.streaming:
            raise unsupported("logprobs", "this engine does not return alternatives")
        if request.echo and request.logprobs is not None and not engine.capabilities.prompt_logprobs:
            raise unsupported("echo", "this engine cannot score a prompt: leave out logprobs")
        self.max_tokens = 16 if request.max_tokens is None else request.max_tokens
        self.prompts = [self._ids(prompt) for prompt in self._listed()]
        self.done: list[Continued] = []

    def _listed(self) -> list[str | list[int]]:
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise invalid("prompt", "is an empty list")
        if isinstance(prompt[0], int):
            return [prompt]
        if (count := len(prompt) * (self.request.n or 1)) > MAX_CHOICES:
            asked = f"{len(prompt)} prompts ask for {count} completions"
            raise invalid("prompt", f"{asked}; at most {MAX_CHOICES} are possible in one request")
        return list(prompt)

    def _ids(self, prompt: str | list[int]) -> tuple[int, ...]:
        vocabulary = self._renderer.vocabulary
        ids = tuple(vocabulary.encode_raw(prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            raise invalid("prompt", "is empty: there is nothing to continue")
        if wrong := next((id for id in ids if not 0 <= id < vocabulary.size), None):
            raise invalid("prompt", f"token id {wrong} is outside the vocabulary of {vocabulary.size}")
        if len(ids) + bool(self.max_tokens) > self._engine.max_context:
            raise context_exceeded("prompt", len(ids), self._engine.max_context)
        return ids

    @property
    def count(self) -> int:
        """Number of completions to sample."""
        return len(self.prompts) * (self.request.n or 1)

    async def run(self, emit: Emit | None = None) -> list[Continued]:
        """Sample every choice; choice `i` continues prompt `i // n`."""
        n = self.request.n or 1
        async with asyncio.TaskGroup() as group:
            choices = [
                group.create_task(self._choice(prompt, number * n + copy, copy, emit))
                for number, prompt in enumerate(self.prompts)
                for copy in range(n)
            ]
        self.done = [choice.result() for choice in choices]
        return self.done

    async def _choice(self, prompt: tuple[int, ...], index: int, copy: int, emit: Emit | None) -> Continued:
        request, reader = self.request, TextReader(self._renderer, self.request.stops)
        scored: list[TokenLogprob] = []
        if request.echo:
            if request.logprobs is not None:
                scored = await self._engine.prompt_logprobs(prompt, top=request.logprobs)
            if emit is not None:
                emit(index, [ContentDelta(self._renderer.decode(prompt))], scored)
        if self.max_tokens == 0:
            return Continued(prompt, tuple(scored), Sampled(Completion((), (), (), "length"), ()), "")
        temperature = 1.0 if request.temperature is None else request.temperature
        sampling = Sampling(
            temperature=temperature if temperature >= COLDEST else 0.0,
            top_p=nucleus(request.top_p),
            top_k=max(0, request.top_k or 0),
            min_p=request.min_p or 0.0,
            max_tokens=min(self.max_tokens, self._engine.max_context - len(prompt)),
            stop_ids=self._renderer.stop_ids,
            seed=None if request.seed is None else (request.seed + copy) % 2**63,
        )
        on_deltas = None if emit is None else lambda deltas, drawn: emit(index, deltas, drawn)
        order = CompletionOptions(sampling, top=request.logprobs or 0)
        sampled = await generate(self._engine, prompt, order, reader, session=None, on_deltas=on_deltas)
        return Continued(prompt, tuple(scored), sampled, reader.text)


class TextWriter:
    """Write the answer to one request, whole or in chunks."""

    def __init__(self, job: TextJob, renderer: Renderer, fingerprint: str) -> None:
        self._job, self._renderer, self._request = job, renderer, job.request
        self._offsets: dict[int, int] = {}
        self._head = {
            "id": fresh_id("cmpl-"),
            "object": "text_completion",
            "created": now(),
            "model": job.request.model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, done: Sequence[Continued]) -> Json:
        """Return the answer as one object."""
        return {
            **self._head,
            "choices": [self._choice(n, one) for n, one in enumerate(done)],
            "usage": self._usage(),
        }

    def _choice(self, index: int, one: Continued) -> Json:
        echoed = self._renderer.decode(one.prompt) if self._request.echo else ""
        logprobs = None
        if self._request.logprobs is not None:
            first = one.prompt[0] if self._request.echo else None
            logprobs = self._logprobs(first, [*one.scored, *one.sampled.drawn], 0)
        choice = {
            "index": index,
            "text": echoed + one.text,
            "logprobs": logprobs,
            "finish_reason": _finish(one),
        }
        if self._request.return_token_ids:
            choice |= {"token_ids": list(one.sampled.completion.ids), "prompt_token_ids": list(one.prompt)}
        return choice

    def opening(self) -> list[Json]:
        """Return no chunks: none come before the first piece."""
        return []

    def chunks(self, index: int, deltas: Sequence[Delta], drawn: Sequence[TokenLogprob]) -> list[Json]:
        """Return pieces of choice `index`; the tokens are sent with the first of them.

        With `echo`, the first piece is the prompt, with its tokens but the first in `drawn`.
        """
        request, begins = self._request, index not in self._offsets
        at = self._offsets.setdefault(index, 0)
        prompt = self._job.prompts[index // (request.n or 1)]
        first = prompt[0] if begins and request.echo else None
        chunks = [self._chunk(index, delta.text) for delta in deltas if isinstance(delta, ContentDelta)]
        if not chunks and (request.logprobs is not None or request.return_token_ids):
            chunks = [self._chunk(index, "")]
        if not chunks:
            return []
        choice = chunks[0]["choices"][0]
        if request.logprobs is not None and (drawn or first is not None):
            choice["logprobs"] = self._logprobs(first, drawn, at)
            ids = [*([] if first is None else [first]), *(token.id for token in drawn)]
            self._offsets[index] = at + sum(map(self._characters, ids))
        if request.return_token_ids:
            choice["token_ids"] = [] if first is not None else [token.id for token in drawn]
            if begins:
                choice["prompt_token_ids"] = list(prompt)
        return chunks

    def closing(self, done: Sequence[Continued]) -> list[Json]:
        """Return each choice's finish reason, and the usage if requested."""
        chunks = [self._chunk(index, "", _finish(one)) for index, one in enumerate(done)]
        if self._request.wants_usage:
            chunks.append({**self._head, "choices": [], "usage": self._usage()})
        return chunks

    def _chunk(self, index: int, text: str, finish: str | None = None) -> Json:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
        return {**self._head, "choices": [choice], **({"usage": None} if self._request.wants_usage else {})}

    def _usage(self) -> Json:
        prompt = sum(len(ids) for ids in self._job.prompts)
        sampled = sum(len(one.sampled.completion.ids) for one in self._job.done)
        cached = sum(one.sampled.completion.cached_tokens for one in self._job.done[:: self._request.n or 1])
        return usage(prompt, sampled, cached)

    def _name(self, id: int) -> str:
        """Return the text of one token; bytes that are not valid text on their own are shown as bytes."""
        raw = self._renderer.vocabulary.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _characters(self, id: int) -> int:
        """Number of characters that begin in a token: one in parts counts with its first byte."""
        return sum(byte & 0xC0 != 0x80 for byte in self._renderer.vocabulary.token_bytes(id))

    # The stop token is among the tokens but not in the text: harnesses expect one entry per sampled token.

    def _logprobs(self, first: int | None, drawn: Sequence[TokenLogprob], offset: int) -> Json:
        """Return lists by token; `first` is a prompt's first token, which has no context."""
        names = [] if first is None else [self._name(first)]
        values: list[float | None] = [None] * len(names)
        tops: list[dict[str, float] | None] = [None] * len(names)
        for token in drawn:
            names.append(self._name(token.id))
            values.append(token.logprob)
            best = {self._name(id): logprob for id, logprob in reversed(token.top)}
            tops.append(best | {names[-1]: token.logprob})
        ids = [*([] if first is None else [first]), *(token.id for token in drawn)]
        offsets = list(itertools.accumulate(map(self._characters, ids), initial=offset))
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets[:-1]}


def _finish(one: Continued) -> str:
    return "length" if one.sampled.completion.finish == "length" else "stop"
