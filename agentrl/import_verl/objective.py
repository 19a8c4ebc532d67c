"""The objective: advantage, loss, KL, correction and aggregation of a verl configuration as ours."""

from __future__ import annotations

import re
from typing import Any

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.parameters import STATISTICS
from agentrl.config.algorithm import ALONE
from agentrl.import_verl.found import Imported
from agentrl.import_verl.keys import ACTOR

_ROLLOUT_N = "actor_rollout_ref.rollout.n"
_MODE = f"{ACTOR}policy_loss.loss_mode"
_KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3"}
_KL |= {f"{name}+": "unbiased" if kind == "k3" else f"{kind}+" for name, kind in _KL.items()}
_SPLIT = re.compile(r"\s*,\s*")


def import_objective(found: Imported) -> None:
    """Everything under `algorithm`."""
    _advantage(found)
    bypass = _correction(found)
    _loss(found, bypass)
    _kl(found)
    if entropy := found.number(f"{ACTOR}entropy_coeff"):
        found.set("algorithm.entropy_coef", entropy)
    _aggregation(found)
    _updates(found)


def _advantage(found: Imported) -> None:
    name = found.text("algorithm.adv_estimator").removeprefix("AdvantageEstimator.").lower()
    name = name.removesuffix("_vectorized").removeprefix("tir_")
    with_std = found.flag("algorithm.norm_adv_by_std_in_grpo")
    ours = "dr_grpo" if name == "grpo" and not with_std else name
    if ours not in ESTIMATORS:
        found.say("algorithm.adv_estimator", "by hand", f"choose algorithm.advantage: {', '.join(ESTIMATORS)}")
        ours = "grpo"
    options: dict[str, Any] = {}
    if ours == "grpo_passk" and not with_std:
        options["normalize_std"] = False
    for key, readers in (("gamma", ("gae", "reinforce_plus_plus")), ("lam", ("gae",))):
        if ours not in readers:
            found.say(f"algorithm.{key}", "no effect", f"{ours} has no discount")
        elif (value := found.number(f"algorithm.{key}")) is not None:
            options[key] = value
    found.set("algorithm.advantage", {"name": ours, **options} if options else ours)
    if ours == "gdpo":
        keys, weights = found.value("algorithm.gdpo_reward_keys"), found.value("algorithm.gdpo_reward_weights")
        if isinstance(keys, list):
            found.hint(
                "algorithm.gdpo_reward_keys",
                "gdpo compares each reward separately: return these parts from a reward function "
                "`f(episode) -> dict`, and weight them in algorithm.advantage.weights as FUNCTION/PART",
            )
            if isinstance(weights, list):
                found.say("algorithm.gdpo_reward_weights", "by hand", "write them in algorithm.advantage.weights")
    elif ours not in ALONE and found.whole(_ROLLOUT_N) == 1:
        found.hint(
            _ROLLOUT_N,
            f"a group of one has no {ours} advantage (verl trains on its raw reward): set rollout.group_size to 2 "
            f"or more, or algorithm.advantage to one of {', '.join(sorted(ALONE))}",
        )


def _loss(found: Imported, bypass: bool) -> None:
    mode = found.text(_MODE).replace("-", "_")
    if found.flag(f"{ACTOR}use_gpg_loss"):
        mode = "gpg"
    if mode == "bypass_mode":
        mode, bypass = "vanilla", True
        found.set("algorithm.old_logprobs", "sampler")
    loss = "ppo_clip" if mode == "vanilla" else mode
    if bypass and _corrected(found, "loss_type") == "reinforce":
        loss = "reinforce"
    if loss not in POLICY_LOSSES:
        found.say(
            _MODE, "by hand", f"choose algorithm.loss: {', '.join(POLICY_LOSSES)}; or name a function of your own"
        )
        loss = "ppo_clip"
    options = _options(found, loss)
    found.set("algorithm.loss", {"name": loss, **options} if options else loss)
    used = _KEYS_OF.get(loss, ())
    for key in dict.fromkeys(key for keys in _KEYS_OF.values() for key in keys):
        if key not in used:
            found.say(ACTOR + key, "no effect", f"the loss {loss} does not read it")


_CLIPS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_KEYS_OF = {
    "ppo_clip": (*_CLIPS, "clip_ratio_c"),
    "gspo": _CLIPS,
    "geo_mean": _CLIPS,
    "cispo": _CLIPS,
    "dppo_tv": (*_CLIPS, "clip_ratio_c"),
    "dppo_kl": (*_CLIPS, "clip_ratio_c"),
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": (*_CLIPS, *(f"policy_loss.clip_cov_{part}" for part in ("ratio", "lb", "ub"))),
    "kl_cov": ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
    "dro": ("policy_loss.dro_beta",),
}
"""The keys below `actor` that each loss of verl reads."""


