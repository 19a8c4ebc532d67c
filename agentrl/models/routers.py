"""The routers of a model with experts: what they choose can be recorded, and chosen for them.

A router of transformers returns (logits, weights, experts): it scores all experts of a token, takes the `top_k`
best with `torch.topk`, and weights those by their scores. To have it take others, its own code runs with the
result of that `topk` replaced, so the weights, and their gradients, are what this family gives to these experts.

Shapes: T tokens, L routers, E experts, k experts per token.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.errors import ConfigError

Routed = tuple[Tensor, ...]
"""What a router returns: the last one are the experts [T, k], the one before it their weights."""
Choose = Callable[[Tensor, Tensor], Tensor]
"""The experts [T, k] to take, from the scores [T, E] and the router's own choice [T, k]."""
_BLOCK = re.compile(r"\.(\d+)\.")
WIDE = 128
"""More experts than this need two bytes each."""


class RouteShape(NamedTuple):
    """What the routes of a token look like: `layers` x `top_k` numbers."""

    layers: int
    top_k: int
    dtype: torch.dtype


class _Routers(ABC):
    """All routers of a model, through which every call of them goes."""

    def __init__(self, model: nn.Module, where: str) -> None:
        """Take over the routers.

        Args:
            where: names the model in errors.

        Raises:
            ConfigError: the model has no routers, or they differ in their numbers of experts.
        """
        named = {name: module for name, module in model.named_modules() if _size(module) is not None}
        found = [(module, size) for module in named.values() if (size := _size(module)) is not None]
        self.name = type(model).__name__
        if not found:
            raise ConfigError(
                f"{where}: {self.name} has no routers that return the experts they choose, so "
                "learner.replay_routes has nothing to replay: remove it, or use a model with experts (Qwen3-MoE, "
                "OLMoE, Mixtral, DeepSeek-V3)"
            )
        if len({size for _, size in found}) > 1:
            raise ConfigError(
                f"{where}: the routers of {self.name} have different numbers of experts, and "
                "learner.replay_routes needs the same in all layers: remove it"
            )
        self.top_k, self.experts = found[0][1]
        self.shape = RouteShape(len(found), self.top_k, torch.int8 if self.experts <= WIDE else torch.int16)
        self._numbers = [int(part[1]) if (part := _BLOCK.search(name)) else -1 for name in named]
        """The block of each router, of all blocks of the model."""
        self._before = [(router, router.__dict__.get("forward")) for router, _ in found]
        for layer, (router, _) in enumerate(found):
            router.__dict__["forward"] = partial(self._route, layer, router.forward)

    def remove(self) -> None:
        """Give the routers back, of which the latest owner must be the first."""
        for router, before in self._before:
            del router.__dict__["forward"]
            if before is not None:
                router.__dict__["forward"] = before

    @abstractmethod
    def _route(self, layer: int, plain: Callable[..., Routed], *args: Tensor, **kwargs: Tensor) -> Routed:
        """Call a router."""


