"""What a key means beyond its type, written on the key: `path: Annotated[str, PathTo("folder")]`.

The loader, the run folder, the command line and the docs generator all read these facts from the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

Command = Literal["eval", "eval FOLDER", "eval --base-url", "serve"]


@dataclass(frozen=True, slots=True)
class PathTo:
    """The text is a path, relative to the YAML file (or to the current folder where a flag gives it).

    Attributes:
        hub: it may name a model in the local Hugging Face cache instead.
        names: words with a special meaning, which are not paths.
        made: the run makes it if it is missing. A text with a scheme (`sqlite:///runs.db`) is an address instead.
    """

    kind: Literal["file", "folder"]
    hub: bool = False
    names: tuple[str, ...] = ()
    made: bool = False


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The text names files of rows, or a dataset in the Hugging Face cache."""

    split: Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class NamesCode:
    """The text names Python code: `module:Name` or `path/to/file.py:Name`.

    Attributes:
        kind: what the code is.
        or_word: a name without a colon is one of agentrl's.
        or_scheme: `SCHEME:REST` of `agentrl.config.schemes` is accepted, too.
    """

    kind: Literal["class", "function"]
    or_word: bool = False
    or_scheme: bool = False


@dataclass(frozen=True, slots=True)
class OnResume:
    """What becomes of a change of the key when a run is resumed. It holds for all keys below it that do not have
    their own. A change of a key without this fact is accepted, and recorded in the run's history.

    Attributes:
        kind: `free` keys do not change what is learned (placement, length, evaluation); `fixed` keys define what
            the run is.
    """

    kind: Literal["free", "fixed"]


@dataclass(frozen=True, slots=True)
class Advanced:
    """Few runs change the key: the docs list it last, and `config show` omits it while it has its default."""


@dataclass(frozen=True, slots=True)
class UnusedBy:
    """Commands for which the key has no effect."""

    commands: tuple[Command, ...]

    def __init__(self, *commands: Command) -> None:
        object.__setattr__(self, "commands", commands)


@dataclass(frozen=True, slots=True)
class _OtherKey:
    """Depends on the value of another key, looked up in the key's own section, then in the sections around it."""

    key: str
    values: tuple[object, ...]

    def __init__(self, key: str, *values: object) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys it depends on."""
        return (self.key,)

    def _choices(self) -> str:
        return _either(f"`{self.key}: {_shown(value)}`" for value in self.values)


@dataclass(frozen=True, slots=True, init=False)
class OnlyWhen(_OtherKey):
    """The key has an effect only while another key has one of these values."""

    def dead(self, *found: object) -> bool:
        """Whether the key has no effect, from the values of `keys`."""
        return found[0] not in self.values

    def why(self, names: tuple[str, ...], *found: object) -> str:
        """The reason, with the keys called as in `names`."""
        return f"unless {names[0]} is {_either(self.values)} (it is {_shown(found[0])})"

    def condition(self) -> str:
        """When the key has an effect, for the docs."""
        return f"Only with {self._choices()}."


@dataclass(frozen=True, slots=True, init=False)
class OnlyWhenOrOwn(OnlyWhen):
    """The same, but the key also has an effect while the other key names a function of the user."""

    def dead(self, *found: object) -> bool:
        return found[0] not in self.values and ":" not in str(found[0])

    def why(self, names: tuple[str, ...], *found: object) -> str:
        return (
            f"unless {names[0]} is {_either((*self.values, 'a function of your own'))} (it is {_shown(found[0])})"
        )

    def condition(self) -> str:
        return f"Only with {self._choices()} or a function of your own."


@dataclass(frozen=True, slots=True, init=False)
class NeverWhen(_OtherKey):
    """The key has no effect while another key has one of these values."""

    def dead(self, *found: object) -> bool:
        return found[0] in self.values

    def why(self, names: tuple[str, ...], *found: object) -> str:
        return f"while {names[0]} is {_shown(found[0])}"

    def condition(self) -> str:
        return f"Not with {self._choices()}."


@dataclass(frozen=True, slots=True)
class _OtherKeys:
    """Depends on whether other keys are given."""

    keys: tuple[str, ...]

    def __init__(self, *keys: str) -> None:
        object.__setattr__(self, "keys", keys)


@dataclass(frozen=True, slots=True, init=False)
class OnlyWith(_OtherKeys):
    """The key has an effect only where one of these other keys is given."""

    def dead(self, *found: object) -> bool:
        return not any(map(_given, found))

    def why(self, names: tuple[str, ...], *found: object) -> str:
        return f"without {_either(names)}"

    def condition(self) -> str:
        return f"Only with {_either(f'`{key}`' for key in self.keys)}."


@dataclass(frozen=True, slots=True, init=False)
class NeverWith(_OtherKeys):
    """The key has no effect where one of these other keys is given."""

    def dead(self, *found: object) -> bool:
        return any(map(_given, found))

    def why(self, names: tuple[str, ...], *found: object) -> str:
        return f"while {_either(name for name, value in zip(names, found, strict=True) if _given(value))} is given"

    def condition(self) -> str:
        return f"Not with {_either(f'`{key}`' for key in self.keys)}."


Effect = OnlyWhen | NeverWhen | OnlyWith | NeverWith
"""Facts that say when a key has an effect."""

Fact = TypeVar("Fact")


def facts(field: FieldInfo, kind: type[Fact]) -> Iterator[Fact]:
    """The facts of a kind that are written on a key."""
    for item in metadata(field):
        if isinstance(item, kind):
            yield item


def is_advanced(field: FieldInfo) -> bool:
    """Whether few runs change a key."""
    return any(facts(field, Advanced))


def effects(field: FieldInfo) -> Iterator[Effect]:
    """The facts that say when a key has an effect."""
    for item in metadata(field):
        if isinstance(item, OnlyWhen | NeverWhen | OnlyWith | NeverWith):
            yield item


@cache
def metadata(field: FieldInfo) -> tuple[Any, ...]:
    """All that `Annotated` adds to the type of a key, also where the type is an alternative to null."""
    found = [*field.metadata]
    for kind in get_args(field.annotation):
        for extra in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
            found += extra.metadata if isinstance(extra, FieldInfo) else (extra,)
    return tuple(found)


def _given(value: object) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _either(items: Iterable[object]) -> str:
    names = [item if isinstance(item, str) else _shown(item) for item in items]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _shown(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
