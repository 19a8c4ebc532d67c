"""Adapters of other ecosystems' environments, and how `SCHEME:REST` becomes an env class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from agentrl.config.address import hide_credentials
from agentrl.config.schemes import SCHEMES, EnvScheme
from agentrl.config.typed import check_types
from agentrl.env.env import Env
from agentrl.errors import AgentRLError, ConfigError
from agentrl.extras import installed
from agentrl.importing import load_object
from agentrl.suggest import did_you_mean

O = TypeVar("O")


class Adapter(Env):
    """Base of adapters: `named` makes a class for one name and its options, which needs no arguments.

    Attributes:
        Options: a frozen dataclass; the keys of `env.options`.
        rest: what follows the colon of `SCHEME:REST`.
        options: the options of this env.
    """

    Options: ClassVar[type]
    rest: ClassVar[str] = ""
    options: Any = None

    @classmethod
    def named(cls, rest: str, options: Mapping[str, Any]) -> type[Adapter]:
        """The env class for `rest`.

        Raises:
            ConfigError: an option is unknown or invalid, or there is no such env.
        """
        body = {"__module__": cls.__module__, "rest": rest, "options": read_options(cls.Options, options)}
        made: type[Adapter] = type(cls.__name__, (cls,), body)
        made.check_name()
        return made

    @classmethod
    def check_name(cls) -> None:
        """Raises ConfigError if there is no env named `rest`."""


def read_options(kind: type[O], given: Mapping[str, Any], where: str = "env.options") -> O:
    """The options as a dataclass. Raises ConfigError for an unknown key or an invalid value."""
    assert is_dataclass(kind)
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            there = f"the options are: {', '.join(known)}" if known else "there are no options"
            raise ConfigError(f"{where}.{name}: unknown; {did_you_mean(name, known, otherwise=there)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    check_types(kind, values, where)
    try:
        return kind(**values)
    except TypeError as e:
        missing = [f.name for f in fields(kind) if f.name not in values and "'" + f.name + "'" in str(e)]
        raise ConfigError(f"{where}.{missing[0] if missing else '?'}: required") from None


def missing_module(scheme: EnvScheme) -> str | None:
    """The first module of a scheme that is not installed."""
    return next((module for module in scheme.modules if not installed(module)), None)


def load_adapter(name: str, rest: str, options: Mapping[str, Any]) -> type[Env]:
    """The env class of `NAME:REST`.

    Raises:
        ConfigError: its package is not installed, there is no such env, or the options are invalid.
    """
    scheme, use = SCHEMES[name], hide_credentials(f"env {name}:{rest}")
    if not rest:
        raise ConfigError(f"env {name}: write {name}:{scheme.rest} ({scheme.about})")
    if (module := missing_module(scheme)) is not None:
        raise ConfigError(f"{use} needs {module}, which is not installed: pip install {scheme.install}")
    adapter: type[Adapter] = load_object(scheme.adapter)
    try:
        return adapter.named(rest, options)
    except AgentRLError:
        raise
    except Exception as e:
        raise ConfigError(f"{use}: {type(e).__name__}: {e}") from e
