"""What the learner says about sampled tokens, beside the episodes of a step: columns, rounded and compressed.

    tokens/step-N.json.zst    one JSON object: columns by episode id, with null where a value is missing

A column has one number for each sampled token of its episode, in the order of the episode's sampled segments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic_core import from_json

from agentrl.errors import CheckpointError
from agentrl.run_folder.files import read_bounded

TRAINED = 1
"""Flag: the token is in the loss."""
CLIPPED = 2
"""Flag: the clip took the token's gradient away."""
MASKED = 4
"""Flag: the token is kept out of the loss: its episode was cut (`rollout.overlong: mask`) or failed a check."""
REJECTED = 8
"""Flag: the correction of off-policy tokens rejected the token."""
VETOED = 16
"""Flag: the ratio of its episode is out of bounds (`algorithm.ratio_veto`)."""
SKIPPED = 32
"""Flag: all advantages of its episode are 0, which leaves nothing to compute."""

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The learner's numbers about the sampled tokens of one episode; None for what was not computed.

    Attributes:
        learner_logprobs: before the update, in the learner's precision.
        ref_logprobs: of the reference policy.
        entropy: of the learner's distribution, in nats.
        ratio: learner to sampler, before clipping.
        advantages: as used in the loss.
        weights: importance weights of the correction.
        flags: TRAINED, CLIPPED, MASKED, REJECTED, VETOED and SKIPPED, added up.
    """

    learner_logprobs: Column | None = None
    ref_logprobs: Column | None = None
    entropy: Column | None = None
    ratio: Column | None = None
    advantages: Column | None = None
    weights: Column | None = None
    flags: NDArray[np.int64] | None = None


NOTHING_RECORDED = TokenColumns()
DIGITS = 6
"""Significant digits kept."""
MAX_BYTES = 1 << 30
"""Bytes of a file once it is uncompressed."""


def tokens_file(run: Path, step: int) -> Path:
    """The file of a step."""
    return run / "tokens" / f"step-{step:06d}.json.zst"


def encode_tokens(columns: Mapping[str, TokenColumns]) -> bytes:
    """The content of a file."""
    data = {
        id: {f.name: _listed(value) for f in fields(one) if (value := getattr(one, f.name)) is not None}
        for id, one in columns.items()
    }
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(
        json.dumps(data, separators=(",", ":")).encode()
    )


def _listed(values: NDArray[np.generic]) -> list[float | int | None]:
    if values.dtype.kind in "iu":
        return [int(value) for value in values.tolist()]
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]


def read_tokens(run: Path, step: int) -> Mapping[str, TokenColumns]:
    """The columns of a step by episode id; empty if none were recorded.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = tokens_file(run, step)
    try:
        data = from_json(zstandard.ZstdDecompressor().decompress(read_bounded(path), max_output_size=MAX_BYTES))
        return {id: _columns(one) for id, one in data.items()}
    except FileNotFoundError:
        return {}
    except (zstandard.ZstdError, ValueError, TypeError, AttributeError, MemoryError) as e:
        raise CheckpointError(f"{path}: damaged: {(str(e).splitlines() or [type(e).__name__])[0]}") from None


def _columns(data: Mapping[str, list[float | None]]) -> TokenColumns:
    known = {field.name for field in fields(TokenColumns)}
    found = {
        name: np.asarray([np.nan if v is None else v for v in values])
        for name, values in data.items()
        if name in known
    }
    if "flags" in found:
        found["flags"] = found["flags"].astype(np.int64)
    return TokenColumns(**found)
