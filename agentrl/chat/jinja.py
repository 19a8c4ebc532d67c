"""Render chat templates as Hugging Face does: the same sandbox, filters and globals, without its imports."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from agentrl.errors import TemplateError

if TYPE_CHECKING:
    import jinja2.nodes
    from jinja2.environment import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_OF_DICTS = frozenset(dir(dict))
_MISSING = object()
_BEYOND_ASCII = re.compile("[\u0080-\U000effff]")


class Fixed(dict[str, Any]):
    """An immutable mapping that caches its JSON text, because schemas are written into every prompt."""

    __slots__ = ("text",)
    text: str


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    plain = type(value) is Fixed and indent is None and separators is None and not (sort_keys or ensure_ascii)
    if plain and hasattr(value, "text"):
        return str(value.text)
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if plain:
        value.text = text
    if ensure_ascii:  # shielded control tokens (planes 15 and 16) must pass through unchanged
        text = _BEYOND_ASCII.sub(lambda m: json.dumps(m.group())[1:-1], text)
    return text


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError as JinjaError

    raise JinjaError(message)


@lru_cache(maxsize=32)
def compile_template(source: str) -> Callable[..., str]:
    """Compile a template to a function from its variables to the rendered text.

    `strftime_now` returns the time of compilation, so that prompts do not change at midnight.

    Raises:
        TemplateError: the source is not valid Jinja.
    """
    import jinja2

    environment = _environment()
    now = datetime.datetime.now()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        template: Template = environment.from_string(source)
    except jinja2.TemplateError as e:
        raise TemplateError(f"the chat template is not valid Jinja: {type(e).__name__}: {e}") from e
    return template.render


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template reads, other than those it has always set before; empty if it is not
    valid Jinja."""
    import jinja2
    from jinja2.meta import find_undeclared_variables

    try:
        parsed = _environment().parse(source)
        read: set[str] = set()
        _follow([parsed], set(), read)
        return frozenset(find_undeclared_variables(parsed)) & read
    except jinja2.TemplateError:
        return frozenset()


@lru_cache(maxsize=32)
def assigned_by(source: str) -> frozenset[str]:
    """Return the variables that a template sets somewhere; empty if it is not valid Jinja."""
    import jinja2

    try:
        return _targets(_environment().parse(source))
    except jinja2.TemplateError:
        return frozenset()


def _targets(node: jinja2.nodes.Node) -> frozenset[str]:
    from jinja2 import nodes

    names = [node] if isinstance(node, nodes.Name) else node.find_all(nodes.Name)
    return frozenset(name.name for name in names if name.ctx != "load")


_VALUES = ("values", "defaults", "call")
"""Fields of `with`, `macro` and `call` that are evaluated before their parameters are set."""


def _follow(statements: Iterable[jinja2.nodes.Node], assigned: set[str], read: set[str]) -> None:
    """Follow statements on every path.

    Args:
        assigned: variables that are set by now; those that are set afterwards in any case are added.
        read: gets the variables that are read while they may not be set. jinja2.meta reports more: to it, an
            `if` with an `else` never sets a variable for certain.
    """
    from jinja2 import nodes

    for node in statements:
        if isinstance(node, nodes.If):
            _follow([node.test], assigned, read)
            then, otherwise = set(assigned), set(assigned)
            _follow(node.body, then, read)
            if node.elif_:  # an `if` in the `else`
                first, *others = node.elif_
                _follow([nodes.If(first.test, first.body, others, node.else_)], otherwise, read)
            else:
                _follow(node.else_, otherwise, read)
            assigned |= then & otherwise
        elif isinstance(node, nodes.Assign):
            _follow([node.node], assigned, read)
            assigned |= _targets(node.target)
        elif isinstance(node, nodes.AssignBlock):
            _follow([*node.body, *([node.filter] if node.filter else [])], set(assigned), read)
            assigned |= _targets(node.target)
        elif isinstance(node, nodes.For):
            _follow([node.iter], assigned, read)
            inside = assigned | _targets(node.target) | {"loop"}
            _follow([*([node.test] if node.test else []), *node.body], inside, read)
            _follow(node.else_, set(assigned), read)
        elif isinstance(node, nodes.Name):
            if node.ctx != "load":
                assigned.add(node.name)
            elif node.name not in assigned:
                read.add(node.name)
        else:  # what a block other than an `if` sets is gone after it
            inside = set(assigned) if hasattr(node, "body") else assigned
            _follow(node.iter_child_nodes(only=_VALUES), inside, read)
            _follow(node.iter_child_nodes(exclude=_VALUES), inside, read)
            if isinstance(node, nodes.Macro):
                assigned.add(node.name)


def _environment() -> ImmutableSandboxedEnvironment:
    """An environment with the extensions that chat templates use."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks assistant text for other tools; it renders as its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Environment(ImmutableSandboxedEnvironment):
        """Looks up `message.role` as the sandbox does, without asking first whether a dict has such a method."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is not dict or attribute in _OF_DICTS:
                return super().getattr(obj, attribute)
            found = obj.get(attribute, _MISSING)
            return self.undefined(obj=obj, name=attribute) if found is _MISSING else found

    return Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
