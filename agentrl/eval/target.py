"""What an evaluation plays: the policy, its configuration and the folder, from what a user names.

Errors name the options of `agentrl eval`; `agentrl.evaluate` puts its arguments in their place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.load import load_sampling_config, make_config
from agentrl.config.overrides import check_effect, keys_set
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean
from agentrl.types import Filters

if TYPE_CHECKING:
    from agentrl.engine.chat_client import Endpoint
    from agentrl.eval.evaluate import Subject
    from agentrl.eval.result import Prices

ELSEWHERE = Path("runs/eval")
"""The default folder of evaluations of models outside of a run."""
_INSTEAD = {
    f"eval.{key}": f"--{key.replace('_', '-')}" for key in ("attempts", "temperature", "top_p", "top_k", "min_p")
}
"""Options that do what these keys do in training."""


def find(
    target: Path | None, env: str | None, overrides: Sequence[str], endpoint: Endpoint | None = None
) -> tuple[Subject, RunConfig, Path]:
    """What is evaluated, its configuration, and the default folder of its evaluations.

    Args:
        target: a run folder, a checkpoint, a model, or (for its env and limits) the YAML file of a run.
        env: an env to play instead, or the name of one of the run's envs.
        overrides: `a.b=c` each, as given to `--set`.
        endpoint: plays in place of the target's policy.

    Raises:
        CheckpointError: no valid weights were found.
        ConfigError: a bare model needs an env, or the env or an override is wrong.
    """
    from agentrl.eval.evaluate import Subject
    from agentrl.rollout.policy_folder import policy_folder, trained_by

    if target is not None:
        if str(target).startswith(("http:/", "https:/")) and not target.exists():
            raise ConfigError(
                f"{str(target).replace(':/', '://', 1)}: is a URL, not a folder; give it with --base-url, the "
                "model there with --model, and the env with --env module:Class, a run folder or a YAML file"
            )
        target = policy_folder(target)
    check_overrides(overrides, target, endpoint)
    named = env is not None and ":" not in env  # one of several envs of the run
    changes = [f"env.use={env}", "envs=null", *overrides] if env and not named else overrides
    if target is None:
        if endpoint is None:
            raise ConfigError("name a policy: a run folder, a checkpoint, or --base-url and --model")
        if env is None:
            raise ConfigError("name an environment: --env module:Class, or a run folder or YAML file with its env")
        return Subject(endpoint=endpoint), _bare(endpoint.model, env, overrides, exists=False), ELSEWHERE
    if (run := trained_by(target)) is not None:
        config = of_env(load_sampling_config(run / "config.yaml", changes, check_paths=False), env)
        if endpoint is not None:
            return Subject(endpoint=endpoint), config, _kept(target, run)
        subject, kept = find_policy(target)
        return subject, config, kept
    if target.is_file():
        config = of_env(load_sampling_config(target, changes, check_paths=True), env)
        if endpoint is not None:
            return Subject(endpoint=endpoint), config, ELSEWHERE
        return model_of(config, str(target)), config, ELSEWHERE
    subject, kept = find_policy(target)
    if endpoint is not None:
        raise ConfigError(f"{target} and --base-url {endpoint.address}: give one of them")
    if env is None:
        raise ConfigError(f"{target}: is a model outside of a run; name what it plays: --env module:Class")
    return subject, _bare(str(target), env, overrides), kept


def find_policy(target: Path) -> tuple[Subject, Path]:
    """A checkpoint of a run, or a model outside of one, and the default folder of its evaluations.

    Raises:
        CheckpointError: no valid weights were found.
        ConfigError: the folder is neither.
    """
    from agentrl.eval.evaluate import Subject
    from agentrl.rollout.policy_folder import policy_folder, trained_by
    from agentrl.run_folder.store import find_checkpoint

    target = policy_folder(target)
    if (run := trained_by(target)) is not None:
        found = find_checkpoint(target, hold=True)
        return Subject(checkpoint=found.path, step=found.step), _kept(target, run)
    if not (target / "config.json").is_file():
        find_checkpoint(target)
        raise ConfigError(
            f"{target}: has no config.yaml; give a run folder, a checkpoint in one, or a model directory"
        )
    return Subject(checkpoint=target), ELSEWHERE


def model_of(config: RunConfig, where: str) -> Subject:
    """The model that a configuration names.

    Raises:
        ConfigError: training would make it; `where` names the configuration.
    """
    from agentrl.eval.evaluate import Subject

    if config.model.path is None:
        raise ConfigError(f"{where}: makes its model in training; train it first, then give its run folder")
    return Subject(checkpoint=Path(config.model.path))


def _kept(target: Path, run: Path) -> Path:
    """Where evaluations of a run's policy go: the run deletes a checkpoint when there are newer ones."""
    return (target.resolve().parent.parent if (target / "config.json").is_file() else run) / "eval"


