"""Load env classes and functions by name (`module:Name`, `path/to/file.py:Name`)."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.config.schemes import scheme_meant, scheme_of
from agentrl.env.adapter import load_adapter
from agentrl.env.env import Env
from agentrl.env.toolenv.observe import error_text
from agentrl.errors import ConfigError
from agentrl.importing import load_object
from agentrl.types import Task


def load_env(
    spec: str, options: Mapping[str, Any] = MappingProxyType({}), *, base: Path | None = None
) -> type[Env]:
    """Load the env class that `spec` names and read its tools and rewards.

    Args:
        spec: `module:Name`, `path/to/file.py:Name`, or `SCHEME:REST` of another ecosystem; a relative path is
            resolved against `base` (by default the working directory).
        options: `env.options`, which become part of the class of a scheme.
        base: folder of the file that names the env.

    Raises:
        ConfigError: it cannot be imported, is not a concrete Env, or declares an invalid tool or reward.
    """
    scheme = scheme_of(spec)
    try:
        found = load_object(spec, base=base) if scheme is None else load_adapter(*scheme, options)
    except ConfigError as e:
        if scheme is None and (meant := scheme_meant(spec)):
            raise ConfigError(f"env {spec!r}: did you mean {meant!r}? `agentrl envs` lists the schemes") from e
        raise
    if not (isinstance(found, type) and issubclass(found, Env)):
        raise ConfigError(
            f"env {spec!r}: {getattr(found, '__name__', found)!r} is not a subclass of agentrl.Env or "
            "agentrl.ToolEnv"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"env {spec!r}: {found.__name__} does not implement {missing}")
    found.check_class()
    return found


def said_by(error: BaseException) -> str:
    """The exception raised by user code, and the line in that code."""
    house, place, trace = str(Path(__file__).parents[1]), "", error.__traceback__
    library, own = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")), ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((house, "<")):
            place = f" ({file}:{trace.tb_lineno})"
            own = own if file.startswith(library) else place
        trace = trace.tb_next
    return f"{error_text(error)}{own or place}"


def drop_overlong(
    tasks: Sequence[Task], num_tokens: Callable[[Task], int], max_tokens: int, policy: str = "drop"
) -> tuple[list[Task], list[tuple[str, int]]]:
    """Keep the tasks whose prompt fits; prompts are never cut.

    Args:
        tasks: the tasks to check.
        num_tokens: counts the tokens of a task's opening messages, including tools.
        max_tokens: maximum prompt length.
        policy: "drop" removes longer ones, "refuse" raises at the first.

    Returns:
        The tasks that fit, and (id, tokens) of each that was dropped.

    Raises:
        ConfigError: no prompt fits, or `policy` is "refuse" and one does not fit.
    """
    kept: list[Task] = []
    dropped: list[tuple[str, int]] = []
    for task in tasks:
        tokens = num_tokens(task)
        if tokens <= max_tokens:
            kept.append(task)
        elif policy == "refuse":
            raise ConfigError(f"task {task.id!r}: its prompt has {tokens} tokens, more than {max_tokens}")
        else:
            dropped.append((task.id, tokens))
    if not kept:
        raise ConfigError(f"no task has a prompt of at most {max_tokens} tokens")
    return kept, dropped
