"""Shared tokens computed once: the learner's update on episodes that rewrite their history.

    pip install -e '.[train]'
    python -m bench.tree [--quick] [--json FILE]

Each episode has 20 turns of `history: fork`: the policy thinks, answers, and its thinking is dropped from the
history, so every turn is a separate row with the same prompt and the answers before it. One step is taken

- with the prefix tree (ours): each shared token is computed once;
- with the shared prompt of each group only, and
- row by row, as separate sequences.

All three use the same learner code, weights and rows in one process, and their gradients are compared. `tokens`
are those that go through the model. A batch of single rows with nothing to share shows the overhead of the tree.
The last line is JSON: its ratio is the time row by row over the time with the tree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.learner.learner import Learner
from agentrl.learner.pack import micro_batches
from agentrl.learner.policy_rank import local_learner
from agentrl.learner.prefix_tree import Row, Span, Tree, common, prefix_tree
from agentrl.learner.rank import LearnerSpec
from agentrl.learner.split import StepRows
from agentrl.types import Sample
from bench.learner import Shape, make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

GOAL_TOKENS = 3.0
GOAL_TIME = 2.0
MICRO_BATCH = 16384
GOAL_SINGLE = 1.05
"""A batch with nothing to share may take this much longer with the tree than without."""


@dataclass(frozen=True)
class Episodes:
    """What is trained."""

    groups: int
    group_size: int
    turns: int
    prompt: int = 200
    thinking: tuple[int, int] = (20, 80)
    answer: tuple[int, int] = (5, 20)
    observation: tuple[int, int] = (5, 40)


def forked_rows(episodes: Episodes, vocab: int, seed: int = 0) -> list[Sample]:
    """Every turn as a row; its own thinking and answer train."""
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(*bounds))]

    rows = []
    for group in range(episodes.groups):
        prompt = tokens((episodes.prompt, episodes.prompt))
        for index in range(episodes.group_size):
            history, advantage = list(prompt), rng.uniform(-1, 1)
            for _ in range(episodes.turns):
                answer = tokens(episodes.answer)
                own = [*tokens(episodes.thinking), *answer]
                rows.append(_sample(history, own, f"g{group}/e{index}", group, advantage))
                history += [*answer, *tokens(episodes.observation)]
    return rows


def single_rows(vocab: int, seed: int = 0) -> list[Sample]:
    """One row each of different prompts: nothing is shared."""
    rng = random.Random(seed)
    rows = []
    for group in range(24):
        lengths = rng.randint(100, 260), rng.randint(60, 200)
        prompt, answer = ([rng.randrange(vocab) for _ in range(n)] for n in lengths)
        rows.append(_sample(prompt, answer, f"g{group}/e0", group, rng.uniform(-1, 1)))
    return rows


def _sample(before: Sequence[int], trained: Sequence[int], episode: str, group: int, advantage: float) -> Sample:
    ids = (*before, *trained)
    mask = (False,) * len(before) + (True,) * len(trained)
    return Sample(
        ids=ids,
        loss_mask=mask,
        logprobs=tuple(-8.0 if on else 0.0 for on in mask),
        advantages=(advantage,) * len(ids),
        versions=(0,) * len(ids),
        episode_id=episode,
        group=group,
    )


def nothing_shared(rows: Sequence[Row]) -> Tree:
    """Every row as a tree of its own."""
    spans, at = [], 0
    for row in rows:
        spans.append(Span(-1, 0, at, len(row), at + len(row)))
        at += len(row)
    ids_T = np.concatenate([np.asarray(row) for row in rows])
    return Tree(spans, ids_T, range(len(rows)))


def prompts_shared(rows: Sequence[Row]) -> Tree:
    """Rows with the same first 200 tokens share what they all have in common, and nothing behind it."""
    groups: dict[Row, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row[:200], []).append(number)
    spans: list[Span] = []
    ids, last, at = [], [0] * len(rows), 0
    for numbers in groups.values():
        ordered = sorted(np.asarray(rows[n]).tolist() for n in numbers)
        shared = common(np.asarray(ordered[0]), np.asarray(ordered[-1]))
        shared = min(shared, min(len(rows[n]) for n in numbers) - 1)
        root = len(spans)
        end = at + shared + sum(len(rows[n]) - shared for n in numbers)
        spans.append(Span(-1, 0, at, shared, end))
        ids.append(np.asarray(rows[numbers[0]][:shared]))
        at += shared
        for number in numbers:
            length = len(rows[number]) - shared
            last[number] = len(spans)
            spans.append(Span(root, shared, at, length, at + length))
            ids.append(np.asarray(rows[number][shared:]))
            at += length
    return Tree(spans, np.concatenate(ids), last)


Pack = Callable[[Sequence[Row]], Tree]
WAYS: dict[str, Pack] = {"tree": prefix_tree, "prompts": prompts_shared, "rows": nothing_shared}


@contextmanager
def packed_by(make: Pack) -> Iterator[None]:
    """Have the learner pack rows in another way."""

    def size(rows: Sequence[Row]) -> int:
        return len(make(rows).ids_T)

    if make is prefix_tree:
        yield
        return
    with patch("agentrl.learner.pack.prefix_tree", make), patch("agentrl.learner.pack.tree_size", size):
        yield


def open_learner(directory: Path, tokens_per_micro_batch: int) -> Learner:
    """agentrl's learner on this model."""
    spec = LearnerSpec(
        directory,
        algorithm=AlgorithmConfig(kl=KLConfig(coef=0.0)),
        optim=OptimConfig(lr=1e-6, warmup_steps=0),
        config=LearnerConfig(tokens_per_micro_batch=tokens_per_micro_batch),
        temperature=1.0,
        total_steps=100,
    )
    return local_learner(spec)


