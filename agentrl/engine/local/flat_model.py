"""The model behind the local engine: loading, one forward pass on flat tokens, weights replaced in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engine.local.attention import (
    ATTENTION,
    AttentionPlan,
    PackedAttention,
    check_attention_support,
    register_attention,
)
from agentrl.engine.local.cache import CacheShape
from agentrl.engine.local.fused import FusedDecoder, can_fuse
from agentrl.errors import ConfigError
from agentrl.models.folder import check_model_folder
from agentrl.models.loading import load_causal_lm
from agentrl.models.routers import RouteRecorder, RouteReplay
from agentrl.models.trial import ALONE, ENDS, SHARED, probe

if TYPE_CHECKING:
    from collections.abc import Iterable

LOGITS_AT_ONCE = 1 << 27
"""Number of logits that scoring computes at a time: 512 MiB in float32."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(path: str | Path, *, dtype: str, device: str) -> PreTrainedModel:
    """Load a causal language model from a Hugging Face directory, in eval mode, with the attention of
    `attention.py`.

    Raises:
        ConfigError: no such directory, not a model directory, or a model the engine cannot run.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    directory, where = Path(path), f"model directory {str(path)!r}"
    check_model_folder(directory, where)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch finds no CUDA device; use device cpu")
    register_attention()
    model = load_causal_lm(directory, where, dtype=DTYPES[dtype], attention=ATTENTION)
    module = cast(torch.nn.Module, model)
    return cast(PreTrainedModel, module.to(device))


class EngineModel:
    """A transformers model in eval mode whose weights can be replaced in place.

    Attributes:
        bytes_per_token, bytes_per_sequence: memory of the cache.
    """

    bytes_per_token: int
    bytes_per_sequence: int = 0
    _state: dict[str, Tensor]
    """What an update writes to, once the model has its final form."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError if the model does not say how long a sequence may be."""
        model.train(False)
        self.module = model
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.max_positions = _positions(model)
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new values into the parameters, after checking everything.

        Raises:
            ValueError: an unknown name, a wrong shape, or a missing parameter (of tied parameters one name is
            enough).
        """
        unknown = [name for name in weights if name not in self._state]
        if unknown:
            raise ValueError(f"the model has no parameter {_some(unknown)}; names must match the state dict")
        for name, tensor in weights.items():
            if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.is_sparse:
                raise ValueError(f"{name} must be a dense tensor with values, got {tensor!r:.80}")
            if tensor.shape != self._state[name].shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, the model's {tuple(self._state[name].shape)}"
                )
        given = {self._state[name].data_ptr() for name in weights}
        missing = [name for name, tensor in self._state.items() if tensor.data_ptr() not in given]
        if missing:
            raise ValueError(f"weights lack {_some(missing)}; an update must give every parameter")
        with torch.no_grad():
            for name, tensor in weights.items():
                self._state[name].copy_(tensor)


class FlatModel(EngineModel):
    """A transformers model on flat batches; construction checks it against the model's own attention."""

    def __init__(self, model: PreTrainedModel, *, routes: bool = False) -> None:
        """Take over the model.

        Args:
            routes: keep the experts that its routers choose in the cache.

        Raises:
            ConfigError: the engine cannot compute the model, or `routes` is True and it has no routers.
        """
        check_attention_support(model)
        register_attention()
        super().__init__(model)
        self._recorder = RouteRecorder(model, WHERE) if routes else None
        self._fused: FusedDecoder | None = None
        self.shape = self._probe()
        self.bytes_per_token = self.shape.bytes_per_token
        self._state = dict(model.state_dict())

    def __call__(self, ids_N: Tensor, positions_N: Tensor, plan: AttentionPlan, keep_k: Tensor) -> Tensor:
        """Compute logits (k, V) of the tokens `keep_k` of a flat batch of N tokens."""
        logits = self._forward(self.module, ids_N, positions_N, keep_k, plan)
        if self._recorder is not None:
            plan.keep_routes(self._recorder.chosen())
        return logits

    def _forward(
        self, model: PreTrainedModel, ids_N: Tensor, positions_N: Tensor, keep_k: Tensor, plan: AttentionPlan
    ) -> Tensor:
        if self._fused is not None and model is self.module:
            return self._fused(ids_N, positions_N, plan, keep_k)
        out = model(
            input_ids=ids_N[None],
            position_ids=positions_N[None],
            use_cache=False,
            attention_plan=plan,
            logits_to_keep=keep_k,
        )
        return cast(Tensor, out.logits)[0]

    def alone(self, ids: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Compute the logits (V,) after these tokens, the same bits each time: without a batch and a cache."""
        ids_N = torch.as_tensor(ids, dtype=torch.long, device=self.device)
        positions_N = torch.arange(len(ids_N), device=self.device)
        return self._forward(self.module, ids_N, positions_N, positions_N[-1:], PackedAttention([len(ids_N)]))[0]

    def scores(self, row: Sequence[int]) -> Iterator[Tensor]:
        """Compute log-probabilities (k, V) at temperature 1 after all tokens of a row but the last, k at a time.

        Of a long row and a large vocabulary, all at once would take gigabytes. Each part is a pass over the row.
        """
        ids_N, positions_N, places_N = self._flat([row])
        for keep_k in torch.split(places_N[:-1], max(1, LOGITS_AT_ONCE // self.vocabulary)):
            logits_kV = self._forward(self.module, ids_N, positions_N, keep_k, PackedAttention([len(row)]))
            yield torch.log_softmax(logits_kV.float(), -1)

    def _flat(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and positions of the concatenated rows, and the indices of all of them."""
        ids = torch.tensor([token for row in rows for token in row], device=self.device)
        positions = torch.cat([torch.arange(len(row), device=self.device) for row in rows])
        return ids, positions, torch.arange(len(ids), device=self.device)

    def _probe(self) -> CacheShape:
        """Compare our attention with the model's own; returns the cache layout."""
        rows = [[token % self.vocabulary for token in row] for row in (ALONE, SHARED, ENDS[1])]
        before = self.module.config._attn_implementation
        name = type(self.module).__name__
        shapes: dict[int, tuple[int, int, int]] = {}

        def packed(tried: PreTrainedModel) -> Tensor:
            tried.set_attn_implementation(ATTENTION)
            if tried is self.module and can_fuse(tried):
                self._fused = FusedDecoder(tried)
            plan = PackedAttention([len(row) for row in rows])
            with self._routed(tried, rows):
                found = self._forward(tried, *self._flat(rows), plan)
            shapes.update(plan.shapes)
            if plan.calls.most_common(1)[0][1] > 1:
                raise ConfigError("a layer attends more than once, and the cache keeps one set of keys and values")
            return found

        def alone(tried: PreTrainedModel) -> list[Tensor]:
            return [self._alone(tried, row) for row in rows]

        layers = int(self.module.config.get_text_config().num_hidden_layers)
        try:
            probe(self.module, packed, alone, where=WHERE, advice="use engine sglang or vllm")
            if len(shapes) != layers or len(set(shapes.values())) != 1:
                raise ConfigError(
                    f"{name} has keys and values of {len(set(shapes.values()))} kinds in {len(shapes)} of "
                    f"{layers} layers, and the engine's cache holds one kind in all; use engine sglang or vllm"
                )
        except ConfigError:
            self.module.set_attn_implementation(before)
            raise
        heads, key_dim, value_dim = shapes[0]
        routes = None
        if self._recorder is not None:
            self._recorder.chosen()  # refused now if they cannot be recorded
            routes = self._recorder.shape
        return CacheShape(layers, heads, key_dim, value_dim, self.dtype, self.device, routes)

    def _alone(self, tried: PreTrainedModel, row: Sequence[int]) -> Tensor:
        """Compute the logits of a row with the model's own attention."""
        tried.set_attn_implementation("eager")
        found = tried(input_ids=torch.tensor([row], device=self.device), use_cache=False).logits[0]
        tried.set_attn_implementation(ATTENTION)
        return cast(Tensor, found)

    @contextmanager
    def _routed(self, tried: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Iterator[None]:
        """Have routers that compute in 16 bits choose as for each row alone.

        Rounding changes what they choose, and that would look like different attention.
        """
        if tried.dtype == torch.float32:
            yield
            return
        try:
            routes_NLk = self._routes(tried, rows)
        except ConfigError:  # no routers, or such that cannot be given experts
            yield
            return
        replay = RouteReplay(tried, WHERE)
        try:
            with replay.replaying(routes_NLk):
                yield
        finally:
            replay.remove()

    def _routes(self, tried: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
        recorder = RouteRecorder(tried, WHERE)
        try:
            found = []
            for row in rows:
                self._alone(tried, row)
                found.append(recorder.chosen())
        finally:
            recorder.remove()
        replay = RouteReplay(tried, WHERE)
        try:
            with replay.trying():
                self._alone(tried, rows[0])
        finally:
            replay.remove()
        return torch.cat(found)


WHERE = "the local engine"


def _positions(model: PreTrainedModel) -> int:
    text = model.config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    if not isinstance(found, int):
        raise ConfigError(f"{type(model).__name__}: config.json does not say max_position_embeddings; add it")
    return found


def _some(names: Iterable[str], at_most: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(repr(name) for name in names[:at_most]) + rest
