"""What a step cannot be faster than: its arithmetic at the speed of this machine's matrix products.

Counted for each half, from the episodes that were played: the update computes every distinct token of the step
once forward and twice backward; the rollout computes every distinct prompt token, every sampled token and every
observation once, each with attention to the tokens before it. Everything else (norms, softmax, sampling, tools,
Python) counts nothing, so no program reaches the bound.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from agentrl.chat.transcript import rows_of
from agentrl.learner.prefix_tree import prefix_tree
from agentrl.types import Episode

ROWS, ROUNDS, TRIALS = 2048, 60, 5


def bound(model: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Seconds that each half of a step takes at least, and the speed they were computed with."""
    config = AutoConfig.from_pretrained(Path(model), local_files_only=True)
    hidden, layers, vocabulary = config.hidden_size, config.num_hidden_layers, config.vocab_size
    head_dim = config.head_dim or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    block = 2 * (hidden * (2 * queries + 2 * keys) + 3 * hidden * config.intermediate_size)
    pair = 4 * queries

    rows = [row.ids for episode in episodes for row in rows_of(episode.segments)]
    tree = prefix_tree(rows)
    pairs = sum(span.length * span.prefix + span.length * (span.length + 1) // 2 for span in tree.spans)
    trained = sum(sum(row.loss_mask) for episode in episodes for row in rows_of(episode.segments))
    predicting = min(trained, len(tree.ids_T))
    forward = layers * (block * len(tree.ids_T) + pair * pairs) + 2 * hidden * vocabulary * predicting

    # Distinct tokens before the first completions are computed once, and all behind them.
    opening = prefix_tree([_opening(episode) for episode in episodes])
    computed, seen, sampled = len(opening.ids_T), 0, 0
    for episode in episodes:
        place, begun = 0, False
        for segment in episode.segments:
            length = len(segment.ids)
            begun = begun or segment.origin == "sampled"
            sampled += length if segment.origin == "sampled" else 0
            if begun:
                computed += length
                seen += length * place + length * (length + 1) // 2
            place += length
    rollout = layers * (block * computed + pair * seen) + 2 * hidden * vocabulary * sampled
    speed = matrix_speed(hidden, config.intermediate_size)
    return {
        "update_bound_s": 3 * forward / speed,
        "rollout_bound_s": rollout / speed,
        "gflops": speed / 1e9,
    }


def matrix_speed(hidden: int, intermediate: int) -> float:
    """Floating-point operations per second of products of this model's shapes, one thread on each core.

    The best of TRIALS trials: a trial on a machine that is busy for a moment gives a bound that a step can beat.
    """
    return max(_trial(hidden, intermediate) for _ in range(TRIALS))


def _trial(hidden: int, intermediate: int) -> float:
    cores = len(os.sched_getaffinity(0))
    seconds: list[float] = []

    def multiply() -> None:
        torch.set_num_threads(1)
        left, right = torch.randn(ROWS, hidden), torch.randn(hidden, intermediate)
        for _ in range(3):
            left @ right
        started = time.perf_counter()
        for _ in range(ROUNDS):
            left @ right
        seconds.append(time.perf_counter() - started)

    threads = [threading.Thread(target=multiply) for _ in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cores * ROUNDS * 2 * ROWS * hidden * intermediate / max(seconds)


def _opening(episode: Episode) -> tuple[int, ...]:
    """The tokens before the first completion."""
    ids: list[int] = []
    for segment in episode.segments:
        if segment.origin == "sampled":
            break
        ids += segment.ids
    return tuple(ids)
