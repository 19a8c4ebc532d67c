"""Streamed completions: convert a server's events to tokens reported once, and a whole answer.

SGLang's events contain everything so far, or (with `--incremental-streaming-output`) only what is new; the token
count in each event shows which. vLLM's events contain what is new.

Source: SGLang 0.5.23, `managers/tokenizer_manager.py`; vLLM 0.33.0, `entrypoints/openai/completion/serving.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

from agentrl.engine.base import TokenLogprob
from agentrl.engine.servers.client import Listener
from agentrl.engine.servers.http import ServerLost, ServerRefused
from agentrl.errors import EngineError

ReadVersion = Callable[[object], int]
"""Converts a server's label of its weights to the version of the policy."""
_TOKEN = "token_id:"
"""vLLM's format for a token reported by its id."""


class SGLangStream:
    """The events of one streamed `/generate`."""

    def __init__(self, where: str, read: ReadVersion, listener: Listener) -> None:
        """`read` converts the label of the weights in each event to a version."""
        self._where, self._read, self._listener = where, read, listener
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self._last: Mapping[str, Any] = {}

    def take(self, event: Any) -> None:
        """Report what is new in an event.

        Raises:
            ServerRefused: it reports that the request cannot be answered.
            EngineError: it is not part of a completion.
        """
        if isinstance(event, Mapping) and event.get("error"):
            raise _error(self._where, event["error"])
        try:
            ids, meta = [index(token) for token in event["output_ids"]], event["meta_info"]
            ended = meta.get("finish_reason") or {}
            if int(ended.get("status_code") or 0) >= 400:  # an aborted request, such as one with a wrong grammar
                raise _error(self._where, {"code": ended["status_code"], "message": ended.get("message")})
            logprobs, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs") or ()
            done = len(self._ids)
            if [index(entry[1]) for entry in logprobs] != ids:
                raise ValueError("the log-probabilities belong to different tokens")
            if int(meta["completion_tokens"]) <= len(ids):  # everything so far
                if ids[:done] != self._ids:
                    raise ValueError("tokens that were already reported have changed")
                ids, logprobs, tops = ids[done:], logprobs[done:], tops[done:]
            version = self._read(meta["weight_version"])
            drawn = [
                TokenLogprob(
                    token, _finite(entry[0], self._where), version, best_of(tops, place, self._listener.top)
                )
                for place, (token, entry) in enumerate(zip(ids, logprobs, strict=True))
            ]
        except (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError) as e:
            raise EngineError(f"{self._where}: the event is not a completion ({e!r}): {event!r:.300}") from e
        self._ids += ids
        self._logprobs += logprobs
        self._last = meta
        if drawn:
            self._listener.tell(drawn)

    def whole(self) -> dict[str, Any]:
        """Return the answer as it would be without streaming."""
        if not self._last:
            raise ServerLost(f"{self._where}: a stream without a completion")
        return {"output_ids": self._ids, "meta_info": {**self._last, "output_token_logprobs": self._logprobs}}


class VLLMStream:
    """The events of one streamed `/v1/completions`."""

    def __init__(self, where: str, version: int, listener: Listener) -> None:
        self._where, self._version, self._listener = where, version, listener
        self._choice: dict[str, Any] = {"token_ids": [], "finish_reason": None, "logprobs": {"token_logprobs": []}}
        self._usage: Any = None

    def take(self, event: Any) -> None:
        """See `SGLangStream`."""
        if isinstance(event, Mapping) and event.get("error"):
            raise _error(self._where, event["error"])
        try:
            self._usage = event.get("usage") or self._usage
            if not event["choices"]:
                return
            choice = event["choices"][0]
            ids = [index(token) for token in choice.get("token_ids") or ()]
            found = choice.get("logprobs") or {}
            logprobs, tops = found.get("token_logprobs") or (), found.get("top_logprobs") or ()
            drawn = [
                TokenLogprob(
                    token, _finite(value, self._where), self._version, _named(tops, place, self._listener.top)
                )
                for place, (token, value) in enumerate(zip(ids, logprobs, strict=True))
            ]
        except (TypeError, KeyError, IndexError, AttributeError, ValueError, OverflowError) as e:
            raise EngineError(f"{self._where}: the event is not a completion ({e!r}): {event!r:.300}") from e
        self._choice["token_ids"] += ids
        self._choice["logprobs"]["token_logprobs"] += logprobs
        self._choice["finish_reason"] = choice.get("finish_reason") or self._choice["finish_reason"]
        if drawn:
            self._listener.tell(drawn)

    def whole(self) -> dict[str, Any]:
        """Return the answer as it would be without streaming."""
        if self._choice["finish_reason"] is None:
            raise ServerLost(f"{self._where}: a stream without an end")
        return {"choices": [self._choice], "usage": self._usage}


def _error(where: str, error: Any) -> EngineError:
    code = error.get("code") if isinstance(error, Mapping) else None
    said = error.get("message") if isinstance(error, Mapping) else error
    text = f"{where}: {said!s:.300}"
    return ServerLost(text) if isinstance(code, int) and code >= 500 else ServerRefused(text)


def _finite(value: Any, where: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise EngineError(f"{where}: a log-probability is not finite: the weights or the cache are damaged")
    return number


def best_of(tops: Sequence[Any], place: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return (id, logprob) of the alternatives at a position, from SGLang's [logprob, id, text]."""
    if not count:
        return ()
    return tuple((int(id), float(logprob)) for logprob, id, *_ in tops[place][:count])


def _named(tops: Sequence[Any], place: int, count: int) -> tuple[tuple[int, float], ...]:
    """The same from vLLM's mapping; it also contains the sampled token, which may not be among the best."""
    if not count:
        return ()
    pairs = [(int(name.removeprefix(_TOKEN)), float(logprob)) for name, logprob in tops[place].items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:count])
