"""Which tokens `clip_cov` and `kl_cov` act on: those whose log-probability and advantage vary together.

These few tokens drive the entropy down. They are chosen once for the whole step, over all ranks, before the
update; chosen per micro-batch, they would depend on the micro-batch.
"""

from __future__ import annotations

from agentrl.algo.late import Tensor


def covariances(advantages_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """[N] (A - mean A) (log pi - mean log pi) over the trained tokens of a whole step."""
    logprobs_N = logprobs_N.detach()
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def shuffle_keys(keys_N: Tensor, seed: int) -> Tensor:
    """[N] long >= 0, a well mixed function of key and seed (splitmix64 with 64-bit wrap-around)."""
    state = keys_N.long() + _signed((seed + 1) * 0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shift_right(state, shift)) * _signed(factor)
    return (state ^ _shift_right(state, 31)) & 0x7FFFFFFFFFFFFFFF


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - (1 << 64) if number >> 63 else number


def _shift_right(state: Tensor, bits: int) -> Tensor:
    """Logical shift: long is signed, and >> on it would copy the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
