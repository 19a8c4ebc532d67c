"""Evaluate a policy without training: a checkpoint, or a model behind an endpoint.

The folder of an evaluation is a run folder: config.yaml, metrics.jsonl, and the episodes under the step of the
checkpoint. Finished tasks are appended to `episodes/partial.jsonl`, so that a repeated evaluation resumes where it
stopped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from agentrl.agents.players import players
from agentrl.config import RunConfig, dump_config
from agentrl.config.section import COLDEST, HOTTEST
from agentrl.engine.chat_client import ChatClient, Endpoint
from agentrl.env.env import Env
from agentrl.env.solved import NOT_DECLARED, reaches
from agentrl.env.tasks import Split
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, EngineError, InfraError, first_error
from agentrl.eval.result import RESULTS_FILE, EvalResult, EvalSpec, Prices, result_of
from agentrl.extras import require
from agentrl.plural import plural
from agentrl.reachable import unreachable
from agentrl.reporting.display import quiet_transformers
from agentrl.reporting.report import Reporter
from agentrl.rollout.build import make_engine, make_guard
from agentrl.rollout.chat_endpoint import ChatPlayer
from agentrl.rollout.code_record import CodeRecord, code_changes, code_of, row_changes
from agentrl.rollout.content import Content, load_content, require_endpoints
from agentrl.rollout.group import GroupPlayer, Plays
from agentrl.rollout.lifecycle import EpisodeStatus
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.prompts import fitting
from agentrl.rollout.renderer import check_renderer, load_renderer, require_template
from agentrl.rollout.task_tools import task_tools
from agentrl.run_folder.checkpoints import MANIFEST
from agentrl.run_folder.files import MAX_BYTES, append, read_bounded
from agentrl.run_folder.records import PARTIAL_FILE, EpisodeRecord, bounded_lines, decode, encode
from agentrl.run_folder.store import CODE_FILE, RunStore
from agentrl.run_folder.task_digests import TASKS_FILE, read_task_digests, task_digests
from agentrl.sandbox import close_pools
from agentrl.types import EVERY_TOKEN, Episode, Filters, Task

SPEC_FILE = "eval.json"
"""File in an evaluation folder with its settings."""
OWN_FIELDS = frozenset(
    {"max_completion_tokens", "max_tokens", "messages", "model", "n", "stream", "temperature", "tools"}
)
"""Fields of a request that an evaluation sets itself, so `--request` cannot."""
LOST_IN_A_ROW = 5
"""Stop an evaluation after this many lost tasks if none has been played: nothing answers."""


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """The settings of an evaluation.

    Attributes:
        split: which tasks; the env's generator or the run's data files give them.
        tasks: number of tasks; None means `eval.tasks` of the run.
        attempts: episodes of each task.
        temperature: 0 is greedy; None is greedy with one attempt, and the temperature of training with several.
        filters: sampling filters.
        concurrency: maximum concurrent episodes.
        prices: prices of the endpoint's tokens.
    """

    split: Split = "held_out"
    tasks: int | None = None
    attempts: int = 1
    temperature: float | None = None
    filters: Filters = EVERY_TOKEN
    concurrency: int = 16
    prices: Prices | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: a model directory with the step of its checkpoint, or an endpoint."""

    checkpoint: Path | None = None
    endpoint: Endpoint | None = None
    step: int = 0

    @property
    def name(self) -> str:
        """A readable name."""
        if self.endpoint is not None:
            return f"{self.endpoint.model} at {self.endpoint.address}"
        return str(self.checkpoint)

    def digest(self) -> str:
        """Of what is known of its content: the manifest of a checkpoint, the sizes and times of other files."""
        if self.endpoint is not None:
            return json.dumps([self.endpoint.base_url, self.endpoint.model, dict(self.endpoint.request)])
        folder = self.checkpoint or Path()
        if (folder / MANIFEST).is_file():
            return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        files = sorted(path for path in folder.glob("*") if path.is_file())
        return str([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def make_spec(subject: Subject, config: RunConfig, options: EvalOptions) -> EvalSpec:
    """What this evaluation plays.

    Raises:
        ConfigError: several greedy attempts at each task would all be the same, or filters have no effect.
    """
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.attempts == 1 else config.rollout.temperature
    if temperature and not COLDEST <= temperature <= HOTTEST:
        raise ConfigError(
            f"--temperature {temperature:g}: must be 0, which is greedy, or from {COLDEST:g} to {HOTTEST:g}"
        )
    if temperature == 0 and options.attempts > 1:
        raise ConfigError(
            f"{options.attempts} greedy attempts at each task are all the same: give a --temperature above 0, "
            "or one attempt"
        )
    if subject.endpoint is None:
        try:
            config.engine.refuse_temperature(temperature, "--temperature")
        except ValueError as e:
            raise ConfigError(str(e)) from None
    filters = options.filters
    if temperature == 0 and filters != EVERY_TOKEN:
        raise ConfigError("--top-p, --top-k and --min-p have no effect on greedy episodes: give a --temperature")
    asked = {} if subject.endpoint is None else subject.endpoint.request
    if owned := sorted(OWN_FIELDS & asked.keys()):
        raise ConfigError(
            f"--request {owned[0]}: the evaluation sets this field itself; use --temperature, --model or --set "
            "rollout.KEY=VALUE"
        )
    if twice := sorted(_given(filters).keys() & asked.keys()):
        raise ConfigError(f"--{twice[0].replace('_', '-')} and --request {twice[0]}: give one of them")
    digest = hashlib.sha256((dump_config(config) + subject.digest()).encode()).hexdigest()[:16]
    tasks = options.tasks or config.eval.tasks
    return EvalSpec(
        subject.name,
        config.sole_env.use,
        options.split,
        tasks,
        options.attempts,
        temperature,
        config.seed,
        digest,
        **dataclasses.asdict(filters),
    )


def _given(filters: Filters) -> dict[str, float]:
    """The filters that are on."""
    off = dataclasses.asdict(EVERY_TOKEN)
    return {name: value for name, value in dataclasses.asdict(filters).items() if value != off[name]}


def default_folder(base: Path, subject: Subject, spec: EvalSpec) -> Path:
    """Where an evaluation goes: a name that the same evaluation finds again, and no other."""
    what = f"step-{subject.step}" if subject.endpoint is None else subject.endpoint.model.replace("/", "-")

    def folder(policy: str) -> Path:
        named = json.dumps(dataclasses.asdict(spec) | {"policy": policy})
        return base / f"{what}-{spec.split}-{hashlib.sha256(named.encode()).hexdigest()[:6]}"

    as_given = folder(subject.name)  # of earlier versions, in which another spelling of a path was another model
    if subject.checkpoint is None or as_given.exists():
        return as_given
    return folder(str(subject.checkpoint.resolve()))


def evaluate(
    subject: Subject,
    config: RunConfig,
    options: EvalOptions,
    *,
    folder: Path,
    fresh: bool = False,
    reporter: Reporter,
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run,
) -> EvalResult:
    """Play tasks and report the result; resumes an unfinished folder.

    Args:
        subject: the model to evaluate.
        config: configuration with the env, limits and seed.
        options: the settings of the evaluation.
        folder: the folder of this evaluation.
        fresh: start over; the old folder is renamed.
        reporter: shows the progress.
        run: runs what is played to its end, on a new event loop.

    Raises:
        CheckpointError: it was trained with another tokenizer, template or parser.
        ConfigError: the env, the model or the endpoint is invalid, there are no such tasks, or the folder contains
            another evaluation.
        InfraError: no task could be played.
    """
    if subject.endpoint is not None and config.agent is not None:
        raise ConfigError(
            "agent: a program is given our own policy; to see it with another model, start it there yourself"
        )
    spec = make_spec(subject, config, options)
    if subject.endpoint is None:
        require("train", "agentrl eval")
    with RunStore.open(config, folder, fresh=fresh, exact=True) as store:
        try:
            return _evaluate(subject, config, options, spec, store, reporter, run)
        except AgentRLError:
            store.discard()
            raise


def _evaluate(
    subject: Subject,
    config: RunConfig,
    options: EvalOptions,
    spec: EvalSpec,
    store: RunStore,
    reporter: Reporter,
    run: Callable[[Coroutine[None, None, None]], None],
) -> EvalResult:
    _claim(store, spec)
    reporter.phase("start")
    reporter.within("reading tasks")
    done = _finished(store, options.prices)
    try:
        content = load_content(config.model_copy(update={"warmup": None}))  # demonstrations are not needed
        found = content.held_out_tasks if spec.split == "held_out" else content.train_tasks
        chosen = found[: spec.tasks]
        splits = (chosen, ()) if spec.split == "train" else ((), chosen)
        record = code_of(config, content), task_digests(*splits)
    except AgentRLError as e:
        if done is None:
            raise
        reporter.note(f"this evaluation is complete; its code and tasks were not compared with today's: {e}")
        return done
    _require_same_code(store, *record)
    if done is not None:
        reporter.note(f"this evaluation is complete in {os.path.relpath(store.path)}; --fresh plays it again")
        return done
    if not chosen:
        raise ConfigError(
            f"there are no {spec.split} tasks: name a file under data.{spec.split}, or give --split train"
        )
    if options.tasks is not None and len(chosen) < options.tasks:
        reporter.note(f"--tasks {options.tasks:,}: there are {len(chosen):,} {spec.split} tasks; all are played")
    content = replace(content, train_tasks=(), held_out_tasks=chosen)
    progress = _Progress(store, subject.step, spec.attempts, reporter)
    started = time.monotonic()
    run(_play(subject, config, options, spec, content, progress))
    rule = content.make_env().solved_rule()
    return progress.finish(spec, time.monotonic() - started, options.prices, "" if rule is None else str(rule))


def _claim(store: RunStore, spec: EvalSpec) -> None:
    """Save what is played in a new folder, or see that the folder holds the same."""
    path = store.path / SPEC_FILE
    new = dataclasses.asdict(spec)
    before = dataclasses.asdict(EVERY_TOKEN)  # what folders of an earlier version do not say
    if path.exists():
        try:
            old = before | dict(json.loads(read_bounded(path)))
        except (ValueError, TypeError, RecursionError) as e:
            raise CheckpointError(f"{path}: damaged: {e}") from None
        if old.get("digest") == spec.digest:  # the same policy, whose path may be written differently
            old["policy"] = spec.policy
        changed = [f"{key}: {old.get(key)} -> {value}" for key, value in new.items() if old.get(key) != value]
        if changed:
            raise ConfigError(
                f"{store.path}: holds another evaluation ({', '.join(changed)}); give another --out, or "
                "start over with --fresh (the old folder is renamed and kept)"
            )
        return
    if store.resumed:
        raise ConfigError(f"{store.path}: is the folder of a training run; give another --out")
    store.write_file(SPEC_FILE, (json.dumps(new, indent=2) + "\n").encode())


def _require_same_code(store: RunStore, code: CodeRecord, tasks: bytes) -> None:
    """Save what the code and the tasks are before anything is played. Raises ConfigError if they changed since."""
    old = CodeRecord.read(store.path / CODE_FILE)
    if old is None:
        if not any((store.path / name).exists() for name in (PARTIAL_FILE, RESULTS_FILE)):
            store.write_file(TASKS_FILE, tasks)
            store.write_file(CODE_FILE, code.to_json())
        return  # episodes of an earlier version, which recorded no code
    changed = code_changes(old, code)
    changed += row_changes(read_task_digests(store.path / TASKS_FILE), json.loads(tasks))
    if changed:
        listed = "\n    ".join(changed)
        raise ConfigError(
            f"{store.path}: the code or the tasks changed since this evaluation began:\n    {listed}\n"
            "undo the change, give another --out, or start over with --fresh (the old folder is renamed and kept)"
        )


def _finished(store: RunStore, prices: Prices | None) -> EvalResult | None:
    """The result of a folder that is complete; its cost at today's prices."""
    if not (store.path / RESULTS_FILE).is_file():
        return None
    result = EvalResult.read(store.path)
    if result.lost:
        return None
    return result.priced(prices)


async def _play(
    subject: Subject,
    config: RunConfig,
    options: EvalOptions,
    spec: EvalSpec,
    content: Content,
    progress: _Progress,
) -> None:
    """Create the player, play, and close it."""
    try:
        await require_endpoints(content)
        if subject.endpoint is not None:
            if why := await unreachable(subject.endpoint.base_url, through_proxy=False):
                raise EngineError(
                    f"--base-url {subject.endpoint.address}: nothing accepts connections there ({why}); start "
                    "the server, or correct the address"
                )
            if config.data.overlong_prompts is not None:
                progress.reporter.note("data.overlong_prompts is not looked at: an endpoint does not count tokens")
            if config.rollout.compact is not None:
                progress.reporter.note("rollout.compact is not applied: an endpoint does not count tokens")
            request = {**subject.endpoint.request, **_given(options.filters)}
            client = ChatClient(replace(subject.endpoint, request=request))
            limits = EpisodeLimits.of(config)
            try:
                await _play_tasks(
                    ChatPlayer(client, content.make_env, limits, spec.temperature),
                    content.held_out_tasks,
                    config,
                    options,
                    progress,
                )
            finally:
                await client.close()
            return
        directory = subject.checkpoint or Path()
        quiet_transformers()
        renderer = load_renderer(config, directory)
        require_template(renderer, await task_tools(content.make_env, content.held_out_tasks))
        check_renderer(renderer, directory)
        progress.reporter.within("starting servers" if config.engine.on_servers else "loading the model")
        engine = await make_engine(config, directory)
        try:
            content = await fitting(content, config, renderer, engine.max_context, progress.reporter)
            async with players(config, None, engine, renderer, content.make_env) as make:
                player = make(temperature=spec.temperature, filters=options.filters)
                await _play_tasks(player, content.held_out_tasks, config, options, progress)
        finally:
            await engine.close()
    finally:
        await close_pools()


async def _play_tasks(
    player: Plays, tasks: Sequence[Task], config: RunConfig, options: EvalOptions, progress: _Progress
) -> None:
    """Play the tasks that are not there yet, so many episodes at once."""
    bounded = AtMost(player, options.concurrency)
    groups = GroupPlayer(
        bounded,
        options.attempts,
        config.seed,
        config.rollout.infra_retries,
        progress.on_episode,
        guard=make_guard(config, progress.reporter.note),
        timeout_s=config.rollout.timeout_s,
    )
    waiting = iter([number for number in range(len(tasks)) if number not in progress.done])
    progress.reporter.phase("evaluate", len(tasks) * options.attempts, len(progress.done) * options.attempts)

    async def work() -> None:
        for number in waiting:
            try:
                group = await groups.play(tasks[number], "eval", number)
            except InfraError as e:
                progress.lose(number, e)
            else:
                progress.keep(number, [*group.episodes, *group.failed])

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(len(tasks), math.ceil(options.concurrency / options.attempts))):
                workers.create_task(work())
    except BaseExceptionGroup as several:
        first = first_error(several)
        raise first from first.__cause__


@dataclass
class AtMost:
    """A player with a bound on concurrent episodes."""

    player: Plays
    at_most: int
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.at_most)

    @property
    def make_env(self) -> Callable[[], Env]:
        """Makes the env."""
        return self.player.make_env

    async def play(
        self, task: Task, *, episode_id: str, seed: int, status: EpisodeStatus | None = None
    ) -> Episode:
        """Play one episode as soon as there is a place; its clock begins then."""
        async with self._places:
            return await self.player.play(task, episode_id=episode_id, seed=seed, status=status)


