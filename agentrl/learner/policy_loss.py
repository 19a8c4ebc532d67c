"""The policy loss of a micro-batch.

Every token's weight comes from counts over the whole update, so that the losses of its micro-batches, on however
many ranks, add up to the loss of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.algo.aggregate import Totals, aggregate, aggregation_weights, totals_of_tokens
from agentrl.algo.correction import (
    Correction,
    LogprobDrift,
    Reject,
    believed_sequences,
    correct,
    drift,
    off_policy_sequences,
)
from agentrl.algo.kl import bounded_exp, kl_per_token, whole_kl
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.metrics import KINDS, Metric, Metrics, mean_of, sum_of
from agentrl.algo.parameters import Named
from agentrl.algo.ratio import LossOutput
from agentrl.algo.segments import trained
from agentrl.config.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from agentrl.config.choice import OwnFunction
from agentrl.errors import ConfigError, traceback_of
from agentrl.importing import load_function, try_function
from agentrl.learner.logprobs import TokenStats
from agentrl.learner.pack import Packed
from agentrl.reporting.metric_docs import describe

OF_LOSSES = frozenset(
    {
        "clip_fraction",
        "dual_clip_fraction",
        "gradient_weight",
        "importance_weight",
        "log_ratio_max",
        "policy_kl",
        "policy_kl_k3",
        "selected_fraction",
    }
)
"""Metrics that a loss reports, one of the user's own as well."""


@dataclass(frozen=True, slots=True)
class ConfiguredLoss:
    """The policy loss that a configuration names.

    Attributes:
        loss: with its parameters bound (see `agentrl.algo.losses`).
        select: for losses that take `selected_T`: chooses those tokens among all tokens of a step.
        correction: between sampler and learner.
        silent: whether an episode whose advantages are all 0 adds nothing to the gradient.
    """

    config: AlgorithmConfig
    loss: Callable[..., LossOutput]
    select: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    correction: Correction
    silent: bool


class Loss(NamedTuple):
    """A micro-batch's part of the loss, its metrics, and the drift if it was measured here.

    `tokens` are the values of its tokens for the record, if they were asked for.
    """

    value: Tensor
    metrics: Metrics
    drift: LogprobDrift
    tokens: Mapping[str, Tensor]


class Frozen(NamedTuple):
    """Log-probabilities of the trained tokens under the reference or teacher.

    Attributes:
        likeliest_Nk: log-probabilities of its likeliest tokens, for a KL of whole distributions.
        rest: whether there are more tokens than these.
    """

    logprobs_N: Tensor
    likeliest_Nk: Tensor | None = None
    rest: bool = False


