"""Load a custom engine by `module:Name`, test it on a few tokens before a run relies on it, and watch it."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.engine import EngineConfig
from agentrl.engine.base import Engine, GenerateOptions, StructureRefused, TokenLogprob
from agentrl.engine.checks import ROUNDING
from agentrl.errors import AgentRLError, ConfigError, traceback_of
from agentrl.importing import load_object
from agentrl.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

TRIAL_S = 120.0
"""Time limit of each request in the trial."""
TRIAL_IDS = (1, 2)
TRIAL_TOKENS = 4
TRIAL_TOLERANCE = 0.2
"""Maximum mean difference between the logprobs of sampled tokens and those of scoring them afterwards."""


async def open_own(config: EngineConfig, model: Path) -> Engine:
    """Create and test the engine that `engine.kind` names, as `Name(model, config, **engine.options)`.

    `Name` is a class or a function; what it returns may be awaitable. Later calls raise ConfigError if it does
    something wrong.

    Raises:
        ConfigError: it cannot be imported or created, is not an `Engine`, or fails the trial.
    """
    where = f"engine.kind {config.kind}"
    try:
        make = load_object(config.kind)
    except ConfigError as e:
        raise ConfigError(f"engine.kind {e}") from None
    if not callable(make):
        raise ConfigError(f"{where}: must be a class or a function, got a value of type {type(make).__name__}")
    if missing := sorted(getattr(make, "__abstractmethods__", ())):
        raise ConfigError(f"{where}: does not implement {', '.join(missing)}")
    try:
        made: Any = make(model, config, **config.options)
        engine = await made if inspect.isawaitable(made) else made
    except AgentRLError:
        raise
    except (Exception, SystemExit) as e:
        raise ConfigError(
            f"{where}: {getattr(make, '__name__', make)}(model, config, **engine.options) raised "
            f"{type(e).__name__}: {e}"
        ) from e
    if not isinstance(engine, Engine):
        raise ConfigError(f"{where}: must be an agentrl.engine.base.Engine, got {type(engine).__name__}")
    vocabulary = _vocabulary(model)
    try:
        await _try(engine, vocabulary, where)
    except BaseException:
        with suppress(Exception):  # what is wrong with the engine is in the first error
            await engine.close()
        raise
    _watch(engine, vocabulary, where)
    return engine


def _watch(engine: Engine, vocabulary: int | None, where: str) -> None:
    """Check everything that the engine does from now on."""
    update = engine.update_weights

    async def asked(method: str, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except (AgentRLError, StructureRefused):
            raise
        except Exception as e:
            raise ConfigError(f"{where}: {method} raised {type(e).__name__}: {e}\n{traceback_of(e)}") from e

    def checked(method: str) -> Callable[..., Awaitable[Completion]]:
        sample: Callable[..., Awaitable[Completion]] = getattr(engine, method)

        async def call(ids: Sequence[int], sampling: Sampling, *args: Any, **named: Any) -> Completion:
            completion: Completion = await asked(method, sample(ids, sampling, *args, **named))
            newest = engine.policy_version
            _check_completion(completion, vocabulary, f"{where}: {method}", sampling.max_tokens, newest)
            return completion

        return call

    async def update_weights(weights: Mapping[str, Tensor], version: int) -> None:
        await asked("update_weights", update(weights, version))
        if engine.policy_version != version:
            raise ConfigError(
                f"{where}: policy_version is {engine.policy_version} after update_weights(weights, {version})"
            )

    watched = {method: checked(method) for method in ("generate", "generate_streaming")}
    for name, call in {**watched, "update_weights": update_weights}.items():
        object.__setattr__(engine, name, call)  # it may be a frozen dataclass


def _vocabulary(model: Path) -> int | None:
    """Return the vocabulary size of the model directory; None if it does not specify one."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _try(engine: Engine, vocabulary: int | None, where: str) -> None:
    """Sample a few tokens, and use each capability that can be tested without new weights.

    Raises:
        ConfigError: what the engine did wrong.
    """
    try:
        max_context, version = getattr(engine, "max_context", None), engine.policy_version
    except Exception as e:
        raise ConfigError(f"{where}: max_context or policy_version raised {type(e).__name__}: {e}") from e
    if not isinstance(max_context, int) or max_context < len(TRIAL_IDS) + TRIAL_TOKENS:
        raise ConfigError(f"{where}: max_context must be a number of tokens, got {max_context!r}")
    if version != 0:
        raise ConfigError(f"{where}: policy_version must be 0 before the first update, got {version!r}")
    sampling = Sampling(temperature=1.0, max_tokens=TRIAL_TOKENS, seed=0)
    told: list[TokenLogprob] = []
    method = "generate"
    try:
        async with asyncio.timeout(TRIAL_S):
            completion = await engine.generate(TRIAL_IDS, sampling, session="trial")
            _check_completion(completion, vocabulary, f"{where}: generate", TRIAL_TOKENS)
            _check_trial(completion, f"{where}: generate")
            await engine.release("trial")
            if engine.capabilities.streaming:
                method = "generate_streaming"
                streamed = await engine.generate_streaming(TRIAL_IDS, sampling, GenerateOptions(told.append))
                _check_completion(streamed, vocabulary, f"{where}: generate_streaming", TRIAL_TOKENS)
                _check_trial(streamed, f"{where}: generate_streaming")
                if tuple(token.id for token in told) != tuple(streamed.ids):
                    raise ConfigError(
                        f"{where}: generate_streaming reported the tokens {[t.id for t in told]} and returned "
                        f"{list(streamed.ids)}"
                    )
            if engine.capabilities.prompt_logprobs:
                method = "prompt_logprobs"
                scored = await engine.prompt_logprobs([*TRIAL_IDS, *completion.ids])
                _check_scores(scored, completion, where)
    except ConfigError:
        raise
    except TimeoutError:
        raise ConfigError(f"{where}: {method} did not return within {TRIAL_S:g} s on trial tokens") from None
    except Exception as e:
        raise ConfigError(f"{where}: {method} raised on trial tokens: {type(e).__name__}: {e}") from e


