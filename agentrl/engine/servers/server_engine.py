"""The engine over inference servers: tokens from SGLang or vLLM, even when servers fail."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import torch
from torch import Tensor

from agentrl.async_tasks import spawn
from agentrl.engine.base import (
    Engine,
    EngineCapabilities,
    GenerateOptions,
    Structure,
    StructureRefused,
    TokenLogprob,
)
from agentrl.engine.checks import ROUNDING, check_prompt, check_sampling
from agentrl.engine.servers.client import InferenceServer, Listener, ServerAnswer
from agentrl.engine.servers.http import ServerRefused, ServerRestarted, ServerTaken
from agentrl.engine.servers.replica_pool import LOST, Host, Replica, ReplicaPool, ServedLimits
from agentrl.engine.servers.reported_routes import RouteLayout, RoutesAsked, joined
from agentrl.engine.servers.weight_sync import AdapterSync, WeightSync, distinct, vocabulary_of
from agentrl.errors import ConfigError, EngineError
from agentrl.models.folder import reading_tensors
from agentrl.models.stored import as_saved, exact_tensors
from agentrl.types import Completion, Sampling

_STRUCTURED_TRIES = 4


def _request_names() -> Iterator[str]:
    """Names that no other client of a server uses. None begins with another: SGLang aborts by prefix."""
    own = uuid.uuid4().hex
    return (f"{own}{number:016x}" for number in count())


class ServedEngine(Engine):
    """Samples from one or more inference servers; create it with `open_engine`.

    A request goes to the server that its session used before, otherwise to the least loaded one; requests of a
    lost server are retried by their token ids. Requests wait while a server restarts.
    """

    capabilities = EngineCapabilities(streaming=True, prompt_logprobs=True, separate_weights=True, sleep=True)

    def __init__(
        self,
        hosts: Sequence[Host],
        sync: WeightSync,
        *,
        model: Path,
        dtype: torch.dtype = torch.float32,
        given: bool = False,
        local: bool = True,
        routes: RouteLayout | None = None,
        limits: ServedLimits | None = None,
        tell: Callable[[str], None] = warnings.warn,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Take servers that are started by `start`.

        Args:
            given: they run already, with weights that nobody knows.
            local: they are on this machine, so that tensors on a GPU can be handed to them in place.
            routes: the layout of the experts that they report; None to ask for none.
        """
        self.max_context = 0
        self._model, self._dtype, self._sync, self._on_close = model, dtype, sync, on_close
        self._routes = routes
        self._reported: dict[str, list[int]] = {}
        """By session, the latest tokens whose routes have been returned; the last one has none."""
        self._names: frozenset[str] | None = None
        self._vocabulary = vocabulary_of(model)
        self._given, self._local, self._tell = given, local, tell
        self._version = self._newest = 0
        self._weights: dict[str, Tensor] | None = None
        self._lock = asyncio.Lock()
        self._requests = _request_names()
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False
        self._pool = ReplicaPool(hosts, limits or ServedLimits(), prepare=self._prepare, tell=tell)

    async def start(self) -> None:
        """Start the servers and return when all of them respond with the weights of the model directory.

        Raises:
            EngineError: one could not be started.
        """
        if self._given:  # it may have served other weights before
            exact = await self._exact()
            self._weights = await asyncio.to_thread(load_folder, self._model, self._dtype, exact)
        try:
            await self._pool.start()
            described = (await self._pool.call_each(lambda server: server.describe())).values()
        except BaseException:
            await self.close()
            raise
        if self._routes is not None and not all(d.routes for d in described):
            await self.close()
            raise ConfigError(
                "learner.replay_routes: a server does not report the experts that routers choose: start it with "
                "--enable-return-routed-experts"
            )
        self.max_context = min(d.max_context for d in described)
        self.capabilities = replace(
            self.capabilities,
            structures=all(d.grammars for d in described),
            routes=self._routes is not None,
        )
        if not all(d.seeds for d in described):
            self._tell(
                "the servers ignore seeds, so sampled episodes differ from run to run (SGLang obeys them on a GPU "
                "with --enable-deterministic-inference in engine.server.args)"
            )

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether there is a server with the current weights; otherwise requests wait for one."""
        return any(not replica.asleep for replica in self._pool.ready)

    @property
    def asleep(self) -> bool:
        """Whether there is a server that can answer once it is awake; one that ends while it sleeps cannot."""
        return not self.ready and bool(self._pool.ready)

    @property
    def outage_s(self) -> float:
        """Seconds, so far, during which no server could answer, which do not count against episodes."""
        return self._pool.outage_s

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Continue `ids`; see `Engine.generate`. Completions that a server abandons are continued on another."""
        return await self._generate(ids, sampling, session, None)

    async def generate_streaming(
        self, ids: Sequence[int], sampling: Sampling, options: GenerateOptions, *, session: str | None = None
    ) -> Completion:
        """Continue `ids` and report the tokens as they arrive; see `Engine.generate_streaming`.

        Reported tokens are final: if a server is lost, another one continues from there.

        Raises:
            EngineError: no server is left.
            ValueError: a mask is set, or as for `generate`.
        """
        if options.mask is not None:
            raise ValueError("server engines do not support grammar masks")
        if options.structure is not None:
            return await self._structured(ids, sampling, session, options, options.structure)
        return await self._generate(ids, sampling, session, options)

    async def _generate(
        self, ids: Sequence[int], sampling: Sampling, session: str | None, options: GenerateOptions | None
    ) -> Completion:
        check_sampling(sampling)
        prompt = check_prompt(ids, self._vocabulary, self.max_context).tolist()
        room = min(sampling.max_tokens, self.max_context - len(prompt))
        asked_routes = self._asked_routes(prompt, session)
        parts: list[ServerAnswer] = []
        while True:
            done = sum(len(part.ids) for part in parts)
            rest = [token for part in parts for token in part.ids]
            asked = replace(sampling, max_tokens=room - done, seed=_moved(sampling.seed, done))
            part = await self._ask(prompt + rest, asked, session, options, routes=asked_routes)
            parts.append(part)
            if part.ids and part.ids[-1] in sampling.stop_ids:
                return self._completion(parts, "stop", prompt, session, asked_routes)
            if done + len(part.ids) >= room or part.finish == "length":
                return self._completion(parts, "length", prompt, session, asked_routes)
            if not part.ids and len(parts) > 8:
                raise EngineError(f"a server ended a completion after {done} tokens, again and again")

    async def _structured(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        session: str | None,
        options: GenerateOptions,
        structure: Structure,
    ) -> Completion:
        """Sample under the server's grammar. A grammar begins with the completion, so one that a server abandons
        begins again.

        Raises:
            EngineError: servers abandon it again and again, or in the middle of what has been reported.
            StructureRefused: a server refuses the structure.
        """
        check_sampling(sampling)
        prompt = check_prompt(ids, self._vocabulary, self.max_context).tolist()
        room = min(sampling.max_tokens, self.max_context - len(prompt) - structure.scored)
        if room < 1:
            raise ValueError("the prompt leaves no room for a token that is scored afterwards")
        asked = replace(sampling, max_tokens=room)
        routes = self._asked_routes(prompt, session)
        for _ in range(_STRUCTURED_TRIES):
            try:
                told = None if structure.scored else options
                part = await self._ask(prompt, asked, session, told, structure, routes=routes)
            except ServerRefused as e:
                raise StructureRefused(str(e)) from e
            if part.finish != "abort":
                whole = self._completion([part], part.finish, prompt, session, routes)
                scored = await self._scored(prompt, whole, options) if structure.scored else whole
                if scored is not None:
                    return scored
            elif part.ids and not structure.scored and options.on_token is not None:
                raise EngineError("a server abandoned a completion under a grammar, which cannot be continued")
        raise EngineError(f"servers abandoned a completion under a grammar {_STRUCTURED_TRIES} times")

    async def _scored(self, prompt: list[int], whole: Completion, options: GenerateOptions) -> Completion | None:
        """Return the completion with the policy's log-probabilities; None if the weights changed meanwhile."""
        version, count = self._version, len(whole.ids)
        drawn = (await self.prompt_logprobs([*prompt, *whole.ids], top=options.top))[-count:] if count else []
        if {version, *whole.versions, *(one.version for one in drawn)} != {version}:
            return None
        for one in drawn if options.on_token is not None else ():
            options.on_token(one)  # type: ignore[misc] # mypy does not see the condition
        return replace(whole, logprobs=tuple(one.logprob for one in drawn))

    async def prompt_logprobs(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        """Score given tokens, all with the weights of one version; see `Engine.prompt_logprobs`.

        Raises:
            EngineError: no server is left.
        """
        row = check_prompt(ids, self._vocabulary, self.max_context).tolist()
        while True:
            async with self._lock:  # during an update, servers have different weights
                version = self._version
            scored = await self._pool.call(None, lambda server: server.score(row, top=top))
            if version == self._version and not self._lock.locked():
                break
        return [TokenLogprob(id, one.logprob, version, one.top) for id, one in zip(row[1:], scored, strict=True)]

    async def release(self, session: str) -> None:
        """Forget the session's server; its cache entries there are evicted when space is needed."""
        self._pool.forget(session)
        self._reported.pop(session, None)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Bring the weights to every server; see `Engine.update_weights`.

        A server that is lost during the update is restarted and gets them then.

        Raises:
            EngineError: the servers reject them, or no server is left.
        """
        async with self._lock:
            exact = await self._exact()
            snapshot = await asyncio.to_thread(copy_weights, weights, self._dtype, exact)
            snapshot = sent = await self._as_saved(snapshot)
            if self._local and any(tensor.is_cuda for tensor in weights.values()):
                sent = {
                    name: tensor.detach().to(_sent_as(name, tensor, self._dtype, exact))
                    for name, tensor in distinct(weights).items()
                }
                sent = await self._as_saved(sent)
            self._newest = max(self._newest, version)
            await self._push(sent, version)
            self._weights, self._version = snapshot, version
        await self._pool.any_ready()

    def server_timing(self) -> Mapping[str, float]:
        """What each server did since the last call: seconds at work, tokens, and request seconds per token."""
        return self._pool.timing()

    async def logprobs_by_server(self, rows: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        """Return by the name of each server the logprob (temperature 1) of each token of each row but the first.

        Used to check whether the weights of servers and learner are the same. A server that is lost meanwhile is
        left out, unless it is the only one, which is asked again when it is back.
        """
        checked = [check_prompt(row, self._vocabulary, self.max_context).tolist() for row in rows]

        async def ask(server: InferenceServer) -> list[list[float]]:
            return [[one.logprob for one in await server.score(row)] for row in checked]

        return await self._pool.call_each(ask)

    async def sleep(self) -> None:
        """Free the servers' GPU memory until the next `update_weights`; requests wait until then.

        Raises:
            EngineError: requests are in flight.
        """
        async with self._lock:
            if any(replica.running for replica in self._pool.ready):
                raise EngineError("the engine cannot sleep while completions are in flight")
            for replica in self._pool.ready:
                replica.asleep = True
            await self._each_asleep(lambda server: server.sleep())

    async def close(self) -> None:
        """Stop the servers that this engine started, and leave the others running; idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*self._aborts, return_exceptions=True)
        try:
            await self._sync.close()
        finally:
            await self._pool.close()
            if self._on_close is not None:
                self._on_close()

    # -- requests ----------------------------------------------------------------------------------------------

    async def _ask(
        self,
        ids: list[int],
        sampling: Sampling,
        session: str | None,
        options: GenerateOptions | None = None,
        structure: Structure | None = None,
        *,
        routes: RoutesAsked | None = None,
    ) -> ServerAnswer:
        told: list[TokenLogprob] = []

        def tell(drawn: Sequence[TokenLogprob]) -> None:
            told.extend(drawn)
            if options is not None and options.on_token is not None:
                for one in drawn:
                    options.on_token(one)

        listener = None if options is None else Listener(tell, options.top)
        tag = {} if structure is None else {"structure": structure.tag}

        async def ask(server: InferenceServer) -> ServerAnswer:
            if told:  # by a server lost since then: keep the known versions
                answer = ServerAnswer.partial(told)
                self._check_answer(answer, sampling, 0, server.url)
                return answer
            request, version = next(self._requests), self._version
            try:
                answer = await server.generate(
                    ids, sampling, request=request, listener=listener, routes=routes, **tag
                )
            except asyncio.CancelledError as e:
                if e.args[:1] != (LOST,):  # a lost server has nothing to abort
                    self._abort(server, request)
                raise
            self._check_answer(answer, sampling, version, server.url)
            return answer

        return await self._pool.call(session, ask)

    def _asked_routes(self, prompt: list[int], session: str | None) -> RoutesAsked | None:
        """Which routes to ask for: those of a long context would be sent again in each turn."""
        if self._routes is None:
            return None
        known = self._reported.get(session or "", [])
        return RoutesAsked(self._routes, len(known) - 1 if known and prompt[: len(known)] == known else 0)

    def _completion(
        self,
        parts: Sequence[ServerAnswer],
        finish: str,
        prompt: list[int],
        session: str | None,
        asked: RoutesAsked | None,
    ) -> Completion:
        routes = None if asked is None else joined(parts, len(prompt), asked)
        if routes is not None and session is not None:
            self._reported[session] = [*prompt, *chain.from_iterable(part.ids for part in parts)]
        return Completion(
            ids=tuple(chain.from_iterable(part.ids for part in parts)),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            versions=tuple(chain.from_iterable(part.versions for part in parts)),
            finish="stop" if finish == "stop" else "length",
            cached_tokens=parts[0].cached_tokens,
            routes=routes,
        )

    def _check_answer(self, answer: ServerAnswer, sampling: Sampling, version: int, url: str) -> None:
        """Refuse what no policy samples, so that no error of a server becomes a gradient.

        Args:
            version: of the weights that all servers had when the request was sent.

        Raises:
            EngineError: more tokens than asked for, ids outside the vocabulary, or log-probabilities above 0.
            ServerRestarted: other weights have sampled it.
        """
        if len(answer.ids) > sampling.max_tokens:
            raise EngineError(f"{url}: {len(answer.ids)} tokens, more than max_tokens={sampling.max_tokens}")
        if wrong := [id for id in answer.ids if not 0 <= id < self._vocabulary]:
            raise EngineError(f"{url}: sampled the id {wrong[0]}, outside the vocabulary of {self._vocabulary}")
        if odd := [p for p in answer.logprobs if p > ROUNDING]:
            raise EngineError(f"{url}: the log-probability {odd[0]} is above 0")
        if others := [v for v in answer.versions if not version <= v <= self._newest]:
            raise ServerRestarted(f"{url}: answers with weights of version {others[0]}, not {version}")

    def _abort(self, server: InferenceServer, request: str) -> None:
        """Abort the request on the server; not awaited, because the caller is being cancelled."""

        async def abort() -> None:
            with contextlib.suppress(EngineError):  # the server is gone, and the request with it
                await server.abort(request)

        spawn(self._aborts, abort())

    # -- weights -----------------------------------------------------------------------------------------------

    async def _prepare(self, server: InferenceServer, usable: Callable[[], None]) -> None:
        """Bring the current weights to a server that has just started."""
        async with self._lock:
            if self._weights is not None:
                failures = await self._sync.push([server], self._weights, self._version)
                for error in failures.values():
                    raise error
            usable()

    async def _exact(self) -> frozenset[str]:
        """Names of the tensors that are sent in their own precision."""
        if self._names is None:
            low = self._dtype != torch.float32
            self._names = await asyncio.to_thread(exact_tensors, self._model) if low else frozenset()
        return self._names

    async def _as_saved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """As servers load them; the matrices of an adapter are."""
        if isinstance(self._sync, AdapterSync):
            return weights
        return await asyncio.to_thread(as_saved, weights, self._model)

    async def _push(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._each_asleep(lambda server: server.wake("weights"))
        replicas = {r.server: r for r in self._pool.ready if r.server is not None}
        for replica in replicas.values():
            replica.updates, replica.loading = replica.updates + 1, True
        try:
            failures = await self._sync.push(list(replicas), weights, version)
        finally:
            for replica in replicas.values():
                replica.loading = False
        for error in failures.values():
            if isinstance(error, ServerTaken):
                self._pool.fail(error)
                raise error
        refused = [error for error in failures.values() if isinstance(error, ServerRefused)]
        if refused and len(refused) == len(replicas):
            raise EngineError(f"the weights of version {version} were refused: {refused[0]}") from refused[0]
        for server, error in failures.items():
            self._pool.lose(replicas[server], str(error))
        await self._each_asleep(lambda server: server.wake("cache"))
        for replica in replicas.values():
            replica.updates += 1
            if replica.ready:
                self._pool.awake(replica)

    async def _each_asleep(self, work: Callable[[InferenceServer], Awaitable[None]]) -> None:
        async def one(replica: Replica) -> None:
            assert replica.server is not None
            try:
                await work(replica.server)
            except EngineError as e:
                self._pool.lose(replica, str(e))

        await asyncio.gather(*(one(r) for r in self._pool.ready if r.asleep))


def _sent_as(name: str, tensor: Tensor, dtype: torch.dtype, exact: Collection[str]) -> torch.dtype:
    return tensor.dtype if name in exact or not tensor.is_floating_point() else dtype


def copy_weights(
    weights: Mapping[str, Tensor], dtype: torch.dtype, exact: Collection[str] = ()
) -> dict[str, Tensor]:
    """Copy to host memory, so that the learner's next step does not change it; tied parameters once.

    Args:
        exact: names of tensors that keep their own dtype (`exact_tensors`), as do those of integers.
    """
    return {
        name: tensor.detach().to(device="cpu", dtype=_sent_as(name, tensor, dtype, exact), copy=True).contiguous()
        for name, tensor in distinct(weights).items()
    }


def load_folder(folder: Path, dtype: torch.dtype, exact: Collection[str] = ()) -> dict[str, Tensor]:
    """Read the weights of a Hugging Face directory.

    Raises:
        ConfigError: a file cannot be read.
    """
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.name.startswith("optimizer"):
            with reading_tensors(file):
                found |= load_file(file)
    if not found:
        raise EngineError(f"{folder} holds no *.safetensors")
    return copy_weights(found, dtype, exact)


def _moved(seed: int | None, done: int) -> int | None:
    """Return a new seed: servers count positions per request, so a continuation must not repeat the same draws."""
    return seed if seed is None or not done else (seed + 0x9E3779B97F4A7C15 * done) % 2**63
