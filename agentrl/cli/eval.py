"""`agentrl eval`: evaluate a checkpoint or a model behind an endpoint, and compare evaluations."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import PlayOverrides, check_effect, given_options, keys_set, policy_folder, trained_by
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.engine.chat_client import Endpoint
    from agentrl.eval.evaluate import Subject
    from agentrl.eval.result import EvalResult, Prices
    from agentrl.types import Filters


class Split(StrEnum):
    """Which tasks are played."""

    HELD_OUT = "held_out"
    TRAIN = "train"


Target = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN|CHECKPOINT|TOOLS.YAML]",
        help="A run folder, a checkpoint, a model directory, a Hugging Face id in the local cache, or (for its "
        "env and limits) the YAML file of a run.",
        show_default=False,
    ),
]
EnvName = Annotated[
    str | None,
    typer.Option(
        help="Env to use instead: `module:Class` or `file.py:Class`; or the name of one of the run's envs. "
        "[default: the run's]",
        show_default=False,
    ),
]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Number of tasks. [default: eval.tasks of the run]", show_default=False)
]
Attempts = Annotated[
    int, typer.Option("--attempts", "-k", min=1, help="Episodes per task, for pass@k and pass^k.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="0 is greedy. [default: 0, or that of training with several attempts]", show_default=False
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        max=1.0, help="Sample from the most likely tokens that together have this probability.", show_default=False
    ),
]
TopK = Annotated[
    int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.", show_default=False)
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Sample from tokens with at least this share of the largest probability.",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Concurrent episodes. [default: 16 for an endpoint, else engine.max_slots]"),
]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        help="Evaluate the model behind this OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1.",
        show_default=False,
    ),
]
ApiKeyEnv = Annotated[
    str, typer.Option(metavar="NAME", help="Environment variable with the endpoint's API key.", show_default=False)
]
Request = Annotated[
    list[str],
    typer.Option(
        metavar="KEY=VALUE", help="Extra field for each request, e.g. reasoning_effort=low.", show_default=False
    ),
]
Price = Annotated[float | None, typer.Option(min=0.0, help="Dollars per million tokens.", show_default=False)]
Minimum = Annotated[
    list[str],
    typer.Option(
        "--min",
        metavar="NAME=VALUE",
        help="Exit with 1 if `solved`, `reward`, `reward/NAME`, `pass@K` or `pass^K` is below this.",
        show_default=False,
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Compare two finished evaluations task by task.", show_default=False),
]

_INSTEAD = {
    f"eval.{key}": f"--{key.replace('_', '-')}" for key in ("attempts", "temperature", "top_p", "top_k", "min_p")
}
"""Options that do what these keys do in training."""


def evaluate(
    context: typer.Context,
    target: Target = None,
    env: EnvName = None,
    tasks: Tasks = None,
    split: Annotated[Split, typer.Option(help="Tasks to evaluate.")] = Split.HELD_OUT,
    attempts: Attempts = 1,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    concurrency: Concurrency = None,
    base_url: BaseUrl = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name at the endpoint.", show_default=False)
    ] = None,
    api_key_env: ApiKeyEnv = "",
    request: Request = [],  # noqa: B006
    price_prompt: Price = None,
    price_completion: Price = None,
    price_cached: Price = None,
    minimum: Minimum = [],  # noqa: B006
    compare: Compare = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. [default: RUN/eval/..., or runs/eval/...]", show_default=False),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, even if some episodes are already done.")
    ] = False,
    overrides: PlayOverrides = [],  # noqa: B006
) -> None:
    """Evaluate a trained policy, or any model behind an endpoint, on the tasks of an env.

    Run the same command again to resume.
    """
    from agentrl.reporting.safe_console import SafeConsole

    if compare is not None:
        given = [each for each in given_options(context) if each != "--compare"]
        if rest := [*([str(target)] if target else []), *given]:
            raise ConfigError(
                "--compare takes the folders of two evaluations and plays nothing: drop the rest "
                f"({', '.join(rest)})"
            )
        from agentrl.eval.compare import compare as compare_folders
        from agentrl.eval.tables import comparison_text

        SafeConsole().print(comparison_text(compare_folders(*compare)), soft_wrap=True)
        return
    bounds = _bounds(minimum, attempts)
    endpoint = _endpoint(base_url, model, api_key_env, request)
    prices = _prices(price_prompt, price_completion, price_cached, endpoint)
    if temperature is not None or attempts == 1:
        _check_training_temperature(overrides)
    subject, config, base = find(target, env, overrides, endpoint)

    from agentrl.eval.evaluate import EvalOptions, default_folder, make_spec
    from agentrl.eval.evaluate import evaluate as play
    from agentrl.reporting.display import make_display

    options = EvalOptions(
        split="held_out" if split is Split.HELD_OUT else "train",
        tasks=tasks,
        attempts=attempts,
        temperature=temperature,
        filters=_filters(top_p, top_k, min_p),
        concurrency=concurrency or (16 if endpoint else config.engine.max_slots),
        prices=prices,
    )
    folder = out or default_folder(base, subject, make_spec(subject, config, options))
    with make_display(config.name, again="", console=SafeConsole(stderr=True)) as display:
        result = play(subject, config, options, folder=folder, fresh=fresh, reporter=display)
    _say(result, bounds)


def _say(result: EvalResult, bounds: dict[str, float]) -> None:
    """Print the result; exit with 1 if tasks were lost or a bound was missed."""
    from agentrl.eval.evaluate import check_minimum
    from agentrl.eval.tables import result_text
    from agentrl.reporting.safe_console import SafeConsole

    SafeConsole().print(result_text(result), soft_wrap=True)
    short = check_minimum(result, bounds)
    for text in short:
        SafeConsole(stderr=True).print(f"--min: {text}", style="red", soft_wrap=True, highlight=False)
    if short or result.lost:
        raise typer.Exit(1)


def find(
    target: Path | None, env: str | None, overrides: list[str], endpoint: Endpoint | None = None
) -> tuple[Subject, RunConfig, Path]:
    """What is evaluated, its configuration, and the default folder of its evaluations.

    Raises:
        CheckpointError: no valid weights were found.
        ConfigError: a bare model needs an env, or the env or an override is wrong.
    """
    from agentrl.config.load import load_sampling_config
    from agentrl.eval.evaluate import Subject
    from agentrl.run_folder.store import find_checkpoint

    _check_overrides(overrides, endpoint)
    named = env is not None and ":" not in env  # one of several envs of the run
    changes = [f"env.use={env}", "envs=null", *overrides] if env and not named else overrides
    if target is None:
        if endpoint is None:
            raise ConfigError("name a policy: a run folder, a checkpoint, or --base-url and --model")
        if env is None:
            raise ConfigError("name an environment: --env module:Class, or a run folder or YAML file with its env")
        return Subject(endpoint=endpoint), _bare(endpoint.model, changes, exists=False), Path("runs/eval")
    if str(target).startswith(("http:/", "https:/")) and not target.exists():
        raise ConfigError(
            f"{str(target).replace(':/', '://', 1)}: is a URL, not a folder; give it with --base-url, the model "
            "there with --model, and the env with --env module:Class, a run folder or a YAML file"
        )
    if target.is_dir():
        check_effect(overrides, "eval FOLDER", f"on an evaluation of {target}, which has the weights")
    target = policy_folder(target)
    if (folder := trained_by(target)) is not None:
        config = of_env(load_sampling_config(folder / "config.yaml", changes, check_paths=False), env)
        # The run deletes a checkpoint when there are newer ones.
        kept = (target.resolve().parent.parent if (target / "config.json").is_file() else folder) / "eval"
        if endpoint is not None:
            return Subject(endpoint=endpoint), config, kept
        found = find_checkpoint(target, hold=True)
        return Subject(checkpoint=found.path, step=found.step), config, kept
    if target.is_file():
        config = of_env(load_sampling_config(target, changes, check_paths=True), env)
        if endpoint is not None:
            return Subject(endpoint=endpoint), config, Path("runs/eval")
        if config.model.path is None:
            raise ConfigError(f"{target}: makes its model in training; train it first, then give its run folder")
        return Subject(checkpoint=Path(config.model.path)), config, Path("runs/eval")
    if not (target / "config.json").is_file():
        find_checkpoint(target)
        raise ConfigError(
            f"{target}: has no config.yaml; give a run folder, a checkpoint in one, or a model directory"
        )
    if endpoint is not None:
        raise ConfigError(f"{target} and --base-url {endpoint.address}: give one of them")
    if env is None:
        raise ConfigError(f"{target}: is a model outside of a run; name what it plays: --env module:Class")
    return Subject(checkpoint=target), _bare(str(target), changes), Path("runs/eval")


def of_env(config: RunConfig, env: str | None) -> RunConfig:
    """The run as one of its envs sees it; a run of one env itself.

    Raises:
        ConfigError: the run has several envs and none is chosen, or it has no env of this name.
    """
    from agentrl.suggest import did_you_mean

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


def _check_overrides(overrides: list[str], endpoint: Endpoint | None) -> None:
    """Check that every flag has an effect here. Raises ConfigError."""
    check_effect(overrides, "eval", "on an evaluation", _INSTEAD)
    if endpoint is not None:
        check_effect(overrides, "eval --base-url", f"with --base-url {endpoint.address}")


def _check_training_temperature(overrides: list[str]) -> None:
    """Refuse training's temperature where it is not used: several attempts without a --temperature use it.

    Raises:
        ConfigError: an override sets it.
    """
    for text in overrides:
        if ("rollout", "temperature") in keys_set(text):
            raise ConfigError(f"--set {text}: has no effect on this evaluation; use --temperature")


def _bare(model: str, changes: list[str], *, exists: bool = True) -> RunConfig:
    """The configuration of a policy outside of a run: the defaults with the overrides of the flags."""
    from agentrl.config.load import make_config

    return make_config(
        {"name": "eval", "model": {"path": os.path.abspath(model)}}, changes, model, check_paths=exists
    )


def _filters(top_p: float | None, top_k: int | None, min_p: float | None) -> Filters:
    """The sampling filter. Raises ConfigError if it leaves no tokens."""
    from agentrl.types import Filters

    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p:g}: must be above 0 and at most 1")
    if min_p is not None and not 0 <= min_p < 1:
        raise ConfigError(f"--min-p {min_p:g}: must be at least 0 and below 1")
    return Filters(1.0 if top_p is None else top_p, top_k or 0, min_p or 0.0)


def _endpoint(base_url: str | None, model: str | None, api_key_env: str, request: list[str]) -> Endpoint | None:
    from agentrl.engine.chat_client import Endpoint

    if base_url is None:
        for name, given in (("model", model), ("api-key-env", api_key_env), ("request", request)):
            if given:
                raise ConfigError(f"--{name} has no effect without --base-url")
        return None
    if model is None:
        raise ConfigError(f"--base-url {base_url}: name the model there: --model NAME")
    endpoint = Endpoint(base_url, model, api_key_env, request=_pairs(request, "--request"))
    endpoint.key()
    return endpoint


def _pair(text: str, option: str) -> tuple[str, Any]:
    from agentrl.config.source import read_value

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{option} {text}: write {option} KEY=VALUE")
    return key, read_value(value, f"{option} {text}")


def _pairs(texts: list[str], option: str) -> dict[str, Any]:
    """The values by their keys. Raises ConfigError if one has two."""
    found: dict[str, Any] = {}
    for text in texts:
        key, value = _pair(text, option)
        if key in found:
            raise ConfigError(f"{option} {text}: {key} is given twice; keep one of them")
        found[key] = value
    return found


def _prices(
    prompt: float | None, completion: float | None, cached: float | None, endpoint: Endpoint | None
) -> Prices | None:
    from agentrl.eval.result import Prices

    if prompt is None and completion is None and cached is None:
        return None
    if endpoint is None:
        raise ConfigError("prices have no effect without --base-url")
    if prompt is None or completion is None:
        raise ConfigError("give both --price-prompt and --price-completion")
    return Prices(prompt, completion, cached)


def _bounds(minimum: list[str], attempts: int) -> dict[str, float]:
    """Lower bounds by name. Raises ConfigError on invalid bounds, before any episode runs."""
    from agentrl.eval.stats import pass_counts

    bounds: dict[str, float] = {}
    for name, value in _pairs(minimum, "--min").items():
        text = f"{name}={value}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"--min {text}: the bound must be a finite number")
        kind, _, k = name.replace("^", "@").partition("@")
        measured = pass_counts(attempts)
        if kind == "pass" and k not in map(str, measured):
            there = f"; K is one of {', '.join(map(str, measured))}" if measured else ""
            raise ConfigError(f"--min {text}: with --attempts {attempts} there is no {name}{there}")
        if kind != "pass" and name not in ("solved", "reward") and not name.startswith("reward/"):
            raise ConfigError(f"--min {text}: the names are solved, reward, reward/NAME, pass@K and pass^K")
        bounds[name] = float(value)
    return bounds
