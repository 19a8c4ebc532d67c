"""A verl configuration as one of ours, with a line for every key that has no effect here.

Read are a YAML file (nested, or with dotted keys) and shell scripts whose command line sets `key=value`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from agentrl.config.algorithm import ADVANTAGES, LOSSES
from agentrl.errors import ConfigError

_SETTING = re.compile(r"\+{0,2}([a-z_]+(?:\.[A-Za-z_0-9]+)+)=(.*)", re.DOTALL)
_ROLLOUT = "actor_rollout_ref.rollout."
_ACTOR = "actor_rollout_ref.actor."
_LOSS = _ACTOR + "policy_loss.loss_mode"
_KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "k1+": "k1+",
    "k3+": "unbiased",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key: "taken" (as another key of ours), "no effect" here, or "by hand" (to be decided)."""

    key: str
    value: Any
    kind: Literal["taken", "no effect", "by hand"]
    text: str

    def __str__(self) -> str:
        return f"{self.kind:9} {self.key} = {self.value!r}: {self.text}"


@dataclass(slots=True)
class Imported:
    """Our configuration (plain data, ready to be written as YAML) and the notes, one a key of the source."""

    config: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Put a value at a dotted path."""
        *sections, key = path.split(".")
        place = self.config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value


# Keys that only change their name.
_RENAMED = {
    "actor_rollout_ref.model.path": "model.path",
    "data.train_batch_size": "rollout.groups_per_step",
    "data.seed": "seed",
    _ROLLOUT + "n": "rollout.group_size",
    _ROLLOUT + "temperature": "rollout.temperature",
    _ROLLOUT + "multi_turn.max_assistant_turns": "rollout.max_turns",
    _ACTOR + "entropy_coeff": "algorithm.entropy_coef",
    _ACTOR + "grad_clip": "optim.max_grad_norm",
    _ACTOR + "ppo_max_token_len_per_gpu": "learner.tokens_per_micro_batch",
    _ACTOR + "optim.lr": "optim.lr",
    _ACTOR + "optim.betas": "optim.betas",
    _ACTOR + "optim.weight_decay": "optim.weight_decay",
    _ACTOR + "optim.lr_warmup_steps": "optim.warmup_steps",
    "trainer.total_training_steps": "steps",
}
# Keys that verl itself parses and never uses in its default trainer.
_DEAD = {
    _ROLLOUT + "multi_turn.enable": "tools or an env make a run multi-turn",
    _ROLLOUT + "multi_turn.tokenization_sanity_check_mode": "verl no longer reads it; see tokenization_check",
    _ROLLOUT + "multi_turn.use_inference_chat_template": "verl does not read it",
    _ROLLOUT + "multi_turn.num_repeat_rollouts": "verl does not read it",
    "data.return_raw_chat": "messages are always kept",
    "data.truncation": "prompts are never cut",
    "trainer.balance_batch": "rows are packed by token budget",
}
_BY_HAND = {
    _ROLLOUT + "multi_turn.function_tool_path": "list its functions under env.options.tools as file.py:name",
    _ROLLOUT + "multi_turn.max_parallel_calls": "set ToolSettings.max_calls_per_turn on the env",
    _ROLLOUT + "multi_turn.max_tool_response_length": "it counts characters; set ToolSettings.observation_tokens",
    _ROLLOUT + "top_p": "training samples from the whole distribution",
    _ROLLOUT + "top_k": "training samples from the whole distribution",
    "trainer.total_epochs": "give `steps` instead",
    "reward.reward_model.enable": "ask a judge from a reward function (agentrl.env.judge)",
    "reward_model.enable": "ask a judge from a reward function (agentrl.env.judge)",
}


def import_verl(source: Path) -> Imported:
    """Translate the configuration in `source` (.yaml, .yml, or a script with `key=value` words).

    Raises:
        ConfigError: the file cannot be read, holds no verl keys, or names a tools file that cannot be read.
    """
    keys = read_keys(source)
    known = (
        "data.",
        "actor_rollout_ref.",
        "algorithm.",
        "trainer.",
        "critic.",
        "reward",
        "custom_reward_function.",
    )
    if not any(key.startswith(known) for key in keys):
        raise ConfigError(f"{source}: no verl key (data.*, actor_rollout_ref.*, algorithm.*, trainer.*) in it")
    found = Imported()
    for key, value in keys.items():
        if value is None or value == {}:
            continue
        if key in _RENAMED:
            found.set(_RENAMED[key], value)
            found.notes.append(Note(key, value, "taken", _RENAMED[key]))
        elif key in _DEAD:
            found.notes.append(Note(key, value, "no effect", _DEAD[key]))
        elif key in _BY_HAND:
            found.notes.append(Note(key, value, "by hand", _BY_HAND[key]))
        elif key in _SPECIAL:
            _SPECIAL[key](found, key, value, keys, source)
        else:
            found.notes.append(Note(key, value, "no effect", "has no counterpart here"))
    found.config.setdefault("env", {}).setdefault("use", "agentrl.env.compose:ComposedEnv")
    return found


def read_keys(source: Path) -> dict[str, Any]:
    """The leaves of a YAML file, or the `key=value` words of a script, by dotted key. Raises ConfigError."""
    if not source.is_file():
        raise ConfigError(f"import-verl: no file {source}")
    text = source.read_text(encoding="utf-8")
    if source.suffix in (".yaml", ".yml"):
        data = _yaml(text, source)
        if not isinstance(data, Mapping):
            raise ConfigError(f"{source}: not a mapping of keys")
        return dict(_leaves(data, ""))
    found: dict[str, Any] = {}
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as e:
        raise ConfigError(f"{source}: cannot be read as a shell script: {e}") from None
    for word in words:
        if match := _SETTING.fullmatch(word):
            found[match[1]] = _yaml(match[2], source) if match[2] else None
    return found


def _yaml(text: str, source: Path) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as e:
        raise ConfigError(f"{source}: not YAML: {str(e).splitlines()[0]}") from None


def _leaves(data: Mapping[str, Any], before: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        path = f"{before}{key}"
        found += _leaves(value, f"{path}.") if isinstance(value, Mapping) and value else [(path, value)]
    return found


Translate = Callable[[Imported, str, Any, Mapping[str, Any], Path], None]


def _file(target: str) -> Translate:
    def translate(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
        files = value if isinstance(value, list) else [value]
        found.set(target, str(files[0]))
        found.notes.append(Note(key, value, "taken", target))
        if len(files) > 1:
            found.notes.append(Note(key, files[1:], "by hand", "only one file is taken; join them"))

    return translate


def _lengths(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    prompt, response = keys.get("data.max_prompt_length", 512), keys.get("data.max_response_length", 512)
    found.set("rollout.token_budget", int(prompt) + int(response))
    found.set("rollout.max_tokens", int(response))
    found.notes.append(Note(key, value, "taken", "rollout.token_budget = prompt + response, over all turns"))


def _tools(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    path = source.parent / str(value)
    if not path.is_file():
        path = Path(str(value))
    if not path.is_file():
        raise ConfigError(f"{source}: {key}: no file {value}")
    data = _yaml(path.read_text(encoding="utf-8"), path)
    entries = data.get("tools") if isinstance(data, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) and "class_name" in e for e in entries):
        raise ConfigError(f"{path}: wanted `tools:` with a list of class_name entries")
    found.set(
        "env.options.tools",
        [{k: e[k] for k in ("class_name", "config", "tool_schema") if k in e} for e in entries],
    )
    found.notes.append(
        Note(key, value, "taken", f"env.options.tools ({len(entries)} tools, one instance an episode)")
    )


def _reward(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    name = keys.get(key.removesuffix("path") + "name") or "compute_score"
    found.set("env.options.reward", f"{value}:{name}")
    found.notes.append(Note(key, value, "taken", "env.options.reward; solution_str no longer holds tool output"))


def _quiet(text: str) -> Translate:
    def translate(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
        found.notes.append(Note(key, value, "taken", text))

    return translate


def _loss_name(keys: Mapping[str, Any]) -> str:
    """Our name of the policy loss that the keys choose."""
    mode = str(keys.get(_LOSS, "vanilla")).replace("-", "_")
    return "ppo_clip" if mode == "vanilla" else mode


def _loss(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    if _loss_name(keys) in LOSSES:
        found.set("algorithm.loss", _loss_name(keys))
        found.notes.append(Note(key, value, "taken", "algorithm.loss"))
    else:
        found.notes.append(Note(key, value, "by hand", "choose algorithm.loss"))


def _clip(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    """`clip_ratio` counts where low and high are not given apart."""
    loss = _loss_name(keys)
    if loss not in ("ppo_clip", "gspo", "clip_cov", "geo_mean"):
        found.notes.append(
            Note(key, value, "by hand", f"the limits of {loss} stand in algorithm.{LOSSES.get(loss)}")
        )
        return
    ours = {"clip_ratio_low": ("clip_low",), "clip_ratio_high": ("clip_high",)}.get(
        key.removeprefix(_ACTOR), ("clip_low", "clip_high")
    )
    for name in ours:
        if len(ours) == 1 or _ACTOR + name.replace("clip_", "clip_ratio_") not in keys:
            found.set(f"algorithm.{loss}.{name}", value)
    note = f"algorithm.{loss}.{' and '.join(ours)}" + ("" if len(ours) == 1 else ", where not given apart")
    found.notes.append(Note(key, value, "taken", note))


def _kl(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    in_loss = bool(keys.get(_ACTOR + "use_kl_loss", False))
    in_reward = bool(keys.get("algorithm.use_kl_in_reward", False))
    if in_loss:
        coef = float(keys.get(_ACTOR + "kl_loss_coef", 0.001))
        kind = _KL.get(str(keys.get(_ACTOR + "kl_loss_type", "low_var_kl")))
    else:
        coef = float(keys.get("algorithm.kl_ctrl.kl_coef", 0.001)) if in_reward else 0.0
        kind = _KL.get(str(keys.get("algorithm.kl_penalty", "kl")))
    found.set("algorithm.kl.coef", coef)
    if coef == 0:
        found.notes.append(Note(key, value, "taken", "algorithm.kl.coef = 0 (no penalty is switched on)"))
        return
    if kind is None:
        found.notes.append(Note(key, value, "by hand", f"algorithm.kl.kind is one of {', '.join(_KL.values())}"))
        return
    found.set("algorithm.kl.kind", kind)
    if in_reward:
        found.set("algorithm.kl.where", "both" if in_loss else "reward")
    found.notes.append(Note(key, value, "taken", "algorithm.kl"))


def _estimator(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    with_std = keys.get("algorithm.norm_adv_by_std_in_grpo", True)
    name = str(value).removesuffix("_vectorized").removeprefix("tir_")
    ours = "dr_grpo" if name == "grpo" and not with_std else name
    if ours not in ADVANTAGES:
        found.notes.append(Note(key, value, "by hand", "choose algorithm.advantage"))
        return
    found.set("algorithm.advantage", ours)
    if ours in ("gae", "reinforce_plus_plus"):
        for parameter in ("gamma", "lam") if ours == "gae" else ("gamma",):
            if f"algorithm.{parameter}" in keys:
                found.set(f"algorithm.{ours}.{parameter}", float(keys[f"algorithm.{parameter}"]))
    found.notes.append(Note(key, value, "taken", "algorithm.advantage"))


def _critic(target: str) -> Translate:
    def translate(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
        if keys.get("algorithm.adv_estimator", "gae") != "gae":
            found.notes.append(Note(key, value, "no effect", "there is no critic without adv_estimator gae"))
            return
        found.set(target, value)
        found.notes.append(Note(key, value, "taken", target))

    return translate


def _aggregation(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    if value in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"):
        found.set("algorithm.aggregation", value)
        found.notes.append(Note(key, value, "taken", "algorithm.aggregation"))
    else:
        found.notes.append(Note(key, value, "by hand", "choose algorithm.aggregation"))


def _updates(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    batch = int(keys.get("data.train_batch_size", 1024))
    mini = int(keys.get(_ACTOR + "ppo_mini_batch_size", batch))
    epochs = int(keys.get(_ACTOR + "ppo_epochs", 1))
    found.set("algorithm.updates_per_step", max(1, batch // max(1, mini)) * epochs)
    found.notes.append(Note(key, value, "taken", "algorithm.updates_per_step = batch / mini batch * epochs"))


def _frequency(target: str) -> Translate:
    def translate(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
        found.set(target, max(0, int(value)))
        found.notes.append(Note(key, value, "taken", target))

    return translate


def _name(found: Imported, key: str, value: Any, keys: Mapping[str, Any], source: Path) -> None:
    found.set("name", re.sub(r"[^A-Za-z0-9._-]", "-", str(value)))
    found.notes.append(Note(key, value, "taken", "name"))


_SPECIAL: dict[str, Translate] = {
    "data.train_files": _file("data.train"),
    "data.val_files": _file("data.held_out"),
    "data.max_prompt_length": _lengths,
    "data.max_response_length": _lengths,
    _ROLLOUT + "multi_turn.tool_config_path": _tools,
    "custom_reward_function.path": _reward,
    "custom_reward_function.name": _quiet("env.options.reward"),
    "reward.custom_reward_function.path": _reward,
    "reward.custom_reward_function.name": _quiet("env.options.reward"),
    _LOSS: _loss,
    _ACTOR + "clip_ratio": _clip,
    _ACTOR + "clip_ratio_low": _clip,
    _ACTOR + "clip_ratio_high": _clip,
    _ACTOR + "use_kl_loss": _kl,
    _ACTOR + "kl_loss_coef": _kl,
    _ACTOR + "kl_loss_type": _kl,
    _ACTOR + "loss_agg_mode": _aggregation,
    _ACTOR + "ppo_mini_batch_size": _updates,
    _ACTOR + "ppo_epochs": _updates,
    "algorithm.use_kl_in_reward": _kl,
    "algorithm.adv_estimator": _estimator,
    "algorithm.norm_adv_by_std_in_grpo": _quiet("algorithm.advantage (grpo with, dr_grpo without)"),
    "critic.optim.lr": _critic("critic.lr"),
    "critic.model.path": _critic("critic.path"),
    "critic.cliprange_value": _critic("critic.value_clip"),
    "trainer.critic_warmup": _critic("critic.warmup_steps"),
    "trainer.test_freq": _frequency("eval.every"),
    "trainer.save_freq": _frequency("checkpoint.every"),
    "trainer.experiment_name": _name,
}
