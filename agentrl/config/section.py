"""The base class of every part of the configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.config.facts import Effect, effects
from agentrl.config.place import Loc, dotted

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
COLDEST, HOTTEST = 1e-5, 1e4
"""Limits of a temperature above 0: divided by less or by more, logits are no numbers, or all equal."""
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]


class Section(BaseModel):
    """A part of the configuration: frozen, without unknown keys, and every key the user wrote must have an
    effect."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="after")
    def _keys_have_effects(self) -> Self:
        if found := list(dead_keys(self)):
            raise DeadKeys(found)
        return self

    @property
    def written(self) -> frozenset[str]:
        """The keys the user wrote; for a dump, which has all keys, those that differ from their defaults."""
        if len(self.model_fields_set) < len(type(self).model_fields):
            return frozenset(self.model_fields_set)
        known = type(self).model_fields
        return frozenset(
            name
            for name, field in known.items()
            if field.is_required() or getattr(self, name) != field.get_default(call_default_factory=True)
        )


def problems_of(invalid: ValidationError) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The place and the text of each problem that pydantic found, keys without effect one by one."""
    for error in invalid.errors(include_url=False):
        loc, cause = error["loc"], error.get("ctx", {}).get("error")
        if isinstance(cause, DeadKeys):
            around = tuple(map(str, loc))
            for key in cause.found:
                yield (*loc, *key.loc), f"{'.'.join((*around, *key.loc))} {key.text(around)}"
        elif error["type"] == "missing":
            yield loc, f"{dotted(loc)} is missing"
        else:
            yield loc, error["msg"]


@dataclass(frozen=True, slots=True)
class DeadKey:
    """A key that was written and has no effect. `loc` and `others` count from the section that was checked."""

    loc: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]
    values: tuple[object, ...]
    fact: Effect

    def text(self, around: Loc = ()) -> str:
        """The message about it; `around` leads to the section that was checked."""
        names = tuple(dotted((*around, *other)) for other in self.others)
        return f"has no effect {self.fact.why(names, *self.values)}: remove one of them"


class DeadKeys(ValueError):
    """Keys of a section that were written and have no effect."""

    def __init__(self, found: Sequence[DeadKey]) -> None:
        super().__init__("; ".join(f"{'.'.join(key.loc)} {key.text()}" for key in found))
        self.found = tuple(found)


def dead_keys(section: Section, *, strict: bool = False) -> Iterator[DeadKey]:
    """The keys of a section, and of those in it, that were written and have no effect.

    Args:
        strict: also check sections that name all their keys; see `Section.written`.
    """
    return _dead_keys((section,), (), strict)


def _dead_keys(around: tuple[Section, ...], loc: tuple[str, ...], strict: bool) -> Iterator[DeadKey]:
    """See `dead_keys`; `around` ends with the section, and `loc` leads there from the first of them."""
    section = around[-1]
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in section.model_fields_set or value is None:
            continue
        here = (*loc, name)
        for fact in effects(field):
            places = [_look_up(around, loc, key) for key in fact.keys]
            found = [place for place in places if place is not None]
            values = tuple(value for _, value in found)
            if len(found) < len(places) or not fact.dead(*values):
                continue
            others = tuple(other for other, _ in found)
            if isinstance(value, Section) and field.default is not None:
                keys = value.model_fields_set if strict else value.written
                given = sorted(key for key in keys if getattr(value, key) is not None)
                yield from (DeadKey((*here, key), others, values, fact) for key in given)
            elif strict or name in section.written:
                yield DeadKey(here, others, values, fact)
            break
        else:
            if isinstance(value, Section):
                yield from _dead_keys((*around, value), here, strict)


def _look_up(around: tuple[Section, ...], loc: tuple[str, ...], key: str) -> tuple[tuple[str, ...], object] | None:
    """The place and the value of a key, seen from inside the last section; None if none of them has it."""
    first, *rest = key.split(".")
    for depth in range(len(around) - 1, -1, -1):
        section = around[depth]
        if first not in type(section).model_fields:
            continue
        value = getattr(section, f"resolved_{first}", None) if not rest else None
        value = getattr(section, first) if value is None else value
        for part in rest:
            value = getattr(value, part)
        if isinstance(value, BaseModel):
            value = getattr(value, "name", value)  # `loss: gspo` is short for `loss: {name: gspo}`
        return (*loc[:depth], first, *rest), value
    return None
