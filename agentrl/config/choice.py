"""A key that chooses one of several kinds by name: `loss: gspo` is short for `loss: {name: gspo}`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from agentrl.config.facts import NamesCode, facts
from agentrl.config.section import Section
from agentrl.suggest import did_you_mean


def is_own(name: str) -> bool:
    """Whether a name points to user code, `module:name` or `path/to/file.py:name`."""
    return ":" in name


def known_or_own(name: str, known: Sequence[str], code: str = "Name") -> str:
    """Return the name if it is known or points to user code.

    Raises:
        ValueError: it is neither.
    """
    if name in known or is_own(name):
        return name
    near = did_you_mean(name.lower(), known, cutoff=0.5)
    hint = f"; {near}" if near else ""
    raise ValueError(f"must be one of {', '.join(known)}, or `module:{code}`, got {name!r}{hint}")


OWN = "own function"
"""The kind that `use` names."""

_CODE = re.compile(r"[^\s:]+:[A-Za-z_][\w.]*")


class OwnFunction(Section):
    """A user-supplied function."""

    use: Annotated[str, NamesCode("function")]
    """`module:function` or `path/to/file.py:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""

    @property
    def name(self) -> str:
        """The name used in messages."""
        return self.use


class OneOf:
    """Written on a key (`Annotated[..., OneOf(...)]`): its value is the name of a kind, or a section with `name`.

    A user-supplied function is `module:function`, or `{use: module:function, options: {...}}`.

    Attributes:
        kinds: the parameters of each kind, by name.
        default: the name used if a section does not give one.
    """

    def __init__(self, kinds: Mapping[str, type[BaseModel]], default: str) -> None:
        self.kinds: Mapping[str, type[BaseModel]] = {**kinds, OWN: OwnFunction}
        self.names = tuple(kinds)
        self.default = default

    def spelled_out(self, value: Any) -> Any:
        """Expand short forms into sections.

        Raises:
            ValueError: the name is unknown.
        """
        if isinstance(value, BaseModel):
            return value
        if isinstance(value, str):
            value = {"use": value} if is_own(value) else {"name": value}
        if not isinstance(value, dict):
            raise ValueError(f"must be a name or a section with `name`, got {_said(value)}")
        if "use" in value:
            if "name" in value:
                raise ValueError("gives both `name` and `use`: remove one of them")
            if isinstance(value["use"], str) and not _CODE.fullmatch(value["use"]):
                raise ValueError(
                    f"use must be `module:function` or `path/to/file.py:function`, got {value['use']!r}"
                )
            return value
        name = value.get("name", self.default)
        if not isinstance(name, str):
            raise ValueError(f"name must be text, got {_said(name)}")
        if is_own(name):
            raise ValueError(f"name is for the kinds that come with agentrl: write `use: {name}`")
        if name not in self.names:
            near = difflib.get_close_matches(name.lower(), self.names, 1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"must be one of {', '.join(self.names)}, or `module:function`, got {name!r}{hint}")
        return {"name": name, **value}

    def kind_of(self, value: Any) -> str | None:
        """The name of the kind that a value chooses, as far as it can be determined."""
        if isinstance(value, OwnFunction):
            return OWN
        if isinstance(value, BaseModel):
            return str(getattr(value, "name", ""))
        try:
            spelled = self.spelled_out(value)
        except ValueError:
            return None
        return OWN if "use" in spelled else str(spelled["name"])

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = {name: handler.generate_schema(kind) for name, kind in self.kinds.items()}
        chosen = core_schema.tagged_union_schema(kinds, discriminator=self.kind_of)
        return core_schema.no_info_before_validator_function(self.spelled_out, chosen)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        short = {"type": "string", "description": f"{', '.join(self.names)}, or `module:function`"}
        return {"anyOf": [short, *_options(handler(schema))]}


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return f"a section with {', '.join(map(str, value)) or 'no keys'}"
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _options(schema: JsonSchemaValue) -> Iterator[Any]:
    seen: list[Any] = []
    for option in schema.get("oneOf", [schema]):
        if option not in seen:  # a kind with two names
            seen.append(option)
            yield option


@cache
def choice_of(field: FieldInfo) -> OneOf | None:
    """The kinds that a field chooses from; None for every other field."""
    return next(facts(field, OneOf), None)