@dataclass(frozen=True)
class Taken:
    """One way: tokens through the model, median seconds of a step, norm of the first step's gradient."""

    tokens: int
    seconds: float
    grad_norm: float


def measure(
    directory: Path, make_rows: Callable[[int], list[Sample]], ways: Sequence[str], steps: int
) -> dict[str, Taken]:
    """Steps of each way in turn, each with a learner of its own; the first step of each is not timed."""
    learners = {way: open_learner(directory, MICRO_BATCH) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    first: dict[str, tuple[int, float]] = {}
    for number in range(steps + 1):
        rows = make_rows(number)
        for way, learner in learners.items():
            with packed_by(WAYS[way]):
                started = time.perf_counter()
                result = asyncio.run(learner.step(StepRows(rows)))
                seconds[way].append(time.perf_counter() - started)
                parts = micro_batches(rows, MICRO_BATCH)
                tokens = sum(len(WAYS[way]([row.ids for row in part]).ids_T) for part in parts)
            first.setdefault(way, (tokens, result.metrics["grad_norm"]))
    return {way: Taken(first[way][0], statistics.median(seconds[way][1:]), first[way][1]) for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer episodes and steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    shape = Shape()
    episodes = Episodes(groups=1, group_size=2, turns=20) if options.quick else Episodes(2, 8, 20)
    steps = 2 if options.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, Path(folder))
        forked = measure(Path(folder), lambda n: forked_rows(episodes, shape.vocab, n), list(WAYS), steps)
        single = measure(Path(folder), lambda n: single_rows(shape.vocab, n), ["tree", "rows"], 3 * steps)
    for way, taken in forked.items():
        print(f"{way:<8} {taken.tokens:>8,} tokens  {taken.seconds:7.2f} s  grad_norm {taken.grad_norm:.7g}")
    cost = single["tree"].seconds / single["rows"].seconds
    print(f"single rows: {single['tree'].seconds:.3f} s with the tree, {single['rows'].seconds:.3f} s without")
    tree, rows = forked["tree"], forked["rows"]
    fewer, faster = rows.tokens / tree.tokens, rows.seconds / tree.seconds
    same = all(abs(taken.grad_norm / tree.grad_norm - 1) < 1e-4 for taken in forked.values())
    report = {
        "bench": "tree",
        "ours": round(tree.seconds, 3),
        "baseline": round(rows.seconds, 3),
        "ratio": round(faster, 2),
        "unit": "s/step of 20-turn history: fork episodes, tree against separate rows",
        "goal": f"{GOAL_TIME}x less time, {GOAL_TOKENS}x fewer tokens, single rows within {GOAL_SINGLE}x",
        "fewer_tokens": round(fewer, 2),
        "against_shared_prompts": round(forked["prompts"].seconds / tree.seconds, 2),
        "single_rows": round(cost, 3),
        "met": faster >= GOAL_TIME and fewer >= GOAL_TOKENS and cost <= GOAL_SINGLE and same,
    }
    if options.json:
        options.json.write_text(json.dumps(report | {"torch": torch.__version__}, indent=1) + "\n")
    finish(report, timed=True)


if __name__ == "__main__":
    main()
