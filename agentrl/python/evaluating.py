"""Evaluate a policy from Python, as `agentrl eval` does."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from agentrl.config.load import load_sampling_config
from agentrl.config.run import ModelConfig, RunConfig
from agentrl.engine.chat_client import Endpoint
from agentrl.env.env import Env
from agentrl.env.toolenv.json_schema import shorten
from agentrl.errors import AgentRLError, CheckpointError, ConfigError, EngineError
from agentrl.eval import target as names
from agentrl.eval.compare import Comparison
from agentrl.eval.compare import compare as compare_folders
from agentrl.eval.evaluate import EvalOptions, Subject, default_folder, make_spec
from agentrl.eval.evaluate import evaluate as play
from agentrl.eval.result import EvalResult, mean_of, task_values
from agentrl.eval.stats import Estimate
from agentrl.eval.tables import result_text
from agentrl.extras import require
from agentrl.importing import name_object
from agentrl.python.blocking import Worker, in_event_loop
from agentrl.python.configure import configure
from agentrl.reporting.display import make_display
from agentrl.reporting.report import Silent
from agentrl.rollout.policy_folder import policy_folder, trained_by
from agentrl.run_folder.files import at_home
from agentrl.run_folder.records import EpisodeRecord, read_records
from agentrl.types import Episode

PolicyPath = str | os.PathLike[str]
"""A run folder, `RUN@STEP`, `RUN@best`, a checkpoint, a model directory or a Hugging Face id in the cache."""
EvalEnv = type[Env] | RunConfig | Mapping[str, object] | str | os.PathLike[str]
"""An env class or its name, or a configuration, its data, a YAML file or a run folder."""


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """The result of an evaluation. `print` shows it as `agentrl eval` does.

    Attributes:
        result: everything that results.json holds: estimates, stop reasons, tokens, seconds, cost.
        step: the optimizer steps of the checkpoint; 0 for other models.
        notes: what the command would have said about it; none if a `console` showed it.
    """

    result: EvalResult
    step: int = 0
    notes: Sequence[str] = ()

    @property
    def solved(self) -> float | None:
        """Share of solved attempts, averaged over tasks; None if the env does not declare what is solved."""
        return None if (found := self.estimates.get("solved")) is None else found.mean

    @property
    def reward(self) -> float:
        """Mean reward over tasks."""
        return self.estimates["reward"].mean

    @property
    def estimates(self) -> Mapping[str, Estimate]:
        """`solved`, `reward`, `reward/NAME`, `pass@K` and `pass^K`: means with 95 % confidence intervals."""
        return self.result.estimates

    @property
    def cost(self) -> float | None:
        """Dollars; None without prices, or if the endpoint did not report all tokens."""
        return self.result.cost

    @property
    def lost(self) -> int:
        """Tasks that could not be played, and are excluded from everything; the same call tries them again."""
        return self.result.lost

    @property
    def folder(self) -> Path:
        """The folder of the evaluation, a run folder."""
        return Path(self.result.folder)

    def tasks(self) -> list[dict[str, Any]]:
        """One row for each task: its id, the number of attempts, and their mean `solved`, `reward` and
        `reward/NAME`.

        Raises:
            CheckpointError: the folder is gone, is damaged, or no longer holds this result.
        """
        values = task_values(self._records())
        return [
            {"task": key.id, "attempts": len(rewards)}
            | {name: mean_of(each[key]) for name, each in values.items()}
            for key, rewards in values.get("reward", {}).items()
        ]

    def episodes(self) -> list[Episode]:
        """Every scored episode with its messages, by task.

        Raises:
            CheckpointError: the folder is gone, is damaged, or no longer holds this result.
        """
        return [record.episode for record in self._records() if record.episode.error is None]

    def _records(self) -> list[EpisodeRecord]:
        return read_records(_checked_folder(self), self.step)

    def __str__(self) -> str:
        return result_text(self.result).plain

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {value.mean:.4g}" for name, value in self.estimates.items())
        return f"<EvaluationResult of {self.result.spec.policy}: {means}; {self.folder}>"


def evaluate(
    policy: PolicyPath | None = None,
    env: EvalEnv | None = None,
    *,
    base_url: str | None = None,
    model: str | None = None,
    api_key_env: str = "",
    request: Mapping[str, object] | None = None,
    tasks: int | None = None,
    split: Literal["held_out", "train"] = "held_out",
    attempts: int = 1,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    concurrency: int | None = None,
    price_prompt: float | None = None,
    price_completion: float | None = None,
    price_cached: float | None = None,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    fresh: bool = False,
    console: Console | None = None,
) -> EvaluationResult:
    """Evaluate a policy on the tasks of an env, as `agentrl eval` does; works in a notebook, too.

    The same call resumes an interrupted evaluation, and returns the result of a finished one.

    Args:
        policy: a run folder (its newest checkpoint), `RUN@STEP`, `RUN@best`, a checkpoint, a model directory or a
            Hugging Face id in the local cache. By default the model of `env`, if that is a run or a configuration
            with `model.path`.
        env: what to play; by default the env of the run that trained the policy, with its limits. A class or its
            name (`module:Class`) replaces only the env, and the name of one of several envs chooses it. A
            configuration (see `configure` for its forms) or a run folder gives everything but the model.
        base_url: evaluate the model behind this OpenAI-compatible endpoint instead of a policy.
        model: its name there.
        api_key_env: environment variable with its API key.
        request: additional fields of each request.
        tasks: number of tasks; by default `eval.tasks`.
        split: which tasks.
        attempts: episodes per task, for pass@k and pass^k.
        temperature: 0 is greedy; by default 0, or that of training with several attempts.
        top_p: sample from the most likely tokens that together have this probability.
        top_k: sample from this many of the most likely tokens.
        min_p: sample from tokens with at least this share of the largest probability.
        concurrency: maximum concurrent episodes; by default 16 for an endpoint, else `engine.max_slots`.
        price_prompt: dollars per million tokens that the endpoint reads.
        price_completion: the same for tokens that it samples.
        price_cached: the same for tokens that it read from its cache.
        overrides: `a.b=c` each, as given to `--set`.
        out: folder for the results; by default in `RUN/eval`, or in `runs/eval` for other models.
        fresh: start over; the old folder is renamed.
        console: where progress goes; by default nothing is shown, and what should be read is in `notes`.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit the configuration.
        ConfigError: an argument, the env, the model or the endpoint is invalid, there are no such tasks, or the
            folder contains another evaluation.
        InfraError: no task could be played.
    """
    with _in_python():
        _check(policy, split, overrides, out)
        if console is not None and not isinstance(console, Console):
            raise ConfigError(f"console is {_kind(console)}: give a rich.console.Console")
        _check_texts(base_url=base_url, model=model, api_key_env=api_key_env)
        attempts = _whole("attempts", attempts) or 1
        tasks, concurrency = _whole("tasks", tasks), _whole("concurrency", concurrency)
        temperature = _number("temperature", temperature)
        fields = None if request is None else _fields(request)
        endpoint = names.make_endpoint(base_url, model, api_key_env, fields)
        prices = names.make_prices(
            _number("price_prompt", price_prompt),
            _number("price_completion", price_completion),
            _number("price_cached", price_cached),
            endpoint,
        )
        filters = names.make_filters(_number("top_p", top_p), _whole("top_k", top_k), _number("min_p", min_p))
        if temperature is not None or attempts == 1:
            names.check_training_temperature(overrides)
        subject, config, base = _find(policy, env, overrides, endpoint)
        at_once = concurrency or (16 if endpoint else config.engine.max_slots)
        options = EvalOptions(split, tasks, attempts, temperature, filters, at_once, prices)
        folder = (
            default_folder(base, subject, make_spec(subject, config, options)) if out is None else at_home(out)
        )
        return _play(subject, config, options, folder, fresh, console)


def compare(a: EvaluationResult | Path | str, b: EvaluationResult | Path | str) -> Comparison:
    """Compare evaluation B with evaluation A, paired by task, as `agentrl eval --compare` does; `print` shows it.

    Args:
        a: an evaluation or its folder.
        b: the same.

    Raises:
        CheckpointError: a folder holds no evaluation, or no longer the given result.
        ConfigError: they have no task in common.
    """
    return compare_folders(_checked_folder(a), _checked_folder(b))


def _checked_folder(of: EvaluationResult | Path | str) -> Path:
    """The folder of an evaluation. Raises CheckpointError if it no longer holds the given result."""
    if isinstance(of, str | os.PathLike):
        return at_home(of)
    if not isinstance(of, EvaluationResult):
        raise ConfigError(f"compare got {_kind(of)}: give an evaluation or its folder")
    if EvalResult.read(of.folder).priced(None) != of.result.priced(None):
        raise CheckpointError(
            f"{of.folder}: was played again and holds another result now; fresh=True keeps the earlier folder "
            "next to it, and out=... plays into another one"
        )
    return of.folder


def _check(policy: object, split: object, overrides: object, out: object) -> None:
    """Check what the type of an argument does not. Raises ConfigError."""
    if policy is not None and not isinstance(policy, str | os.PathLike):
        raise ConfigError(
            f"policy is {_kind(policy)}: give the path of a run, a checkpoint or a model; an env or a "
            "configuration is `env`"
        )
    if split not in ("held_out", "train"):
        raise ConfigError(f"split is {split!r}: it is 'train' or 'held_out'")
    if not isinstance(overrides, list | tuple) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(f"overrides is {overrides!r}: give a list of texts such as 'rollout.max_turns=3'")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise ConfigError(f"out is {_kind(out)}: give the path of a folder")
    for name, path in (("policy", policy), ("out", out)):
        if path is not None and not _may_exist(path):
            raise ConfigError(f"{name} is {str(path)[:60]!r}: no file system has such a path")


def _may_exist(path: str | os.PathLike[str]) -> bool:
    """Whether a path is short enough and has no NUL."""
    try:
        os.stat(path)
    except OSError as e:
        return e.errno != errno.ENAMETOOLONG
    except ValueError:
        return False
    return True


def _check_texts(**given: object) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}: give a text")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of {type(value).__name__}"


def _whole(name: str, value: int | None) -> int | None:
    """The number, also of NumPy. Raises ConfigError if it is not a positive whole one."""
    if value is None:
        return None
    with suppress(TypeError):  # of an array, for example
        if not isinstance(value, bool) and (found := index(value)) >= 1:
            return found
    raise ConfigError(f"{name} is {value!r}: it must be a whole number of at least 1")


def _number(name: str, value: float | None) -> float | None:
    """The number, also of NumPy. Raises ConfigError if it is not finite, or negative."""
    if value is None:
        return None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(value, bool | str | bytes) and 0 <= (found := float(value)) < math.inf:
            return found
    raise ConfigError(f"{name} is {shorten(value)}: it must be a finite number of at least 0")


def _fields(request: Mapping[str, object]) -> Callable[[], Mapping[str, object]] | None:
    """Additional fields of a request; None if there are none. Raises ConfigError if they are not JSON."""
    try:
        fields = json.loads(json.dumps(dict(request), allow_nan=False))
    except (TypeError, ValueError) as e:
        raise ConfigError(f"request: must be a mapping of JSON values: {e}") from None
    return (lambda: fields) if fields else None


def _find(
    policy: PolicyPath | None, env: EvalEnv | None, overrides: Sequence[str], endpoint: Endpoint | None
) -> tuple[Subject, RunConfig, Path]:
    """What is evaluated, its configuration, and the default folder of its evaluations."""
    if policy is not None and endpoint is not None:
        raise ConfigError("policy and base_url: give one of them; the run whose env is played is `env`")
    if isinstance(env, str) and "\n" in env:
        raise ConfigError("env is a text of several lines: give the path of a YAML file, or its data as a mapping")
    target = None if policy is None else at_home(policy)
    if isinstance(env, str | os.PathLike):
        env = os.path.expanduser(env) if isinstance(env, str) else at_home(env)
    if callable(env):
        return names.find(target, name_object(env), overrides, endpoint)
    if env is None or (isinstance(env, str) and not _is_file_of_run(env)):
        return names.find(target, env, overrides, endpoint)
    if not isinstance(env, RunConfig | Mapping | str | os.PathLike):
        raise ConfigError(f"env is {_kind(env)}: give an env class, a configuration, a YAML file or a run folder")
    run = _run_folder(env)
    if run is not None and target is None and endpoint is None:
        return names.find(run, None, overrides)
    names.check_overrides(overrides, None if target is None else policy_folder(target), endpoint)
    config = _configuration(env, overrides, target, endpoint)
    if config.envs:
        raise ConfigError(
            f"the configuration has several envs: give one, by_env[NAME] of what `agentrl.configure` or "
            f"`agentrl.load_config` returns (one of {', '.join(config.envs)})"
        )
    if endpoint is not None:
        return Subject(endpoint=endpoint), config, names.ELSEWHERE if run is None else run / "eval"
    if target is None:
        return names.model_of(config, "the configuration"), config, names.ELSEWHERE
    subject, base = names.find_policy(target)
    return subject, config, base


def _is_file_of_run(env: str) -> bool:
    """Whether a text names a YAML file or a run folder, and not an env."""
    return env.endswith((".yaml", ".yml")) or os.path.isfile(env) or _run_folder(env) is not None


def _run_folder(env: object) -> Path | None:
    """The run folder that a path names."""
    if not isinstance(env, str | os.PathLike):
        return None
    return Path(env) if os.path.isfile(os.path.join(env, "config.yaml")) else None


def _configuration(
    env: RunConfig | Mapping[str, object] | str | os.PathLike[str],
    overrides: Sequence[str],
    policy: Path | None,
    endpoint: Endpoint | None,
) -> RunConfig:
    """The configuration; without a `model`, with that of the policy."""
    if isinstance(env, str | os.PathLike):
        run = _run_folder(env)
        file = Path(env) if run is None else run / "config.yaml"
        return load_sampling_config(file, overrides, check_paths=run is None)
    if isinstance(env, RunConfig) or "model" in env or (policy is None and endpoint is None):
        return configure(env if isinstance(env, RunConfig) else {"name": "eval", **env}, overrides)
    config = configure({"name": "eval", "model": {"tiny": {}}, **env}, overrides)
    if policy is None:
        return config
    folder = policy_folder(policy)
    if (trainer := trained_by(folder)) is None:
        model = ModelConfig(path=os.path.realpath(folder))
    else:
        model = load_sampling_config(trainer / "config.yaml", (), check_paths=False).model
    return config.model_copy(update={"model": model})


def _play(
    subject: Subject, config: RunConfig, options: EvalOptions, folder: Path, fresh: bool, console: Console | None
) -> EvaluationResult:
    """Play in this thread, or in another one if this one runs an event loop."""
    loop = _Loop()

    def call() -> EvaluationResult:
        if subject.endpoint is None:
            require("train", "agentrl.evaluate")
            from agentrl.torch_threads import one_after_fork

            one_after_fork()
        notes = _Notes()
        with ExitStack() as stack:
            show = partial(make_display, config.name, again="", console=console)
            reporter = notes if console is None else stack.enter_context(show())
            result = play(subject, config, options, folder=folder, fresh=fresh, reporter=reporter, run=loop.run)
        return EvaluationResult(result, subject.step, tuple(map(_note, notes.texts)))

    if not in_event_loop():
        return call()
    with _interrupts_raised():
        return Worker(call, loop.cancel, "agentrl-evaluate").result()


@contextmanager
def _interrupts_raised() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt in the main thread. asyncio.run would cancel its main task, which waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Loop:
    """Runs a coroutine on a new event loop, and cancels it from another thread."""

    def __init__(self) -> None:
        self._canceled = threading.Event()
        self._cancel: Callable[[], object] = lambda: None

    def run(self, work: Coroutine[None, None, None]) -> None:
        """As asyncio.run."""

        async def cancelable() -> None:
            task = asyncio.current_task()
            assert task is not None
            self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
            if self._canceled.is_set():
                task.cancel()
            await work

        asyncio.run(cancelable())

    def cancel(self) -> None:
        """Cancel what runs, or will run."""
        self._canceled.set()
        with suppress(RuntimeError):  # the loop has ended
            self._cancel()


class _Notes(Silent):
    """Shows nothing, and keeps the notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        """Keep it, once."""
        if text not in self.texts:
            self.texts.append(text)


