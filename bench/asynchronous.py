"""What asynchronous training buys, and what staleness costs: parts (c) and (d) of bench/rollout.py.

Runs of the calculator example with 16 groups in a step, from one cold-started policy: synchronous, one step ahead,
asynchronous (staleness up to 4), the last also without correction; the seeds differ in tasks and draws. For (c)
the tool takes lognormal time, 200 ms in the median.
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
from typing import Any

from agentrl.config import load_config
from agentrl.config.run import RunConfig
from agentrl.env.env import StepInfo
from agentrl.envs.calculator import Calculator
from agentrl.run.report import Silent
from agentrl.run.store import RunStore
from agentrl.types import Message

EXAMPLE = Path(__file__).parent.parent / "examples" / "calculator" / "tools.yaml"
GROUPS_PER_STEP = 16
TOOL_MEDIAN_S, TOOL_SIGMA, TOOL_MOST_S = 0.2, 1.0, 5.0


class SlowCalculator(Calculator):
    """Use the calculator, then answer with the number."""

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        """As the calculator does, but a message with calls takes its time."""
        if message.tool_calls:
            seconds = TOOL_MEDIAN_S * random.lognormvariate(0, TOOL_SIGMA)
            await asyncio.sleep(min(seconds, TOOL_MOST_S))
        return await super().step(message)


CORRECTED = {"correction": {"importance": "token"}}
MODES: dict[str, tuple[int, Mapping[str, Any]]] = {
    "synchronous": (0, {}),
    "one step ahead": (1, CORRECTED),
    "asynchronous": (4, CORRECTED),
    "asynchronous, not corrected": (4, {}),
}


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


def make_start(folder: Path) -> Path:
    """The cold-started policy, made once: a run of a single step, of which only the start is kept."""
    start = folder / "made" / "start"
    if not start.is_dir():
        train(configured(None, 0, 1, 0, {}, slow=False), start.parent)
    return start


def train(config: RunConfig, folder: Path) -> dict[str, Any]:
    """One run: success before and after, seconds, staleness and the curve."""
    from agentrl.train.run import train_run

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
        "train_s": round(summary.train_seconds, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "waiting_for_episodes_s": round(sum(line["rollout_seconds"] for line in lines), 1),
        "updating_s": round(sum(line["update_seconds"] for line in lines), 1),
        "staleness_mean": mean("staleness/mean", lines),
        "staleness_max": max(line.get("staleness/max", 0.0) for line in lines),
        "drift_mean_abs": mean("drift/mean_abs", lines),
        "load_average": round(os.getloadavg()[0], 1),
    }


def compare(folder: Path, modes: Sequence[str], seeds: int, steps: int, *, slow: bool) -> dict[str, list[Any]]:
    """Every mode with every seed; runs that are there already are not run again."""
    found: dict[str, list[Any]] = {mode: [] for mode in modes}
    start = make_start(folder)
    for seed in range(seeds):
        for mode in modes:
            staleness, more = MODES[mode]
            name = f"{mode.replace(' ', '-').replace(',', '')}-{'slow' if slow else 'quick'}-{steps}"
            done = folder / f"seed{seed}" / f"{name}.json"
            if not done.exists():
                result = train(configured(start, seed, steps, staleness, more, slow), done.with_suffix(""))
                done.write_text(json.dumps(result))
            found[mode].append(json.loads(done.read_text()))
            print(f"seed {seed}, {mode}: {done.read_text()}", file=sys.stderr, flush=True)
    return found
