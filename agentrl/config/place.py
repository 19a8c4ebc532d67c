"""Where a value of a configuration is: the keys and numbers that lead to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from agentrl.errors import ConfigError

Loc = tuple[str | int, ...]


def dotted(loc: Iterable[str | int]) -> str:
    """`("env", "options", 0)` as `env.options[0]`; an empty name is `''`."""
    text = ""
    for part in loc:
        name = part if isinstance(part, int) else part or "''"
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text


_FREE = re.compile(
    r"(?<![\w/.-])(?:env\.(?:options|settings|reward_weights|solved_at)|data\.(?:options|columns|train|held_out)"
    r"|warmup\.(?:options|demonstrations)|agent\.(?:sandbox|use|command)|eval\.sets)(?:\.[\w/-]+)*"
)
"""The keys whose values only the env, or the program that plays it, can check."""


class Places:
    """Where the keys of a run were written, for errors that are found only with the env's code at hand."""

    def __init__(self, of_keys: Mapping[str, str]) -> None:
        self._of_keys = of_keys

    def __eq__(self, other: object) -> bool:
        """Two runs with the same values are the same run, wherever they were written."""
        return isinstance(other, Places)

    __hash__ = None  # type: ignore[assignment]

    def of(self, text: str, root: str) -> str:
        """`tools.yaml:5:3` for the first key that `text` names, `--set a.b=c` for a flag; empty if there is none.

        Args:
            text: the error.
            root: where the section is that the text calls `env`: `env` itself, or `envs.NAME`.
        """
        for word in _FREE.findall(text):
            keys = word.removeprefix("env.") if root != "env" and word.startswith("env.") else word
            key = keys if keys == word and root == "env" else f"{root}.{keys}"
            while key:
                if key in self._of_keys:
                    return self._of_keys[key]
                key = key.rpartition(".")[0]
        return ""


@contextmanager
def located(places: Places | None, root: str = "env") -> Iterator[None]:
    """Put the place of the key in front of each ConfigError that names one."""
    try:
        yield
    except ConfigError as e:
        place = "" if places is None else places.of(str(e), root)
        if not place:
            raise
        raise ConfigError(f"{place}: {e}") from e
