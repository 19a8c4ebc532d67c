"""A random order of very many numbers without a table: each position is computed when it is asked for."""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 6


class Permutation:
    """A permutation of the numbers below `size`, chosen by `key`.

    A Feistel network permutes the numbers of an even number of bits, and results of `size` or more are permuted
    again until they are below (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """

    def __init__(self, size: int, key: str) -> None:
        """Raises ValueError if there are no numbers below `size`."""
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._bytes = (self._half + 7) // 8
        self._keys = [blake2b(f"{key}/{n}".encode(), digest_size=32).digest() for n in range(ROUNDS)]

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} of {self.size}")
        found = self._permuted(index)
        while found >= self.size:
            found = self._permuted(found)
        return found

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for key in self._keys:
            given = right.to_bytes(self._bytes, "little")
            mixed = int.from_bytes(blake2b(given, digest_size=8, key=key).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        return left << self._half | right
