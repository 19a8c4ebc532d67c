"""Which keys `--set` names, and whether they have an effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from agentrl.config.facts import Command, UnusedBy, facts
from agentrl.config.schema import field_at
from agentrl.config.source import read_value
from agentrl.errors import ConfigError


def check_effect(
    overrides: Sequence[str], command: Command, what: str, instead: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that every `--set` has an effect for a command that only samples from a policy.

    Args:
        command: the name under which keys declare that they have no effect.
        what: where an effect was expected, for errors: `on serving`.
        instead: options that do what the key would.

    Raises:
        ConfigError: one of them has no effect.
    """
    for text in overrides:
        for loc in keys_set(text):
            for end in range(1, len(loc) + 1):
                field = field_at(loc[:end])
                unused = {each for fact in facts(field, UnusedBy) for each in fact.commands} if field else ()
                if command in unused:
                    key = ".".join(loc[:end])
                    why = ", which updates no weights" if end > 1 and {"eval", "serve"} <= {*unused} else ""
                    remedy = f"use {instead[key]}" if key in instead else "leave it out"
                    raise ConfigError(f"--set {text}: `{key}` has no effect {what}{why}; {remedy}")


def keys_set(override: str) -> Iterator[tuple[str, ...]]:
    """The location of each key that one `--set a.b=c` sets; several where its value is a section.

    Raises:
        ConfigError: the value is not YAML.
    """
    key, _, value = override.partition("=")

    def below(loc: tuple[str, ...], given: object) -> Iterator[tuple[str, ...]]:
        if not isinstance(given, dict) or not given:
            yield loc
            return
        for name, inner in given.items():
            yield from below((*loc, name), inner)

    return below(tuple(part.strip() for part in key.split(".")), read_value(value, f"--set {override}"))
