"""The parameters of each estimator and each policy loss, one section each."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.section import Section

NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Discount = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def check_band(low: float | None, high: float) -> None:
    if low is not None and low >= high:
        raise ValueError(f"low = {low} must be below high = {high}")


class GRPOOptions(Section):
    """Parameters of `advantage: grpo`."""

    std: Literal["group", "batch", "none"] = "group"
    """What the difference to the mean is divided by: the std of the group, of the whole step, or nothing."""
    eps: Above0 = 1e-6
    """Added to the std."""


class TurnLevelOptions(Section):
    """Parameters of `advantage: turn_level`."""

    gamma: Discount = 1.0
    """What a reward counts one turn earlier; those of the whole episode belong to its last turn."""
    baseline: Literal["group", "turn"] = "group"
    """Compare with all turns of the group, or with those of the same number."""
    normalize_std: bool = True
    """Divide by the std of what is compared with."""
    eps: Above0 = 1e-6
    """Added to the std."""


class GAEOptions(Section):
    """Parameters of `advantage: gae`; its critic has the section `critic`."""

    gamma: Discount = 1.0
    """Discount of later rewards."""
    lam: Discount = 1.0
    """Weight of later value errors: 1 uses whole returns, 0 the next value only."""
    per: Literal["token", "turn"] = "token"
    """What `gamma` and `lam` count; observations between tokens never count."""
    whiten: bool = True
    """Scale the advantages of a step to mean 0 and variance 1."""


class ReinforcePlusPlusOptions(Section):
    """Parameters of `advantage: reinforce_plus_plus`."""

    gamma: Discount = 1.0
    """Discount of later rewards."""
    per: Literal["token", "turn"] = "token"
    """What `gamma` counts."""


class GDPOOptions(Section):
    """Parameters of `advantage: gdpo`."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weights by reward name; 1 where a reward is not named."""
    normalize_std: bool = True
    """Divide each reward by its std within the group."""
    eps: Above0 = 1e-6
    """Added to the std."""


class PassKOptions(Section):
    """Parameters of `advantage: grpo_passk`."""

    normalize_std: bool = True
    """Divide by the std of the group."""
    eps: Above0 = 1e-6
    """Added to the std."""


class OptimalTokenBaselineOptions(Section):
    """Parameters of `advantage: optimal_token_baseline`."""

    zero_tail: bool = True
    """No baseline where the longest episode of a group has no sibling left."""


class PPOClipOptions(Section):
    """Parameters of `loss: ppo_clip`."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The policy ratio is held above 1 - clip_low."""
    clip_high: Above0 = 0.28
    """The policy ratio is held below 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Where the advantage is negative the loss is at most dual_clip times its size; null switches it off."""


class GSPOOptions(Section):
    """Parameters of `loss: gspo`."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio of a sequence is held above 1 - clip_low."""
    clip_high: Above0 = 4e-4
    """The ratio of a sequence is held below 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative the loss is at most dual_clip times its size; null switches it off."""


class GeoMeanOptions(Section):
    """Parameters of `loss: geo_mean`."""

    clip_low: Above0 = 0.4
    """The log-ratio of a token counts from -clip_low upwards where the advantage is negative."""
    clip_high: Above0 = 0.4
    """The log-ratio of a token counts up to clip_high where the advantage is positive."""


class CISPOOptions(Section):
    """Parameters of `loss: cispo`."""

    ratio_max: Above0 = 5.0
    """Ratios count up to this."""
    ratio_min: NonNegative = 0.0
    """Ratios count at least as this; 0 leaves the lower side open."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.ratio_min >= self.ratio_max:
            raise ValueError(f"ratio_min = {self.ratio_min} must be below ratio_max = {self.ratio_max}")
        return self


class SAPOOptions(Section):
    """Parameters of `loss: sapo`: how sharply the gate closes around a ratio of 1."""

    tau_positive: Above0 = 1.0
    """Where the advantage is positive."""
    tau_negative: Above0 = 1.05
    """Elsewhere."""
    level: Literal["token", "sequence"] = "token"
    """Gate the ratio of each token, or the geometric mean of those of its sequence."""


class ReinforceOptions(Section):
    """Parameters of `loss: reinforce`."""

    importance: Literal["none", "token", "sequence"] = "none"
    """Weigh by the ratio to the old policy, of each token or of its sequence, or not at all."""
    high: Above0 = 2.0
    """Ratios count up to this."""
    low: Above0 | None = None
    """Where given, ratios outside [low, high] count as 0 instead of being cut at high."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        check_band(self.low, self.high)
        return self


class DROOptions(Section):
    """Parameters of `loss: dro`."""

    beta: Above0 = 0.1
    """Weight of the squared log-ratio."""


class DPPOOptions(Section):
    """Parameters of `loss: dppo_tv` and `loss: dppo_kl`."""

    divergence_low: NonNegative = 0.2
    """Tokens with negative advantage stop once their probability has fallen by this divergence."""
    divergence_high: NonNegative = 0.2
    """Tokens with positive advantage stop once their probability has risen by this divergence."""
    ratio_max: Annotated[float, Field(ge=1)] = 20.0
    """Ratios count up to this."""


class ClipCovOptions(Section):
    """Parameters of `loss: clip_cov`."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """As in `ppo_clip`."""
    clip_high: Above0 = 0.2
    """As in `ppo_clip`."""
    fraction: Share = 2e-4
    """Share of the step's tokens that get no gradient (at least one token)."""
    cov_low: float = 1.0
    """They are drawn among those with a covariance above this."""
    cov_high: float = 5.0
    """They are drawn among those with a covariance below this."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low} must be below cov_high = {self.cov_high}")
        return self


class KLCovOptions(Section):
    """Parameters of `loss: kl_cov`."""

    fraction: Share = 2e-4
    """Share of the step's tokens, those of largest covariance, that are penalised (at least one)."""
    kl_coef: NonNegative = 1.0
    """Weight of |log-ratio| on them."""


class VESPOOptions(Section):
    """Parameters of `loss: vespo`: the weight W^k exp(lambda (1 - W)) of a sequence with ratio W."""

    k_positive: NonNegative = 2.0
    """k where the advantage is positive."""
    lambda_positive: NonNegative = 3.0
    """lambda where the advantage is positive."""
    k_negative: NonNegative = 3.0
    """k where the advantage is negative."""
    lambda_negative: NonNegative = 2.0
    """lambda where the advantage is negative."""