class RouteRecorder(_Routers):
    """Keeps what the routers chose in the latest forward pass."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__(model, where)
        self._chosen: dict[int, Tensor] = {}

    def chosen(self) -> Tensor:
        """[T, L, k] the experts of every token of the latest forward pass.

        Raises:
            ConfigError: a router was not called, or returned something else.
        """
        parts_L = [self._chosen.get(layer) for layer in range(self.shape.layers)]
        parts = [part for part in parts_L if part is not None]
        if len(parts) < len(parts_L) or any(part.shape != (len(parts[0]), self.top_k) for part in parts):
            raise ConfigError(f"the routers of {self.name} do not return the experts of each token: {_REMOVE}")
        return torch.stack(parts, 1).to(self.shape.dtype)

    def _route(self, layer: int, plain: Callable[..., Routed], *args: Tensor, **kwargs: Tensor) -> Routed:
        out = plain(*args, **kwargs)
        if _is_routed(out):
            self._chosen[layer] = out[-1]
        return out


class RouteCounts(NamedTuple):
    """What was replayed in a forward pass: tokens, those whose own experts differ in any layer, and experts."""

    tokens: Tensor
    tokens_differ: Tensor
    experts_differ: Tensor


class RouteReplay(_Routers):
    """Has the routers take recorded experts, weighted by their current scores."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__(model, where)
        self._choose: Callable[[int, Tensor, Tensor], Tensor] | None = None
        self._trying = False
        self._given: Tensor | None = None
        self._known: Tensor | None = None
        self._differ: Tensor | None = None

    @contextmanager
    def replaying(self, routes_TLk: Tensor | None) -> Iterator[None]:
        """Within the block, forward passes over T tokens take these experts; the router's own where one is -1.

        Args:
            routes_TLk: None to leave everything to the routers, also within another such block. Those of servers
                have all blocks of the model, also those without a router.

        Raises:
            ConfigError: they are of a model with another number of routers, or of experts per token.
        """
        if routes_TLk is not None and self.shape.layers < routes_TLk.shape[1] and self._numbered(routes_TLk):
            routes_TLk = routes_TLk[:, self._numbers]
        if routes_TLk is not None and routes_TLk.shape[1:] != (self.shape.layers, self.top_k):
            raise ConfigError(
                f"the engine's completions have routes of {routes_TLk.shape[1]} layers with {routes_TLk.shape[2]} "
                f"experts each, and {self.name} has {self.shape.layers} with {self.top_k}: remove "
                "learner.replay_routes, or have the engine return those of this model"
            )
        before = self._choose, self._given, self._known, self._differ
        self._given, self._choose = routes_TLk, None if routes_TLk is None else self._recorded
        self._known = None if routes_TLk is None else routes_TLk[:, 0, 0] >= 0
        self._differ = None
        try:
            yield
        finally:
            self._choose, self._given, self._known, self._differ = before

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Within the block, routers take the experts that they like least: it raises if they cannot.

        Raises:
            ConfigError: in the forward pass, if a router's weights do not follow from the experts given to it.
        """
        self._choose, self._trying = _least_liked, True
        try:
            yield
        finally:
            self._choose, self._trying = None, False

    def _numbered(self, routes_TLk: Tensor) -> bool:
        """Whether the routes have a layer for the block of each router."""
        return 0 <= min(self._numbers) <= max(self._numbers) < routes_TLk.shape[1]

    def counts(self) -> RouteCounts | None:
        """Of the latest forward pass in a `replaying` block; None if nothing was replayed."""
        if self._known is None or self._differ is None:
            return None
        return RouteCounts(self._known.sum(), self._differ.gt(0).sum(), self._differ.sum())

    def _recorded(self, layer: int, scores_TE: Tensor, own_Tk: Tensor) -> Tensor:
        assert self._given is not None
        assert self._known is not None
        given_Tk, known_T1 = self._given[:, layer].long(), self._known[:, None]
        new_Tk = known_T1 & ~(given_Tk[:, :, None] == own_Tk[:, None, :]).any(-1)
        count_T = new_Tk.sum(-1)
        self._differ = count_T if layer == 0 or self._differ is None else self._differ + count_T
        return torch.where(known_T1, given_Tk, own_Tk)

    def _route(self, layer: int, plain: Callable[..., Routed], *args: Tensor, **kwargs: Tensor) -> Routed:
        if self._choose is None:
            return plain(*args, **kwargs)
        with _Replaced(self.top_k, self.experts, partial(self._choose, layer)) as replaced:
            out = plain(*args, **kwargs)
        taken = _is_routed(out) and out[-1] is replaced.experts_Tk
        if not taken or (self._trying and not _weighted(out[-2])):
            raise ConfigError(
                f"the routers of {self.name} give no weight to experts other than those they choose: {_REMOVE}"
            )
        return out


_REMOVE = "remove learner.replay_routes, or use a model of another family (Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3)"


class _TopK(NamedTuple):
    values: Tensor
    indices: Tensor


class _Replaced(TorchFunctionMode):
    """Replaces the result of the `topk` with which a router chooses among all experts of each token."""

    def __init__(self, top_k: int, experts: int, choose: Choose) -> None:
        super().__init__()
        self._top_k, self._experts, self._choose = top_k, experts, choose
        self.experts_Tk: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, number = args[0], args[1] if len(args) > 1 else kwargs["k"]
        if scores.dim() != 2 or (number, scores.shape[1]) != (self._top_k, self._experts):
            return found
        self.experts_Tk = self._choose(scores, found[1])
        return _TopK(scores.gather(1, self.experts_Tk), self.experts_Tk)


def _size(module: nn.Module) -> tuple[int, int] | None:
    """(k, E) of a router; None for any other module."""
    if not re.search(r"(Router|Gate)$", type(module).__name__):
        return None
    top_k = getattr(module, "top_k", None)
    experts = getattr(module, "n_routed_experts", None) or getattr(module, "num_experts", None)
    return (top_k, experts) if isinstance(top_k, int) and isinstance(experts, int) else None


def _is_routed(out: object) -> bool:
    if not isinstance(out, tuple) or len(out) != 3:
        return False
    experts = cast(object, out[-1])
    return isinstance(experts, Tensor) and experts.dim() == 2 and not experts.is_floating_point()


def _least_liked(_: int, scores_TE: Tensor, own_Tk: Tensor) -> Tensor:
    return scores_TE.topk(own_Tk.shape[1], largest=False).indices


def _weighted(weights_Tk: Tensor) -> bool:
    """Whether they are weights; single ones may be rounded to 0."""
    return bool(weights_Tk.isfinite().all()) and float((weights_Tk != 0).float().mean()) > 0.5
