"""Train as configured: from the run folder to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agentrl.agents.players import MakePlayer, check_agent, players
from agentrl.chat.template import Renderer
from agentrl.config.needs import require_extras
from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.env.images import refuse_images
from agentrl.env.solved import NOT_DECLARED
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.learner import Learner
from agentrl.learner.lora import refuse_unknown_targets
from agentrl.learner.memory import keep_freed_memory, long_lived
from agentrl.learner.ray_learner import join_cluster
from agentrl.learner.routing_replay import refuse_replay
from agentrl.learner.sequence_check import refuse_unsplittable
from agentrl.reporting.loggers.log_feed import LogFeed
from agentrl.reporting.report import Reporter, Summary
from agentrl.rollout.admission import Admission
from agentrl.rollout.build import make_engine, make_guard, make_token_check
from agentrl.rollout.content import (
    Content,
    check_held_out,
    fewer_tasks,
    load_content,
    repeated_ids,
    require_endpoints,
)
from agentrl.rollout.group import GroupPlayer, GroupsByEnv
from agentrl.rollout.lifecycle import EpisodeStatus
from agentrl.rollout.prompts import fitting
from agentrl.rollout.renderer import check_renderer, load_renderer, require_template
from agentrl.rollout.rewards.model import RewardModel, check_reward_model, make_reward_model
from agentrl.rollout.scheduler import Scheduler, Stall
from agentrl.rollout.task_tools import task_tools
from agentrl.run_folder.curve import write_curve
from agentrl.run_folder.store import RunStore
from agentrl.sandbox import close_pools
from agentrl.trainer.algorithm import algorithm_of
from agentrl.trainer.code_check import CheckedCode, check_code
from agentrl.trainer.estimator import check_penalties, check_weights
from agentrl.trainer.evaluation import EvaluationParts, check_background, make_evaluation
from agentrl.trainer.examiner import Examiner
from agentrl.trainer.feed import check_feed, load_feed, make_admission
from agentrl.trainer.hints import check_hints, make_hints
from agentrl.trainer.in_step import InStep, starting_engine
from agentrl.trainer.logging import logging, rewind
from agentrl.trainer.loop import train
from agentrl.trainer.rewardless import RewardWatch
from agentrl.trainer.room import too_long
from agentrl.trainer.samples import penalized
from agentrl.trainer.save import Checkpoints, resume
from agentrl.trainer.signals import StoppedEarly, StopRequest, stop_requested, unless_stopped
from agentrl.trainer.start import make_learner, make_room, make_start, sent_weights
from agentrl.trainer.step_log import StepLog
from agentrl.trainer.summary import earlier_seconds, summarize
from agentrl.trainer.teacher_check import check_teacher, check_teacher_folder
from agentrl.trainer.training_run import Run
from agentrl.trainer.verify import WeightCheck, check_rows
from agentrl.types import Group


@dataclass(frozen=True)
class _Setting:
    """The inputs of a run."""

    config: RunConfig
    store: RunStore
    reporter: Reporter
    stop: StopRequest
    disk_thread: Executor
    examiner: Examiner
    loggers: LogFeed
    join: Callable[[RunConfig], Future[None]]
    """Connects to the Ray cluster."""
    accept_code: bool = False

    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return bool(self.stop)


def train_run(
    config: RunConfig,
    store: RunStore,
    reporter: Reporter,
    stop: StopRequest | None = None,
    *,
    accept_code: bool = False,
) -> Summary:
    """Train as configured, resuming from the run folder; returns the summary, which is also written to disk.

    Args:
        config: the run.
        store: its folder.
        reporter: shows progress.
        stop: asks the run to save and end; signals set it, too.
        accept_code: resume also if the code of env and rewards, or the tasks, have changed.

    Raises:
        AgentRLError: describes the problem and a remedy. The run folder can be resumed afterwards.
    """
    keep_freed_memory()
    with (
        logging(config, store, reporter.note) as loggers,
        stop_requested(reporter.note, stop) as stop,
        Examiner(store.path, config.episodes_per_step) as examiner,
        ThreadPoolExecutor(1, "agentrl-disk") as disk,  # ends before the examiner, which it calls
        _cluster_thread() as join,
    ):
        setting = _Setting(config, store, reporter, stop, disk, examiner, loggers, join, accept_code)
        try:
            summary = asyncio.run(_train_run(setting))
        except Exception as e:
            with contextlib.suppress(OSError):  # the disk may be what failed
                store.event(f"ended by {type(e).__name__}: {' '.join(str(e).split())[:1000]}")
            raise
        loggers.finish(dataclasses.asdict(summary))
        return summary


@contextlib.contextmanager
def _cluster_thread() -> Iterator[Callable[[RunConfig], Future[None]]]:
    """Yields what joins a run to its Ray cluster; the cluster is left in the end, in the same thread.

    Linux kills the processes of a Ray that was started here when the thread that started them ends. A run that is
    aborted may still be connecting, which leaving then waits for.
    """
    with ThreadPoolExecutor(1, "agentrl-ray") as thread:
        stack = contextlib.ExitStack()
        try:
            yield lambda config: thread.submit(join_cluster, config, stack)
        finally:
            thread.submit(stack.close).result()


async def _train_run(setting: _Setting) -> Summary:
    config, store, reporter = setting.config, setting.store, setting.reporter
    _let_abort(setting.stop)
    started = time.monotonic()
    reporter.within("reading tasks")
    earlier = earlier_seconds(store, _earlier_summary(store, reporter))
    content = _checked_content(config, store, reporter)
    await require_endpoints(content, config.reward_model, config.teachers_on_servers.values())
    code = check_code(config, content, store, accept=setting.accept_code)
    for line in code.changed:
        reporter.note(f"changed since the newest checkpoint: {line}")
    if config.uses_ray:  # what cannot run there shows before a cold start takes its time
        reporter.within("connecting to Ray")
        await asyncio.wrap_future(setting.join(config))
    await _train(setting, content, code)
    summary = summarize(store, config, time.monotonic() - started + earlier)
    store.write_summary(summary)
    # Behind what the steps have drawn in this thread, which may still be at work.
    await asyncio.get_running_loop().run_in_executor(setting.disk_thread, write_curve, store.path)
    return summary


async def _train(setting: _Setting, content: Content, code: CheckedCode) -> None:
    """From the start policy to the last checkpoint."""
    config, store, reporter = setting.config, setting.store, setting.reporter
    reporter.within("making the start policy")
    began = time.monotonic()
    start = await make_start(config, content, store.path, reporter=reporter, stopping=setting.stopping)
    warmup_seconds = 0.0 if config.warmup is None else time.monotonic() - began
    if start is not None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push(StoppedEarly.ends)
            run = await _make_run(stack, setting, content, start)
            stack.push_async_exit(run.checkpoints.end)
            done = run.scheduler.admission.next_step - 1
            if not done and not store.metrics() and not setting.stop:
                before = await unless_stopped(setting.stopping, run.evaluation.after(0))
                before = {"warmup_seconds": warmup_seconds, **before}
                store.log_metrics(0, before)
                setting.loggers.metrics(0, before)
            if not setting.stop:
                await run.evaluation.catch_up([line for line in store.metrics() if line["step"] == done])
                code.record(store)
                store.adopt()
                run.begin()
                with long_lived():
                    await train(run)
            await run.checkpoints.saved()
            await run.evaluation.finished()


def _earlier_summary(store: RunStore, reporter: Reporter) -> Summary | None:
    """The summary as the run last ended, for its wall time."""
    try:
        return store.read_summary()
    except CheckpointError as e:
        reporter.note(f"{store.path / 'summary.json'} cannot be read, so wall time counts the steps before: {e}")
        return None


def _let_abort(stop: StopRequest) -> None:
    """Have `stop.abort` cancel this task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def abort() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
            loop.call_soon_threadsafe(task.cancel)

    stop.abort = abort


