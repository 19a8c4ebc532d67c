"""A teacher on a server: the log-probabilities of given tokens, from OpenAI's completions with `echo`."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from agentrl.config.address import THIS_MACHINE
from agentrl.config.teacher import TeacherConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.learner.pack import in_pack_order
from agentrl.learner.rank import Annotator, LearnerSpec
from agentrl.learner.split import Columns, Rows
from agentrl.retry_after import retry_after
from agentrl.types import Sample

if TYPE_CHECKING:
    from openai import OpenAI

Part = TypeVar("Part")
Result = TypeVar("Result")
LONGEST_PAUSE_S = 20.0
SGLANG_RESERVES = 7
"""How many tokens the prompts of SGLang 0.5.23 must have less than its context."""
POLL_S = 0.2
"""How often a wait checks whether the run was aborted."""
ROUNDING = 1e-2
"""How far above 0 the log-probability of a certain token may come out in a server's precision."""


class TeacherServer:
    """Asks a server for the log-probabilities of tokens: an `Annotator`. Safe to use from several threads.

    Source: the OpenAI API reference (legacy completions), as vLLM, SGLang and `agentrl serve` implement it.
    """

    def __init__(self, config: TeacherConfig) -> None:
        self.config, self.where = config, f"{config.place}.url {config.address} ({config.model})"
        self._client: OpenAI | None = None
        self._connecting, self._closed = threading.Lock(), threading.Event()

    def annotate(self, batches: Sequence[Rows], names: frozenset[str]) -> list[Columns]:
        """`ref_logprobs` of all rows, at temperature 1.

        Raises:
            ConfigError: the server refuses the request, or answers without log-probabilities.
            EngineError: it could not be reached within `teacher.retry_s`, or `close` was called meanwhile.
        """
        rows = [row for batch in batches for row in in_pack_order(batch)]
        return [{"ref_logprobs": found} for found in self._each(self._of_row, rows)]

    def scored(self, ids: Sequence[int]) -> tuple[list[float | None], list[str]]:
        """The log-probability of each token given those before it (None for the first), and its text.

        Raises:
            ConfigError, EngineError: see `annotate`.
        """
        return self._each(self._scored, [ids])[0]

    def longest(self) -> int | None:
        """The most tokens that it scores at once; None if it does not say.

        Less than its context: vLLM and SGLang always sample a token, even with `max_tokens: 0`.
        """
        import openai

        try:
            models = {model.id: model for model in self._connected().models.list().data}
        except (openai.OpenAIError, ValueError, AttributeError, TypeError):  # it need not list its models
            return None
        model = models.get(self.config.model or "")
        context, owner = getattr(model, "max_model_len", None), getattr(model, "owned_by", None)
        return context - (SGLANG_RESERVES if owner == "sglang" else 1) if isinstance(context, int) else None

    def close(self) -> None:
        """End what waits for the server, in any thread; idempotent."""
        self._closed.set()
        if self._client is not None:
            self._client.close()

    def _each(self, call: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """What the call gives for each part, in threads that do not outlive an aborted run."""
        todo: SimpleQueue[tuple[Future[Result], Part]] = SimpleQueue()
        waiting: list[Future[Result]] = [Future() for _ in parts]
        for pair in zip(waiting, parts, strict=True):
            todo.put(pair)

        def work() -> None:
            while not todo.empty():
                with suppress(Empty):
                    each, part = todo.get_nowait()
                    if each.set_running_or_notify_cancel():
                        try:
                            each.set_result(call(part))
                        except BaseException as e:
                            each.set_exception(e)

        for _ in range(min(self.config.max_concurrent, len(parts))):
            threading.Thread(target=work, name="agentrl-teacher", daemon=True).start()
        try:
            while True:
                done, pending = wait(waiting, POLL_S, FIRST_EXCEPTION)
                if failed := [each for each in done if each.exception() is not None]:
                    failed[0].result()
                if not pending:
                    return [each.result() for each in waiting]
                self._refuse_closed()
        finally:
            for each in waiting:
                each.cancel()

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise EngineError(f"{self.where}: closed before it had answered")

    def _scored(self, ids: Sequence[int]) -> tuple[list[float | None], list[str]]:
        choices = getattr(self._ask(ids), "choices", None)  # the client does not check what it is answered
        found = getattr(choices[0], "logprobs", None) if choices else None
        values, texts = (list(getattr(found, key, None) or ()) for key in ("token_logprobs", "tokens"))
        if not len(ids) <= len(values) <= len(ids) + 1:  # with or without the token that it adds
            raise ConfigError(
                f"{self.where}: scores {len(values)} of {len(ids)} given tokens; it needs a server whose "
                "/completions supports `echo` with `logprobs`"
            )
        scores = values[1 : len(ids)]
        if wrong := [value for value in scores if not _is_logprob(value)]:
            raise ConfigError(
                f"{self.where}: {len(wrong)} of {len(scores)} scores are no log-probabilities: {wrong[0]!r:.100}"
            )
        return [None, *scores], texts[: len(ids)]

    def _of_row(self, row: Sample) -> tuple[float, ...]:
        end = max((n + 1 for n, on in enumerate(row.loss_mask) if on), default=0)
        if end == 0:
            return ()
        values, _ = self._scored(row.ids[:end])
        return tuple(float(value or 0.0) for value, on in zip(values, row.loss_mask, strict=False) if on)

    def _ask(self, ids: Sequence[int]) -> Any:
        """The answer; failures of the server are tried again."""
        import openai

        until, pause, told = time.monotonic() + self.config.retry_s, 0.5, False
        while True:
            asked = 0.0
            try:
                return self._connected().completions.create(
                    model=self.config.model or "",
                    prompt=list(ids),
                    echo=True,
                    logprobs=1,
                    max_tokens=1,
                    temperature=1.0,
                )
            except openai.APIStatusError as e:
                if e.status_code < 500 and e.status_code not in (408, 409, 429):
                    raise ConfigError(f"{self.where}: HTTP {e.status_code}: {str(e)[:500]}") from e
                why, asked = f"HTTP {e.status_code}: {str(e)[:200]}", retry_after(e)
            except (openai.APIError, ValueError) as e:  # no connection, a timeout, or an answer that is no JSON
                why = f"{type(e).__name__}: {str(e.__cause__ or e)[:200]}"
            left = until - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"{self.where}: no answer for {self.config.retry_s} s ({why}); the run can be resumed when it "
                    "is back"
                )
            if not told and max(pause, asked) > 2:
                warnings.warn(f"{self.where} does not answer ({why}); trying again", stacklevel=2)
                told = True
            self._closed.wait(asked if pause < asked <= left else min(pause, left))
            self._refuse_closed()
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _connected(self) -> OpenAI:
        from openai import DefaultHttpxClient, OpenAI

        with self._connecting:
            if self._client is None:
                key = os.environ.get(self.config.key_env, "") if self.config.key_env else "none"
                if not key:
                    raise ConfigError(
                        f"{self.config.place}.key_env: the environment variable {self.config.key_env} is not set"
                    )
                url = self.config.url or ""
                near = urlsplit(url).hostname in THIS_MACHINE  # which no proxy reaches
                self._client = OpenAI(
                    base_url=url,
                    api_key=key,
                    max_retries=0,
                    timeout=self.config.timeout_s,
                    http_client=DefaultHttpxClient(trust_env=not near),
                )
            return self._client


