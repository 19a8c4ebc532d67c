"""Request checks shared by all engines, so that the same mistake gives the same error everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.config.section import COLDEST
from agentrl.types import Sampling

ROUNDING = 1e-3
"""How far above 0 rounding may put a log-probability."""


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for parameters outside their valid range."""
    if not sampling.temperature >= 0.0:
        raise ValueError(f"temperature must be 0 (greedy) or more, got {sampling.temperature}")
    if 0.0 < sampling.temperature < COLDEST:
        raise ValueError(f"temperature must be 0 (greedy) or at least {COLDEST}, got {sampling.temperature}")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1], got {sampling.top_p}")
    if not 0 <= sampling.top_k < 2**31:
        raise ValueError(f"top_k must be 0 (off) or more, and less than 2**31, got {sampling.top_k}")
    if not 0.0 <= sampling.min_p < 1.0:
        raise ValueError(f"min_p must be in [0, 1), got {sampling.min_p}")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
    for stop in sampling.stop_ids:
        if not isinstance(stop, int) or not 0 <= stop < 2**31:
            raise ValueError(f"stop_ids must be token ids, got {stop!r}")


def check_ids(ids: Sequence[int], vocabulary: int) -> NDArray[np.int64]:
    """Return the ids as an array.

    Raises:
        ValueError: the list is empty, or an id is outside the vocabulary.
    """
    array = np.asarray(ids, dtype=np.int64)
    if array.size == 0:
        raise ValueError("ids is empty: there is nothing to continue")
    if array.view(np.uint64).max() >= vocabulary:  # negative numbers are the largest ones
        wrong = min(int(array.min()), 0) or int(array.max())
        raise ValueError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")
    return array


def check_prompt(ids: Sequence[int], vocabulary: int, max_context: int) -> NDArray[np.int64]:
    """Return the ids as an array.

    Raises:
        ValueError: as for `check_ids`, or they leave no room for a new token.
    """
    array = check_ids(ids, vocabulary)
    if array.size >= max_context:
        raise ValueError(
            f"the prompt has {array.size} tokens and max_context is {max_context}: no room for a single new token"
        )
    return array


def check_session(session: str | None) -> None:
    """Raise ValueError for a session that is no name."""
    if session is not None and not isinstance(session, str):
        raise ValueError(f"session must be a string or None, got {session!r:.80}")
