"""An env worker: plays whole episodes in a separate process and sends requests to the engine in the training
process.

Nothing here imports Ray: `rollout/ray/workers.py` turns `EnvWorker` into actors and forwards its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.token_check import Mode, TokenCheckBudget, TokenReport
from agentrl.config.run import RunConfig
from agentrl.config.schemes import scheme_of
from agentrl.engine.base import Engine, EngineCapabilities
from agentrl.env.load import load_env
from agentrl.errors import AgentRLError, ConfigError, EngineError
from agentrl.rollout.compaction import Compaction
from agentrl.rollout.content import env_factory
from agentrl.rollout.episode import Player, TokenCheck, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.renderer import load_renderer
from agentrl.sandbox import close_pools
from agentrl.scratch import ScratchFolder
from agentrl.types import Completion, Episode, Sampling, Task


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Everything a worker needs to create players; picklable.

    Attributes:
        config: configuration of the run.
        tokenizer: tokenizer files of the model directory, by name.
        code: Python files next to the env's file, if the env is given as a path; written to disk if that path is
            missing or has different content.
        max_context: the engine's context length.
    """

    config: RunConfig
    tokenizer: Mapping[str, bytes]
    code: Mapping[str, bytes]
    max_context: int


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """The parameters of one episode."""

    task: Task
    episode_id: str
    seed: int
    limits: EpisodeLimits
    sampling: Sampling
    token_check: Mode | None
    hints: bool


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the engine: a completion, or (without ids) to drop a session or a request."""

    number: int
    session: str | None
    ids: NDArray[np.int32] | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class EngineReply:
    """The response to a request: a completion, or the name and text of the engine's error."""

    number: int
    completion: Completion | None
    error: tuple[str, str] = ("", "")


class RemoteEngine(Engine):
    """The worker's proxy of the engine: it samples; weights are updated elsewhere."""

    capabilities = EngineCapabilities(weights=False)

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self._version = 0
        self._numbers: itertools.count[int] = itertools.count()
        self._open: dict[int, asyncio.Future[Completion]] = {}
        self._asked: list[EngineRequest] = []
        self._some = asyncio.Event()

    @property
    def policy_version(self) -> int:
        """Version of the newest completion."""
        return self._version

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """Send a request and wait for the answer; see `Engine.generate`."""
        number = next(self._numbers)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        self._ask(EngineRequest(number, session, np.asarray(ids, dtype=np.int32), sampling))
        try:
            return await future
        except asyncio.CancelledError:
            self._ask(EngineRequest(number, None))
            raise
        finally:
            del self._open[number]

    async def release(self, session: str) -> None:
        """Ask the engine to drop the session, without waiting."""
        self._ask(EngineRequest(-1, session))

    async def asked(self) -> list[EngineRequest]:
        """Requests since the last call; waits until there is at least one."""
        await self._some.wait()
        self._some.clear()
        found, self._asked = self._asked, []
        return found

    def answer(self, answers: Sequence[EngineReply]) -> None:
        """Deliver answers to the waiting requests."""
        for answer in answers:
            future = self._open.get(answer.number)
            if future is None or future.done():
                continue
            if answer.completion is not None:
                self._version = max((self._version, *answer.completion.versions))
                future.set_result(answer.completion)
            else:
                name, text = answer.error
                future.set_exception(ValueError(text) if name == "ValueError" else EngineError(text))

    def _ask(self, request: EngineRequest) -> None:
        self._asked.append(request)
        self._some.set()


class _Reports(TokenCheckBudget):
    """Keeps the report of an episode for the driver, which aggregates and decides."""

    last: TokenReport | None = None

    def add(self, report: TokenReport, name: str) -> bool:
        self.last = report
        return not report.failed


