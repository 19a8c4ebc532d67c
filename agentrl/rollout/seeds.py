"""Sampling seeds, derived from the run's seed."""

from __future__ import annotations

import hashlib


def draw_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed and the position of the sample; the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