def _is_logprob(value: object) -> bool:
    """Whether it is a finite number that is not above 0, but for rounding."""
    return isinstance(value, int | float) and math.isfinite(value) and value <= ROUNDING


class TeacherServers:
    """The servers that teach the envs of a run, each asked about the episodes of its envs: an `Annotator`."""

    rows_apart: tuple[str, ...] = ()

    def __init__(self, teachers: Mapping[str, TeacherConfig]) -> None:
        distinct = {teacher.model_dump_json(): TeacherServer(teacher) for teacher in teachers.values()}
        self._by_env = {env: distinct[teacher.model_dump_json()] for env, teacher in teachers.items()}
        self._servers = tuple(distinct.values())
        self._threads = ThreadPoolExecutor(len(self._servers), "agentrl-teachers")

    def annotate(self, batches: Sequence[Rows], names: frozenset[str]) -> list[Columns]:
        """`ref_logprobs` of all rows, from all servers at the same time.

        A row of an env without a teacher gets the sampler's log-probabilities: there is no distance to anything.

        Raises:
            ConfigError, EngineError: see `TeacherServer.annotate`; what the other servers are asked is abandoned
                when they are closed.
        """
        rows = [row for batch in batches for row in in_pack_order(batch)]
        found: list[Columns] = [{"ref_logprobs": _sampled(row)} for row in rows]
        places = {
            server: [n for n, row in enumerate(rows) if self._by_env.get(row.env) is server]
            for server in self._servers
        }
        try:
            asked = {
                self._threads.submit(server.annotate, [(rows[n],) for n in own], names): own
                for server, own in places.items()
                if own
            }
        except RuntimeError:  # `close` was called meanwhile
            raise EngineError("the connections to the teachers' servers are closed") from None
        done, _ = wait(asked, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()
        for each, own in asked.items():
            for n, columns in zip(own, each.result(), strict=True):
                found[n] = columns
        return found

    def close(self) -> None:
        """End what waits for the servers, in any thread; idempotent."""
        for server in self._servers:
            server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _sampled(row: Sample) -> tuple[float, ...]:
    return tuple(value for value, on in zip(row.logprobs, row.loss_mask, strict=True) if on)


class TeacherRanks:
    """One rank whose calls begin at once in another thread, while ranks in this process compute."""

    size = 1

    def __init__(self, rank: TeacherServers) -> None:
        self._rank, self._thread = rank, ThreadPoolExecutor(1, "agentrl-teacher-calls")

    def start(
        self, call: Callable[[Annotator, Part], Result], parts: Sequence[Part], *, doing: str, writes: bool = False
    ) -> Callable[[], list[Result]]:
        """Begin; what is returned waits for the results."""
        begun: list[Future[Result]] = [self._thread.submit(call, self._rank, part) for part in parts]
        return lambda: [each.result() for each in begun]

    def close(self) -> None:
        """End the thread and the connections; idempotent."""
        self._rank.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def asked_teacher(spec: LearnerSpec) -> TeacherRanks | None:
    """The teachers on servers as ranks of the learner, if there are any."""
    return TeacherRanks(TeacherServers(spec.servers)) if spec.servers else None