def policy_loss(
    configured: ConfiguredLoss,
    packed: Packed,
    stats: TokenStats,
    totals: Totals,
    *,
    frozen: Frozen | None = None,
    observed_O: Tensor | None = None,
    kl_coef: float = 0.0,
    first_update: bool = True,
    record: bool = False,
) -> Loss:
    """The policy loss of one micro-batch with its penalties.

    Args:
        packed: its tokens; `columns` may hold learner_logprobs (before the first update; the current ones are
            taken if there are none), correction weights, selected, and the scale of the KL penalty and
            the mean of its step (see `agentrl.trainer.algorithm`).
        stats: of the policy that is trained, with gradients.
        totals: counts of the whole update.
        frozen: log-probabilities under the reference or teacher, if the loss has a KL penalty.
        observed_O: log-probabilities of the env's answers under the policy, if the loss has an observation loss.
        kl_coef: the current weight of the penalty.
        first_update: whether the policy is still the one that the step began with.
        record: return the values of the tokens.
    """
    config, columns = configured.config, packed.columns
    new_N, sequence_N, sampler_N = stats.logprobs_N, packed.sequence_N, packed.sampler_logprobs_N
    mask_N = torch.ones_like(packed.ids_N, dtype=torch.bool)
    evaluated_N = columns.get("learner_logprobs")
    learner_N = new_N.detach() if evaluated_N is None else evaluated_N
    old_N = sampler_N if config.old_logprobs == "sampler" else learner_N
    measured = LogprobDrift()
    if evaluated_N is None and first_update:
        measured = drift(learner_N, sampler_N, sequence_N, mask_N)
    weights_N = aggregation_weights(
        config.aggregation, mask_N, sequence_N, totals, scale=config.aggregation_scale, dtype=new_N.dtype
    )
    metrics: Metrics = {}
    loss_weights_N = weights_N * columns.get("high_entropy", 1.0)
    if "correction" in columns:
        loss_weights_N = loss_weights_N * columns["correction"]
    elif configured.correction.importance != "none":
        corrected = correct(learner_N, sampler_N, sequence_N, mask_N, configured.correction)
        loss_weights_N, metrics = loss_weights_N * corrected.weights_T, corrected.metrics
    kept_N = mask_N
    if config.ratio_veto is not None:
        kept_N = believed_sequences(new_N, old_N, sequence_N, mask_N, limit=config.ratio_veto)
        metrics = metrics | {"ratio_veto": mean_of(~kept_N)}
    if config.correction.off_policy is not None:
        near_N = off_policy_sequences(
            new_N, old_N, packed.advantages_N, sequence_N, mask_N, threshold=config.correction.off_policy
        )
        kept_N, metrics = kept_N & near_N, metrics | {"off_policy_masked": mean_of(~near_N)}
    selected = {} if configured.select is None else {"selected_T": columns["selected"].bool()}
    loss, found = configured.loss(
        new_N, old_N, packed.advantages_N, loss_weights_N, sequence_N, kept_N, **selected
    )
    metrics = metrics | found
    tokens: dict[str, Tensor] = {}
    if record:
        clipped_N = _clipped(loss, new_N, packed.advantages_N * loss_weights_N) & kept_N
        ratio_N = bounded_exp(new_N.detach() - old_N)
        tokens = {"learner_logprobs": learner_N, "ratio": ratio_N, "clipped": clipped_N}
        tokens |= {"kept": kept_N, "advantages": packed.advantages_N}
        tokens |= {} if stats.entropy_N is None else {"entropy": stats.entropy_N.detach()}
        tokens |= {} if frozen is None else {"ref_logprobs": frozen.logprobs_N}
        if configured.correction.importance != "none":
            tokens["weights"] = columns.get("correction", loss_weights_N / weights_N)
    if frozen is not None and kl_coef > 0:
        kl_N = _kl(config.kl, stats, frozen, mask_N, columns.get("kl_mean"))
        scaled_N = kl_N * columns["kl_scale"] if "kl_scale" in columns else kl_N  # an env with its own weight
        if "taught" in columns:  # some episodes have no teacher: those of other envs, or without a hint
            scaled_N, kl_N = scaled_N * columns["taught"], kl_N[columns["taught"] > 0]
        loss = loss + kl_coef * aggregate(scaled_N, weights_N, mask_N)
        metrics["kl"] = mean_of(kl_N)
    if stats.entropy_N is not None:
        metrics["entropy"] = mean_of(stats.entropy_N)
        if config.entropy_coef > 0:
            loss = loss - config.entropy_coef * aggregate(stats.entropy_N, weights_N, mask_N)
    if observed_O is not None:
        loss = loss - config.observation_coef * observed_O.sum() / max(totals.num_observed, 1)
        metrics["observation_loss"] = mean_of(-observed_O)
    metrics["loss"] = sum_of(loss)
    return Loss(loss, metrics, measured, tokens)


def _kl(config: KLConfig, stats: TokenStats, frozen: Frozen, mask_N: Tensor, mean_N: Tensor | None) -> Tensor:
    """[N] the KL of each token."""
    if config.loss_kind != "full":
        return kl_per_token(config.loss_kind, stats.logprobs_N, frozen.logprobs_N, mask_N, mean_N)
    assert stats.at_Nk is not None
    assert frozen.likeliest_Nk is not None
    return whole_kl(stats.at_Nk, frozen.likeliest_Nk, rest=frozen.rest, beta=config.jsd_beta)


def _clipped(loss: Tensor, logprobs_N: Tensor, pulls_N: Tensor) -> Tensor:
    """[N] whether the loss gives a token no gradient although its advantage and weight (`pulls_N`) would."""
    (gradient_N,) = torch.autograd.grad(loss, logprobs_N, retain_graph=True, allow_unused=True)
    return (pulls_N != 0) & (torch.zeros_like(pulls_N) if gradient_N is None else gradient_N).eq(0)


def make_policy_loss(config: AlgorithmConfig) -> ConfiguredLoss:
    """The policy loss that the configuration names; a user-supplied function is tested on a few tokens.

    Raises:
        ConfigError: a user-supplied function cannot be loaded or is invalid.
    """
    correction = make_correction(config.correction)
    if isinstance(config.loss, OwnFunction):
        return ConfiguredLoss(config, _own_loss(config.loss), None, correction, silent=False)
    return _built_in(config, config.loss, correction)


def make_correction(config: CorrectionConfig) -> Correction:
    """The correction between sampler and learner."""
    rules = tuple(
        Reject(name, limit[1], limit[0]) if isinstance(limit, tuple) else Reject(name, limit)  # type: ignore[arg-type]
        for name, limit in config.reject.items()
    )
    return Correction(config.importance, config.high, config.low, config.normalize, rules, config.veto)


def _built_in(config: AlgorithmConfig, parameters: Named, correction: Correction) -> ConfiguredLoss:
    entry = POLICY_LOSSES[parameters.name]
    loss = partial(entry.fn, config=parameters)
    choose: Callable[..., Tensor] | None = entry.select
    select = None if choose is None else partial(choose, config=parameters)
    return ConfiguredLoss(config, loss, select, correction, entry.silent)


