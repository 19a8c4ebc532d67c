"""How long the blocks of a sharded model compute on one rank, without the time that ranks wait for each other.

The ranks of a model meet before every block, so their updates take equally long, whichever of them is slow. The
time inside of the blocks' forward passes is each rank's own.
"""

from __future__ import annotations

import time

import torch
from torch import nn

Moment = torch.cuda.Event | float


class LayerClock:
    """Adds up the time of the forward passes of a model's blocks; make it after the model has been sharded.

    On a GPU the moments are taken on its stream, so that nothing waits for them before `seconds`.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begun: dict[int, Moment] = {}
        self._spans: list[tuple[Moment, Moment]] = []
        blocks = getattr(model, "_no_split_modules", None) or ()
        for module in model.modules():
            if type(module).__name__.removeprefix("FSDP") in blocks:  # fully_shard changes its class
                # Inside of FSDP's own hooks, which gather the block's parameters and give them back.
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave, prepend=True)

    def reset(self) -> None:
        """Forget what was measured so far."""
        self._begun.clear()
        self._spans.clear()

    def seconds(self) -> float:
        """The time since the last `reset`; waits until it has passed on the GPU."""
        return sum(_between(begin, end) for begin, end in self._spans)

    def _enter(self, module: nn.Module, args: object) -> None:
        self._begun[id(module)] = self._now()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        begun = self._begun.pop(id(module), None)  # a recomputation may end in the middle of a block
        if begun is not None:
            self._spans.append((begun, self._now()))

    def _now(self) -> Moment:
        if not self._on_gpu:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
