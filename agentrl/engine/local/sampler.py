"""Sample the next token, for a batch in which every row has separate sampling parameters.

One uniform number decides each draw: it is a hash of (seed, position), so it depends neither on the other rows nor
on when the row is computed. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LOGITS_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Number of logits processed at a time; limits the float64 scratch to 32 MiB, on a GPU to 256 MiB."""


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (B,) numbers in [0, 1) with 53 random bits, from the splitmix64 finalizer over seed and position.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014); the seed is mixed
    before the position is added, so that neighboring seeds give unrelated streams.
    """
    state = _mix(_mix(seeds_B) + (positions_B.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Draw:
    """Sampling parameters of a batch: arrays of length B, `uniform` from `uniforms`."""

    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]
    uniform: NDArray[np.float64]


def sample(logits_BV: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return ids (B,) and their logprobs (B,) under the temperature-scaled, otherwise unfiltered distribution.

    Rows with temperature 0 take the largest logit, with the logprob at temperature 1. A row whose logits are not
    finite gets a logprob that is not finite. Filters apply in the order temperature, min_p and top_k, top_p.
    """
    vocabulary = logits_BV.shape[1]
    step = max(1, _LOGITS_AT_ONCE.get(logits_BV.device.type, 1 << 22) // vocabulary)
    parts = [
        _sample(logits_BV[i : i + step], draw, slice(i, i + step)) for i in range(0, logits_BV.shape[0], step)
    ]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample(logits_BV: Tensor, draw: Draw, rows: slice) -> tuple[Tensor, Tensor]:
    device, vocabulary = logits_BV.device, logits_BV.shape[1]
    temperature, top_k, top_p = draw.temperature[rows], draw.top_k[rows], draw.top_p[rows]
    min_p = draw.min_p[rows]
    greedy = temperature == 0.0
    logits_BV = logits_BV.float()
    if not (temperature == 1.0).all():
        scale = torch.from_numpy(np.where(greedy, 1.0, temperature).astype(np.float32)).to(device)
        logits_BV = logits_BV / scale[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    if greedy.all():
        ids_B = logits_BV.argmax(-1)
        return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    probs_BV = logprobs_BV.double().exp_()
    uniform_B1 = torch.from_numpy(draw.uniform[rows]).to(device)[:, None]
    ids_B = _invert(probs_BV, uniform_B1)
    filtered = ~greedy & (((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0) | (min_p > 0.0))
    if filtered.any():
        index = torch.from_numpy(np.flatnonzero(filtered)).to(device)
        k_B1 = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)[filtered]).to(device)[:, None]
        p_B1 = torch.from_numpy(top_p[filtered]).to(device)[:, None]
        least_B1 = torch.from_numpy(min_p[filtered]).to(device)[:, None]
        ids_B[index] = _filtered(probs_BV[index], k_B1, p_B1, least_B1, uniform_B1[index])
    if greedy.any():
        ids_B = torch.where(torch.from_numpy(greedy).to(device), logits_BV.argmax(-1), ids_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]


def _invert(weights_BV: Tensor, uniform_B1: Tensor) -> Tensor:
    """Return (B,) indices whose interval of the cumulative weights contains `uniform`; never one of weight 0."""
    cumulated_BV = weights_BV.cumsum(-1)
    total_B1 = cumulated_BV[:, -1:]
    below_total = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    target_B1 = torch.minimum(uniform_B1 * total_B1, below_total)
    return torch.searchsorted(cumulated_BV, target_B1, right=True)[:, 0].clamp_(max=weights_BV.shape[1] - 1)


def _filtered(probs_BV: Tensor, k_B1: Tensor, p_B1: Tensor, least_B1: Tensor, uniform_B1: Tensor) -> Tensor:
    """Sample among the k most likely tokens with at least this share of the largest probability and, of these,
    among the fewest whose mass reaches p."""
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    unlikely_BV = sorted_BV < least_B1 * sorted_BV[:, :1]
    sorted_BV = sorted_BV.masked_fill((rank_V >= k_B1) | unlikely_BV, 0.0)
    sorted_BV /= sorted_BV.sum(-1, keepdim=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill((before_BV >= p_B1) & (rank_V > 0), 0.0)
    return order_BV.gather(1, _invert(sorted_BV, uniform_B1)[:, None])[:, 0]
