"""Objects by name: `module:Name` or `path/to/file.py:Name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_origin

from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean

_given: dict[str, tuple[object, bool]] = {}
"""Objects of this process that were given in place of their names, by name, and whether a function that returns
the object is found."""


def name_object(given: object, *, factory: bool = False) -> str:
    """The name under which `load_object` finds this class, function or other callable.

    An object that cannot be imported again (of a notebook or script, nested, or an instance) is kept in this
    process, and only this process finds it.

    Args:
        factory: what is found is a function that returns the object, as its class would return an instance.
    """
    given = get_origin(given) or given  # of a generic class with parameters
    of_class = given if isinstance(given, type) or hasattr(given, "__qualname__") else type(given)
    module, name = getattr(of_class, "__module__", "__main__"), getattr(of_class, "__qualname__", "object")
    if isinstance(given, partial):
        module, name = "__main__", f"partial_{getattr(given.func, '__name__', 'function')}"
    if module != "__main__" and of_class is given:
        found: object = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is given:
            return f"{module}:{name}"
    short = re.sub(r"\W", "", name.rpartition(".")[2]) or "function"
    number, name = 1, short
    imported = None if module == "__main__" else sys.modules.get(module)
    while hasattr(imported, name) or not _may_replace(
        _given.setdefault(f"{module}:{name}", (given, factory))[0],
        given,  # also by other threads
    ):
        number += 1
        name = f"{short}_{number}"
    spec = f"{module}:{name}"
    _given[spec] = given, factory
    return spec


def is_given(spec: str) -> bool:
    """Whether only this process knows the object of this name."""
    return spec in _given


def _may_replace(old: object, new: object) -> bool:
    """Whether an object is the same, or an earlier version of the same cell or file."""
    if old is new:
        return True
    if isinstance(old, partial) and isinstance(new, partial):
        return _may_replace(old.func, new.func) and _equal([old.args, old.keywords], [new.args, new.keywords])
    code = getattr(new, "__code__", None)
    if code is not None and getattr(old, "__code__", None) is code:  # two results of one function
        return _equal(values_of(old), values_of(new))
    same = getattr(old, "__qualname__", "") == getattr(new, "__qualname__", None)
    if same and isinstance(old, type) and isinstance(new, type) and "<locals>" in new.__qualname__:
        if _code(old) != _code(new):
            return True
        bases = old.__bases__, new.__bases__
        alike = _equal(values_of(old), values_of(new))
        return alike and len({*map(len, bases)}) == 1 and all(map(_may_replace, *bases))
    return same and "<lambda>" not in getattr(new, "__qualname__", "")


def function_of(member: Any) -> Any:
    """The function of a method, also of a property or class method; anything else itself."""
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def values_of(made: object) -> dict[str, object]:
    """By name, what the call of a function gave a class or function that it made.

    These are the attributes of the class, and the variables of the call that the code reads.
    """
    values: dict[str, object] = {}
    for name, item in _members(made).items() if isinstance(made, type) else [("", made)]:
        if not isinstance(item, FunctionType):
            values[name] = item
        while isinstance(item, FunctionType):  # what decorates it, then what it decorates
            for variable, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
                if variable != "__class__":  # of super()
                    with suppress(ValueError):  # it has no value yet
                        values[variable] = cell.cell_contents
            item = getattr(item, "__wrapped__", None)
    return values


def _members(kind: type) -> dict[str, object]:
    """The attributes of a class, and the functions of its methods."""
    return {
        name: function_of(item)
        for name, item in vars(kind).items()
        if name != "_abc_impl" and (callable(item) or not name.startswith("__"))
    }


def _code(kind: type) -> list[object]:
    return [item.__code__ if isinstance(item, FunctionType) else None for item in _members(kind).values()]


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # of arrays, for example
        return False


def load_object(spec: str, *, base: Path | None = None) -> Any:
    """Any object named as `module:Name` or `path/to/file.py:Name` (dots after the colon reach inside).

    Raises:
        ConfigError: the form is wrong, the module does not import, or it has no such name.
    """
    if spec in _given:
        given, factory = _given[spec]
        return (lambda: given) if factory else given
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
            if module_name == "__main__":
                raise ConfigError(
                    f"{spec!r}: was defined in another process (notebook or script): put it in a file and name "
                    "it as path/to/file.py:Name"
                )
            names = [n for n in getattr(found, "__dict__", {}) if not n.startswith("_")]
            there = f"it has: {', '.join(sorted(names)[:12])}" if names else "it has no public names"
            hint = did_you_mean(part, names, otherwise=there)
            raise ConfigError(f"{spec!r}: {module_name} has no {part!r}; {hint}")
        found = getattr(found, part)
    return found


def load_function(spec: str, where: str) -> Callable[..., Any]:
    """The function named as `module:Name` or `path/to/file.py:Name`.

    Args:
        where: the setting that names it, for messages.

    Raises:
        ConfigError: it cannot be loaded, or is not a function.
    """
    found = load_object(spec)
    if not callable(found):
        raise ConfigError(f"{where}: is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def check_call(function: Callable[..., Any], where: str, *arguments: str) -> None:
    """Check that a call of a user's function with these arguments runs it.

    Args:
        where: names the function in messages.
        arguments: names of the positional arguments.

    Raises:
        ConfigError: it takes other arguments, is async, or is a generator function.
    """
    code = function if inspect.isroutine(function) or isinstance(function, partial) else type(function).__call__
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        raise ConfigError(f"{where} is async, and nothing would await it")
    if inspect.isgeneratorfunction(code):
        raise ConfigError(f"{where} is a generator: write `return` instead of `yield`")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as e:
        raise ConfigError(f"{where} must take ({', '.join(arguments)}): {e}") from None
    except ValueError:  # a function of C code has no signature
        return


def try_function(call: Callable[[], object], where: str) -> None:
    """Call a user's function once, before a run depends on it.

    Raises:
        ConfigError: it raised an exception.
    """
    try:
        call()
    except ConfigError:
        raise
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{where}: a first call with a few tokens raised {type(e).__name__}: {e}") from e


def load_file(path: Path) -> ModuleType:
    """Import a Python file under a name made from its place and text (a changed file is read again).

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
    except (Exception, SystemExit) as e:
        sys.modules.pop(name, None)
        raise ConfigError(f"{path}{_line_of(e, path)}: {type(e).__name__}: {e}") from e
    finally:
        sys.path.remove(str(path.parent))
    return module


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
    path = ((base or Path.cwd()) / os.path.expanduser(name)).resolve()
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
    except (Exception, SystemExit) as e:
        raise ConfigError(f"{spec!r}: importing {name} raised {type(e).__name__}: {e}") from e