def _check_completion(
    completion: Completion, vocabulary: int | None, where: str, max_tokens: int, newest: int = 0
) -> None:
    """Raises ConfigError unless it is a completion of so many tokens, by weights up to the version `newest`."""
    if not isinstance(completion, Completion):
        raise ConfigError(f"{where} must return an agentrl.types.Completion, got {completion!r:.200}")
    ids, logprobs, versions = completion.ids, completion.logprobs, completion.versions
    for name, values, kind in (
        ("ids", ids, int),
        ("logprobs", logprobs, (int, float)),
        ("versions", versions, int),
    ):
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
            said = "numbers" if name == "logprobs" else "whole numbers"
            raise ConfigError(f"{where} must return {name} as a tuple of {said}, got {values!r:.200}")
    if not len(ids) == len(logprobs) == len(versions):
        raise ConfigError(
            f"{where} returned {len(ids)} ids, {len(logprobs)} logprobs and {len(versions)} versions; one of each "
            "per token is needed"
        )
    if len(ids) > max_tokens:
        raise ConfigError(f"{where} returned {len(ids)} tokens with max_tokens {max_tokens}")
    if wrong := [id for id in ids if id < 0 or (vocabulary is not None and id >= vocabulary)]:
        raise ConfigError(f"{where} returned the id {wrong[0]}, outside the model's vocabulary of {vocabulary}")
    if odd := [p for p in logprobs if not math.isfinite(p) or p > ROUNDING]:
        raise ConfigError(f"{where} returned the log-probability {odd[0]}; finite numbers up to 0 are expected")
    if unknown := [version for version in versions if not 0 <= version <= newest]:
        raise ConfigError(f"{where} returned the policy version {unknown[0]}; the newest is {newest}")
    if completion.finish not in ("stop", "length", "abort"):
        raise ConfigError(f"{where} returned finish {completion.finish!r}; expected 'stop', 'length' or 'abort'")


def _check_trial(completion: Completion, where: str) -> None:
    """Raises ConfigError if the engine sampled nothing or gave up."""
    if not completion.ids:
        raise ConfigError(f"{where} returned no tokens")
    if completion.finish == "abort":
        raise ConfigError(f"{where} returned finish 'abort'; expected 'stop' or 'length'")


def _check_scores(scored: Sequence[TokenLogprob], completion: Completion, where: str) -> None:
    expected = [*TRIAL_IDS[1:], *completion.ids]
    if [token.id for token in scored] != expected:
        raise ConfigError(
            f"{where}: prompt_logprobs returned the tokens {[token.id for token in scored]}, expected {expected}"
        )
    last = scored[-len(completion.ids) :]
    gap = sum(abs(a.logprob - b) for a, b in zip(last, completion.logprobs, strict=True)) / len(last)
    if not gap <= TRIAL_TOLERANCE:
        raise ConfigError(
            f"{where}: generate and prompt_logprobs differ by {gap:.3g} per token on the same tokens at "
            "temperature 1: log-probabilities must be those of the distribution sampled from"
        )