def of_env(config: RunConfig, env: str | None) -> RunConfig:
    """The run as one of its envs sees it; a run of one env itself.

    Raises:
        ConfigError: the run has several envs and none is chosen, or it has no env of this name.
    """
    names = ", ".join(config.envs)
    if config.envs and env is None:
        raise ConfigError(f"the run has several envs; name the one to evaluate: --env NAME (one of {names})")
    if env is None or (":" in env and not config.envs):
        return config
    if env in config.envs:
        return config.by_env[env]
    hint = did_you_mean(env, list(config.envs), otherwise=f"its envs are {names}") if config.envs else ""
    raise ConfigError(
        f"--env {env}: the run has no env of this name; {hint}"
        if config.envs
        else f"--env {env}: must be `module:Class` or `path/to/file.py:Class`"
    )


def check_overrides(overrides: Sequence[str], policy: Path | None, endpoint: Endpoint | None) -> None:
    """Check that every override has an effect on the evaluation of this policy. Raises ConfigError."""
    check_effect(overrides, "eval", "on an evaluation", _INSTEAD)
    if endpoint is not None:
        check_effect(overrides, "eval --base-url", f"with --base-url {endpoint.address}")
    if policy is not None and policy.is_dir():
        check_effect(overrides, "eval FOLDER", f"on an evaluation of {policy}, which has the weights")


def check_training_temperature(overrides: Sequence[str]) -> None:
    """Refuse training's temperature where it is not used: several attempts without a --temperature use it.

    Raises:
        ConfigError: an override sets it.
    """
    for text in overrides:
        if ("rollout", "temperature") in keys_set(text):
            raise ConfigError(f"--set {text}: has no effect on this evaluation; use --temperature")


def _bare(model: str, env: str, overrides: Sequence[str], *, exists: bool = True) -> RunConfig:
    """The configuration of a policy outside of a run: the defaults with the env and the overrides."""
    if ":" not in env:
        raise ConfigError(f"--env {env}: must be `module:Class` or `path/to/file.py:Class`")
    changes = [f"env.use={env}", *overrides]
    return make_config(
        {"name": "eval", "model": {"path": os.path.realpath(model)}}, changes, model, check_paths=exists
    )


def make_filters(top_p: float | None, top_k: int | None, min_p: float | None) -> Filters:
    """The sampling filter. Raises ConfigError if it leaves no tokens."""
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p:g}: must be above 0 and at most 1")
    if min_p is not None and not 0 <= min_p < 1:
        raise ConfigError(f"--min-p {min_p:g}: must be at least 0 and below 1")
    return Filters(1.0 if top_p is None else top_p, top_k or 0, min_p or 0.0)


def make_endpoint(
    base_url: str | None, model: str | None, api_key_env: str, request: Callable[[], Mapping[str, object]] | None
) -> Endpoint | None:
    """The endpoint that plays; None without a base URL.

    Args:
        request: gives additional fields of each request, if there are any.

    Raises:
        ConfigError: something is missing, invalid or without effect.
    """
    from agentrl.engine.chat_client import Endpoint

    if base_url is None:
        for name, given in (("model", model), ("api-key-env", api_key_env), ("request", request)):
            if given:
                raise ConfigError(f"--{name} has no effect without --base-url")
        return None
    if model is None:
        raise ConfigError(f"--base-url {base_url}: name the model there: --model NAME")
    endpoint = Endpoint(base_url, model, api_key_env, request={} if request is None else request())
    endpoint.key()
    return endpoint


def make_prices(
    prompt: float | None, completion: float | None, cached: float | None, endpoint: Endpoint | None
) -> Prices | None:
    """The prices of the endpoint's tokens. Raises ConfigError if one is missing, infinite or has no effect."""
    from agentrl.eval.result import Prices

    if prompt is None and completion is None and cached is None:
        return None
    if endpoint is None:
        raise ConfigError("prices have no effect without --base-url")
    if prompt is None or completion is None:
        raise ConfigError("give both --price-prompt and --price-completion")
    if not all(map(math.isfinite, (prompt, completion, cached or 0.0))):
        raise ConfigError("--price-prompt, --price-completion and --price-cached must be finite numbers")
    return Prices(prompt, completion, cached)
