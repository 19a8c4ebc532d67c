"""Sample the next token, for a batch in which every row has separate sampling parameters.

One uniform number decides each draw: it is a hash of (seed, position), so it depends neither on the other rows nor
on when the row is computed. The logits do depend on the other rows, by the rounding of matrix products, so a draw
that this rounding could change is reported as unsure. Shapes: B rows, V vocabulary, b blocks, W tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

ROUNDING, ROUNDING_OF_LARGE = 5e-5, 4e-6
"""Maximum difference of a float32 logit between two batches, and as a share of the row's largest one, whichever is
more; half of it was measured (docs/design/local-engine.md)."""
_LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Number of logits processed at a time; limits the float64 scratch to 32 MiB, on a GPU to 256 MiB."""
_ONE_BLOCK = 64
"""From a larger vocabulary, a block of about sqrt(V) tokens is drawn first, and then one of these: there are fewer
borders that rounding could move across the number."""


def uniforms(seeds_B: NDArray[np.uint64], positions_B: IntArray) -> FloatArray:
    """Return (B,) numbers in [0, 1) with 53 random bits, from the splitmix64 finalizer over seed and position.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014); the seed is mixed
    before the position is added, so that neighboring seeds give unrelated streams.
    """
    state = mix(mix(seeds_B) + (positions_B.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: a bijection in which each bit depends on all others."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of a batch: arrays of length B, `uniform` from `uniforms`."""

    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    min_p: FloatArray
    uniform: FloatArray

    def of(self, rows: slice | IntArray) -> Draw:
        """Return the parameters of some rows."""
        return Draw(*(getattr(self, field.name)[rows] for field in fields(self)))


class Drawn(NamedTuple):
    """Ids (B,), their logprobs (B,), and which of them (B,) could differ if the logits differed by `ROUNDING`."""

    ids: Tensor
    logprobs: Tensor
    unsure: BoolArray


def sample(logits_BV: Tensor, draw: Draw) -> Drawn:
    """Sample one id per row. Logprobs are taken after temperature scaling but before any filter.

    Rows with temperature 0 take the largest logit, with the logprob at temperature 1. A row whose logits are not
    finite gets a logprob that is not finite. Filters apply in the order temperature, min_p and top_k, top_p.
    """
    vocabulary = logits_BV.shape[1]
    step = max(1, _LOGITS_AT_ONCE.get(logits_BV.device.type, 1 << 22) // vocabulary)
    parts = [
        _sample(logits_BV[i : i + step], draw.of(slice(i, i + step))) for i in range(0, logits_BV.shape[0], step)
    ]
    if len(parts) == 1:
        return parts[0]
    ids, logprobs, unsure = zip(*parts, strict=True)
    return Drawn(torch.cat(ids), torch.cat(logprobs), np.concatenate(unsure))


def _sample(logits_BV: Tensor, draw: Draw) -> Drawn:
    device, vocabulary = logits_BV.device, logits_BV.shape[1]
    greedy = draw.temperature == 0.0
    rounding_B = _rounding(logits_BV)
    logits_BV = logits_BV.float()
    if not (draw.temperature == 1.0).all():
        scale_B = np.where(greedy, 1.0, draw.temperature)
        logits_BV = logits_BV / torch.from_numpy(scale_B.astype(np.float32)).to(device)[:, None]
        rounding_B /= scale_B
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    if greedy.all():
        ids_B, unsure_B = _largest(logits_BV, rounding_B)
        return Drawn(ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0], unsure_B)
    probs_BV = logprobs_BV.double().exp_()
    cut_B = np.zeros(len(greedy), dtype=np.bool_)
    filtered = ~greedy & (((draw.top_k > 0) & (draw.top_k < vocabulary)) | (draw.top_p < 1.0) | (draw.min_p > 0.0))
    if filtered.any():
        rows = np.flatnonzero(filtered)
        rows_k = torch.from_numpy(rows).to(device)
        probs_BV[rows_k], cut_B[rows] = _filtered(probs_BV[rows_k], draw.of(rows), rounding_B[rows])
    drawn_B, unsure_B = _by_weight(probs_BV, draw.uniform, rounding_B)
    ids_B = torch.from_numpy(drawn_B).to(device)
    unsure_B |= cut_B
    if greedy.any():
        largest_B, close_B = _largest(logits_BV, rounding_B)
        ids_B = torch.where(torch.from_numpy(greedy).to(device), largest_B, ids_B)
        unsure_B = np.where(greedy, close_B, unsure_B)
    return Drawn(ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0], unsure_B)


def _rounding(logits_BV: Tensor) -> FloatArray:
    """Return (B,) by how much the logits of each row may differ in another batch; masked ones do not count."""
    if logits_BV.dtype != torch.float32:  # nobody repeats draws from others, and asking a GPU takes time
        return np.full(len(logits_BV), ROUNDING)
    ends_2B = np.abs(torch.stack(torch.aminmax(logits_BV, dim=-1)).cpu().numpy())
    size_B = np.where(np.isfinite(ends_2B), ends_2B, 0.0).max(0).astype(np.float64)
    return cast(FloatArray, np.maximum(ROUNDING, ROUNDING_OF_LARGE * size_B))


def _largest(logits_BV: Tensor, rounding_B: FloatArray) -> tuple[Tensor, BoolArray]:
    """Return (B,) indices of the largest logits, and whether the second largest is within rounding of each."""
    best_B2 = logits_BV.topk(min(2, logits_BV.shape[1]), -1).values.cpu().numpy()
    with np.errstate(invalid="ignore"):  # two infinite ones
        close_B = best_B2[:, 0] - best_B2[:, -1] <= 2 * rounding_B
    return logits_BV.argmax(-1), close_B & (best_B2.shape[1] > 1)


def _by_weight(weights_BV: Tensor, uniform_B: FloatArray, rounding_B: FloatArray) -> tuple[IntArray, BoolArray]:
    """Return (B,) indices drawn by weight, never one of weight 0, and whether rounding could change them."""
    count, vocabulary = weights_BV.shape
    if vocabulary <= _ONE_BLOCK:
        return _interval(weights_BV.cpu().numpy(), uniform_B, rounding_B)
    width = round(vocabulary**0.5)
    weights_BbW = F.pad(weights_BV, (0, -vocabulary % width)).view(count, -1, width)
    block_B, unsure_B = _interval(weights_BbW.sum(-1).cpu().numpy(), uniform_B, rounding_B)
    row_B = torch.from_numpy(np.arange(count) * weights_BbW.shape[1] + block_B).to(weights_BV.device)
    chosen_BW = weights_BbW.flatten(0, 1).index_select(0, row_B).cpu().numpy()
    second_B = uniforms((uniform_B * 2.0**53).astype(np.uint64), np.zeros(count, dtype=np.int64))
    index_B, unsure_too_B = _interval(chosen_BW, second_B, rounding_B)
    return block_B * width + index_B, unsure_B | unsure_too_B


def _interval(weights_BW: FloatArray, uniform_B: FloatArray, rounding_B: FloatArray) -> tuple[IntArray, BoolArray]:
    """Return (B,) indices whose interval of the cumulative weights contains `uniform`, and which are unsure.

    If the logits differ by r, a border c of the cumulative probabilities moves by at most 2 r c (1 - c).
    """
    cumulated_BW = weights_BW.cumsum(1)
    total_B = cumulated_BW[:, -1]
    target_B = np.minimum(uniform_B * total_B, np.nextafter(total_B, 0.0))
    index_B = (cumulated_BW > target_B[:, None]).argmax(1)  # 0 if the weights are nan
    rows_B = np.arange(len(index_B))
    upper_B = cumulated_BW[rows_B, index_B]
    unsure_B = np.zeros(len(index_B), dtype=np.bool_)
    for border_B in (upper_B, upper_B - weights_BW[rows_B, index_B]):
        reach_B = 2 * rounding_B * border_B * (total_B - border_B)
        unsure_B |= np.abs(target_B - border_B) * total_B < reach_B
    return index_B, unsure_B


def _filtered(probs_BV: Tensor, draw: Draw, rounding_B: FloatArray) -> tuple[Tensor, BoolArray]:
    """Keep the k most likely tokens with at least this share of the largest probability and, of these, the fewest
    whose mass reaches p; others get probability 0. Also return whether (B,) rounding could change which are kept.
    """
    device, vocabulary = probs_BV.device, probs_BV.shape[1]
    k_B1 = torch.from_numpy(np.where(draw.top_k > 0, draw.top_k, vocabulary)).to(device)[:, None]
    p_B1 = torch.from_numpy(draw.top_p).to(device)[:, None]
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=device)
    floor_B1 = torch.from_numpy(draw.min_p).to(device)[:, None] * sorted_BV[:, :1]
    mass_BV = sorted_BV.masked_fill((rank_V >= k_B1) | (sorted_BV < floor_B1), 0.0)
    mass_BV /= mass_BV.sum(-1, keepdim=True)
    before_BV = mass_BV.cumsum(-1) - mass_BV
    kept_BV = sorted_BV.masked_fill((mass_BV == 0.0) | ((before_BV >= p_B1) & (rank_V > 0)), 0.0)
    count_B1 = (kept_BV > 0.0).sum(-1, keepdim=True).clamp_(min=1)  # none if the logits are nan
    last_B1 = sorted_BV.gather(1, count_B1 - 1)
    next_B1 = sorted_BV.gather(1, count_B1.clamp(max=vocabulary - 1)).masked_fill(count_B1 == vocabulary, 0.0)
    rounding_B1 = torch.from_numpy(rounding_B).to(device)[:, None]
    share_B1 = torch.expm1(2 * rounding_B1)
    unsure_B = (
        (last_B1 - next_B1 < share_B1 * next_B1)
        | ((sorted_BV - floor_B1).abs() < share_B1 * floor_B1)
        | ((before_BV - p_B1).abs() < 2 * rounding_B1 * p_B1 * (1 - p_B1))
    ).any(-1)
    return torch.zeros_like(probs_BV).scatter_(1, order_BV, kept_BV), unsure_B.cpu().numpy()
