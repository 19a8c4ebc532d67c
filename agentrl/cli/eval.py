"""`agentrl eval`: evaluate a checkpoint or a model behind an endpoint, and compare evaluations."""

from __future__ import annotations

import math
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import PlayOverrides, given_options
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.eval.result import EvalResult


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
    if compare is not None:
        _compare(context, target, *compare)
        return
    bounds = _bounds(minimum, attempts)

    from agentrl.eval import target as names

    fields = partial(_pairs, request, "--request") if request else None
    endpoint = names.make_endpoint(base_url, model, api_key_env, fields)
    prices = names.make_prices(price_prompt, price_completion, price_cached, endpoint)
    if temperature is not None or attempts == 1:
        names.check_training_temperature(overrides)
    subject, config, base = names.find(target, env, overrides, endpoint)

    from agentrl.eval.evaluate import EvalOptions, default_folder, make_spec
    from agentrl.eval.evaluate import evaluate as play
    from agentrl.reporting.display import make_display
    from agentrl.reporting.safe_console import SafeConsole

    options = EvalOptions(
        split="held_out" if split is Split.HELD_OUT else "train",
        tasks=tasks,
        attempts=attempts,
        temperature=temperature,
        filters=names.make_filters(top_p, top_k, min_p),
        concurrency=concurrency or (16 if endpoint else config.engine.max_slots),
        prices=prices,
    )
    folder = out or default_folder(base, subject, make_spec(subject, config, options))
    with make_display(config.name, again="", console=SafeConsole(stderr=True)) as display:
        result = play(subject, config, options, folder=folder, fresh=fresh, reporter=display)
    _say(result, bounds)


def _compare(context: typer.Context, target: Path | None, a: Path, b: Path) -> None:
    """Print how evaluation B differs from A. Raises ConfigError if there are other arguments."""
    from agentrl.eval.compare import compare
    from agentrl.eval.tables import comparison_text
    from agentrl.reporting.safe_console import SafeConsole

    given = [each for each in given_options(context) if each != "--compare"]
    if rest := [*([str(target)] if target else []), *given]:
        raise ConfigError(
            f"--compare takes the folders of two evaluations and plays nothing: drop the rest ({', '.join(rest)})"
        )
    SafeConsole().print(comparison_text(compare(a, b)), soft_wrap=True)


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
