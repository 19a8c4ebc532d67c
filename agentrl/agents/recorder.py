"""The recorder: every episode gets a separate URL and key, and requests to it are recorded as the transcript.

A request continues the turn it is recognized to follow (`agentrl.serve.conversations`); any other request starts a
new branch in the tree, and differences are counted by kind. Clients cannot choose sampling parameters:
temperature, filters and seed come from the run, because the learner needs to know them.

    recorder = Recorder(engine, renderer, EpisodeLimits(...))
    async with running(recorder.app()) as address:
        recording = recorder.open(temperature=1.0, seed=7)
        ...                      # a program talks to address + recording.path with recording.key
        recording.seal()
        recording.turns(), recording.ledger.segments, recording.metrics()
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.engine.base import Engine, GenerateOptions
from agentrl.env.toolenv.observe import plain_text
from agentrl.errors import EngineError, first_error
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.seeds import draw_seed
from agentrl.serve.api_errors import ApiError, unsupported
from agentrl.serve.conversations import Conversations
from agentrl.serve.endpoint import ApiEndpoint, ApiKeyGuard, Settings, keys_in, with_errors
from agentrl.serve.prometheus import Metrics
from agentrl.serve.reader import ArgumentsDelta, CallBegun, ContentDelta, Delta, ReasoningDelta
from agentrl.serve.service import ChatService, Choice, Client, Emit, Gate, GenerationRequest, Job
from agentrl.serve.turns import DriftKind, Matched, Prompt
from agentrl.serve.turns import ServedTurn as SessionTurn
from agentrl.types import CallRecord, Completion, Message, Sampling, StopReason, Turn

NO_LIMIT = 1 << 30
"""Maximum concurrent completions: the engine queues the rest, because a rejected request would only be retried."""


SMALL_BODY = 1 << 20
BYTES_PER_TOKEN = 64
"""Larger requests are refused unread: no prompt within the limits of an episode takes as much."""

EDITS = (DriftKind.REWORDED, DriftKind.TOOLS, DriftKind.HISTORY, DriftKind.FOREIGN)
"""What explains a branch, most telling first: after a reworded turn, the turns behind it have another history."""


@dataclass(frozen=True, slots=True)
class _Spoken:
    """A finished completion, with its times on the monotonic clock."""

    turn: SessionTurn
    began: float
    ended: float


class EpisodeRecording:
    """The recording of one episode.

    Attributes:
        id: part of its URL.
        key: the API key that its program sends.
        ledger: the tree of all tokens.
        session: recognizes its turns.
        stop: the limit that a request reached; None if none did.
        offered: the tools offered in requests that send none.
        jobs: what may be asked for again, by request.
        sampling: completions in progress.
        cut_off: whether completions were in progress when the episode ended.
        refusal: the first request that was refused, and why.
        bug: an exception of our own code that a request met.
    """

    def __init__(
        self, renderer: Renderer, limits: EpisodeLimits, *, context: int, temperature: float, seed: int
    ) -> None:
        self.id, self.key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self.ledger = Transcript(renderer)
        self.session = Conversations(renderer, ledger=self.ledger)
        self.stop: StopReason | None = None
        self.offered: Sequence[Mapping[str, Any]] = ()
        self.jobs: dict[str, RecordedJob] = {}
        self.sampling: set[asyncio.Task[Any]] = set()
        self.cut_off = False
        self.refusal: ApiError | None = None
        self.bug: Exception | None = None
        self.lock = asyncio.Lock()
        self._limits, self._context, self._temperature, self._seed = limits, context, temperature, seed
        self._asked = itertools.count()
        self._opened = time.monotonic()
        self._said: list[_Spoken] = []
        self._branches: dict[int, str] = {}
        self._prompted: set[bytes] = set()
        self._parents: set[int | None] = set()
        self._systems: set[str | None] = set()
        self._trouble: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._sealed = False
        self._turns_left = asyncio.Event()
        self._promised = 0  # tokens that completions in progress may add to the episode
        self._tools: dict[str, Mapping[str, Any]] = {}

    @property
    def path(self) -> str:
        """The base path of its URL; the rest follows OpenAI's API."""
        return f"/episodes/{self.id}/v1"

    @property
    def keyed_path(self) -> str:
        """The same with the key, for programs that cannot send it."""
        return f"/episodes/{self.id}.{self.key}/v1"

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tool schemas sent by its program, without duplicates."""
        return tuple(self._tools.values())

    @property
    def trouble(self) -> str | None:
        """The external failure that left a request without an answer."""
        return next(iter(self._trouble.values()), None)

    @property
    def num_turns(self) -> int:
        """Completions so far."""
        return len(self._said)

    @property
    def ending(self) -> StopReason:
        """The limit that a request or the last completion met, else how that completion ends."""
        if self.stop is not None:
            return self.stop
        last = self._said[-1].turn
        if last.completion.finish != "length":
            return StopReason.TERMINATED if last.message.tool_calls else StopReason.ANSWERED
        if len(last.branch.ids) >= self._context:
            return StopReason.CONTEXT_FULL
        return StopReason.TOKEN_BUDGET if self._room(last) < 1 else StopReason.MAX_TOKENS

    def seal(self) -> None:
        """End the episode: new requests are rejected, and completions in progress are dropped."""
        self._sealed, self.cut_off = True, self.cut_off or bool(self.sampling)
        self._turns_left.set()
        for task in self.sampling:
            task.cancel()

    def check_open(self) -> None:
        """Raises ApiError when the episode is over."""
        if self._sealed:
            raise ApiError(410, "This episode has ended.", code="episode_ended")

    def client(self, request: Request) -> RecordedClient:
        """The client of one request. Raises ApiError when the episode is over."""
        self.check_open()
        key = request.headers.get("idempotency-key", "")
        again = request.headers.get("x-stainless-retry-count", "0") != "0" or bool(key)
        return RecordedClient(self.session, self._adjust, self, again, key)

    def admit(self, ask: GenerationRequest) -> None:
        """Reject requests that an episode may not make.

        Raises:
            ApiError: the episode is over, a limit is exhausted, or several choices are requested.
        """
        self._check_limits()
        if ask.n > 1:
            raise unsupported("n", "an episode continues from a single choice; request n: 1")
        for tool in ask.tools or self.offered:
            self._tools.setdefault(str(tool), tool)

    def admit_prompt(self, prompt: Prompt) -> None:
        """Reject a prompt that exhausts the token budget. Raises ApiError."""
        if self._room(prompt) < 1:
            self.stop = self.stop or StopReason.TOKEN_BUDGET
            self._check_limits()

    def _room(self, prompt: Prompt | SessionTurn) -> int:
        """Tokens that a completion may have: what all branches leave of the token budget."""
        return self._limits.token_budget - prompt.branch.spent

    def _check_limits(self) -> None:
        self.check_open()
        if self.stop is None and self.num_turns >= self._limits.max_turns:
            self.stop = StopReason.MAX_TURNS
        if self.stop is not None:
            raise ApiError(
                400,
                f"This episode has met its limit ({self.stop}): {self.num_turns} completions were sampled.",
                code="episode_limit_reached",
            )

    @contextlib.asynccontextmanager
    async def one_turn(self, job: Job) -> AsyncIterator[None]:
        """Sample during the block, at most what is left of the token budget. Waits while that depends on the
        completions in progress, or they may be the last ones of the episode: abandoned ones do not count.

        Raises:
            ApiError: a limit is exhausted, or the episode is over.
        """
        prompt = job.prompt
        while (
            not self._sealed
            and self.sampling
            and (self._all_taken or self._room(prompt) - self._promised < job.limit)
        ):
            self._turns_left.clear()
            await self._turns_left.wait()
        self.admit_prompt(prompt)
        self._check_limits()
        job.limit = min(job.limit, self._room(prompt))
        promised = prompt.branch.spent - self.ledger.spent + job.limit
        task = asyncio.current_task()
        assert task is not None
        self.sampling.add(task)
        self._promised += promised
        try:
            yield
        finally:
            self.sampling.discard(task)
            self._promised -= promised
            self._turns_left.set()

    @property
    def _all_taken(self) -> bool:
        return self.num_turns + len(self.sampling) >= self._limits.max_turns

    def add(self, spoken: Sequence[Choice], began: float) -> None:
        """Record a finished completion, which was requested at `began` of the monotonic clock."""
        for one in spoken:
            self._said.append(_Spoken(one.turn, began, time.monotonic()))
            self._counts["parse_error"] += len(one.turn.message.parse_errors)
            self._counts["agent/forks"] += one.turn.matched is Matched.FORK
            if (reason := self._reason(one.turn)) is not None:
                self._branches[one.turn.number] = reason
                self._counts[f"agent/branch_{reason}"] += 1
                parents = [len(said.turn.branch.ids) for said in self._said if said.turn.number == one.turn.parent]
                self._counts["agent/rerendered_tokens"] += one.turn.prompt_tokens - sum(parents)
            self._counts["agent/cut"] += one.turn.completion.finish == "length"

    def _reason(self, turn: SessionTurn) -> str | None:
        """Why a turn begins a branch; None for the first of the episode and for the first after its parent."""
        again, splits = turn.prompted in self._prompted, turn.parent in self._parents
        system = next((plain_text(m.content) for m in turn.branch.context if m.role == "system"), None)
        known = system in self._systems
        self._prompted.add(turn.prompted)
        self._parents.add(turn.parent)
        self._systems.add(system)
        if not splits:
            return None
        edits = {event.kind for event in turn.drift}
        if found := next((kind for kind in EDITS if kind in edits), None):
            return found.value
        if again:
            return "repeat"
        return "rewind" if turn.parent is not None else "opening" if known else "sub_agent"

    def count(self, name: str) -> None:
        """Increment a counter."""
        self._counts[name] += 1

    def left(self) -> None:
        """Count a request whose client left before its answer, or that the end of the episode cut off."""
        if not self._sealed:
            self._counts["agent/unanswered"] += 1

    def failed(self, key: str, error: str) -> None:
        """Record a request that failed, unless a retry is answered."""
        self._trouble[key] = error

    def answered(self, key: str) -> None:
        """Record that a retried request was answered."""
        self._trouble.pop(key, None)

    def metrics(self) -> dict[str, float]:
        """Event counts: forks, retries, differences by kind as `agent/drift_KIND`, branches by reason as
        `agent/branch_REASON`, and the prompt tokens that they were rendered with."""
        drift = {f"agent/drift_{kind.value}": float(n) for kind, n in self.session.drift.items()}
        return drift | {name: float(n) for name, n in self._counts.items() if n}

    def turns(self, started: float | None = None) -> list[Turn]:
        """The completions in sampling order, each with the messages after it.

        Args:
            started: when the episode began, on the monotonic clock; by default when the recording was opened.
        """
        started = self._opened if started is None else started
        after: dict[int, SessionTurn] = {}
        for spoken in self._said:
            if spoken.turn.parent is not None:
                after.setdefault(spoken.turn.parent, spoken.turn)
        return [
            replace(
                _turn(spoken.turn, after.get(spoken.turn.number)),
                engine_seconds=spoken.ended - spoken.began,
                start_s=spoken.began - started,
                branch=self._branches.get(spoken.turn.number),
            )
            for spoken in self._said
        ]

    def leaves(self) -> list[Transcript]:
        """The branches that end with a completion that no request continues."""
        parents = {spoken.turn.parent for spoken in self._said}
        return [spoken.turn.branch for spoken in self._said if spoken.turn.number not in parents]

    @property
    def conversations(self) -> set[str]:
        """Names of its engine sessions."""
        return {spoken.turn.conversation for spoken in self._said}

    def _adjust(self, ask: GenerationRequest) -> GenerationRequest:
        """The request with the run's sampling parameters, and the tools offered if it has none."""
        limit = min(ask.limit or self._limits.max_tokens, self._limits.max_tokens)
        seed = draw_seed(self._seed, next(self._asked))
        tools = ask.tools or self.offered
        sampling = {"temperature": self._temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": seed}
        return replace(ask, tools=tools, scored=True, limit=limit, **sampling)  # type: ignore[arg-type]


def _turn(turn: SessionTurn, child: SessionTurn | None) -> Turn:
    observed: Sequence[Message] = ()
    if child is not None:
        observed = child.branch.context[len(turn.branch.context) : -1]
    results = {m.tool_call_id: plain_text(m.content) for m in observed if m.role == "tool"}
    calls = tuple(CallRecord(c, results[c.id], "ok", 0.0) for c in turn.message.tool_calls if c.id in results)
    completion, place = turn.completion, turn.branch.branch[-1].message
    return Turn(
        turn.message, tuple(observed), 0.0, completion.finish, len(completion.ids), 0.0, 0.0, calls, place=place
    )


@dataclass(frozen=True, slots=True)
class RecordedClient(Client):
    """The client of one request: `again` marks a possible retry of an earlier request, identified by `key` if
    given."""

    recording: EpisodeRecording = field(kw_only=False, default=None)  # type: ignore[assignment]
    again: bool = False
    key: str = ""

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The tools of the env, if the run offers them."""
        return self.recording.offered

    def refused(self, error: ApiError) -> None:
        """Remember why; a request that is too large to be read has met the token budget."""
        self.recording.refusal = self.recording.refusal or error
        if error.code == "request_too_large":
            self.recording.stop = self.recording.stop or StopReason.TOKEN_BUDGET


class RecordedJob(Job):
    """A completion that is sampled once, regardless of retries."""

    def __init__(self, job: Job, recording: EpisodeRecording, key: str) -> None:
        super().__init__(job.service, job.ask, job.session, job.prompt, job.limit, job.grammars)
        self._recording, self._key = recording, key
        self._task: asyncio.Future[list[Choice]] | None = None
        self._waiting = 0

    async def run(self, emit: Emit | None = None) -> list[Choice]:
        """Sample the completion, or wait for sampling in progress; dropped if there are no more waiters.

        Raises:
            ApiError: the episode is over, or has met a limit.
            EngineError: the engine is lost.
        """
        spoken = None
        while spoken is None:
            first = self._task is None
            if self._task is None:
                self._task = asyncio.ensure_future(self._sample(emit))
            spoken = await self._wait(self._task)
        if emit is not None and not first:
            for index, one in enumerate(spoken):
                emit(index, _deltas(one), one.drawn)
        return spoken

    async def _wait(self, task: asyncio.Future[list[Choice]]) -> list[Choice] | None:
        """The sampled choices; None if sampling was dropped because those who waited before have left."""
        self._waiting += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if here is not None and here.cancelling():
                raise
            self._recording.check_open()
            if self._task is task:
                self._task = None
            return None
        finally:
            self._waiting -= 1
            if not self._waiting and not task.done():
                self.drop()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    def drop(self) -> None:
        """Stop sampling; a later request samples again."""
        if self._task is not None and not self._task.done():
            self._task.cancel()

    async def _sample(self, emit: Emit | None) -> list[Choice]:
        recording, key = self._recording, self._key
        recording.jobs.setdefault(key, self)
        try:
            async with recording.one_turn(self):
                began = time.monotonic()
                spoken = await super().run(emit)
                recording.answered(key)
                recording.add(spoken, began)
        except BaseException as e:
            if recording.jobs.get(key) is self:
                del recording.jobs[key]
            trouble = first_error(e)
            if isinstance(trouble, EngineError):
                recording.failed(key, str(trouble))
            elif isinstance(trouble, asyncio.CancelledError):
                recording.left()
            elif isinstance(trouble, Exception) and not isinstance(trouble, ApiError):
                recording.bug = trouble
            raise
        return spoken


def _deltas(spoken: Choice) -> list[Delta]:
    """A whole turn as stream chunks for a client."""
    message = spoken.sent.message
    deltas: list[Delta] = [ReasoningDelta(message.reasoning)] if message.reasoning else []
    if text := plain_text(message.content):
        deltas.append(ContentDelta(text))
    for index, (call, arguments) in enumerate(zip(message.tool_calls, spoken.sent.raw_arguments, strict=True)):
        deltas += [CallBegun(index, call.id, call.name), ArgumentsDelta(index, arguments)]
    return deltas


class RecordingService(ChatService):
    """Answers the requests of episodes."""

    async def prepare(self, ask: GenerationRequest, client: Client) -> Job:
        """Check and render a request; a retry of an answered request gets the same answer.

        Raises:
            ApiError: it cannot be answered, or the episode has met a limit.
        """
        assert isinstance(client, RecordedClient)
        recording = client.recording
        key = f"{client.key} {hashlib.sha256(repr(ask).encode()).hexdigest()}"
        async with recording.lock:
            if client.again and (earlier := recording.jobs.get(key)) is not None:
                recording.count("agent/retries")
                return earlier
            recording.admit(ask)
            try:
                job = RecordedJob(await super().prepare(ask, client), recording, key)
                recording.admit_prompt(job.prompt)
            except ApiError as e:
                if e.code == "context_length_exceeded":
                    recording.stop = self.when_full
                raise
            except Exception as e:
                recording.bug = e
                raise
            recording.jobs[key] = job
            return job

    when_full: StopReason = StopReason.CONTEXT_FULL
    """Which limit a prompt meets that leaves no room."""


class _CappedEngine(Engine):
    """An engine with a smaller context: the token budget of an episode."""

    def __init__(self, engine: Engine, max_context: int) -> None:
        self._engine, self.max_context = engine, max_context
        self.capabilities = engine.capabilities

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        return await self._engine.generate(ids, sampling, session=session)

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        return await self._engine.generate_streaming(ids, sampling, options, session=session)

    async def release(self, session: str) -> None:
        await self._engine.release(session)


class Recorder:
    """Holds the recordings of all episodes in flight.

    Args:
        engine: samples.
        renderer: of the run.
        limits: of each episode.
    """

    def __init__(self, engine: Engine, renderer: Renderer, limits: EpisodeLimits) -> None:
        self.engine, self.renderer, self.limits = engine, renderer, limits
        budget = limits.token_budget
        capped = engine if engine.max_context <= budget else _CappedEngine(engine, budget)
        self._talk = RecordingService(capped, renderer, gate=Gate(NO_LIMIT), metrics=Metrics())
        if engine.max_context > budget:
            self._talk.when_full = StopReason.TOKEN_BUDGET
        largest = SMALL_BODY + BYTES_PER_TOKEN * min(budget, engine.max_context)
        self._settings = Settings(names=("policy",), accept_any_model=True, max_body_bytes=largest)
        self._open: dict[str, EpisodeRecording] = {}

    def open(self, *, temperature: float, seed: int) -> EpisodeRecording:
        """Begin an episode; `close` it in any case."""
        context = self.engine.max_context
        recording = EpisodeRecording(
            self.renderer, self.limits, context=context, temperature=temperature, seed=seed
        )
        self._open[recording.id] = recording
        return recording

    async def close(self, recording: EpisodeRecording) -> None:
        """Forget an episode and free what the engine keeps for it; idempotent."""
        recording.seal()
        self._open.pop(recording.id, None)
        for name in recording.conversations:
            with contextlib.suppress(EngineError):
                await self.engine.release(name)

    def app(self, extra_routes: Sequence[Route] = ()) -> ASGIApp:
        """The application: the chat, responses and messages dialects under the address of each episode."""
        return ApiKeyGuard(with_errors([*self.routes(), *extra_routes]), self._settings)

    def routes(self) -> list[Route]:
        """OpenAI's and Anthropic's routes, except text completions, which have no conversation."""
        endpoint = ApiEndpoint(self._talk, self._settings)
        prefix = "/episodes/{episode}/v1"
        routes = endpoint.api_routes(prefix, self.find_client)
        return [route for route in routes if route.path != f"{prefix}/completions"]

    async def metrics(self, request: Request) -> Response:
        """Answer with counters in Prometheus format."""
        return await ApiEndpoint(self._talk, self._settings).metrics(request)

    def find(self, request: Request) -> EpisodeRecording:
        """The recording of a request. Raises ApiError if the key in its path or header is not its own."""
        id, _, key = request.path_params["episode"].partition(".")
        recording = self._open.get(id)
        known = recording.key if recording is not None else secrets.token_hex(16)
        given = [key] if key else keys_in(request.headers)
        if not any(hmac.compare_digest(one.encode(), known.encode()) for one in given) or not recording:
            raise no_episode()
        return recording

    def find_client(self, request: Request) -> Client:
        """The client of a request. Raises ApiError if it is nobody's, or the episode is over."""
        return self.find(request).client(request)


def no_episode() -> ApiError:
    """The error for a request without an open episode of this address and key."""
    text = "There is no episode with this address and key, or it has ended."
    return ApiError(401, text, code="invalid_api_key")
