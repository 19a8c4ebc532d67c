"""Declarations of a ToolEnv class, read once per class: tools, rewards, arguments of `setup`."""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from agentrl.env.solved import BY_NAME, SolvedRule, rule_of
from agentrl.env.toolenv.declare import REWARD_MARK, TOOL_MARK, RewardMark, ToolMark
from agentrl.env.toolenv.dispatch import call_function, listed, read_returned
from agentrl.env.toolenv.json_schema import (
    Signature,
    check_name,
    describe_callable,
    describe_errors,
    function_schema,
    owners_of,
    read_lazily,
    resolved_hints,
    shorten,
)
from agentrl.env.toolenv.typed_dicts import readable
from agentrl.errors import ConfigError
from agentrl.suggest import did_you_mean

_REWARD_ARGUMENTS = {"episode": {"episode"}, "turn": {"turn"}, "group": {"episodes"}}


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One declared tool; `attribute` is the method's name on the class."""

    name: str
    attribute: str
    schema: Mapping[str, object]
    signature: Signature
    mark: ToolMark

    def bind(self, owner: object) -> MethodTool:
        """Bind the tool to an instance."""
        return MethodTool(
            self.name,
            self.schema,
            self.mark.parallel,
            self.mark.timeout_s,
            self.signature,
            getattr(owner, self.attribute),
            self.mark.inline,
        )


