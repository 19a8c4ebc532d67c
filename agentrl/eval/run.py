"""Playing tasks with a checkpoint, without training on them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.run import RunConfig
from agentrl.env.tasks import Split
from agentrl.errors import ConfigError
from agentrl.rollout.collect import collect
from agentrl.rollout.metrics import episode_metrics, is_solved
from agentrl.rollout.setup import check_renderer, load_content, load_renderer, make_engine, make_player
from agentrl.run.report import Reporter
from agentrl.sandbox import close_pools
from agentrl.types import Episode, Group


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found. `low` and `high` bound `solved` with 95 % confidence (Wilson's interval).

    `reward` and `rewards` (by name) are means over the episodes that were scored; `malformed` and `limits` count
    among them, `infra_failures` are those that were lost and played again.
    """

    checkpoint: str
    solved: float
    low: float
    high: float
    reward: float
    rewards: Mapping[str, float]
    malformed: int
    limits: int
    infra_failures: int
    sampled_tokens: int
    seconds: float
    episodes: tuple[Episode, ...]


def evaluate(
    checkpoint: Path,
    config: RunConfig,
    *,
    tasks: int | None = None,
    split: Split = "held_out",
    temperature: float = 0.0,
    reporter: Reporter,
) -> EvalResult:
    """Play one episode of each of the first tasks of a split.

    Args:
        checkpoint: a Hugging Face model directory with its tokenizer.
        config: the run that says which env, which limits and which seed.
        tasks: how many; `eval.tasks` of the run by default.
        split: which tasks; the env's generator or the run's data files give them.
        temperature: 0 is greedy.
        reporter: told of every episode that ends.

    Raises:
        CheckpointError: it was trained with another tokenizer, template or parser.
        ConfigError: the env or the model cannot be used, or there are no such tasks.
        InfraError: an episode could not be played although it was tried again.
    """
    content = load_content(config.model_copy(update={"warmup": None}))  # demonstrations are not needed
    found = content.held_out_tasks if split == "held_out" else content.train_tasks
    chosen = found[: tasks or config.eval.tasks]
    if not chosen:
        raise ConfigError(f"there are no {split} tasks: name a file under data.{split}, or give --split train")
    renderer = load_renderer(config, checkpoint)
    check_renderer(renderer, checkpoint)
    engine = await make_engine(config, checkpoint)
    player = make_player(config, engine, renderer, content.make_env, temperature=temperature)

    async def play() -> list[Group]:
        try:
            return await collect(
                player,
                chosen,
                group_size=1,
                label="eval",
                seed=config.seed,
                infra_retries=config.rollout.infra_retries,
                on_episode=lambda episode: reporter.step({}),
            )
        finally:
            await engine.close()
            await close_pools()

    reporter.phase("evaluate", len(chosen))
    started = time.monotonic()
    groups = asyncio.run(play())
    return _result(checkpoint, groups, time.monotonic() - started)


def _result(checkpoint: Path, groups: list[Group], seconds: float) -> EvalResult:
    metrics = episode_metrics(groups)
    episodes = tuple(episode for group in groups for episode in group.episodes)
    low, high = wilson(sum(map(is_solved, episodes)), len(episodes))
    return EvalResult(
        checkpoint=str(checkpoint),
        solved=metrics["solved"],
        low=low,
        high=high,
        reward=metrics["reward"],
        rewards={key[len("reward/") :]: value for key, value in metrics.items() if key.startswith("reward/")},
        malformed=int(metrics["malformed"]),
        limits=int(metrics["limits"]),
        infra_failures=int(metrics["infra_failures"]),
        sampled_tokens=int(metrics["sampled_tokens"]),
        seconds=seconds,
        episodes=episodes,
    )


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share of successes, (0, 1) without trials.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212.
    """
    if trials == 0:
        return 0.0, 1.0
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)
