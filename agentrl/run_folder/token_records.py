"""The learner's values of sampled tokens, next to the episodes of a step: columns, rounded and compressed.

    tokens/step-N.tok.zst    a line of JSON (episode ids, tokens of each, column names), then the columns

A column has one number for each sampled token of all episodes, in the order of ids and sampled segments: float32
with 16 bits of mantissa (flags: int8). The first bytes of all numbers come first, then the second ones, and so on,
which compresses well. NaN stands for a value that was not computed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from agentrl.errors import CheckpointError
from agentrl.run_folder.files import decompressed

if TYPE_CHECKING:  # whoever opens a run folder need not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.float64]

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
"""Flag: all advantages of its episode are 0, which leaves nothing to compute, or dropped its group."""


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
NAMES = tuple(field.name for field in fields(TokenColumns))


def tokens_file(run: Path, step: int) -> Path:
    """The file of a step."""
    return run / "tokens" / f"step-{step:06d}.tok.zst"


def encode_tokens(columns: Mapping[str, TokenColumns]) -> bytes:
    """The content of a file."""
    import numpy as np

    counts = [len(one.flags) if one.flags is not None else 0 for one in columns.values()]
    names = [name for name in NAMES if any(getattr(one, name) is not None for one in columns.values())]
    header = json.dumps({"ids": list(columns), "counts": counts, "columns": names}).encode() + b"\n"
    parts = [header]
    for name in names:
        found = [getattr(one, name) for one in columns.values()]
        filled = [
            np.full(n, np.nan) if values is None else values for values, n in zip(found, counts, strict=True)
        ]
        parts.append(_packed(np.concatenate(filled), flags=name == "flags"))
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(b"".join(parts))


def _packed(values: NDArray[np.generic], *, flags: bool) -> bytes:
    import numpy as np

    if flags:
        return values.astype(np.int8).tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    rounded = np.where(np.isnan(values.astype(np.float32)), bits, (bits + 0x40) & np.uint32(0xFFFFFF80))
    return rounded.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes()


def _unpacked(data: bytes, *, flags: bool) -> NDArray[np.generic]:
    import numpy as np

    if flags:
        return np.frombuffer(data, dtype=np.int8).astype(np.int64)
    planes = np.frombuffer(data, dtype=np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view("<f4").ravel().astype(np.float64)


def read_tokens(run: Path, step: int, names: Collection[str] = NAMES) -> Mapping[str, TokenColumns]:
    """The columns of a step by episode id; empty if none were recorded.

    Args:
        names: the columns to read; the others are None.

    Raises:
        CheckpointError: the file is damaged or cannot be read.
    """
    path = tokens_file(run, step)
    try:
        return _decoded(b"".join(decompressed(path)), names)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from None
    except (zstandard.ZstdError, EOFError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as e:
        raise CheckpointError(f"{path}: damaged: {(str(e).splitlines() or [type(e).__name__])[0]}") from None


def _decoded(data: bytes, names: Collection[str]) -> dict[str, TokenColumns]:
    import numpy as np

    line, _, body = data.partition(b"\n")
    header = json.loads(line)
    ids, counts, columns = header["ids"], header["counts"], header["columns"]
    if not all(type(id) is str for id in ids) or not all(type(n) is int and 0 <= n < 1 << 40 for n in counts):
        raise ValueError("its header has no ids of episodes with their numbers of tokens")
    if len(ids) != len(counts) or len(set(columns)) != len(columns) or len(columns) > len(NAMES):
        raise ValueError("its header names columns or counts that do not fit its episodes")
    total = sum(counts)
    ends = np.cumsum(counts)[:-1]
    split: dict[str, list[NDArray[np.generic]]] = {}
    at = 0
    for name in columns:
        size = total * (1 if name == "flags" else 4)
        if name in names:
            split[name] = np.split(_unpacked(body[at : at + size], flags=name == "flags"), ends)
        at += size
    if at != len(body):
        raise ValueError(f"it has {len(body)} bytes of columns, not {at}")
    known = [name for name in NAMES if name in split]
    return {
        id: TokenColumns(**{name: split[name][n] for name in known if not _missing(split[name][n])})  # type: ignore[arg-type]
        for n, id in enumerate(ids)
    }


def _missing(values: NDArray[np.generic]) -> bool:
    import numpy as np

    return values.dtype.kind == "f" and bool(np.isnan(values.astype(np.float64)).all())