def _own_loss(own: OwnFunction) -> Callable[..., LossOutput]:
    where, options = f"algorithm.loss {own.use!r}", own.options
    function = load_function(own.use, where)
    kinds: dict[str, str] = {}

    def loss(*tensors_T: Tensor) -> LossOutput:
        # what is masked has no loss, even if the function reads no mask
        *kept, sequence, mask = trained(tensors_T[-1], *tensors_T)
        if not mask.numel():
            return kept[0].sum(), {}  # no tokens, no loss: the function need not handle this
        _, sequence = torch.unique(sequence, return_inverse=True)  # sequences without tokens get no number
        try:
            found = function(*kept, sequence, mask, **options)
        except Exception as e:
            raise ConfigError(f"{where} raised {type(e).__name__}: {e}\n{traceback_of(e)}") from e
        value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(value, Tensor) or value.shape != () or not bool(value.isfinite()):
            raise ConfigError(f"{where}: must return a finite scalar tensor (or that and metrics), got {value!r}")
        named = _metrics(metrics, where)
        for name, metric in named.items():
            if (before := kinds.setdefault(name, metric.kind)) != metric.kind:
                raise ConfigError(f"{where}: its metric {name!r} was a {before} before and is a {metric.kind} now")
        return value, named

    def with_gradient(*tensors_T: Tensor) -> LossOutput:
        value, metrics = loss(*tensors_T)
        if not value.requires_grad and bool(value):
            raise _without_gradient(where)
        return value + tensors_T[0][:0].sum(), metrics  # a plain 0 chooses none of these tokens

    try_function(lambda: _check_loss(loss, where), where)
    return with_gradient


def _without_gradient(where: str) -> ConfigError:
    return ConfigError(f"{where}: its value does not depend on logprobs_T: there is nothing to train")


def _metrics(given: object, where: str) -> Metrics:
    """Metrics unchanged; plain tensors become the mean of their values. Raises ConfigError if they are none."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise ConfigError(f"{where}: metrics must be a mapping from names to numbers, got {given!r:.200}")
    if taken := sorted(name for name in given if name not in OF_LOSSES and describe(name) is not None):
        raise ConfigError(
            f"{where}: its metric {taken[0]!r} would replace agentrl's (docs/metrics.md): use another name"
        )
    return {name: _metric(m, f"{where}: its metric {name!r}") for name, m in given.items()}


def _metric(given: object, what: str) -> Metric:
    """One metric, detached. Raises ConfigError if it is none."""
    try:
        if not isinstance(given, Metric):
            values_N = torch.as_tensor(given)
            if values_N.is_complex():
                raise TypeError
            return mean_of(values_N)
        value, num = (torch.as_tensor(one).detach() for one in given[1:])
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{what} must be a number or a tensor of real numbers, got {given!r:.200}") from None
    if given.kind not in KINDS or value.ndim or num.ndim or value.is_complex():
        raise ConfigError(f"{what} must be made by mean_of, max_of, min_of or sum_of, got {given!r:.200}")
    return Metric(given.kind, value, num)


def _check_loss(loss: Callable[..., LossOutput], where: str) -> None:
    """A scalar with a gradient, that adds up over micro-batches."""
    random = torch.Generator().manual_seed(0)
    sequence_T = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask_T = torch.ones_like(sequence_T, dtype=torch.bool)
    old_T = -torch.rand(7, generator=random, dtype=torch.float64)
    new_T = old_T + 0.1 * torch.randn(7, generator=random, dtype=torch.float64)
    advantages_T = torch.randn(7, generator=random, dtype=torch.float64)
    totals = totals_of_tokens(mask_T, sequence_T)
    weights_T = aggregation_weights("token-mean", mask_T, sequence_T, totals, dtype=torch.float64)

    def of(part: slice) -> tuple[Tensor, Tensor]:
        leaf_T = new_T[part].clone().requires_grad_()
        sequence = sequence_T[part] - sequence_T[part][0]
        value, _ = loss(leaf_T, old_T[part], advantages_T[part], weights_T[part], sequence, mask_T[part])
        if not value.requires_grad:
            raise _without_gradient(where)
        value.backward()  # type: ignore[no-untyped-call]
        assert leaf_T.grad is not None
        return value.detach(), leaf_T.grad

    whole, gradient_T = of(slice(0, 7))
    if not bool(gradient_T.isfinite().all()):
        raise ConfigError(f"{where}: its gradient is not finite on a few tokens")
    (first, first_T), (second, second_T) = of(slice(0, 3)), of(slice(3, 7))
    if not torch.allclose(whole, first + second, 1e-6) or not torch.allclose(
        gradient_T, torch.cat([first_T, second_T]), 1e-6
    ):
        raise ConfigError(
            f"{where}: its value over two episodes ({float(whole):.6g}) is not the sum of its values over each "
            f"({float(first + second):.6g}): it would change with the micro-batches; return "
            "(weights_T * your_token_loss_T).sum()"
        )
