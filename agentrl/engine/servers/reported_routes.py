"""Experts that a server reports for the tokens of a completion, for `learner.replay_routes`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agentrl.errors import ConfigError, EngineError
from agentrl.types import Routes

if TYPE_CHECKING:
    from agentrl.engine.servers.client import ServerAnswer


class RouteLayout(NamedTuple):
    """What a server reports for a token: `top_k` experts for each of its `layers`, also those without experts.

    Servers send four bytes for each; `width` are kept.
    """

    layers: int
    top_k: int
    width: int

    @property
    def size(self) -> int:
        """Bytes of a token in `Routes`."""
        return self.layers * self.top_k * self.width

    def routes(self, data: bytes, start: int) -> Routes:
        """Routes with this layout."""
        return Routes(data, *self, start)


class RoutesAsked(NamedTuple):
    """The routes that an answer must have: from the token number `start` on."""

    layout: RouteLayout
    start: int


def layout_of(model: Path) -> RouteLayout:
    """What servers of the model in a folder report.

    Raises:
        ConfigError: its config.json does not say how many layers it has, or experts per token.
    """
    from agentrl.models.model_config import any_config
    from agentrl.models.routers import WIDE

    where = f"model directory {str(model)!r}"
    text = any_config(model, where).get_text_config()
    layers, top_k = (getattr(text, name, None) for name in ("num_hidden_layers", "num_experts_per_tok"))
    experts = max(
        getattr(text, name, None) or 0 for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    if not isinstance(layers, int) or not isinstance(top_k, int):
        raise ConfigError(
            f"learner.replay_routes: {where} does not say num_hidden_layers and num_experts_per_tok in its "
            "config.json: remove it"
        )
    return RouteLayout(layers, top_k, 1 if 0 < experts <= WIDE else 2)


def read_routes(text: object, asked: RoutesAsked, length: int, where: str) -> Routes:
    """Decode the experts of a sequence of `length` tokens but its last: 32-bit integers in base64.

    Raises:
        EngineError: they are missing, or not of so many tokens, layers and experts.
    """
    import numpy as np  # `agentrl plan` loads this module, and needs to start at once

    layout, tokens = asked.layout, length - 1 - asked.start
    if not isinstance(text, str):
        raise EngineError(f"{where}: the answer lacks routed_experts, which learner.replay_routes needs")
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (binascii.Error, ValueError) as e:
        raise EngineError(f"{where}: routed_experts cannot be read: {e}") from e
    if found.size != tokens * layout.layers * layout.top_k:
        raise EngineError(
            f"{where}: routed_experts has {found.size} numbers, not {layout.top_k} for each of {tokens} tokens in "
            f"{layout.layers} layers"
        )
    if found.size and not 0 <= found.min() <= found.max() < 1 << (8 * layout.width - 1):
        raise EngineError(
            f"{where}: routed_experts has the expert {found.min() if found.min() < 0 else found.max()}"
        )
    return layout.routes(found.astype(f"i{layout.width}").tobytes(), asked.start)


def joined(parts: Sequence[ServerAnswer], prompt: int, asked: RoutesAsked) -> Routes | None:
    """The routes of a completion in several parts, each of which continued all tokens before it; None if no part
    has any.

    A part that went on with new weights had its context computed again, and reports the experts of that. Those
    with which its earlier tokens were sampled are not known, so they are -1.

    Args:
        prompt: number of tokens before the first part.
    """
    parts = [part for part in parts if part.ids]
    if all(part.routes is None for part in parts):
        return None
    layout, start = asked
    data, length = b"", prompt
    for part in parts:
        read = length + len(part.ids) - 1
        if part.routes is None:
            known = read
        else:
            older = max(
                (n + 1 for n, version in enumerate(part.versions) if version != part.versions[-1]), default=0
            )
            known = length + older - 1 if older else 0
        data = data.ljust((min(known, read) - start) * layout.size, b"\xff")
        if part.routes is not None:
            data += part.routes.data[len(data) :]
        length += len(part.ids)
    return layout.routes(data, start)
