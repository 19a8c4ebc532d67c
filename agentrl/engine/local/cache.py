"""The key-value cache: one row of tokens per slot, and the attention plan that reads and writes it.

Shapes: S slots, C tokens a slot can hold, K key-value heads, D head size, N tokens of a flat batch, H query heads;
of the slots that decode n tokens, R rows of the cache, W tokens of a row, G = H / K query heads that read the same
keys; for routes L routers and k experts of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.models.routers import RouteShape

WORTH_GATHERING = 1.5
"""On a CPU, the rows of the slots that decode are gathered if there are this many times as many rows."""
SCORES = 1 << 24
"""Number of attention scores that a prefill computes at a time: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Storage per token: `layers` times keys (heads, key_dim) and values (heads, value_dim) of `dtype`, and its
    routes if they are recorded."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    routes: RouteShape | None = None

    @property
    def bytes_per_token(self) -> int:
        routes = 0 if self.routes is None else self.routes.layers * self.routes.top_k * self.routes.dtype.itemsize
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize + routes


class KVCache:
    """Two tensors per layer, keys (S, K, D, C) and values (S, K, C, D).

    Keys are laid out the way the product with the queries reads them: a third faster on CPU than (C, D), measured.
    Everything is finite at all times (unused positions are zero), because masked positions still enter a product.
    With `spare` there is one more slot, number S, for values that are never read. Routes, where they are recorded,
    are a third tensor (S, C, L, k) that goes where keys and values go.
    """

    def __init__(self, shape: CacheShape, slots: int, capacity: int, *, spare: bool = False) -> None:
        self.shape = shape
        self._spare = int(spare)
        self.slots = slots
        self.capacity = capacity
        self.keys = [self._empty(shape.key_dim, capacity) for _ in range(shape.layers)]
        self.values = [self._empty(capacity, shape.value_dim) for _ in range(shape.layers)]
        self.routes = self._unrouted()

    def _unrouted(self) -> Tensor | None:
        if (routes := self.shape.routes) is None:
            return None
        size = (self.slots + self._spare, self.capacity, routes.layers, routes.top_k)
        return torch.full(size, -1, dtype=routes.dtype, device=self.shape.device)

    def _empty(self, *size: int) -> Tensor:
        shape = self.shape
        return torch.zeros(self.slots + self._spare, shape.heads, *size, dtype=shape.dtype, device=shape.device)

    def zero(self) -> None:
        """Clear everything, including non-finite values."""
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def write(self, layer: int, slots_N: Tensor, positions_N: Tensor, key_NKD: Tensor, value_NKD: Tensor) -> None:
        """Store the keys and values of N tokens, each at its position in its slot."""
        self.keys[layer][slots_N, :, :, positions_N] = key_NKD
        self.values[layer][slots_N, :, positions_N] = value_NKD

    def write_routes(self, slots_N: Tensor, positions_N: Tensor, routes_NLk: Tensor) -> None:
        """Store the routes of N tokens, each at its position in its slot."""
        assert self.routes is not None
        self.routes[slots_N, positions_N] = routes_NLk

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]
        if self.routes is not None:
            self.routes[target, :length] = self.routes[source, :length]

    def swap(self, left: Sequence[int], right: Sequence[int], length: int) -> None:
        """Swap the first `length` tokens of slot left[i] and slot right[i], all i at once."""
        device = self.shape.device
        here, there = torch.tensor([*left, *right], device=device), torch.tensor([*right, *left], device=device)
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[here, :, :, :length] = keys[there, :, :, :length]
            values[here, :, :length] = values[there, :, :length]
        if self.routes is not None:
            self.routes[here, :length] = self.routes[there, :length]

    def rebuild(self, rows: Sequence[int], lengths: Sequence[int], slots: int, capacity: int) -> None:
        """Resize: new slot i takes lengths[i] tokens of old slot rows[i], other slots are empty.

        Works layer by layer, so that at most one layer exists twice.
        """
        self.slots, self.capacity = slots, capacity
        moves = [move for move in zip(range(slots), rows, lengths, strict=False) if move[2]]
        for layer in range(self.shape.layers):
            old, new = self.keys[layer], self._empty(self.shape.key_dim, capacity)
            for target, source, length in moves:
                new[target, :, :, :length] = old[source, :, :, :length]
            self.keys[layer] = new
            old, new = self.values[layer], self._empty(capacity, self.shape.value_dim)
            for target, source, length in moves:
                new[target, :, :length] = old[source, :, :length]
            self.values[layer] = new
        before, self.routes = self.routes, self._unrouted()
        if before is not None and self.routes is not None:
            for target, source, length in moves:
                self.routes[target, :length] = before[source, :length]


