"""GAE: generalized advantage estimation with a critic."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor, torch
from agentrl.algo.parameters import Discount, Named
from agentrl.algo.returns import Rows, discounts, scan, whiten
from agentrl.algo.step_data import Advantages, StepData, given


class GAE(Named):
    """Generalized advantage estimation; the critic has its own section, `critic`.

    Source: arXiv:1506.02438.
    """

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount of later rewards."""
    lam: Discount = 1.0
    """Weight of later value errors: 1 uses whole returns, 0 only the next value."""
    per: Literal["token", "turn"] = "token"
    """Apply `gamma` and `lam` per token or per turn; observations between tokens never count."""
    whiten: bool = True
    """Scale the advantages of a step to mean 0 and variance 1."""


def gae(step: StepData, config: GAE) -> Advantages:
    """The advantage of each token, and the critic's targets."""
    advantages_N, returns_N = gae_advantages(
        step.token_rewards(),
        given(step.values_N),
        step.sequence_N,
        gamma=config.gamma,
        lam=config.lam,
        turn_N=step.turn_N if config.per == "turn" else None,
    )
    return Advantages(whiten(advantages_N) if config.whiten else advantages_N, returns_N)


def gae_advantages(
    rewards_N: Tensor,
    values_N: Tensor,
    sequence_N: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    turn_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages_N, returns_N) over trained tokens, not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V. The value after
    the last trained token is 0: a truncated episode counts as ended.

    Args:
        values_N: [N] the critic's values.
        turn_N: [N] the turn of each token; if given, gamma and lam are applied once per turn.
    """
    rows = Rows(sequence_N)
    rewards_EL, values_EL = rows.pad(rewards_N), rows.pad(values_N)
    gamma_EL = discounts(rows, gamma, turn_N, rewards_EL.dtype)
    lam_EL = discounts(rows, lam, turn_N, rewards_EL.dtype)
    next_EL = torch.cat([values_EL[:, 1:], torch.zeros_like(values_EL[:, :1])], dim=1)
    delta_EL = rewards_EL + gamma_EL * next_EL - values_EL
    advantages_N = rows.flat(scan(delta_EL, gamma_EL * lam_EL))
    return advantages_N, advantages_N + values_N


ENTRIES = {"gae": Estimator(gae, GAE, ("values_N",), compares=False)}
