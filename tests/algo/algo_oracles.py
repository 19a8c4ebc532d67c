"""Recorded outputs of verl 0.9.1 and TRL 1.16: numbers only, read as test cases.

The full record (`../shared/oracles` beside the repository) is used where it is there; a subset of its float64
cases lies in `data/` and always runs. `python tests/algo/algo_oracles.py` makes the subset from the record.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

FULL = Path(__file__).resolve().parents[2].parent / "shared" / "oracles"
SUBSET = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Case:
    """One recorded call: `inputs` and `outputs` name arrays or hold numbers."""

    folder: Path
    peer: str
    dtype: str
    id: str
    kind: str
    fn: str
    params: dict[str, Any]
    inputs: dict[str, str]
    outputs: dict[str, Any]
    error: str | None

    def array(self, key: str) -> np.ndarray:
        """A recorded array by its key in the archive."""
        return _arrays(self.folder, self.peer, self.dtype)[key]

    def input(self, name: str) -> Tensor:
        """An input as a flat tensor, [B, T] read row by row; per-row inputs stay [B]."""
        return self.tensor(self.inputs.get(name, f"in/{name}"))

    def output(self, name: str) -> Tensor:
        """An output that was recorded as an array, flat."""
        return self.tensor(self.outputs[name])

    def tensor(self, key: str) -> Tensor:
        """A recorded array as a flat tensor; integers and masks keep their type."""
        return torch.from_numpy(np.array(self.array(key))).flatten()

    @property
    def tolerance(self) -> float:
        """How far apart the same formula may be in this precision."""
        return 1e-7 if self.dtype == "float64" else 2e-5


@functools.cache
def _arrays(folder: Path, peer: str, dtype: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{peer}_{dtype}.npz") as archive:
        return {name: archive[name] for name in archive.files}


def _read(folder: Path, peer: str, dtype: str) -> list[Case]:
    record = json.loads((folder / f"{peer}_{dtype}.json").read_text())
    return [
        Case(
            folder, peer, dtype, c["id"], c["kind"], c.get("fn") or "", c["params"], c.get("inputs") or {},
            c.get("outputs") or {}, c.get("error"),
        )
        for c in record["cases"]
    ]  # fmt: skip


def parameters(peer: str, *kinds: str) -> list[Any]:
    """The cases of these kinds for `pytest.mark.parametrize`: the subset, and the full record or a skip."""
    found = [pytest.param(c, id=f"subset-{c.id}") for c in _read(SUBSET, peer, "float64") if c.kind in kinds]
    if not FULL.is_dir():
        skip = pytest.mark.skip(reason=f"the full record of {peer} is not there: no folder ../shared/oracles")
        return [*found, pytest.param(None, id="full", marks=skip)]
    for dtype in ("float64", "float32"):
        found += [pytest.param(c, id=f"{dtype}-{c.id}") for c in _read(FULL, peer, dtype) if c.kind in kinds]
    return found


def count(peer: str) -> int:
    """Number of cases in the full record of a peer, per precision."""
    return len(_read(FULL, peer, "float64"))


def close(actual: Tensor | float, expected: Tensor | float, tolerance: float, what: str = "") -> None:
    """Equal within the tolerance, relative to the largest expected value (at least 1)."""
    a, e = (torch.as_tensor(x).detach().double().flatten() for x in (actual, expected))
    assert a.shape == e.shape, f"{what}: shapes {tuple(a.shape)} and {tuple(e.shape)}"
    if not a.numel():
        return
    bound = tolerance * max(1.0, float(e.abs().max()))
    gap = float((a - e).abs().max())
    assert gap <= bound, f"{what}: differs by {gap:.3g}, more than {bound:.3g}"


def _subset_keys(case: Case) -> Iterator[str]:
    yield from case.inputs.values()
    for name, value in case.outputs.items():
        if isinstance(value, str) and (name != "returns" or case.fn == "gae"):
            yield value


def write_subset() -> None:
    """Write the subset: each function with each of its settings, not with each aggregation and each input."""
    SUBSET.mkdir(exist_ok=True)
    for peer in ("verl", "trl"):
        record = json.loads((FULL / f"{peer}_float64.json").read_text())
        cases = [c for c in _read(FULL, peer, "float64") if _wanted(c)]
        names = {c.id for c in cases}
        kept = [_short(c) for c in record["cases"] if c["id"] in names]
        arrays = _arrays(FULL, peer, "float64")
        keys = {k for c in cases for k in _subset_keys(c)} | {k for k in arrays if k.startswith("in/")}
        header = {"versions": record["versions"], "cases": kept}
        (SUBSET / f"{peer}_float64.json").write_text(json.dumps(header, separators=(",", ":")) + "\n")
        np.savez_compressed(SUBSET / f"{peer}_float64.npz", **{k: arrays[k] for k in sorted(keys)})


_FIGURES = ("pg_clipfrac", "ppo_kl", "is_mean", "is_ratio_fraction_high", "masked_fraction", "chi2_token", "kl")


def _short(case: dict[str, Any]) -> dict[str, Any]:
    """The case without the figures that no test reads."""
    metrics = case.get("outputs", {}).get("metrics")
    if not metrics:
        return case
    kept = {
        k: v
        for k, v in metrics.items()
        if k.endswith((*_FIGURES, "ppl_diff", "ppl_abs_diff", "ppl_ratio", "pg_clipfrac_lower"))
    }
    return case | {"outputs": case["outputs"] | {"metrics": kept}}


def _wanted(case: Case) -> bool:
    if case.error is not None:
        return case.id.count("/") < 3 or case.id.endswith("token-mean/noisw/seqadv")
    if case.kind == "policy_loss":
        plain = case.params.get("loss_agg_mode") == "token-mean" and "tokadv" not in case.id
        plain = plain and ("/isw" not in case.id or case.fn in ("vanilla", "geo_mean"))
        return plain or case.id in ("pl/geo_mean/empty_row", "pl/vanilla/default/seq-mean-token-mean/noisw/seqadv")
    if case.kind == "advantage":
        return "dense" not in case.id or case.fn == "gae"
    if case.kind == "rollout_rs":
        return "mask_with_empty" not in case.id
    if case.kind == "rollout_is":
        return "/2.0/" in case.id or "/0.5_5.0/" in case.id
    if case.kind in ("value_loss", "entropy"):
        return "token-mean" in case.id and "grad_logits" not in case.outputs
    if case.peer == "trl" and case.kind == "loss":
        return case.id.startswith("grpo/") or case.id.endswith(("/default", "/seqlevel", "/tis_token"))
    return True


if __name__ == "__main__":
    write_subset()
