"""Parts of a micro-batch side by side, one core each, for small models on a CPU.

The operations of a small model are short, and two torch threads that share each of them wait for each other. Two
threads that each compute half of the rows do not: an update takes two thirds of the time (bench/learner.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.config.run import LearnerConfig
from agentrl.learner.shard import World
from agentrl.learner.split import Rows, balanced
from agentrl.models.small import PLAIN_DECODERS, is_small
from agentrl.torch_threads import compute_with

T = TypeVar("T")
Backward = Callable[[Tensor], None]
"""Computes the gradient of a loss."""


class Lanes:
    """Trains on rows, with parts of them at the same time if there are several lanes.

    Gradients are added up in the order of the lanes, so the same number of lanes gives the same bits.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], size: int) -> None:
        """With `size` threads; the loss must be a sum over episodes."""
        self.size = size
        self._parameters = list(parameters)
        self._threads = None if size == 1 else _single_threads(size)

    def run(self, rows: Rows, train: Callable[[Rows, Backward], T]) -> list[tuple[Rows, T]]:
        """Train on the rows: adds to the gradients of the parameters, and leaves the parameters as they are.

        Args:
            train: computes the loss of its rows and calls its second argument with it, once.

        Returns:
            The parts that the rows were split into, and what `train` returned for each.
        """
        parts = self._parts(rows)
        if self._threads is None or len(parts) == 1:
            return [(rows, train(rows, torch.Tensor.backward))]

        def compute(part: Rows) -> tuple[Sequence[Tensor | None], T]:
            gradients: list[Tensor | None] = []

            def backward(loss: Tensor) -> None:
                gradients.extend(torch.autograd.grad(loss, self._parameters, allow_unused=True))

            return gradients, train(part, backward)

        found = []
        for part, (gradients, known) in zip(parts, self._threads.map(compute, parts), strict=True):
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            found.append((part, known))
        return found

    def close(self) -> None:
        """End the threads; idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _parts(self, rows: Rows) -> list[Rows]:
        return [rows] if self.size == 1 else [tuple(part) for part in balanced(rows, self.size) if part] or [rows]


def _single_threads(size: int) -> ThreadPoolExecutor:
    """As many threads, in each of which torch computes with one."""
    all_here = threading.Barrier(size + 1)

    def begin() -> None:
        compute_with(1)
        all_here.wait()

    pool = ThreadPoolExecutor(size, "agentrl-lane", initializer=begin)
    for _ in range(size):
        pool.submit(torch.get_num_threads)
    all_here.wait()
    return pool


def num_lanes(policy: PreTrainedModel, world: World, config: LearnerConfig) -> int:
    """How many lanes pay: one for each of torch's threads if the policy is small, on a CPU, and its forward passes
    do not disturb each other; else 1."""
    simple = config.lora is None and not (
        config.replay_routes or config.offload_activations or config.checkpoint_activations
    )
    if world.size > 1 or not simple or next(policy.parameters()).device.type != "cpu":
        return 1
    stateless = type(policy).__name__ in PLAIN_DECODERS
    return torch.get_num_threads() if stateless and is_small(policy) else 1