@dataclass(frozen=True, slots=True)
class CacheSpan:
    """A run of new tokens in one slot: positions `start` to `start + count`, at `offset` of the flat batch.

    `copies` are other slots with the same tokens; they get the same keys and values.
    """

    slot: int
    start: int
    count: int
    offset: int
    copies: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that it is computed for."""
        return self.slot, *self.copies


@dataclass(frozen=True, slots=True)
class Copies:
    """Where keys and values go if some go to several slots: those of token `rows_M[i]` to `slots_M[i]`."""

    rows_M: Tensor
    slots_M: Tensor


class CachedAttention:
    """Plan for a flat batch over the cache: first the tokens of the slots that decode, one or a few for each, then
    those of `spans`.

    Decoding reads the cache rows 0 to `high` as one view, whether or not all of them take part: that is cheaper
    than gathering, as long as the decoding slots are close together. On a CPU, they are gathered if they are not.
    Every row has W queries, as many as the slot with the most new tokens.
    """

    def __init__(
        self,
        cache: KVCache,
        slots_N: Tensor,
        positions_N: Tensor,
        widths: Sequence[int],
        spans: Sequence[CacheSpan],
        prefix: int = 0,
        copies: Copies | None = None,
    ) -> None:
        """Take slot and position of each token.

        Args:
            widths: how many new tokens each slot that decodes has, slots ascending. The first tokens are theirs.
            prefix: the slots that decode start with so many tokens in common, all before their positions; keys
                and values of these are read from the first of the slots only.
            copies: where keys and values go; None: to the slots of the tokens.
        """
        self.cache = cache
        self._copies = copies
        self.slots = slots_N
        self.positions = positions_N
        self.spans = spans
        self.decoding, self.width = sum(widths), max(widths, default=0)
        decode = slots_N[: self.decoding]
        self.prefix = prefix
        self.first = int(decode[0]) if prefix else 0
        self.high = int(decode[-1]) + 1 if widths else 0
        self._rows, self._gathered = decode, None
        if widths and slots_N.device.type == "cpu" and len(widths) * WORTH_GATHERING <= self.high:
            self.high = len(widths)
            self._gathered, self._rows = torch.unique_consecutive(decode, return_inverse=True)
        self.length = int(positions_N[: self.decoding].max()) + 1 if widths else 0
        self._one_each = self.width == 1 and self.decoding == self.high
        if self.width > 1:
            self._columns = torch.tensor([c for width in widths for c in range(width)], device=slots_N.device)
        self._decode_bias: dict[tuple[int | None, int], Tensor] = {}
        self._span_bias: dict[tuple[int, int, int | None], Tensor] = {}

    def attend(
        self,
        layer: int,
        query_NHD: Tensor,
        key_NKD: Tensor,
        value_NKD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        if (copies := self._copies) is None:
            self.cache.write(layer, self.slots, self.positions, key_NKD, value_NKD)
        else:
            rows_M = copies.rows_M
            self.cache.write(layer, copies.slots_M, self.positions[rows_M], key_NKD[rows_M], value_NKD[rows_M])
        keys_SKDC, values_SKCD = self.cache.keys[layer], self.cache.values[layer]
        parts = []
        if self.high:
            parts.append(self._decode(layer, query_NHD[: self.decoding], scaling, window))
        for span in self.spans:
            for piece in _pieces(span, query_NHD.shape[1]):
                query_LHD = query_NHD[piece.offset : piece.offset + piece.count]
                parts.append(
                    self._prefill(piece, query_LHD, keys_SKDC[span.slot], values_SKCD[span.slot], scaling, window)
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def keep_routes(self, routes_NLk: Tensor) -> None:
        if (copies := self._copies) is None:
            self.cache.write_routes(self.slots, self.positions, routes_NLk)
        else:
            rows_M = copies.rows_M
            self.cache.write_routes(copies.slots_M, self.positions[rows_M], routes_NLk[rows_M])

    def _decode(self, layer: int, query_nHD: Tensor, scaling: float, window: int | None) -> Tensor:
        kv_heads = self.cache.shape.heads
        query_nKGD = query_nHD.view(len(query_nHD), kv_heads, -1, query_nHD.shape[-1])
        prefix = self.prefix if window is None or window >= self.length else 0
        keys_RKDC = self._read(self.cache.keys[layer][..., prefix : self.length])
        values_RKCD = self._read(self.cache.values[layer][:, :, prefix : self.length])
        scores_nKGC = self._by_token(torch.bmm(self._by_row(query_nKGD), keys_RKDC.flatten(0, 1)))
        bias = self._bias_of_decode(window, prefix, query_nHD.dtype)
        scores_nKGC = torch.add(bias, scores_nKGC, alpha=scaling)
        if prefix:
            shared = self._scores_of_prefix(layer, query_nKGD * scaling)
            scores_nKGC = torch.cat([shared, scores_nKGC], -1)
        weights_nKGC = torch.softmax(scores_nKGC, -1, dtype=torch.float32).to(query_nHD.dtype)
        own = self._by_row(weights_nKGC[..., prefix:])
        out_nKGD = self._by_token(torch.bmm(own, values_RKCD.flatten(0, 1)))
        if prefix:
            values_KCD = self.cache.values[layer][self.first, :, :prefix]
            out_nKGD += _times(weights_nKGC[..., :prefix], values_KCD)
        return out_nKGD.flatten(1, 2)

    def _read(self, cached_SKXX: Tensor) -> Tensor:
        """(R, ...): the rows of the slots that decode, maybe with others between them."""
        if self._gathered is None:
            return cached_SKXX[: self.high]
        return cached_SKXX.index_select(0, self._gathered)

    def _scores_of_prefix(self, layer: int, query_nKGD: Tensor) -> Tensor:
        """(n, K, G, prefix): scores of the common prefix, which is read once, from the first slot that decodes."""
        return _times(query_nKGD, self.cache.keys[layer][self.first, ..., : self.prefix])

    def _by_row(self, x_nKGX: Tensor) -> Tensor:
        """(R * K, W * G, X): the tokens of each row together, padded with zeros."""
        if self._one_each:
            return x_nKGX.flatten(0, 1)
        kv_heads, group, size = x_nKGX.shape[1:]
        if self.width == 1:
            x = x_nKGX.new_zeros(self.high, kv_heads, group, size).index_copy_(0, self._rows, x_nKGX)
        else:
            x = x_nKGX.new_zeros(self.high, kv_heads, self.width, group, size)
            x[self._rows, :, self._columns] = x_nKGX
        return x.view(self.high * kv_heads, self.width * group, size)

    def _by_token(self, x_BLX: Tensor) -> Tensor:
        """(n, K, G, X): the inverse of `_by_row`."""
        x = x_BLX.view(self.high, self.cache.shape.heads, self.width, -1, x_BLX.shape[-1])
        if self.width > 1:
            return x[self._rows, :, self._columns]
        return x[:, :, 0] if self._one_each else x[:, :, 0].index_select(0, self._rows)

    def _bias_of_decode(self, window: int | None, start: int, dtype: torch.dtype) -> Tensor:
        """(n, 1, 1, length - start): 0 where a token may attend, the most negative number elsewhere; the positions
        from `start` on."""
        if (window, start) not in self._decode_bias:
            last_n = self.positions[: self.decoding]
            self._decode_bias[window, start] = bias_of(last_n, self.length, window, dtype, start)[:, None, None]
        return self._decode_bias[window, start]

    def _prefill(
        self,
        span: CacheSpan,
        query_LHD: Tensor,
        keys_KDC: Tensor,
        values_KCD: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        count, heads, dim = query_LHD.shape
        kv_heads, end = keys_KDC.shape[0], span.start + span.count
        group = heads // kv_heads
        key = (span.start, count, window)
        if key not in self._span_bias:
            last = torch.arange(span.start, end, device=self.slots.device)
            self._span_bias[key] = bias_of(last, end, window, query_LHD.dtype).repeat_interleave(group, 0)
        out = _attend(
            query_LHD.reshape(count, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, count * group, dim),
            keys_KDC[:, :, :end],
            values_KCD[:, :end],
            self._span_bias[key],
            scaling,
        )
        return out.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, heads, -1)


def _pieces(span: CacheSpan, heads: int) -> list[CacheSpan]:
    """Split the span so that the scores of each piece stay within `SCORES` numbers."""
    size = max(1, SCORES // (heads * (span.start + span.count)))
    return [
        replace(span, start=span.start + at, count=min(size, span.count - at), offset=span.offset + at)
        for at in range(0, span.count, size)
    ]


def _times(x_nKGX: Tensor, y_KXY: Tensor) -> Tensor:
    """(n, K, G, Y): all tokens with the same factor."""
    n, kv_heads, group, size = x_nKGX.shape
    out = torch.bmm(x_nKGX.transpose(0, 1).reshape(kv_heads, n * group, size), y_KXY)
    return out.view(kv_heads, n, group, -1).transpose(0, 1)


def attend_rows(
    cache: KVCache, layer: int, query_RHD: Tensor, length: int, bias: Tensor, scaling: float
) -> Tensor:
    """Attend with one query per slot 0 to R over the first `length` positions, read in place: (R, H, D)."""
    rows, heads, dim = query_RHD.shape
    kv_heads, capacity, value_dim = cache.values[layer].shape[1:]
    batch = rows * kv_heads
    return _attend(
        query_RHD.reshape(batch, heads // kv_heads, dim),
        cache.keys[layer][:rows].view(batch, dim, capacity)[:, :, :length],
        cache.values[layer][:rows].view(batch, capacity, value_dim)[:, :length],
        bias,
        scaling,
    ).view(rows, heads, value_dim)


def bias_of(last_L: Tensor, length: int, window: int | None, dtype: torch.dtype, start: int = 0) -> Tensor:
    """(L, length - start): 0 at the positions up to last_L (of the last `window`), the most negative number
    elsewhere; the positions from `start` on."""
    places = torch.arange(start, length, device=last_L.device)
    hidden = places > last_L[:, None]
    if window is not None:
        hidden |= places <= last_L[:, None] - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=last_L.device)
    return bias.masked_fill_(hidden, torch.finfo(dtype).min)


def _attend(query_BLD: Tensor, keys_BDC: Tensor, values_BCD: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Softmax attention, the softmax in float32; `bias` broadcasts to (B, L, C)."""
    scores = torch.baddbmm(bias, query_BLD, keys_BDC, alpha=scaling)
    return torch.bmm(torch.softmax(scores, -1, dtype=torch.float32).to(query_BLD.dtype), values_BCD)
