"""Draft tokens: guesses at the next tokens of a sequence, from what followed the same tokens earlier.

A policy that calls tools writes the same names, brackets and quotes again and again. One decode step computes a
sequence's last token together with its drafts, samples a token after each, and keeps those up to the first that
differs from its draft. Each token is still sampled from its own logits, with the random number that belongs to its
position. In float32 and for dense models, the output is therefore the same as without drafts. In other cases,
drafts can change a token through rounding, just as other sequences in the batch can.

Shapes: B sequences, N sampled tokens, j drafts.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from agentrl.engine.local.sampler import IntArray

CONTEXT = 3
"""Number of tokens that predict the next one."""
MOST = 7
"""Drafts of a sequence in one step."""
_ENTRIES_LOG2 = 16
_BITS = 21
"""Of a token in a key: vocabularies are smaller than 2 million."""
_TRUSTED, _MOST_TRUSTED, _PENALTY = 3, 15, 4
"""Each prediction has a score, which gains one when it is right and loses `_PENALTY` when it is wrong; it becomes
a draft at `_TRUSTED`. Scores of predictions that are right less than four times out of five tend to fall."""
_EMPTY = np.uint64(2**64 - 1)


class Drafts:
    """A table from the last tokens of a sequence to the one that followed them last, of constant size."""

    def __init__(self) -> None:
        size = 1 << _ENTRIES_LOG2
        self._keys = np.full(size, _EMPTY)
        self._tokens = np.zeros(size, dtype=np.int64)
        self._scores = np.zeros(size, dtype=np.int64)

    def learn(self, contexts_NC: IntArray, ids_N: IntArray) -> None:
        """Note which token followed each context. Of contexts that share an entry, the last of a call counts."""
        keys = _keys(contexts_NC)
        entries, backwards = np.unique(_entries(keys)[::-1], return_index=True)
        rows = len(keys) - 1 - backwards
        keys, ids_N = keys[rows], ids_N[rows]
        scores = self._scores[entries]
        known = self._keys[entries] == keys
        right = known & (self._tokens[entries] == ids_N)
        scores += np.where(right, 1, np.where(known, -_PENALTY, -1))
        replaced = ~right & (scores <= 0)
        self._scores[entries] = np.where(replaced, 1, np.minimum(scores, _MOST_TRUSTED))
        entries, keys, ids_N = entries[replaced], keys[replaced], ids_N[replaced]
        self._keys[entries], self._tokens[entries] = keys, ids_N

    def guess(self, contexts_BC: IntArray, room_B: IntArray, least: int) -> IntArray:
        """Return (B, j) drafts of sequences that end with these tokens, -1 behind the last of each.

        Args:
            room_B: the most drafts for each sequence.
            least: only as many columns as at least so many sequences have.
        """
        contexts_BC = contexts_BC.copy()
        columns = []
        going_B = np.ones(len(room_B), dtype=np.bool_)
        for column in range(min(MOST, int(room_B.max(initial=0)))):
            keys = _keys(contexts_BC)
            entries = _entries(keys)
            going_B = (
                going_B & (room_B > column) & (self._keys[entries] == keys) & (self._scores[entries] >= _TRUSTED)
            )
            if np.count_nonzero(going_B) < least:
                break
            columns.append(np.where(going_B, self._tokens[entries], -1))
            contexts_BC[:, :-1] = contexts_BC[:, 1:]
            contexts_BC[:, -1] = columns[-1]
        return np.stack(columns, 1) if columns else np.zeros((len(room_B), 0), dtype=np.int64)


def _keys(contexts_NC: IntArray) -> NDArray[np.uint64]:
    tokens_NC = contexts_NC.astype(np.uint64)
    keys = tokens_NC[:, 0]
    for place in range(1, CONTEXT):
        keys = (keys << np.uint64(_BITS)) | tokens_NC[:, place]
    return keys


def _entries(keys: NDArray[np.uint64]) -> IntArray:
    """Fibonacci hashing: the upper bits of a product with 2^64 over the golden ratio."""
    hashed = (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _ENTRIES_LOG2)
    return cast(IntArray, hashed.astype(np.int64))