def _options(found: Imported, loss: str) -> dict[str, Any]:
    """The parameters of the chosen loss, verl's values written out."""

    def read(key: str) -> Any:
        return found.number(ACTOR + key)

    low, high = _clip(found, "low"), _clip(found, "high")
    if loss in ("ppo_clip", "gspo", "geo_mean", "clip_cov"):
        options = {"clip_low": low, "clip_high": high}
        if loss == "ppo_clip":
            options["dual_clip"] = read("clip_ratio_c")
        if loss == "clip_cov":
            options["fraction"] = read("policy_loss.clip_cov_ratio")
            options |= {"cov_low": read("policy_loss.clip_cov_lb"), "cov_high": read("policy_loss.clip_cov_ub")}
        return options
    if loss == "cispo":
        return {"ratio_max": 1 + high, "ratio_min": max(0.0, 1 - low)}
    if loss in ("dppo_tv", "dppo_kl"):
        return {"divergence_low": low, "divergence_high": high, "ratio_max": read("clip_ratio_c")}
    if loss == "sapo":
        return {"tau_positive": read("tau_pos"), "tau_negative": read("tau_neg")}
    if loss == "kl_cov":
        return {"fraction": read("policy_loss.kl_cov_ratio"), "kl_coef": read("policy_loss.ppo_kl_coef")}
    if loss == "dro" and (beta := read("policy_loss.dro_beta")) is not None:
        return {"beta": beta}
    if loss == "reinforce" and (level := _level(found)) is not None:
        low_weight, high_weight = _band(_corrected(found, "rollout_is_threshold", 2.0))
        return {"importance": level, "high": high_weight} | ({"low": low_weight} if low_weight else {})
    return {}


def _clip(found: Imported, side: str) -> Any:
    """`clip_ratio` is meant where the side is not given, although verl takes its default for the side there."""
    key = f"{ACTOR}clip_ratio_{side}"
    if not found.has(key) and found.has(f"{ACTOR}clip_ratio"):
        ratio = found.number(f"{ACTOR}clip_ratio")
        found.say(f"{ACTOR}clip_ratio", "taken", "both clip bounds of the loss, unless set separately")
        return ratio
    return found.number(key)