def _checked_content(config: RunConfig, store: RunStore, reporter: Reporter) -> Content:
    """Load the tasks and the env; reports notes.

    Raises:
        ConfigError: they are invalid.
    """
    require_extras(config)
    for view in config.by_env.values():
        if said := too_long(view):
            raise ConfigError(said)
    refuse_unsplittable(config)
    refuse_replay(config)
    refuse_unknown_targets(config)
    check_background(config)
    content = load_content(config)
    check_held_out(config, content)
    check_hints(config, content)
    check_penalties(config, content)
    check_weights(config, content)
    check_reward_model(config.reward_model, [part.make_env() for part in content.by_env.values()])
    if config.model.path is not None:
        check_teacher_folder(config, Path(config.model.path))  # before a cold start, which takes time
    notes = (*repeated_ids(content), *fewer_tasks(config, content))
    for note in (*notes, *config.algorithm.notes(config.rollout.max_staleness, config.critic)):
        reporter.note(note)
    for name, part in content.by_env.items():
        _check_part(config, name, part, store, reporter)
    check_feed(config, content)  # before a cold start, which takes time
    return content


def _check_part(config: RunConfig, name: str, content: Content, store: RunStore, reporter: Reporter) -> None:
    """Check the content of one env; its name is empty if it is the only one."""
    where = f"envs.{name}: " if name else ""
    if config.agent is None:
        refuse_images(content.make_env())
    else:
        # refused before any model is loaded
        check_agent(config.agent, config.places, timeout_s=config.rollout.timeout_s)
    if (rule := content.make_env().solved_rule()) is None:
        reporter.note(f"{where}solved: {NOT_DECLARED}; held-out tasks are compared by their reward")
    else:
        store.event(f"{where}solved: {rule}")