class _Progress:
    """The tasks that are done, in memory and in the folder.

    Attributes:
        done: the records of each task that is done, by its number.
        lost: what kept a task from being played, by its number.
    """

    def __init__(self, store: RunStore, step: int, attempts: int, reporter: Reporter) -> None:
        self.store, self.step, self.reporter = store, step, reporter
        self.done: dict[int, list[EpisodeRecord]] = {}
        self.lost: dict[int, InfraError] = {}
        self._path = store.path / PARTIAL_FILE
        for record in _whole_lines(self._path):
            self.done.setdefault(record.group, []).append(record)
        for number, records in list(self.done.items()):
            if sum(record.episode.error is None for record in records) != attempts:
                del self.done[number]  # cut in the middle of a task
        if self.done:
            reporter.note(f"resuming the evaluation in {store.path}")
        lines = [encode(record) + b"\n" for records in self.done.values() for record in records]
        store.write_file(PARTIAL_FILE, b"".join(lines))

    def on_episode(self, episode: Episode) -> None:
        """Show that an episode ended."""
        if episode.error is None:
            self.reporter.step({})

    def keep(self, number: int, episodes: Sequence[Episode]) -> None:
        """A task is done; written before the next one is asked for."""
        records = [EpisodeRecord(self.step, number, episode) for episode in episodes]
        append(self._path, b"".join(encode(record) + b"\n" for record in records), sync=True)
        self.done[number] = records

    def lose(self, number: int, error: InfraError) -> None:
        """A task cannot be played. Raises EngineError when that is so from the beginning."""
        self.lost[number] = error
        if not self.done and len(self.lost) >= LOST_IN_A_ROW:
            raise EngineError(f"the first {len(self.lost)} tasks all failed to run; the last error: {error}")

    def finish(self, spec: EvalSpec, seconds: float, prices: Prices | None, solved: str) -> EvalResult:
        """Write what a run folder holds. Raises InfraError if no task was played."""
        if not self.done:
            raise next(iter(self.lost.values()))
        store = self.store
        records = [record for number in sorted(self.done) for record in self.done[number]]
        result = result_of(
            store.path, spec, records, lost=len(self.lost), seconds=seconds, prices=prices, solved=solved
        )
        store.rewind(self.step - 1)
        store.write_episodes(self.step, records)
        store.log_metrics(self.step, result.metrics())
        store.write_file(RESULTS_FILE, result.to_json().encode())
        if not self.lost:
            self._path.unlink()
        for text in result.biased:
            self.reporter.note(text)
        if not result.counted:
            of = f" for {plural(result.unreported, 'request')}" if result.unreported else ""
            why = "rollout.token_budget did not count them, and there is no cost"
            self.reporter.note(f"the endpoint reports no tokens{of}: {why}")
        for error in list(self.lost.values())[:1]:
            self.reporter.note(
                f"{len(self.lost)} of {len(self.lost) + len(self.done)} tasks could not be played and are "
                f"excluded from all metrics ({error}); the same command again tries them once more"
            )
        return result


def _whole_lines(path: Path) -> Iterator[EpisodeRecord]:
    """The records up to the first line that is not whole (torn, damaged, or longer than any episode)."""
    for line in bounded_lines(path, MAX_BYTES):
        try:
            yield decode(line)
        except (ValidationError, RecursionError):
            return


def check_minimum(result: EvalResult, minimum: Mapping[str, float]) -> list[str]:
    """What stays below its bound, in words.

    Raises:
        ConfigError: a bound names something that was not estimated.
    """
    short = []
    for name, bound in minimum.items():
        if "solved" not in result.estimates and (name == "solved" or name.startswith("pass")):
            raise ConfigError(f"--min {name}: `solved` is {NOT_DECLARED}")
        if name not in result.estimates:
            raise ConfigError(f"--min {name}: not measured here; there is: {', '.join(result.estimates)}")
        value = result.estimates[name].mean
        if not reaches(value, bound):
            short.append(f"{name} is {value:.7g}, below {bound:.7g}")
    return short
