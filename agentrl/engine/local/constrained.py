"""Sampling for requests with extra options: grammar masks before sampling, alternatives after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.engine.base import GenerateOptions, Mask, TokenLogprob
from agentrl.engine.local.sampler import BoolArray, Draw, Drawn, sample


def sample_constrained(
    logits_BV: Tensor,
    draw: Draw,
    by_row: Mapping[int, GenerateOptions],
    alone: Callable[[int], Tensor] | None,
    kept: Callable[[NDArray[np.int64]], BoolArray],
) -> tuple[Tensor, Tensor, dict[int, Exception]]:
    """Return ids (B,) and logprobs (B,), with the masks of the special rows; logprobs are the unrestricted ones.

    Also return, by row, why a mask does not work: it raised, or allows no token.

    Args:
        alone: computes the logits (V,) of a row without the rest of the batch. Rows whose id depends on the
            rounding of the batch are sampled from these; `logits_BV` holds them afterwards. None: they are not.
        kept: which of the ids (B,) count; each row depends on the ids of earlier ones only.
    """
    masks = {row: options.mask for row, options in by_row.items() if options.mask is not None}
    allowed, failed = _allowed(masks, logits_BV)
    ids_B, logprobs_B, unsure_B = _sample_masked(logits_BV, draw, allowed)
    while alone is not None and unsure_B.any():
        unsure = np.flatnonzero(unsure_B & kept(ids_B.cpu().numpy()))
        if not len(unsure):
            break
        unsure_B[unsure] = False
        index = torch.from_numpy(unsure).to(logits_BV.device)
        logits_BV[index] = torch.stack([alone(row) for row in unsure.tolist()])
        again = {k: allowed[row] for k, row in enumerate(unsure.tolist()) if row in allowed}
        ids_B[index], logprobs_B[index], _ = _sample_masked(logits_BV[index], draw.of(unsure), again)
    for row in allowed:
        if torch.isfinite(logprobs_B[row]):
            try:
                masks[row].take(int(ids_B[row]))
            except Exception as error:
                failed[row] = error
    return ids_B, logprobs_B, failed


def _allowed(masks: Mapping[int, Mask], logits_BV: Tensor) -> tuple[dict[int, Tensor], dict[int, Exception]]:
    """Return (V,) by row, which tokens its mask allows, and why others do not say so."""
    allowed, failed = dict[int, Tensor](), dict[int, Exception]()
    for row, mask in masks.items():
        try:
            known = mask.allowed()[: logits_BV.shape[1]]
            if not known.any():
                raise ValueError("it allows no token that the model has")
            allowed_V = torch.zeros(logits_BV.shape[1], dtype=torch.bool)
            allowed_V[: len(known)] = torch.from_numpy(known)
            allowed[row] = allowed_V.to(logits_BV.device)
        except Exception as error:
            failed[row] = error
    return allowed, failed


def _sample_masked(logits_BV: Tensor, draw: Draw, allowed: Mapping[int, Tensor]) -> Drawn:
    if not allowed:
        return sample(logits_BV, draw)
    restricted_BV = logits_BV.clone()
    for row, allowed_V in allowed.items():
        restricted_BV[row].masked_fill_(~allowed_V, -torch.inf)
    ids_B, logprobs_B, unsure_B = sample(restricted_BV, draw)
    rows = torch.tensor(list(allowed), device=logits_BV.device)
    free_kV = scaled_logprobs(logits_BV[rows], draw.temperature[list(allowed)])
    logprobs_B[rows] = free_kV.gather(1, ids_B[rows][:, None])[:, 0]
    return Drawn(ids_B, logprobs_B, unsure_B)


def tell(
    by_row: Mapping[int, GenerateOptions],
    logits_BV: Tensor,
    temperature_B: NDArray[np.float64],
    ids_B: Tensor,
    logprobs_B: Tensor,
    version: int,
) -> None:
    """Report sampled tokens to their callbacks, with the requested alternatives."""
    for row, options in by_row.items():
        if options.on_token is None:
            continue
        top: tuple[tuple[int, float], ...] = ()
        if options.top:
            top = most_likely(scaled_logprobs(logits_BV[row][None], temperature_B[[row]])[0], options.top)
        options.on_token(TokenLogprob(int(ids_B[row]), float(logprobs_B[row]), version, top))


def scored(logprobs_TV: Tensor, ids: Sequence[int], top: int, version: int) -> list[TokenLogprob]:
    """Return the given tokens with their logprobs, and the `top` most likely tokens at each position."""
    target_T1 = torch.tensor(ids, dtype=torch.long, device=logprobs_TV.device)[:, None]
    own = logprobs_TV.gather(1, target_T1)[:, 0].tolist()
    return [
        TokenLogprob(id, logprob, version, most_likely(row_V, top) if top else ())
        for id, logprob, row_V in zip(ids, own, logprobs_TV, strict=True)
    ]


def scaled_logprobs(logits_BV: Tensor, temperature_B: NDArray[np.float64]) -> Tensor:
    """(B, V) log-probabilities at each row's temperature; at temperature 1 where it is 0 (greedy)."""
    scale_B = torch.from_numpy(np.where(temperature_B == 0.0, 1.0, temperature_B).astype(np.float32))
    return torch.log_softmax(logits_BV.float() / scale_B.to(logits_BV.device)[:, None], -1)


def most_likely(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """(id, logprob) of the `count` most likely tokens, best first."""
    best = torch.topk(logprobs_V, min(count, len(logprobs_V)))
    return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
