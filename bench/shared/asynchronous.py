"""What asynchronous training buys, and what staleness costs: parts (c) and (d) of bench/rollout.py.

Runs with 8 groups of 8 in a step, from one cold-started policy: synchronous, one step ahead, asynchronous
(staleness up to 4). Stale tokens are clipped against the log-probabilities of their sampler, as is the default;
two more rows weigh them by truncated importance instead, or do nothing. The seeds differ in tasks and draws. (c)
plays the calculator example with a tool that takes lognormal time, 200 ms in the median. (d) plays it as it is, or
a task that is learnt in seconds: to say one of four colours, with a learning rate that moves the policy far in
four updates.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from agentrl import ToolEnv, reward
from agentrl.config import load_config
from agentrl.config.run import RunConfig
from agentrl.env.env import StepInfo
from agentrl.env.read import final_answer
from agentrl.env.tasks import Split, generated
from agentrl.envs.calculator import Calculator
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore
from agentrl.types import Episode, Message, Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator" / "tools.yaml"
GROUPS_PER_STEP = 8
COLOURS = ("red", "blue", "green", "black")
Task_ = Literal["slow calculator", "calculator", "colours"]
TOOL_MEDIAN_S, TOOL_SIGMA, TOOL_MOST_S = 0.2, 1.0, 5.0


class Colours(ToolEnv):
    """Say a colour."""

    def setup(self, number: int) -> str:
        """The number is of no use."""
        return f"Number {number}."

    @reward
    def solved(self, episode: Episode) -> bool:
        """Exactly the one word."""
        return final_answer(episode) == COLOURS[0]

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        """Numbers of one digit."""
        return generated("colours", split, seed, 100_000, lambda rng: {"number": rng.randrange(8)})

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        """One in four says the right one."""
        rng = random.Random(seed)
        found = []
        for _ in range(num):
            opening = [Message("system", cls.__doc__ or ""), Message("user", f"Number {rng.randrange(8)}.")]
            found.append([*opening, Message("assistant", rng.choice(COLOURS))])
        return found


class SlowCalculator(Calculator):
    """Use the calculator, then answer with the number."""

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        """As the calculator does, but a message with calls takes its time."""
        if message.tool_calls:
            seconds = TOOL_MEDIAN_S * random.lognormvariate(0, TOOL_SIGMA)
            await asyncio.sleep(min(seconds, TOOL_MOST_S))
        return await super().step(message)


MODES: dict[str, tuple[int, Mapping[str, Any]]] = {
    "synchronous": (0, {}),
    "one step ahead": (1, {}),
    "asynchronous": (4, {}),
    "asynchronous, truncated importance": (4, {"correction": {"importance": "token"}}),
    "asynchronous, not corrected": (4, {"old_logprobs": "learner"}),
}


def colours(start: Path | None, seed: int, steps: int, staleness: int, more: Mapping[str, Any]) -> RunConfig:
    """The small task; without a start policy only what makes one."""
    tiny = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 300}
    rollout = {"groups_per_step": GROUPS_PER_STEP, "max_turns": 1, "max_tokens": 8, "token_budget": 200}
    return RunConfig.model_validate(
        {
            "env": f"{__file__}:Colours",
            "seed": seed,
            "steps": steps,
            "model": {"tiny": tiny} if start is None else {"path": str(start)},
            "warmup": None if start else {"num": 320, "until_pass": 0.9, "probe_every": 20, "lr": 1e-2},
            "rollout": rollout | {"max_staleness": staleness},
            "optim": {"lr": 4e-3, "warmup_steps": 0},
            "algorithm": {"kl": {"coef": 0.0}, **more},
            "checkpoint": {"every": 0},
        }
    )


def configured(
    start: Path | None, seed: int, steps: int, staleness: int, more: Mapping[str, Any], slow: bool
) -> RunConfig:
    """The example with these changes; without a start policy only what makes one."""
    data = load_config(EXAMPLE).model_dump()
    data["seed"], data["steps"] = seed, steps
    data["rollout"] |= {"max_staleness": staleness, "groups_per_step": GROUPS_PER_STEP}
    data["algorithm"] |= more
    data["eval"]["every"] = 0
    data["checkpoint"]["every"] = 0
    if start is not None:
        data["warmup"], data["model"] = None, data["model"] | {"tiny": None, "path": str(start)}
    if slow:
        data["env"]["use"] = f"{__file__}:SlowCalculator"
    return RunConfig.model_validate(data)


def make_start(folder: Path, task: Task_) -> Path:
    """The cold-started policy, made once: a run of a single step, of which only the start is kept."""
    start = folder / ("made" if task != "colours" else "made-colours") / "start"
    if not start.is_dir():
        train(make_config(task, None, 0, 1, 0, {}), start.parent)
    return start


def make_config(
    task: Task_, start: Path | None, seed: int, steps: int, staleness: int, more: Mapping[str, Any]
) -> RunConfig:
    """The run of a task."""
    if task == "colours":
        return colours(start, seed, steps, staleness, more)
    return configured(start, seed, steps, staleness, more, slow=task == "slow calculator" and start is not None)


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """One run: success before and after, seconds, staleness and the curve."""
    from agentrl.trainer.run import train_run

    began = time.perf_counter()
    with RunStore.open(config, folder) as store:
        summary = train_run(config, store, Silent())
        lines = [line for line in store.metrics() if line["step"] > 0]
    last = lines[-10:]

    def mean(name: str, of: Sequence[Mapping[str, float]]) -> float:
        return round(sum(line.get(name) or 0.0 for line in of) / max(1, len(of)), 4)

    return {
        "steps": summary.steps,
        "held_out_before": summary.held_out_before,
        "held_out_after": summary.held_out_after,
        "solved_last_10": mean("solved", last),
        "solved_all": mean("solved", lines),
        "train_s": round(summary.train_seconds, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "waiting_for_episodes_s": round(sum(line["rollout_seconds"] for line in lines), 1),
        "updating_s": round(sum(line["update_seconds"] for line in lines), 1),
        "staleness_mean": mean("staleness/mean", lines),
        "staleness_max": max(line.get("staleness/max", 0.0) for line in lines),
        "drift_mean_abs": mean("drift/mean_abs", lines),
        "load_average": round(os.getloadavg()[0], 1),
    }


def compare(
    folder: Path, modes: Sequence[str], seeds: int, steps: int, task: Task_, lr: float | None = None
) -> dict[str, list[Any]]:
    """Every mode with every seed; runs that are there already are not run again."""
    found: dict[str, list[Any]] = {mode: [] for mode in modes}
    start = make_start(folder, task)
    for seed in range(seeds):
        for mode in modes:
            staleness, more = MODES[mode]
            name = f"{mode} {task} {steps} {lr or ''}".strip().replace(",", "").replace(" ", "-")
            done = folder / f"seed{seed}" / f"{name}.json"
            if not done.exists():
                config = make_config(task, start, seed, steps, staleness, more)
                if lr is not None:
                    config = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": lr})})
                result = train(config, done.with_suffix(""))
                done.write_text(json.dumps(result))
            found[mode].append(json.loads(done.read_text()))
            print(f"seed {seed}, {mode}: {done.read_text()}", file=sys.stderr, flush=True)
    return found