@contextmanager
def _in_python() -> Iterator[None]:
    """Errors name the arguments of `evaluate`, not the options of the command."""
    try:
        yield
    except (CheckpointError, ConfigError, EngineError) as e:
        if _is_own(e):
            e.args = tuple(_in_words(part) if isinstance(part, str) else part for part in e.args)
        raise


def _is_own(error: BaseException) -> bool:
    """Whether no other code raised it, whose words it would repeat; those of an endpoint name no options."""
    cause = error.__cause__
    return (
        cause is None
        or type(cause).__module__.startswith("openai")
        or (isinstance(cause, AgentRLError) and _is_own(cause))
    )


def _note(text: str) -> str:
    """A note in the words of Python; only these two name options, and others may repeat what an env says."""
    named = text.startswith(("--tasks", "this evaluation is complete"))
    return (_in_words(text) if named else text).replace("the same command", "the same call")


def _in_words(text: str) -> str:
    """The same text with arguments in place of options."""
    return _OPTION.sub(lambda option: _ARGUMENTS.get(option[1], option[0]), text)


_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?:, in Python \w+=(?:True)?)?")
_ARGUMENTS = {name.replace("_", "-"): name for name in inspect.signature(evaluate).parameters} | {
    "fresh": "fresh=True",
    "set": "overrides",
}
"""Arguments of `evaluate` by the options of `agentrl eval`, without their dashes."""
