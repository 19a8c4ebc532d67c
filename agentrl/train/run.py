"""A run: what the loop works with, where it begins, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from agentrl.agents.players import make_agent, players
from agentrl.algo.correction import DriftGate
from agentrl.chat.template import Renderer
from agentrl.config.run import RunConfig
from agentrl.engine.base import Engine
from agentrl.env.images import refuse_images
from agentrl.env.solved import NOT_DECLARED
from agentrl.env.toolenv.rewards import weight_of_nothing
from agentrl.errors import AgentRLError, ConfigError
from agentrl.learner.driver import Driver
from agentrl.learner.memory import keep_freed_memory
from agentrl.learner.split import Update
from agentrl.reporting.report import Reporter, Summary
from agentrl.rollout.admission import Admission, Batch
from agentrl.rollout.build import make_engine, make_guard, make_token_check
from agentrl.rollout.collect import collect
from agentrl.rollout.content import Content, check_held_out, load_content, repeated_ids, require_solved
from agentrl.rollout.group import GroupPlayer, Plays
from agentrl.rollout.metrics import (
    episode_metrics,
    mean_reward,
    passed,
    reward_parts,
    set_aside,
    solved,
    staleness,
)
from agentrl.rollout.prompts import fitting
from agentrl.rollout.renderer import RENDERER_FILE, check_renderer, load_renderer, require_template
from agentrl.rollout.rewards.model import RewardModel, make_reward_model
from agentrl.rollout.scheduler import Scheduler, Stall
from agentrl.run_folder.curve import write_curve
from agentrl.run_folder.records import EpisodeRecord
from agentrl.run_folder.redraws import Redraws
from agentrl.run_folder.store import RunStore
from agentrl.sandbox import close_pools
from agentrl.train.advantages import Scores
from agentrl.train.feed import load_feed, make_admission, save_feed
from agentrl.train.in_step import InStep, counting, starting_engine
from agentrl.train.rewardless import RewardWatch
from agentrl.train.room import too_long
from agentrl.train.samples import penalised
from agentrl.train.signals import StoppedEarly, StopRequest, stop_requested, unless_stopped
from agentrl.train.start import copy_tokenizer, make_learner, make_start, sent_weights
from agentrl.train.verify import WeightCheck, check_rows
from agentrl.types import Filters, Group, Sample

P = ParamSpec("P")
T = TypeVar("T")
DRAW_EVERY_S = 20.0


@dataclass
class Run:
    """Everything the loop uses. Steps count from 1: step N is the N-th optimizer step."""

    config: RunConfig
    store: RunStore
    reporter: Reporter
    stop: StopRequest
    content: Content
    scheduler: Scheduler
    engine: Engine
    learner: Driver
    learner_thread: Executor
    disk_thread: Executor
    renderer: Renderer
    examined: Plays
    start: Path
    in_step: InStep
    rewards: RewardWatch
    redraws: Redraws
    check: WeightCheck | None = None
    _warned: set[str] = field(default_factory=set)
    _mark: float = field(default_factory=time.monotonic)
    _seconds: dict[str, float] = field(default_factory=dict)
    _saving: asyncio.Future[None] | None = None
    _drawn: float | None = None

    async def update(self, samples: Sequence[Sample], scores: Scores) -> Update:
        """One step of the learner, on its own thread, so that the event loop goes on."""
        self.in_step.pause("update")
        if self.config.engine.server.sleep:
            await self.engine.sleep()
        with self._timed("update_seconds"):
            return await self._in_learner(self.learner.step, samples, scores)

    async def publish(self, version: int) -> None:
        """Hand the learner's weights to the engine; completions that it is sampling go on with them."""
        self.in_step.pause("sending weights")
        with self._timed("publish_seconds"):
            await self.engine.update_weights(sent_weights(self.config, self.learner), version=version)
        if self.check is not None:
            self._seconds["sync_gap"] = await self.check.gap(version)

    async def held_out(self, step: int) -> dict[str, float]:
        """Of the held-out tasks: `held_out`, the share of episodes that are solved (where that is declared),
        `held_out_reward`, their mean reward, and with several attempts `held_out_pass`, the share of tasks solved
        at least once. Empty where there are no such tasks.

        The loop waits meanwhile, so all tokens are drawn with the weights of this step, and no training episode
        begins (those in flight go on).
        """
        tasks, attempts = self.content.held_out_tasks[: self.config.eval.tasks], self.config.eval.attempts
        if not tasks:
            return {}
        self.in_step.pause("held-out tasks")
        retries, seed = self.config.rollout.infra_retries, self.config.seed
        count = counting(self.reporter, "held-out tasks", len(tasks) * attempts)
        groups = await collect(
            self.examined,
            tasks,
            group_size=attempts,
            label=f"held-out-{step}",
            seed=seed,
            infra_retries=retries,
            on_episode=count,
            guard=make_guard(self.config, self.reporter.note),
        )
        share = solved(groups)
        found = {"held_out_reward": mean_reward(groups)}
        if share is not None:
            found |= {"held_out": share} | ({"held_out_pass": passed(groups)} if attempts > 1 else {})
        return found

    def begin(self) -> None:
        """The clock of the first step starts."""
        self.reporter.phase("train", self.config.steps, self.scheduler.admission.next_step - 1)
        self.in_step.resume()
        self._mark = time.monotonic()

    async def finish(self, batch: Batch, records: Sequence[EpisodeRecord], update: Update) -> None:
        """All that follows an update: write its episodes, evaluate and save where due, write its line."""
        step, seconds, config = batch.step, time.monotonic() - self._mark, self.config
        metrics = episode_metrics(batch.groups, batch.aside) | staleness(batch.groups, step - 1)
        metrics |= {**update.metrics, **batch.metrics, **self._seconds}
        metrics |= {
            "seconds": seconds,
            "trained_tokens": float(update.trained),
            "learner_tokens": float(update.tokens),
            "tokens_per_s": metrics["sampled_tokens"] / seconds,
        }
        if self.config.rollout.refill_zero_signal:
            metrics |= set_aside(batch.aside)
        self.store.write_episodes(step, [*records, *_records_aside(batch)])
        self._note_redraws(batch)
        if step == 1 and (nothing := _weight_of_nothing(self.config, batch)):
            self.reporter.note(f"step 1: {nothing}")
        self.rewards.see(step, [episode for group in batch.groups for episode in group.episodes])
        if metrics["groups_with_signal"] == 0 and config.algorithm.compares:
            self.reporter.note(
                f"step {step}: all episodes of every group scored the same; no reward to learn from"
            )
        last = step == config.steps
        if last or (config.eval.every and step % config.eval.every == 0):
            metrics |= await self.held_out(step)
        self.store.log_metrics(step, metrics)
        self.reporter.step({"step": step} | metrics)
        if last or self.stop or (config.checkpoint.every and step % config.checkpoint.every == 0):
            self.in_step.pause("checkpoint")
            await self.save(step)
        self._check_drift(step, metrics)
        self._draw()
        self.in_step.taken(batch)
        self._mark = time.monotonic()

    def _draw(self) -> None:
        """Draw the curve beside the next steps, not more often than every `DRAW_EVERY_S`."""
        now = time.monotonic()
        if self._drawn is None or now - self._drawn >= DRAW_EVERY_S:
            self._drawn = now
            self.disk_thread.submit(write_curve, self.store.path)

    async def save(self, step: int) -> None:
        """Write checkpoint `step`: a Hugging Face directory with its tokenizer, and the optimiser beside it.

        What it holds is what is now; with `checkpoint.background` writing it goes on beside the next steps.
        """
        await self.saved()
        config = self.config.checkpoint
        with ExitStack() as stack:
            folder = stack.enter_context(self.store.checkpoint(step, config.keep, best=config.best))
            copy_tokenizer(self.start, folder)
            save_feed(self.scheduler.admission, folder)
            (folder / RENDERER_FILE).write_text(json.dumps({"hash": self.renderer.hash}))
            write = await self._in_learner(self.learner.snapshot)
            rest = stack.pop_all()

        def finish() -> None:
            with rest:
                write(folder)

        self._saving = asyncio.get_running_loop().run_in_executor(self.disk_thread, finish)
        if not config.background:
            await self.saved()

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Raises:
            OSError: it could not be written; there is nothing of it.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _in_learner(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self.learner_thread, partial(function, *args, **kwargs)
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started

    def _note_redraws(self, batch: Batch) -> None:
        """Keep what the step lost, and warn where the loss is not blind to what the policy does."""
        found = Redraws.of([*batch.groups, *batch.aside])
        self.store.log_redraws(batch.step, found)
        self.redraws += found
        for kind, text in self.redraws.findings().items() if found.redrawn else ():
            if kind not in self._warned:
                self._warned.add(kind)
                self.reporter.note(f"step {batch.step}: {text}")
                self.store.event(text)

    def _check_drift(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stop where sampler and learner disagree; a step with stale tokens cannot tell, its policy has moved."""
        if metrics.get("staleness/max", 0.0) > 0:
            return
        measured = {k.removeprefix("drift/"): v for k, v in metrics.items() if k.startswith("drift/")}
        passed = DriftGate(**self.config.algorithm.drift_gate.model_dump()).exceeded_in(measured)
        if passed:
            raise AgentRLError(
                f"step {step}: sampler and learner disagree too much: {passed} (algorithm.drift_gate). What is "
                "trained is not what was sampled; look at engine.dtype, or raise the limit if you know why"
            )


def train_run(config: RunConfig, store: RunStore, reporter: Reporter) -> Summary:
    """Train as configured, going on where the run folder stands; returns the summary, which is also written.

    Raises:
        AgentRLError: with what, where and what to do. The run folder can be resumed afterwards.
    """
    keep_freed_memory()
    with (
        stop_requested(tell=reporter.note) as stop,
        ThreadPoolExecutor(1, "agentrl-learner") as thread,
        ThreadPoolExecutor(1, "agentrl-disk") as disk,
    ):
        return asyncio.run(_train_run(config, store, reporter, stop, thread, disk))


async def _train_run(
    config: RunConfig, store: RunStore, reporter: Reporter, stop: StopRequest, thread: Executor, disk: Executor
) -> Summary:
    from agentrl.train.loop import train

    started = time.monotonic()
    reporter.within("reading tasks")
    earlier = store.read_summary()
    if said := too_long(config):
        raise ConfigError(said)
    content = load_content(config)
    check_held_out(config, content)
    for note in (*repeated_ids(content), *config.algorithm.notes(config.rollout.max_staleness)):
        reporter.note(note)
    _check_who_plays(config, content)
    if (rule := content.make_env().solved_rule()) is None:
        reporter.note(f"solved: {NOT_DECLARED}; held-out tasks are compared by their reward")
    else:
        store.event(f"solved: {rule}")
    if config.data.sampler.order == "weighted":
        require_solved(content, "data.sampler.order: weighted")
    reporter.within("making the start policy")
    start = await make_start(
        config, content, store.path, learner_thread=thread, reporter=reporter, stopping=lambda: bool(stop)
    )
    warmup_seconds = 0.0 if config.warmup is None else time.monotonic() - started
    if start is not None:
        checkpoint = store.latest_checkpoint()
        done = checkpoint.step if checkpoint else 0
        store.rewind(done)
        policy = checkpoint.path if checkpoint else start
        renderer = load_renderer(config, start)
        require_template(renderer, content.make_env().tools)
        check_renderer(renderer, policy)
        async with contextlib.AsyncExitStack() as stack:
            stack.push(StoppedEarly.ends)
            reporter.phase("start")
            reporter.within("loading the learner")
            learner = make_learner(config, policy, start)
            stack.callback(learner.close)
            if checkpoint:
                learner.load_optimizer(checkpoint.path)
            reward_model = await make_reward_model(config.reward_model, start, config.ray)
            if reward_model is not None:
                stack.push_async_callback(reward_model.close)
            lora = config.learner.lora
            reporter.within(starting_engine(config))
            base = start if config.engine.sync == "lora" else policy
            engine = await unless_stopped(lambda: bool(stop), make_engine(config, base, trains=True))
            stack.push_async_callback(close_pools)
            stack.push_async_callback(engine.close)
            reporter.within("measuring prompts")
            measuring = fitting(content, config, renderer, engine.max_context, reporter)
            content = await unless_stopped(lambda: bool(stop), measuring)
            admission = make_admission(config, content.train_tasks, done=done)
            if checkpoint:
                load_feed(admission, checkpoint.path)
            if checkpoint or (lora is not None and lora.adapter is not None):  # it has what `start` has not
                await engine.update_weights(sent_weights(config, learner), version=done)
            async with players(config, start, engine, renderer, content.make_env) as make:
                player = make(temperature=config.rollout.temperature, token_check=make_token_check(config))
                greedy = make(temperature=0.0)
                in_step = InStep(reporter, config.rollout.groups_per_step * config.rollout.group_size)
                run = Run(
                    config=config,
                    store=store,
                    reporter=reporter,
                    stop=stop,
                    content=content,
                    scheduler=_scheduler(
                        config, player, greedy, reward_model, admission, engine, reporter, store, in_step
                    ),
                    engine=engine,
                    learner=learner,
                    learner_thread=thread,
                    disk_thread=disk,
                    renderer=renderer,
                    examined=make(temperature=config.eval.temperature, filters=_filters(config)),
                    start=start,
                    in_step=in_step,
                    rewards=RewardWatch(content.make_env()),
                    redraws=store.redraws(),
                    check=_weight_check(config, engine, renderer, content, learner, thread),
                )
                if not any(line["step"] == 0 for line in store.metrics()) and not stop:
                    playing = run.held_out(0) if config.eval.before_training else None
                    before = None if playing is None else await unless_stopped(lambda: bool(stop), playing)
                    store.log_metrics(0, {"warmup_seconds": warmup_seconds} | (before or {}))
                if not stop:
                    run.begin()
                    await train(run)
                await run.saved()
    summary = summarise(store, config, time.monotonic() - started + (earlier.wall_seconds if earlier else 0.0))
    store.write_summary(summary)
    write_curve(store.path)
    return summary


def _check_who_plays(config: RunConfig, content: Content) -> None:
    """Raises ConfigError where the episodes cannot be played, before any model is loaded."""
    if config.agent is None:
        refuse_images(content.make_env())
    else:
        make_agent(config.agent)


def _filters(config: RunConfig) -> Filters:
    """Which tokens the evaluations of the run may draw."""
    return Filters(config.eval.top_p, config.eval.top_k, config.eval.min_p)


def _weight_check(
    config: RunConfig, engine: Engine, renderer: Renderer, content: Content, learner: Driver, thread: Executor
) -> WeightCheck | None:
    """Needed where weights travel to other processes."""
    if not engine.capabilities.separate_weights:
        return None

    async def ask(samples: Sequence[Sample]) -> list[list[float]]:
        return await asyncio.get_running_loop().run_in_executor(thread, learner.probe, samples)

    rows = check_rows(renderer, content.make_env(), engine.max_context - 1)
    return WeightCheck(engine, ask, rows, config.engine.resolved_tolerance)


def _scheduler(
    config: RunConfig,
    player: Plays,
    greedy: Plays,
    reward_model: RewardModel | None,
    admission: Admission,
    engine: Engine,
    reporter: Reporter,
    store: RunStore,
    in_step: InStep,
) -> Scheduler:
    rollout = config.rollout

    def tell(text: str) -> None:
        reporter.note(text)
        store.event(text)

    def less_overlong(group: Group) -> Group:
        return penalised([group], rollout.overlong_penalty)[0]

    return Scheduler(
        GroupPlayer(
            player,
            rollout.group_size,
            config.seed,
            rollout.infra_retries,
            on_episode=in_step.ended,
            greedy=greedy if config.algorithm.advantage == "remax" else None,
            reward_model=reward_model,
            guard=make_guard(config, tell),
            timeout_s=rollout.timeout_s,
        ),
        admission,
        version=lambda: engine.policy_version,
        amend=less_overlong if rollout.overlong == "penalise" else None,
        stall=Stall(rollout.note_after_s, tell),
    )


def _weight_of_nothing(config: RunConfig, batch: Batch) -> str:
    """What to say of a weight of a part that none of these episodes had; empty where there is none."""
    given = {part for group in batch.groups for episode in group.episodes for part in reward_parts(episode)}
    return weight_of_nothing(config.env.reward_weights, given)


def _records_aside(batch: Batch) -> list[EpisodeRecord]:
    """The episodes of groups that were put aside, and the failed ones among them, numbered after the batch's."""
    return [
        EpisodeRecord(batch.step, number, episode, set_aside=True)
        for number, group in enumerate(batch.aside, len(batch.groups))
        for episode in (*group.episodes, *group.failed)
    ]


def summarise(store: RunStore, config: RunConfig, wall_seconds: float) -> Summary:
    """The summary of a run folder: sums over its metrics lines."""
    lines = store.metrics()
    redraws = store.redraws()
    first = next((line for line in lines if line["step"] == 0), {})
    steps = [line for line in lines if line["step"] > 0]

    def total(name: str) -> int:
        return int(sum(line.get(name) or 0 for line in steps))

    return Summary(
        run=str(store.path),
        steps=len(steps),
        held_out_before=first.get("held_out"),
        held_out_after=next((line["held_out"] for line in reversed(steps) if "held_out" in line), None),
        held_out_reward_before=first.get("held_out_reward"),
        held_out_reward_after=next(
            (r["held_out_reward"] for r in reversed(steps) if "held_out_reward" in r), None
        ),
        warmup_seconds=first.get("warmup_seconds", 0.0),
        train_seconds=sum(line.get("seconds") or 0.0 for line in steps),
        wall_seconds=wall_seconds,
        episodes=total("episodes"),
        sampled_tokens=total("sampled_tokens"),
        malformed=total("malformed"),
        limits=total("limits"),
        infra_failures=total("infra_failures"),
        env=config.env.use,
        redrawn=dict(redraws.reasons.most_common()),
        redrawn_tasks=redraws.worst_tasks(20),
        biased=list(redraws.findings().values()),
        sandbox_broken=redraws.broken.total(),
        sandbox_broken_tasks=dict(redraws.broken.most_common(20)),
        faults={
            name.removeprefix("faults/"): total(name)
            for name in sorted({name for line in steps for name in line if name.startswith("faults/")})
        },
        finished=len(steps) >= config.steps,
    )