def _kl(found: Imported) -> None:
    in_loss, in_reward = found.flag(f"{ACTOR}use_kl_loss"), found.flag("algorithm.use_kl_in_reward")
    loss_keys = (f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type")
    reward_keys = (
        "algorithm.kl_penalty",
        *(f"algorithm.kl_ctrl.{k}" for k in ("type", "kl_coef", "horizon", "target_kl")),
    )
    for keys, on, switch in ((loss_keys, in_loss, "use_kl_loss"), (reward_keys, in_reward, "use_kl_in_reward")):
        for key in keys if not on else ():
            found.say(key, "no effect", f"{switch} is off")
    if not in_loss and not in_reward:
        found.set("algorithm.kl.coef", 0.0)
        return
    coef_key, kind_key = loss_keys if in_loss else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    coef = found.number(coef_key)
    found.set("algorithm.kl.coef", coef)
    if coef == 0:
        return
    if in_loss and in_reward and found.number("algorithm.kl_ctrl.kl_coef") != coef:
        found.say("algorithm.kl_ctrl.kl_coef", "by hand", f"one weight for both penalties; {coef} was taken")
    kind = _KL.get(found.text(kind_key))
    if kind is None:
        found.say(kind_key, "by hand", f"choose algorithm.kl.kind: {', '.join(dict.fromkeys(_KL.values()))}")
    else:
        found.set("algorithm.kl.kind", kind if in_loss else kind.removesuffix("+").replace("unbiased", "k3"))
    if in_reward:
        found.set("algorithm.kl.where", "both" if in_loss else "reward")
        if found.text("algorithm.kl_ctrl.type") == "adaptive":
            found.set("algorithm.kl.control", "adaptive")
            found.set("algorithm.kl.target", found.number("algorithm.kl_ctrl.target_kl"))
            found.set("algorithm.kl.horizon", found.number("algorithm.kl_ctrl.horizon"))
        else:
            for key in ("horizon", "target_kl"):
                found.say(f"algorithm.kl_ctrl.{key}", "no effect", "kl_ctrl.type is fixed")


# --- correction ---------------------------------------------------------------------------------------------

_PLACES = ("algorithm.rollout_correction.", f"{ACTOR}rollout_correction.", "algorithm.")
_LEVELS = {"token": "token", "true": "token", "sequence": "sequence", "geometric": "sequence"}
_OLD_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _corrected(found: Imported, name: str, default: Any = None) -> Any:
    """A key of the correction, wherever it stands."""
    return next((v for place in _PLACES if (v := found.keys.values.get(place + name)) is not None), default)


def _level(found: Imported) -> str | None:
    level = str(_corrected(found, "rollout_is", _corrected(found, "rollout_is_level", ""))).lower()
    if level == "true":
        level = str(_corrected(found, "rollout_is_level", "token")).lower()
    return _LEVELS.get(level)


def _band(threshold: Any) -> tuple[float | None, float]:
    """`2.0` is a highest ratio, `"0.5_5.0"` a lowest and a highest."""
    low, band, high = str(threshold).partition("_")
    try:
        return (float(low), float(high)) if band else (None, float(low))
    except ValueError:
        return None, 2.0


def _correction(found: Imported) -> bool:
    """The section `correction`; whether the sampler's log-probabilities are the old ones."""
    bypass = str(_corrected(found, "bypass_mode", False)).lower() == "true"
    if bypass:
        found.set("algorithm.old_logprobs", "sampler")
        if _corrected(found, "loss_type") != "reinforce":
            for place in _PLACES:
                for name in ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"):
                    found.say(place + name, "no effect", "with bypass_mode the ratio is that to the sampler")
    elif (level := _level(found)) is not None:
        found.set("algorithm.correction.importance", level)
        low, high = _band(_corrected(found, "rollout_is_threshold", 2.0))
        if _corrected(found, "rollout_is_mode") == "mask":
            low = float(_corrected(found, "rollout_is_threshold_lower", 1 / high))
        found.set("algorithm.correction.high", high)
        if low is not None:
            found.set("algorithm.correction.low", low)
        if str(_corrected(found, "rollout_is_batch_normalize", False)).lower() == "true":
            found.set("algorithm.correction.normalize", True)
    elif (cap := found.number(f"{ACTOR}tis_imp_ratio_cap")) is not None and cap > 0:
        found.set("algorithm.correction.importance", "token")
        found.set("algorithm.correction.high", cap)
    veto = _corrected(found, "rollout_token_veto_threshold", _corrected(found, "rollout_is_veto_threshold"))
    if veto is not None:
        found.set("algorithm.correction.veto", veto)
    _rejections(found)
    return bypass


def _rejections(found: Imported) -> None:
    given = _corrected(found, "rollout_rs")
    if given is None or str(given).lower() in ("false", "none", ""):
        return
    names = [str(n) for n in given] if isinstance(given, list) else _SPLIT.split(str(given))
    limits = _corrected(found, "rollout_rs_threshold", _corrected(found, "rollout_is_threshold", 2.0))
    listed = limits if isinstance(limits, list) else _SPLIT.split(str(limits))
    if len(listed) == 1:
        listed *= len(names)
    lower = _corrected(found, "rollout_rs_threshold_lower")
    rejected: dict[str, Any] = {}
    for name, limit in zip(names, listed, strict=False):
        statistic = _OLD_REJECTIONS.get(name, name)
        low, high = _band(limit)
        low = float(lower) if lower is not None and low is None else low
        if statistic not in STATISTICS:
            found.hint("algorithm.rollout_correction.rollout_rs", f"{name}: choose one of {', '.join(STATISTICS)}")
        elif statistic.endswith("k1"):
            rejected[statistic] = [1 / high if low is None else low, high]
        else:
            rejected[statistic] = high
    if rejected:
        found.set("algorithm.correction.reject", rejected)


# --- how losses are summed, and how often a step updates ----------------------------------------------------

_MEAN = "seq-mean-token-mean"
_OWN_MEAN = ("gspo", "sapo", "geo_mean")
"""Losses that verl aggregates as `_MEAN`, whatever `loss_agg_mode` says."""


def _aggregation(found: Imported) -> None:
    key = f"{ACTOR}loss_agg_mode"
    mode = found.text(key)
    loss = found.get("algorithm.loss")
    name = loss["name"] if isinstance(loss, dict) else loss
    if name in _OWN_MEAN and mode != _MEAN:
        if found.get("algorithm.entropy_coef") or (
            found.get("algorithm.kl.coef") and found.get("algorithm.kl.where") != "reward"
        ):
            found.hint(
                key,
                f"verl aggregates {name} as {_MEAN} and the penalties as {mode}; agentrl aggregates both alike: "
                f"algorithm.aggregation is {_MEAN}",
            )
        found.say(key, "no effect", f"verl aggregates {name} as {_MEAN} whatever it says")
        mode = _MEAN
    if mode == "seq-mean-token-sum-norm":
        factor = found.number(f"{ACTOR}loss_scale_factor")
        found.set("algorithm.aggregation_scale", factor or found.number("data.max_response_length"))
    elif mode not in ("token-mean", "token-sum", _MEAN, "seq-mean-token-sum"):
        found.say(key, "by hand", "choose algorithm.aggregation")
        return
    else:
        found.say(f"{ACTOR}loss_scale_factor", "no effect", f"{mode} has no factor")
    found.set("algorithm.aggregation", mode)


def _updates(found: Imported) -> None:
    batch, mini = found.whole("data.train_batch_size"), found.whole(f"{ACTOR}ppo_mini_batch_size")
    found.set("algorithm.updates_per_step", max(1, batch // max(1, mini)))
    if (epochs := found.whole(f"{ACTOR}ppo_epochs")) > 1:
        found.set("algorithm.epochs", epochs)
    if mini > batch:
        found.say(f"{ACTOR}ppo_mini_batch_size", "taken", f"the batch of {batch} in one update; verl refuses this")
    elif batch % max(1, mini):
        found.hint(
            f"{ACTOR}ppo_mini_batch_size", f"{batch} is not a multiple of {mini}; updates take equal shares"
        )
