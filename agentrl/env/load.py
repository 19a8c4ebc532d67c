"""From what a run names to what it uses: env classes and functions (`module:Name`, `path/to/file.py:Name`)."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.env.env import Env
from agentrl.env.toolenv.observe import error_text
from agentrl.errors import ConfigError
from agentrl.types import Task


def load_env(spec: str, *, base: Path | None = None) -> type[Env]:
    """The env class that `spec` names, its tools and rewards already read.

    Args:
        spec: `module:Name` or `path/to/file.py:Name`; a relative path counts from `base` (else the working
            directory).
        base: folder of the file that names the env.

    Raises:
        ConfigError: it cannot be imported, is no concrete Env, or declares a tool or reward that cannot be used.
    """
    found = load_object(spec, base=base)
    if not (isinstance(found, type) and issubclass(found, Env)):
        raise ConfigError(
            f"env {spec!r}: {getattr(found, '__name__', found)!r} is no subclass of agentrl.Env or agentrl.ToolEnv"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"env {spec!r}: {found.__name__} does not implement {missing}")
    found.check_class()
    return found


def load_object(spec: str, *, base: Path | None = None) -> Any:
    """Any object named as `module:Name` or `path/to/file.py:Name` (dots after the colon reach inside).

    Raises:
        ConfigError: the form is wrong, the module does not import, or it has no such name.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{spec!r}: write `module:Name` or `path/to/file.py:Name`")
    if module_name.endswith(".py") or "/" in module_name:
        module = load_file(_resolve(module_name, base, spec))
    else:
        module = _import(module_name, spec)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")]
            near = get_close_matches(part, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(sorted(names)[:12])}"
            raise ConfigError(f"{spec!r}: {module_name} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def load_file(path: Path) -> ModuleType:
    """Import a Python file under a name made from its place and text (a changed file is read anew).

    Raises:
        ConfigError: the file cannot be run.
    """
    text = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + b"\0" + text).hexdigest()[:12]
    name = f"agentrl_file_{re.sub(r'[^0-9a-zA-Z_]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # A file may import its neighbours by their bare names, as a script does.
    sys.path.insert(0, str(path.parent))
    try:
        # Not the loader's way: a compiled copy is told from its source by size and whole second only.
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except ConfigError:
        sys.modules.pop(name, None)
        raise
    except Exception as e:
        sys.modules.pop(name, None)
        raise ConfigError(f"{path}{_line_of(e, path)}: {type(e).__name__}: {e}") from e
    finally:
        sys.path.remove(str(path.parent))
    return module


def said_by(error: BaseException) -> str:
    """What code of the user's raised, and the line of theirs on which it did."""
    house, place, trace = str(Path(__file__).parents[1]), "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((house, "<")):
            place = f" ({file}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{error_text(error)}{place}"


def _line_of(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f":{error.lineno}"
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f":{line}" if line else ""


def _resolve(name: str, base: Path | None, spec: str) -> Path:
    path = ((base or Path.cwd()) / Path(name).expanduser()).resolve()
    if not path.is_file():
        raise ConfigError(f"{spec!r}: no file {path}")
    return path


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name and (name == e.name or name.startswith(f"{e.name}.")):
            raise ConfigError(
                f"{spec!r}: no module {e.name!r}; for a file write `path/to/file.py:Name`, or install its package"
            ) from e
        raise ConfigError(f"{spec!r}: importing {name} needs module {e.name!r}, which is not installed") from e
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"{spec!r}: importing {name} raised {type(e).__name__}: {e}") from e


def drop_overlong(
    tasks: Sequence[Task], num_tokens: Callable[[Task], int], max_tokens: int, policy: str = "drop"
) -> tuple[list[Task], list[tuple[str, int]]]:
    """Keep the tasks whose prompt fits; prompts are never cut.

    Args:
        tasks: tasks to look at, all of them.
        num_tokens: tokens of a task's opening messages, tools included.
        max_tokens: longest prompt that fits.
        policy: "drop" leaves the others out, "refuse" stops at the first.

    Returns:
        The tasks that fit, and (id, tokens) of each that was dropped.

    Raises:
        ConfigError: none fits, or `policy` is "refuse" and one does not.
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
