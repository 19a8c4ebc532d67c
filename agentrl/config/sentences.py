"""The sentences under the fields of a section, read from its source only when something asks for them.

pydantic's `use_attribute_docstrings` would read them at every start, and take a fifth of its time.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise

from pydantic import BaseModel

from agentrl.syntax import parse, source_of


def sentence(section: type[BaseModel], name: str) -> str:
    """What is written under a field, or given as its description; empty if there is nothing."""
    return section.model_fields[name].description or sentences(section).get(name, "")


@functools.cache
def sentences(section: type[BaseModel]) -> Mapping[str, str]:
    """What is written under the fields of a section and of those it extends, by name."""
    above = [kind for kind in section.__mro__[1:] if issubclass(kind, BaseModel) and kind is not BaseModel]
    return {**(sentences(above[0]) if above else {}), **dict(_own(section))}


def _own(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    try:
        [written] = parse(textwrap.dedent(source_of(section))).body
    except (OSError, TypeError, SyntaxError):  # defined where no source is kept
        return
    assert isinstance(written, ast.ClassDef)
    for field, below in pairwise(written.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