async def _load_learner(config: RunConfig, policy: Path, start: Path, reporter: Reporter) -> Learner:
    """The learner; a note says which of its models pad their rows."""
    reporter.within("loading the learner")
    learner = await make_learner(config, policy, start)
    for name in await learner.rows_apart():
        reporter.note(f"{name}: rows are padded instead of packed; see docs/models.md, rows computed apart")
    return learner


async def _make_run(stack: contextlib.AsyncExitStack, setting: _Setting, content: Content, start: Path) -> Run:
    """Load the learner and the engine, at the latest checkpoint if there is one; `stack` closes them.

    Raises:
        StoppedEarly: the run was asked to stop meanwhile.
    """
    config, store, reporter = setting.config, setting.store, setting.reporter
    checkpoint = store.latest_checkpoint()
    done = checkpoint.step if checkpoint else 0
    for note in _lost(config, store, done):
        reporter.note(note)
    rewind(config, store, setting.loggers, done)
    policy = checkpoint.path if checkpoint else start
    renderer = load_renderer(config, start)
    for part in content.by_env.values():
        require_template(renderer, await task_tools(part.make_env, part.train_tasks))
    check_renderer(renderer, policy)
    for note in await unless_stopped(setting.stopping, check_teacher(config, start)):
        reporter.note(note)
    reporter.phase("start")
    learner = await _load_learner(config, policy, start, reporter)
    stack.push_async_callback(learner.close)
    hints, record = await make_hints(config, renderer, policy), config.log.tokens != "none"
    algorithm = algorithm_of(config, learner.reference_apart, hints, record=record)
    if checkpoint:
        await resume(learner, algorithm, checkpoint.path)
    await make_room(config, learner)
    reward_model = await make_reward_model(config.reward_model, start, config.ray)
    if reward_model is not None:
        stack.push_async_callback(reward_model.close)
    reporter.within(starting_engine(config))
    stopping = setting.stopping
    # Not the checkpoint: a server that is started again later would find it deleted.
    engine = await unless_stopped(stopping, make_engine(config, start, trains=True))
    stack.push_async_callback(close_pools)
    stack.push_async_callback(engine.close)
    reporter.within("measuring prompts")
    content = await unless_stopped(stopping, fitting(content, config, renderer, engine.max_context, reporter))
    admission = make_admission(config, {k: part.train_tasks for k, part in content.by_env.items()}, done=done)
    for note in load_feed(admission, checkpoint.path) if checkpoint else ():
        reporter.note(note)
    lora = config.learner.lora
    if checkpoint or (lora is not None and lora.adapter is not None):  # the engine loaded `start`
        await engine.update_weights(await sent_weights(config, learner), version=done)
    make_envs = {name: part.make_env for name, part in content.by_env.items()}
    make = await stack.enter_async_context(players(config, start, engine, renderer, make_envs))
    in_step = InStep(reporter, config.episodes_per_step)
    group_player = _group_players(setting, make, reward_model, in_step)
    parts = EvaluationParts(
        config,
        content,
        start,
        renderer,
        lambda: sent_weights(config, learner),
        reporter,
        in_step,
        store.await_metrics,
        lambda step, metrics: _late(setting, step, metrics),
        stopping,
    )
    return Run(
        config=config,
        scheduler=_scheduler(setting, group_player, admission, engine),
        algorithm=algorithm,
        learner=learner,
        engine=engine,
        evaluation=await make_evaluation(parts, make, stack),
        checkpoints=Checkpoints(
            config.checkpoint, store, learner, algorithm, admission, renderer, start, setting.disk_thread
        ),
        log=_step_log(setting, content),
        in_step=in_step,
        stop=setting.stop,
        check=_weight_check(config, engine, renderer, content, learner),
    )


