"""What the parameters of losses, estimators and corrections are made of. Their defaults exist nowhere else."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Discount = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
ClipLow = Annotated[float, Field(gt=0, lt=1)]
DualClip = Annotated[float, Field(gt=1)]


class Parameters(BaseModel):
    """Named numbers and switches with their defaults: frozen, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Named(Parameters):
    """The parameters of one loss or estimator, chosen by its name."""

    name: str
    """Which one."""


def check_band(low: float | None, high: float) -> None:
    """Raises ValueError unless [low, high] is a band of ratios."""
    if low is not None and not 0 < low < high:
        raise ValueError(f"low = {low} must be above 0 and below high = {high}")
