"""What differs between two configurations, and what that means for a run that is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.config.dump import config_changes
from agentrl.config.facts import OnResume, facts
from agentrl.config.run import RunConfig
from agentrl.config.schema import field_at

Kind = Literal["free", "recorded", "fixed"]


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs.

    Attributes:
        key: the key with its sections, `optim.lr`.
        old: the value before, as text.
        new: the value after.
        kind: what it means for a resumed run.
    """

    key: str
    old: str
    new: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def changes_of(old: RunConfig, new: RunConfig) -> list[Change]:
    """Every key whose value differs, in the order of the configuration."""
    found = [Change(".".join(loc), before, after, kind_of(loc)) for loc, before, after in config_changes(old, new)]
    if (old.critic is None) != (new.critic is None):  # the state of a critic cannot be made up or dropped
        found = [_fixed(change) if change.key.startswith("critic") else change for change in found]
    if set(old.envs) != set(new.envs):
        found = [_fixed(change) if change.key.startswith("env") else change for change in found]
    return found


def kind_of(loc: Sequence[str]) -> Kind:
    """What a change of a key means for a resumed run: the fact on the key, or on the nearest section around it."""
    for end in range(len(loc), 0, -1):
        field = field_at(tuple(loc[:end]))
        for fact in facts(field, OnResume) if field is not None else ():
            return fact.kind
    return "recorded"


def _fixed(change: Change) -> Change:
    return Change(change.key, change.old, change.new, "fixed")
