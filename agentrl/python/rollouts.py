"""Play an env with a model, without a trainer: groups of episodes, and the rows that a trainer would get."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.agents.players import players
from agentrl.config.run import RunConfig
from agentrl.env.curriculum import TaskSampler
from agentrl.env.mixture import TaskSource
from agentrl.errors import ConfigError, first_error
from agentrl.extras import require
from agentrl.models.tiny import make_tiny_model
from agentrl.python.blocking import expect_asyncio, iterate
from agentrl.python.configure import configure
from agentrl.python.training import RunSettings
from agentrl.reporting.report import Silent
from agentrl.rollout.build import make_engine, make_token_check
from agentrl.rollout.content import Content, corpus, load_content
from agentrl.rollout.group import GroupPlayer, GroupsByEnv
from agentrl.rollout.lifecycle import EpisodeStatus
from agentrl.rollout.prompts import fitting
from agentrl.rollout.renderer import check_renderer, load_renderer, require_template
from agentrl.rollout.rewards.model import make_reward_model
from agentrl.rollout.task_tools import task_tools
from agentrl.run_folder.files import at_home
from agentrl.run_folder.store import find_checkpoint
from agentrl.sandbox import using_pools
from agentrl.scratch import ScratchFolder
from agentrl.trainer.feed import check_feed, make_admission
from agentrl.types import Group, Sample


@dataclass(frozen=True)
class Rollouts:
    """Groups of episodes as they end: `async for group in rollouts(...)`, or `for group in rollouts(...)`.

    While a group is used, about `rollout.groups_per_step` further groups wait, and as many are played. Each
    iteration plays the same episodes again: the same seeds, tasks and model.
    """

    config: RunConfig
    model: Path | None
    split: Literal["train", "held_out"]
    num_groups: int

    def __aiter__(self) -> AsyncIterator[Group]:
        expect_asyncio("`async for` over agentrl.rollouts", "use `for`")
        return _play(self)

    def __iter__(self) -> Iterator[Group]:
        return iterate(lambda: _play(self))


def rollouts(
    config: RunSettings,
    num_groups: int,
    *,
    model: Path | str | None = None,
    split: Literal["train", "held_out"] = "train",
) -> Rollouts:
    """Play groups of episodes of a configuration with a model, as a training step would.

    Args:
        config: the configuration; see `configure` for its forms. Its env, tasks, `rollout`, `engine`, `agent` and
            `reward_model` count, and its seed.
        num_groups: groups to play, of `rollout.group_size` episodes each.
        model: a model directory, a run folder (its newest checkpoint) or a checkpoint; by default `model.path`, or
            a new random model for `model.tiny`.
        split: the tasks to play, in their configured order. An order that depends on results gets each group when
            it is complete. No group is replaced: `rollout.refill_zero_signal` and `group_filter` have no effect.

    Raises:
        ConfigError: the configuration, the env or the model is invalid. What is found only when the episodes begin
            is raised by the iteration.
    """
    if num_groups < 1:
        raise ConfigError(f"num_groups is {num_groups}: ask for at least one group")
    if split not in ("train", "held_out"):
        raise ConfigError(f"split is {split!r}: it is 'train' or 'held_out'")
    require("train", "agentrl.rollouts")
    ready = configure(config).model_copy(update={"warmup": None})
    return Rollouts(ready, None if model is None else at_home(model), split, num_groups)


def training_rows(groups: Sequence[Group], config: RunSettings | None = None) -> list[Sample]:
    """The rows that a trainer gets for these groups: token ids, loss mask, sampler log-probabilities, advantages.

    Args:
        groups: complete groups, from `rollouts` or a run folder. Statistics over the batch see all of them.
        config: whose `algorithm` (also of its `envs`) and `rollout.overlong` estimate the advantages; GRPO without
            it.

    Raises:
        ConfigError: the advantages need log-probabilities or values of the learner, which a rollout does not have.
    """
    require("train", "agentrl.training_rows")
    from agentrl.trainer.algorithm import Algorithm

    ready = None if config is None else configure(config)
    algorithm = RunConfig.model_fields["algorithm"].get_default() if ready is None else ready.algorithm
    overlong = "train" if ready is None else ready.rollout.overlong
    own = {} if ready is None else {name: env.algorithm.advantage for name, env in ready.envs.items()}
    made = Algorithm(algorithm, overlong=overlong, by_env={name: each for name, each in own.items() if each})
    if made.advantage_needs:
        raise ConfigError(
            f"the configuration needs {', '.join(sorted(made.advantage_needs))} of a learner for its advantages: "
            "choose another algorithm.advantage (also under `envs`) and no KL penalty in the reward here, or "
            "train with agentrl.train"
        )
    return list(made.advantages(made.rows(groups)).samples)


async def _play(asked: Rollouts) -> AsyncIterator[Group]:
    from agentrl.torch_threads import one_after_fork
    from agentrl.trainer.samples import penalized

    one_after_fork()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(using_pools())
        content = load_content(asked.config)
        folder = _model(asked, content, stack)
        groups, source = await _prepare(asked, content, folder, stack)
        rollout = asked.config.rollout
        penalty = rollout.overlong_penalty if rollout.overlong == "penalise" else 0.0
        at_once = max(rollout.groups_per_step, 1)
        queue: asyncio.Queue[Group] = asyncio.Queue(at_once)  # groups wait for a slow reader, rather than pile up
        waiting = iter(range(asked.num_groups))

        async def work() -> None:
            for number in waiting:
                ((position, task),) = source.take(1)
                group = await groups.play(task, asked.split, number)
                if source.rated:
                    source.report(position, group)
                await queue.put(penalized([group], penalty)[0] if penalty else group)

        async def everything() -> None:
            try:
                async with asyncio.TaskGroup() as running:
                    for _ in range(min(at_once, asked.num_groups)):
                        running.create_task(work())
            except BaseExceptionGroup as several:
                raise first_error(several) from several

        playing = asyncio.create_task(everything())
        try:
            for _ in range(asked.num_groups):
                getting = asyncio.create_task(queue.get())
                try:
                    await asyncio.wait({getting, playing}, return_when=asyncio.FIRST_COMPLETED)
                    if not getting.done() and playing.done() and queue.empty():
                        playing.result()  # raises what ended it
                    group = await getting
                finally:
                    getting.cancel()
                yield group
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


async def _prepare(
    asked: Rollouts, content: Content, folder: Path, stack: contextlib.AsyncExitStack
) -> tuple[GroupsByEnv, TaskSource]:
    """The player of groups, and where its tasks come from."""
    config = asked.config
    renderer = load_renderer(config, folder)
    if asked.split == "train":
        check_feed(config, content)
    for part in content.by_env.values():
        tasks = part.train_tasks if asked.split == "train" else part.held_out_tasks
        if not len(tasks):
            raise ConfigError(f"there are no {asked.split} tasks: name a file under data.{asked.split}")
        require_template(renderer, await task_tools(part.make_env, tasks))
    check_renderer(renderer, folder)
    engine = await make_engine(config, folder)
    stack.push_async_callback(engine.close)
    content = await fitting(content, config, renderer, engine.max_context, Silent())
    make_envs = {name: part.make_env for name, part in content.by_env.items()}
    make = await stack.enter_async_context(players(config, folder, engine, renderer, make_envs))
    reward_model = await make_reward_model(config.reward_model, folder, config.ray)
    if reward_model is not None:
        stack.push_async_callback(reward_model.close)
    playing: dict[str, EpisodeStatus] = {}
    token_check = make_token_check(config)
    by_env = {
        name: GroupPlayer(
            make(env=name, temperature=view.rollout.temperature, token_check=token_check),
            view.rollout.group_size,
            view.seed,
            view.rollout.infra_retries,
            greedy=make(env=name, temperature=0.0) if view.algorithm.advantage.name == "remax" else None,
            reward_model=reward_model,
            timeout_s=view.rollout.timeout_s,
            playing=playing,
        )
        for name, view in config.by_env.items()
    }
    return GroupsByEnv(by_env, playing), _source(asked, content)


def _source(asked: Rollouts, content: Content) -> TaskSource:
    if asked.split == "held_out" and not asked.config.envs:
        return TaskSampler(content.held_out_tasks, asked.config.seed)
    tasks = {
        name: part.train_tasks if asked.split == "train" else part.held_out_tasks
        for name, part in content.by_env.items()
    }
    return make_admission(asked.config, tasks).sampler


def _model(asked: Rollouts, content: Content, stack: contextlib.AsyncExitStack) -> Path:
    """The folder of the model that plays."""
    if asked.model is not None:
        if (asked.model / "config.json").is_file():
            return asked.model
        return find_checkpoint(asked.model).path
    if asked.config.model.path is not None:
        return Path(asked.config.model.path)
    assert asked.config.model.tiny is not None
    folder = stack.enter_context(ScratchFolder("tiny")).path / "model"
    make_tiny_model(folder, corpus(content), asked.config.model.tiny, seed=asked.config.seed)
    return folder
