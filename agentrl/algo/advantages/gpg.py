"""GPG: rewards minus the mean of the group, scaled up for groups without signal."""

from __future__ import annotations

from typing import Literal

from agentrl.algo.entries import Estimator
from agentrl.algo.late import Tensor
from agentrl.algo.parameters import Named
from agentrl.algo.siblings import group_centered, has_signal
from agentrl.algo.step_data import Advantages, StepData, spread


class GPGAdvantage(Named):
    """Reward - mean of the group, scaled up to make up for groups whose rewards are all equal.

    Source: GPG, arXiv:2504.02546.
    """

    name: Literal["gpg"] = "gpg"


def gpg(step: StepData, config: GPGAdvantage) -> Advantages:
    """The advantage of an episode for each of its tokens."""
    return spread(gpg_advantages(step.rewards_E, step.group_E), step)


def gpg_advantages(rewards_E: Tensor, group_E: Tensor) -> Tensor:
    """[E] alpha * (r - mean), alpha = episodes / episodes in groups whose rewards differ."""
    signal = int(has_signal(rewards_E, group_E).sum())
    return group_centered(rewards_E, group_E) * (rewards_E.numel() / max(signal, 1))


ENTRIES = {"gpg": Estimator(gpg, GPGAdvantage)}