def _lost(config: RunConfig, store: RunStore, done: int) -> Iterator[str]:
    """Notes on steps that no checkpoint has, and on lines of metrics that are missing."""
    steps = [int(line["step"]) for line in store.metrics()]
    if (recorded := max(steps, default=0)) > done:
        what = f"step {recorded} is" if recorded == done + 1 else f"steps {done + 1} to {recorded} are"
        yield f"{what} done again: no checkpoint has them (checkpoint.every is {config.checkpoint.every})"
    if (missing := done - len({step for step in steps if 0 < step <= done})) > 0:
        yield f"metrics.jsonl lacks {missing} of the {done} steps that are done; totals leave them out"


def _step_log(setting: _Setting, content: Content) -> StepLog:
    return StepLog(
        setting.config,
        setting.store,
        setting.reporter,
        {
            name: RewardWatch(part.make_env(), _rewarded_before(setting.store, name))
            for name, part in content.by_env.items()
            if _needs_rewards(setting.config.by_env[name])
        },
        setting.store.redraws(),
        setting.disk_thread,
        setting.examiner,
        setting.loggers,
    )


def _rewarded_before(store: RunStore, env: str) -> bool:
    """Whether an env gave a reward in the steps before; its name is empty if it is the only one."""
    return any(line.get(f"env/{env}/reward" if env else "reward") for line in store.metrics())


def _needs_rewards(config: RunConfig) -> bool:
    """Whether an env without rewards teaches nothing."""
    if config.teacher is None or config.algorithm.kl.coef == 0:
        return config.algorithm.advantage.name != "none"
    return config.teacher.hint == "solved"


def _weight_check(
    config: RunConfig, engine: Engine, renderer: Renderer, content: Content, learner: Learner
) -> WeightCheck | None:
    """Needed if weights travel to other processes."""
    if not engine.capabilities.separate_weights:
        return None
    env = next(iter(content.by_env.values())).make_env()
    rows = check_rows(renderer, env, engine.max_context - 1)
    return WeightCheck(engine, learner.probe, rows, config.engine.resolved_tolerance)


def _group_players(
    setting: _Setting, make: MakePlayer, reward_model: RewardModel | None, in_step: InStep
) -> GroupsByEnv:
    """One player of groups for each env; they share the token check, the guard and the episodes in flight."""
    playing: dict[str, EpisodeStatus] = {}
    guard = make_guard(setting.config, lambda text: _tell(setting, text))
    token_check = make_token_check(setting.config)
    found = {
        name: GroupPlayer(
            make(
                env=name, temperature=config.rollout.temperature, token_check=token_check, hints=config.asks_hints
            ),
            config.rollout.group_size,
            config.seed,
            config.rollout.infra_retries,
            on_episode=in_step.ended,
            greedy=make(env=name, temperature=0.0) if config.algorithm.advantage.name == "remax" else None,
            reward_model=reward_model,
            guard=guard,
            timeout_s=config.rollout.timeout_s,
            playing=playing,
        )
        for name, config in setting.config.by_env.items()
    }
    return GroupsByEnv(found, playing)


def _late(setting: _Setting, step: int, metrics: Mapping[str, float]) -> None:
    """Log the metrics of an evaluation that ended after its step."""
    setting.store.add_metrics(step, metrics)
    setting.loggers.metrics(step, metrics)
    setting.reporter.late(step, metrics)
    keep, best = setting.config.checkpoint.keep, setting.config.checkpoint.best
    setting.disk_thread.submit(setting.store.tidy_checkpoints, keep, best=best)


def _scheduler(setting: _Setting, player: GroupsByEnv, admission: Admission, engine: Engine) -> Scheduler:
    rollout = setting.config.rollout

    def less_overlong(group: Group) -> Group:
        return penalized([group], rollout.overlong_penalty)[0]

    return Scheduler(
        player,
        admission,
        version=lambda: engine.policy_version,
        amend=less_overlong if rollout.overlong == "penalise" else None,
        stall=Stall(rollout.note_after_s, lambda text: _tell(setting, text)),
    )


def _tell(setting: _Setting, text: str) -> None:
    setting.reporter.note(text)
    setting.store.event(text)
