"""How far the policy has moved from the reference, per token, and the controllers of the penalty.

With d = logprob - ref_logprob of a token drawn from the policy:

    k1   d                     unbiased value; gradient of its mean is zero, so never use it in the loss alone
    abs  |d|
    k2   d^2 / 2               biased value, unbiased gradient (on policy)
    k3   exp(-d) - 1 + d       unbiased value of low variance, biased gradient

A straight-through form ("k1+", "abs+", "k2+", "k3+") has the value of the one and the gradient of k2, which
is d * grad(logprob): the unbiased one, linear in the drift, so that it never vanishes where drift is large.
"unbiased" is k3+. "centered" has its value and the gradient (d - b) * grad(logprob), where b is the mean d of the
step: unbiased as well, and of lower variance where the reference is far away, as a teacher is at first. "full" is
not an estimate from the token drawn: `whole_kl` compares the whole distributions.

Source: Schulman, "Approximating KL divergence" (2020); arXiv:2506.09477 on the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import KL_KINDS

_MAX_LOG_RATIO = 20.0
"""Beyond it exp() is continued by its tangent: exp(20) is 5e8, and squares of it still fit float32."""


def bounded_exp(x_T: Tensor, bound: float = _MAX_LOG_RATIO) -> Tensor:
    """exp(x) up to `bound`, then its tangent: finite for every finite x, with a gradient that stays."""
    inner_T = x_T.clamp(max=bound)
    return torch.exp(inner_T) * (1 + (x_T - inner_T))


def kl_per_token(
    kind: str, logprobs_T: Tensor, ref_logprobs_T: Tensor, loss_mask_T: Tensor, mean_T: Tensor | None = None
) -> Tensor:
    """[T] the KL estimate of each token, 0 (value and gradient) where the token is not trained.

    Args:
        kind: one of KL_KINDS.
        logprobs_T: [T] log-probabilities under the policy; gradients flow into them.
        ref_logprobs_T: [T] under the reference; no gradient.
        loss_mask_T: [T] bool.
        mean_T: [T] the mean d of the step for "centered"; None: 0.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL kind {kind!r}; there are {', '.join(KL_KINDS)}")
    # Mask before exp(): inf or nan in a masked position would still poison the gradient.
    d_T = torch.where(loss_mask_T.bool(), logprobs_T - ref_logprobs_T.detach(), logprobs_T.new_zeros(()))
    if kind == "centered":
        above_T = d_T.detach() if mean_T is None else d_T.detach() - mean_T
        gradient_T = torch.where(loss_mask_T.bool(), above_T, 0.0) * d_T
        return _value("k3", d_T.detach()) + (gradient_T - gradient_T.detach())
    if kind == "unbiased" or kind.endswith("+"):
        value_T = _value("k3" if kind == "unbiased" else kind[:-1], d_T.detach())
        gradient_T = d_T.square() / 2
        return value_T + (gradient_T - gradient_T.detach())
    return _value(kind, d_T)


def whole_kl(at_Tk: Tensor, ref_at_Tk: Tensor, *, rest: bool, beta: float = 1.0) -> Tensor:
    """[T] a divergence of policy and reference in the place of each token: KL(policy, reference) by default.

    Its gradient does not depend on the token drawn there (Rao-Blackwell). Where `rest`, the k tokens are not the
    whole vocabulary, and the others count as one more token; the result is then a lower bound.

    Args:
        at_Tk: [T, k] log-probabilities under the policy; gradients flow into them.
        ref_at_Tk: [T, k] of the same tokens under the reference; no gradient.
        beta: of the generalized Jensen-Shannon divergence, arXiv:2306.13649, equation 1: with the mixture m of
            beta * reference and (1 - beta) * policy, beta * KL(reference, m) + (1 - beta) * KL(policy, m). As in
            TRL, 1 is KL(policy, reference) and 0 is KL(reference, policy).
    """
    own, other = at_Tk, ref_at_Tk.detach()
    if rest:
        own, other = _with_rest(own), _with_rest(other)
    if beta == 1:
        return _expected(own, own - other)
    if beta == 0:
        return _expected(other, other - own)
    bounded = [logprobs.clamp(min=-1e4) for logprobs in (own, other)]  # logaddexp(-inf, -inf) has the gradient nan
    mixture = torch.logaddexp(bounded[0] + math.log1p(-beta), bounded[1] + math.log(beta))
    return beta * _expected(other, other - mixture) + (1 - beta) * _expected(own, own - mixture)


def _with_rest(at_Tk: Tensor) -> Tensor:
    """[T, k + 1] with all other tokens as one more."""
    others_T = (1 - at_Tk.exp().sum(-1)).clamp(min=torch.finfo(at_Tk.dtype).eps)
    return torch.cat([at_Tk, others_T.log()[..., None]], dim=-1)


def _expected(logprobs_Tk: Tensor, values_Tk: Tensor) -> Tensor:
    """[T] the mean of the values under a distribution; impossible tokens count 0, whatever their value."""
    return (logprobs_Tk.exp() * values_Tk.masked_fill(logprobs_Tk == -torch.inf, 0.0)).sum(-1)


def _value(kind: str, d_T: Tensor) -> Tensor:
    if kind == "k1":
        return d_T
    if kind == "abs":
        return d_T.abs()
    if kind == "k2":
        return d_T.square() / 2
    # expm1 keeps the digits that exp(-d) - 1 + d loses for small d; equal to it to rounding elsewhere.
    near_T = torch.expm1(-d_T.clamp(-1.0, 1.0)) + d_T
    return torch.where(d_T.abs() <= 1.0, near_T, bounded_exp(-d_T) - 1 + d_T)


class FixedKL:
    """The coefficient of the KL penalty is fixed."""

    def __init__(self, coef: float) -> None:
        if not coef >= 0:
            raise ValueError(f"the KL coefficient must be 0 or larger, got {coef}")
        self.coef = coef

    def update(self, kl: float, num_episodes: int) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coef": self.coef, "start": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Does nothing: the coefficient comes from the configuration."""


class AdaptiveKL:
    """The coefficient follows the KL: it grows while the KL is above the target and shrinks below it.

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon. Source: arXiv:1909.08593.

    Args:
        coef: the initial coefficient.
        target: the target KL per token.
        horizon: how slowly it adapts, in episodes.
    """

    def __init__(self, coef: float, *, target: float, horizon: float) -> None:
        if not (coef > 0 and target > 0 and horizon > 0):
            raise ValueError(f"coef, target and horizon must be above 0, got {coef}, {target}, {horizon}")
        self.coef, self.target, self.horizon = coef, target, horizon
        self.start = coef

    def update(self, kl: float, num_episodes: int) -> None:
        """Adapt to the mean KL of a step and its number of episodes. A KL that is nan changes nothing."""
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        # Many episodes in one step: the factor must stay above 0, or the penalty would turn into a reward.
        self.coef *= max(1 + error * num_episodes / self.horizon, 0.1)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint needs."""
        return {"coef": self.coef, "start": self.start}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Resume with the coefficient of a checkpoint, unless it began at another one than is configured now.

        Target and horizon are the configuration's.
        """
        if float(state.get("start", self.start)) == self.start:
            self.coef = float(state["coef"])


KLController = FixedKL | AdaptiveKL
