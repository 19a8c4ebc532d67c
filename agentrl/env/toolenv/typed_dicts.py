"""`typing.TypedDict` in type hints: pydantic reads only that of `typing_extensions` before Python 3.12."""

from __future__ import annotations

import functools
import operator
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

import typing_extensions

NEEDED = sys.version_info < (3, 12)


def readable(hint: object) -> object:
    """The hint with each `typing.TypedDict` replaced by its `typing_extensions` counterpart.

    A recursive one is left unchanged.
    """
    return _converted(hint, {}) if NEEDED else hint


def _converted(hint: object, done: dict[object, object]) -> object:
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        return _typed_dict(hint, done)
    return with_parts(hint, lambda part: _converted(part, done))


def with_parts(hint: object, change: Callable[[object], object]) -> object:
    """The hint with each of its type arguments changed; `int` and `str` of `dict[int, str]`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None or not arguments or origin is typing.Literal:
        return hint
    if origin is typing.Annotated:
        inner = change(arguments[0])
        return hint if inner is arguments[0] else typing.Annotated[(inner, *arguments[1:])]
    if not all(isinstance(part, type) or get_origin(part) or part in (None, ...) for part in arguments):
        return hint
    parts = tuple(change(part) for part in arguments)
    if all(new is old for new, old in zip(parts, arguments, strict=True)):
        return hint
    if origin is Union:
        return Union[parts]  # noqa: UP007 - parts are known at run time only
    if origin is types.UnionType:
        return functools.reduce(operator.or_, parts)
    return origin[parts]


def _typed_dict(hint: Any, done: dict[object, object]) -> object:
    if hint in done:
        return done[hint]
    done[hint] = hint  # for recursive ones
    fields = {name: _converted(part, done) for name, part in get_type_hints(hint, include_extras=True).items()}
    required = set(hint.__required_keys__)
    for name, part in fields.items():  # the keys know nothing of hints that are text
        if get_origin(part) in (typing.Required, typing.NotRequired):
            if get_origin(part) is typing.Required:
                required.add(name)
            else:
                required.discard(name)
            fields[name] = get_args(part)[0]
    make: Any = typing_extensions.TypedDict
    made = make(hint.__name__, fields, total=False)
    made.__required_keys__, made.__optional_keys__ = frozenset(required), frozenset(fields.keys() - required)
    made.__doc__, made.__module__ = hint.__doc__, hint.__module__
    done[hint] = made
    return made