@dataclass(slots=True)
class MethodTool:
    """A `BoundTool` around a typed Python callable."""

    name: str
    schema: Mapping[str, object]
    parallel: bool
    timeout_s: float | None
    signature: Signature
    function: Callable[..., object]
    inline: bool = False

    def validate(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Convert arguments to the annotated types. Raises InvalidArguments."""
        return self.signature.validate(arguments)

    async def call(self, arguments: dict[str, object], timeout_s: float | None) -> object:
        """Run the function. Raises CallTimeout, and whatever the function raises."""
        function = listed(self.function)
        value = await call_function(function, arguments, timeout_s, inline=self.inline, apart=self.parallel)
        return await read_returned(value, self.function, timeout_s, self.parallel)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One declared reward; `takes` names the argument that its method wants, if any."""

    name: str
    attribute: str
    mark: RewardMark
    takes: str | None
    says_bool: bool = False
    """Whether the return annotation is bool."""
    says_parts: bool = False
    """Whether the return annotation is a mapping of parts."""


@dataclass(frozen=True, slots=True)
class SetupSpec:
    """The arguments of `setup`: one data row."""

    where: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    open_ended: bool
    adapters: Mapping[str, TypeAdapter[dict[str, object]]]
    """By argument, the type of {argument: value}."""

    def converted(self, row: Mapping[str, object]) -> dict[str, object]:
        """The arguments of a row that fits, in the annotated types: `"2"` becomes 2."""
        return {name: self._converted(name, value) for name, value in row.items()}

    def _converted(self, name: str, value: object) -> object:
        if (adapter := self.adapters.get(name)) is None:
            return value
        try:
            found = adapter.validate_python({name: value}, strict=True)
        except ValidationError:
            found = adapter.validate_python({name: value}, strict=False)
        return found[name]

    def without_nulls(self, row: Mapping[str, object]) -> dict[str, object]:
        """The row without keys whose value is null, except those that an argument needs.

        In columns, a key that one row has is null in all rows without it.
        """
        found: dict[str, object] = {}
        for name, value in row.items():
            lean = _without_nulls(value)
            if value is not None:
                found[name] = lean if self._fits(name, lean) else value
            elif name in self.required:
                found[name] = None
        return found

    def _fits(self, name: str, value: object) -> bool:
        try:
            self._converted(name, value)
        except Exception:  # also of code of a type, like __post_init__
            return False
        return True

    def problem(self, row: Mapping[str, object]) -> str | None:
        """The problem with `row`, in one line; None if it fits."""
        missing = [name for name in self.required if name not in row]
        if missing:
            return f"argument {missing[0]!r} of {self.where} is missing; it has: {', '.join(row) or 'nothing'}"
        if "self" in row:
            return f"{self.where} cannot take a column named 'self'; rename it: `data.columns: {{other: self}}`"
        unknown = [name for name in row if name not in self.names]
        if unknown and not self.open_ended:
            return (
                f"{unknown[0]!r} is not an argument of {self.where} ({', '.join(self.names) or 'none'}); "
                "drop the column, or let setup take **rest"
            )
        for name, adapter in self.adapters.items():
            if name in row:
                try:
                    adapter.validate_python({name: row[name]}, strict=False)
                except ValidationError as e:
                    text = describe_errors(e, {name: row[name]}, ())
                    return f"{text.replace(f'args.{name}', f'argument {name!r}', 1)} ({self.where})"
                except Exception as e:  # code of a type, like __post_init__
                    return f"argument {name!r}: refused by its type: {type(e).__name__}: {e} ({self.where})"
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """Everything declared on one ToolEnv class."""

    tools: tuple[ToolSpec, ...]
    rewards: tuple[RewardSpec, ...]
    setup: SetupSpec
    system: str

    @property
    def solved(self) -> SolvedRule | None:
        """The solved rule declared by the rewards; None if they declare none."""
        marked = {r.name: r.mark.solved_at for r in self.rewards if r.mark.solved_at is not None}
        if marked:
            return SolvedRule("@reward(solved=...)", marked)
        if any(r.name == "solved" and r.mark.per == "episode" for r in self.rewards):
            return replace(BY_NAME, strict=True)
        if len(self.rewards) == 1 and self.rewards[0].says_bool and self.rewards[0].mark.per == "episode":
            return SolvedRule("the only reward, a bool", {self.rewards[0].name: 1.0})
        if any(r.says_parts and r.mark.per == "episode" for r in self.rewards):
            return BY_NAME
        return None


def tool_from(function: Callable[..., object], mark: ToolMark | None = None) -> MethodTool:
    """A free function as a tool, marked with `@tool` or not."""
    if isinstance(function, type) or not hasattr(function, "__qualname__"):
        raise ConfigError(
            f"tool {shorten(function)}: a {type(function).__name__} cannot be a tool; write a function with typed "
            "arguments that calls it"
        )
    mark = mark or getattr(function, TOOL_MARK, None) or ToolMark(None, False, None, False)
    where = f"tool {getattr(function, '__module__', None) or 'builtins'}.{function.__qualname__}"
    name = check_name(mark.name or function.__name__, where)
    signature = describe_callable(function, where=where, method=False)
    return MethodTool(
        name, function_schema(name, signature), mark.parallel, mark.timeout_s, signature, function, mark.inline
    )


@functools.cache
def class_spec(cls: type) -> ClassSpec:
    """Read the declarations of `cls`, in the order of definition, base classes first.

    Raises:
        ConfigError: a tool without type hints, a reward with unknown arguments, two tools with the same name, ...
    """
    if sys.flags.optimize > 1:
        raise ConfigError(
            "python -OO and PYTHONOPTIMIZE=2 remove the docstrings, which are the system prompt and the "
            "descriptions of tools: run Python without them"
        )
    tools: dict[str, ToolSpec] = {}
    rewards: dict[str, RewardSpec] = {}
    check_methods(cls)
    _check_attributes(cls)
    for attribute, function in _members(cls).items():
        where = place_of(function, cls, attribute)
        if attribute in _OWN_NAMES and (hasattr(function, TOOL_MARK) or hasattr(function, REWARD_MARK)):
            raise ConfigError(
                f"{where}: `{attribute}` is a part of ToolEnv itself, which a tool or reward would replace; name "
                f"the method otherwise and say `name={attribute!r}` in the decorator"
            )
        if (mark := getattr(function, TOOL_MARK, None)) is not None:
            spec = tool_spec(cls, attribute, function, mark, where)
            if spec.name in tools:
                raise ConfigError(f"{where}: a second tool named {spec.name!r}; give one another `name=`")
            tools[spec.name] = spec
        if (mark := getattr(function, REWARD_MARK, None)) is not None:
            reward_spec = _reward_spec(attribute, function, mark, where)
            if reward_spec.name in rewards:
                raise ConfigError(f"{where}: a second reward named {reward_spec.name!r}; give one another `name=`")
            rewards[reward_spec.name] = reward_spec
    _check_hooks(cls)
    return ClassSpec(tuple(tools.values()), tuple(rewards.values()), _setup_spec(cls), _system(cls))


def place_of(function: Any, cls: type, attribute: str) -> str:
    """`file:line: Class.method`, for errors."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = f"{cls.__qualname__}.{attribute}"
    return f"{code.co_filename}:{code.co_firstlineno}: {name}" if code else f"{cls.__module__}.{name}"


def check_methods(cls: type) -> None:
    """Raises ConfigError if a tool or reward of the class is not a plain method and therefore not callable, or if
    anything but a method with a decorator, or None, replaces one."""
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if not isinstance(value, staticmethod | classmethod | property):
                continue
            inner = value.fget if isinstance(value, property) else value.__func__
            for kind, mark in (("tool", TOOL_MARK), ("reward", REWARD_MARK)):
                if hasattr(value, mark) or hasattr(inner, mark):
                    raise ConfigError(
                        f"{place_of(inner, base, name)}: a {type(value).__name__} cannot be a {kind}; "
                        "write a plain method that takes self"
                    )

    for name in dict.fromkeys(name for base in cls.__mro__ for name in vars(base)):
        owner, *bases = (base for base in cls.__mro__ if name in vars(base))
        new, old = vars(owner)[name], vars(bases[0])[name] if bases else None
        for kind, mark in (("tool", TOOL_MARK), ("reward", REWARD_MARK)):
            if new is not None and hasattr(old, mark) and not _is_marked(new):
                method = getattr(new, "__func__", new)
                raise ConfigError(
                    f"{place_of(method, owner, name)}: replaces the {kind} {bases[0].__qualname__}.{name} without "
                    f"`@{kind}`; write that above a plain method, or `{name} = None` to remove the {kind}"
                )


def _is_marked(method: object) -> bool:
    return hasattr(method, TOOL_MARK) or hasattr(method, REWARD_MARK)


def check_timeout(seconds: Any, where: str) -> None:
    """Raises ConfigError for a timeout that no call could meet."""
    if seconds is not None and not _number(seconds) > 0:
        raise ConfigError(f"{where}: timeout_s must be a number of seconds above 0, got {shorten(seconds)}")


def _number(value: Any) -> float:
    """The number as a float; NaN for anything else, and for a number too large for a float."""
    if isinstance(value, bool) or not hasattr(type(value), "__float__"):
        return math.nan
    try:
        return float(value)
    except Exception:  # of a type from another package: an array, a NaN that signals
        return math.nan


def _check_attributes(cls: type) -> None:
    """Raises ConfigError if `settings`, `sandbox` or `toolboxes` on the class have the wrong type."""
    from agentrl.env.toolenv.settings import ToolSettings
    from agentrl.sandbox import Sandbox

    def refuse(name: str, wanted: str, value: object) -> None:
        raise ConfigError(f"{cls.__qualname__}.{name} must be {wanted}, got {shorten(value)}")

    plain = {
        name: value
        for name in ("settings", "sandbox", "toolboxes")
        if not hasattr(type(value := getattr(cls, name)), "__get__")
    }
    if not isinstance(settings := plain.get("settings", ToolSettings()), ToolSettings):
        refuse("settings", "ToolSettings(...)", settings)
    if not isinstance(sandbox := plain.get("sandbox"), Sandbox | None):
        refuse("sandbox", "Sandbox(...)", sandbox)
    toolboxes = plain.get("toolboxes", ())
    if not isinstance(toolboxes, list | tuple) or not all(map(callable, toolboxes)):
        refuse("toolboxes", "a tuple of classes (imported, not named as text)", toolboxes)


_OWN_NAMES: set[str] = set()
"""Attributes of ToolEnv and Env."""


_HOOKS: Mapping[str, tuple[str, ...]] = {"system": (), "respond": ("message",), "teardown": ()}
"""Optional methods of an env, with the names of the arguments that they get."""


def _check_hooks(cls: type) -> None:
    """Raises ConfigError if a hook is no method, or does not take its arguments."""
    for name, arguments in _HOOKS.items():
        hook = getattr(cls, name)
        wanted = f"write `def {name}({', '.join(('self', *arguments))})`"
        if not callable(hook):
            raise ConfigError(f"{cls.__qualname__}.{name} must be a method, got {shorten(hook)}; {wanted}")
        if not inspect.isfunction(hook):
            continue
        of_self = () if isinstance(inspect.getattr_static(cls, name), staticmethod) else (None,)
        try:  # of a decorated method, the decorator's function is what gets the arguments
            inspect.signature(hook, follow_wrapped=False).bind(*of_self, **dict.fromkeys(arguments))
        except TypeError as e:
            raise ConfigError(f"{place_of(hook, cls, name)}: {e}; {wanted}") from None


def reserve_names(cls: type) -> None:
    """Reserve the names of this class and its bases, so that subclasses cannot reuse them."""
    for base in cls.__mro__:
        _OWN_NAMES.update(vars(base), vars(base).get("__annotations__", {}))


def _members(cls: type) -> dict[str, Any]:
    """Functions of the class and its bases by name; the most derived one wins, at the first position.

    Raises:
        ConfigError: a tool or reward is another object, such as a cached function or a `partialmethod`.
    """
    found: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if inspect.isfunction(value):
                found[name] = value
                continue
            found.pop(name, None)
            for kind, mark, declared in (("tool", TOOL_MARK, ToolMark), ("reward", REWARD_MARK, RewardMark)):
                if isinstance(getattr(value, mark, None), declared):
                    raise ConfigError(
                        f"{place_of(value, base, name)}: a {type(value).__name__} cannot be a {kind}; write "
                        "a plain method that takes self and calls the cached or wrapped function"
                    )
    return found


def tool_spec(cls: type, attribute: str, function: Callable[..., object], mark: ToolMark, where: str) -> ToolSpec:
    """Read the declaration of one marked method. Raises ConfigError; `where` names the method."""
    name = check_name(mark.name or attribute, where)
    check_timeout(mark.timeout_s, where)
    if mark.inline and inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: inline=True is for plain functions; an async one never leaves the loop")
    signature = describe_callable(function, where=where, method=True, owners=owners_of(cls, attribute))
    return ToolSpec(name, attribute, function_schema(name, signature), signature, mark)


def _reward_spec(attribute: str, function: Callable[..., object], mark: RewardMark, where: str) -> RewardSpec:
    names = list(inspect.signature(function).parameters)[1:]
    allowed = _REWARD_ARGUMENTS.get(mark.per) if isinstance(mark.per, str) else None
    if allowed is None:
        raise ConfigError(f"{where}: per={mark.per!r} must be 'episode', 'turn' or 'group'")
    check_timeout(mark.timeout_s, where)
    if not math.isfinite(_number(mark.weight)):
        raise ConfigError(f"{where}: weight must be a finite number, got {shorten(mark.weight)}")
    if mark.solved_at is not None:
        rule_of(mark.solved_at, f"{where}: solved")
        if mark.per != "episode":
            raise ConfigError(f"{where}: solved= is for a reward per episode; this one is per {mark.per}")
    if mark.judge is not None and not callable(getattr(mark.judge, "score", None)):
        raise ConfigError(f"{where}: judge={shorten(mark.judge)} has no method `score`; give a Judge")
    if mark.judge is not None and mark.per == "group":
        raise ConfigError(f"{where}: judge= has no effect on a reward per group; ask the judge in the method")
    if len(names) > 1 or not set(names) <= allowed or (mark.per == "group" and not names):
        raise ConfigError(
            f"{where}: a reward per {mark.per} takes {'exactly' if mark.per == 'group' else 'nothing or'} "
            f"`{next(iter(allowed))}`, got ({', '.join(names)})"
        )
    returned = function.__annotations__.get("return")
    says_parts = re.match(r"(typing\.|collections\.abc\.|<class ')*([Dd]ict|Mapping)\b", str(returned)) is not None
    return RewardSpec(
        mark.name or attribute,
        attribute,
        mark,
        names[0] if names else None,
        says_bool=returned in (bool, "bool"),
        says_parts=says_parts,
    )


def _setup_spec(cls: type) -> SetupSpec:
    function: Any = cls.setup  # type: ignore[attr-defined]  # every ToolEnv has one
    where = f"{cls.__qualname__}.setup"
    if not callable(function):
        raise ConfigError(f"{where} must be a method, got {shorten(function)}; write `def setup(self, ...)`")
    if getattr(function, "__module__", "") == "agentrl.env.toolenv.env":
        return SetupSpec(where, (), (), False, {})  # not overridden: the row is empty
    without_self = isinstance(inspect.getattr_static(cls, "setup"), staticmethod | classmethod)
    parameters = list(inspect.signature(function).parameters.values())[0 if without_self else 1 :]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if bad := [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]:
        raise ConfigError(f"{where}: parameter {bad[0]} cannot take a column of a data row; name each argument")
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    hints = resolved_hints(function, where, owners_of(cls, "setup"))
    adapters: dict[str, TypeAdapter[dict[str, object]]] = {}
    make: Any = TypedDict
    for parameter in named:
        argument = make("argument", {parameter.name: readable(hints.get(parameter.name, object))})
        argument.__pydantic_config__ = ConfigDict(extra="allow")  # columns of a column that the type does not name
        try:
            adapter: TypeAdapter[dict[str, object]] = TypeAdapter(argument)
        except Exception:
            continue  # hints that pydantic cannot check are ignored here
        if not read_lazily(adapter):
            adapters[parameter.name] = adapter
    return SetupSpec(
        where,
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        open_ended,
        adapters,
    )


def _system(cls: type) -> str:
    for base in cls.__mro__:
        if base.__module__ in ("agentrl.env.toolenv.env", "agentrl.env.textenv"):
            return ""
        if text := base.__dict__.get("__doc__"):
            return inspect.cleandoc(text)
    return ""


def unknown_weights(spec: ClassSpec, weights: Mapping[str, float], env: str) -> None:
    """Raises ConfigError if a weight does not match a reward of the class."""
    names = [r.name for r in spec.rewards]
    for name, weight in weights.items():
        if name not in names and name.split("/")[0] not in names:
            hint = did_you_mean(name, names, otherwise=f"the rewards are: {', '.join(names) or 'none'}")
            raise ConfigError(f"env.reward_weights.{name[:80]}: {env} has no such reward; {hint}")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"env.reward_weights.{name[:80]} must be a number, got {shorten(weight)}")