class EnvWorker:
    """The actor: plays many episodes at once in one event loop."""

    def __init__(self, kit: WorkerSetup) -> None:
        """Import the env and load the tokenizer.

        Errors are stored for `ready`, because Ray reports an exception here as the death of the actor.
        """
        self._folder = ScratchFolder("worker")
        self._engine: RemoteEngine | None = None
        self._max_context = kit.max_context
        self._playing: dict[str, asyncio.Task[Episode]] = {}
        self._error: AgentRLError | None = None
        try:
            self._load(kit, self._folder.path)
        except AgentRLError as e:
            self._error = e

    def _load(self, kit: WorkerSetup, folder: Path) -> None:
        views = {name: _with_code(kit, name, view, folder) for name, view in kit.config.by_env.items()}
        for name, content in kit.tokenizer.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        self._renderer = load_renderer(kit.config, folder)
        self._make_env = {
            name: env_factory(load_env(view.sole_env.use, view.sole_env.options), view)
            for name, view in views.items()
        }
        engine = RemoteEngine(kit.max_context)
        self._compaction = {name: Compaction.of(view, engine) for name, view in views.items()}

    async def ready(self) -> None:
        """Returns once the worker can play.

        Raises:
            ConfigError: the env or the tokenizer cannot be used here.
        """
        if self._error is not None:
            raise ConfigError(f"rollout.workers: on {platform.node()}: {self._error}") from self._error
        self._proxy()

    async def play(self, order: EpisodeRequest) -> tuple[Episode, TokenReport | None]:
        """Play one episode; returns it with the report of its token check."""
        reports = _Reports()
        player = Player(
            self._proxy(),
            self._renderer,
            self._make_env[order.task.env],
            order.limits,
            replace(order.sampling, stop_ids=self._renderer.stop_ids),
            None if order.token_check is None else TokenCheck(order.token_check, reports),
            self._compaction[order.task.env],
            order.hints,
        )
        playing = asyncio.ensure_future(
            run_episode(player, order.task, episode_id=order.episode_id, seed=order.seed)
        )
        self._playing[order.episode_id] = playing
        try:
            return await playing, reports.last
        finally:
            del self._playing[order.episode_id]

    async def asked(self) -> list[EngineRequest]:
        """Requests of the episodes to the engine; waits until there is at least one."""
        return await self._proxy().asked()

    async def answer(self, answers: Sequence[EngineReply]) -> None:
        """Deliver the engine's answers."""
        self._proxy().answer(answers)

    async def cancel(self, episode_id: str) -> None:
        """Stop an abandoned episode; its env is closed."""
        if (playing := self._playing.get(episode_id)) is not None:
            playing.cancel()

    async def stop(self) -> None:
        """Close the envs of all episodes, and the sandboxes."""
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        if playing:
            await asyncio.wait(playing)
        await close_pools()
        self._folder.close()

    def _proxy(self) -> RemoteEngine:
        if self._engine is None:  # created inside the actor's event loop
            self._engine = RemoteEngine(self._max_context)
        return self._engine


def pack_setup(config: RunConfig, model: Path, max_context: int) -> WorkerSetup:
    """The worker setup of a run with the tokenizer in the directory `model`."""
    text = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")
    files = {file for pattern in text for file in model.glob(pattern) if file.is_file()}
    tokenizer = {str(f.relative_to(model)): f.read_bytes() for f in files if not f.name.endswith(".index.json")}
    code: dict[str, bytes] = {}
    for name, view in config.by_env.items():
        if (env := _env_file(view)) is not None:
            with contextlib.suppress(OSError):
                code |= {str(Path(name, file.name)): file.read_bytes() for file in env.parent.glob("*.py")}
    return WorkerSetup(config, tokenizer, code, max_context)


def _env_file(config: RunConfig) -> Path | None:
    """The Python file of the run's env; None if the env is given as a module."""
    if scheme_of(config.sole_env.use):
        return None
    name = config.sole_env.use.rpartition(":")[0]
    return Path(os.path.expanduser(name)).absolute() if name.endswith(".py") or "/" in name else None


def _with_code(kit: WorkerSetup, name: str, config: RunConfig, folder: Path) -> RunConfig:
    """The view of an env that can be imported here: in place, or from the transferred files."""
    env = _env_file(config)
    if env is None or (env.is_file() and env.read_bytes() == kit.code.get(str(Path(name, env.name)))):
        return config
    code = folder / "code" / name
    code.mkdir(parents=True)
    for file, content in kit.code.items():
        if Path(file).parent == Path(name):
            (code / Path(file).name).write_bytes(content)
    use = f"{code / env.name}:{config.sole_env.use.rpartition(':')[2]}"
    return config.model_copy(update={"env": config.sole_env.model_copy(update={"use": use})})
