"""What an import has found so far: our configuration, and a note for every key of the source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from agentrl.import_verl.keys import BY_KEY, How, row_of
from agentrl.import_verl.read_config import Keys

_SWITCHES = {"algorithm.pf_ppo": "algorithm.use_pf_ppo", "global_profiler": "global_profiler.tool"}
"""Keys that enable a section, in addition to its `enable`."""


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key: "taken" (as another key of ours), the "same" here without a key, "no effect" in verl
    either, "by hand" (something is to be decided), or "refused" (not supported, and why)."""

    key: str
    value: object
    kind: How
    text: str

    def __str__(self) -> str:
        given = "" if self.value is None else f" = {self.value!r}"
        return f"{self.kind:9} {self.key}{given}: {self.text}"


@dataclass(slots=True)
class Imported:
    """Our configuration (plain data, ready for YAML) and the notes, at least one for each key of the source."""

    keys: Keys
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def set(self, path: str, value: object) -> None:
        """Put a value at a dotted path."""
        *sections, key = path.split(".")
        place = self.config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value

    def get(self, path: str) -> Any:
        """The value at a dotted path; None where nothing was put."""
        place: Any = self.config
        for part in path.split("."):
            place = place.get(part) if isinstance(place, dict) else None
        return place

    def has(self, key: str) -> bool:
        """Whether the source gives the key a value."""
        return self.keys.values.get(key) is not None

    def value(self, key: str) -> object:
        """The value of a key of verl: that of the source, else verl's own default."""
        found = self.keys.values.get(key)
        return found if found is not None else BY_KEY[key].default

    def number(self, key: str, *, whole: bool = False) -> Any:
        """The value as a number, verl's default where it is none (which is noted)."""
        value = self.value(key)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return self._unreadable(key, "a number")
        if (
            value is None
            or isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            return self._unreadable(key, "a number") if self.has(key) else value
        if whole and value != round(value):
            return self._unreadable(key, "a whole number") if self.has(key) else round(value)
        return round(value) if whole else value

    def whole(self, key: str) -> Any:
        """The value as a whole number."""
        return self.number(key, whole=True)

    def flag(self, key: str) -> bool:
        """The value as yes or no."""
        value = self.value(key)
        if isinstance(value, str):
            if value.lower() in ("true", "false"):
                return value.lower() == "true"
            return bool(self._unreadable(key, "true or false"))
        return bool(value)

    def text(self, key: str) -> str:
        """The value as text; empty if there is none."""
        value = self.value(key)
        return "" if value is None else str(value)

    def say(self, key: str, kind: How, text: str) -> None:
        """Note what became of a key, in place of what its row says. Only what the source holds is noted."""
        if self.has(key) and key not in self._said:
            self._said.add(key)
            self.notes.append(Note(key, self.keys.values[key], kind, text))

    def say_below(self, prefix: str, kind: How, text: str, *, but: tuple[str, ...] = ()) -> None:
        """The same note for every key that begins with `prefix`, except where `but` follows it."""
        for key in self.keys.values:
            if key.startswith(prefix) and not key.removeprefix(prefix).startswith(but or ("\0",)):
                self.say(key, kind, text)

    def hint(self, key: str, text: str) -> None:
        """Note something to decide, whether the source holds the key or not."""
        self._said.add(key)
        self.notes.append(Note(key, self.keys.values.get(key), "by hand", text))

    def note_rest(self) -> None:
        """Note what the rows say of all keys of which nothing was said."""
        for key, value in self.keys.values.items():
            if key in self._said:
                continue
            row = row_of(key)
            if row is None and value in (None, {}):  # an empty section
                continue
            if row is None:
                self.notes.append(Note(key, value, "by hand", "not a key that verl documents"))
                continue
            kind, text = row.kind(value), row.text
            if value is None or (kind == "same" and row.how != "same"):
                kind, text = "same", "verl's default; nothing to write"
            elif kind in ("by hand", "refused") and (switch := self._switched_off(key)):
                kind, text = "no effect", f"{switch} is off"
            self.notes.append(Note(key, value, kind, text))

    def _switched_off(self, key: str) -> str | None:
        """The key of the source that switches off the section which `key` belongs to."""
        parts = key.split(".")
        for end in range(len(parts) - 1, 0, -1):
            place = ".".join(parts[:end])
            names = [*(f"{place}.{name}" for name in ("enable", "enabled")), _SWITCHES.get(place, "")]
            for name in names:
                if name in self.keys.values and name != key and self.keys.values[name] in (False, None, 0):
                    return name
        return None

    def _unreadable(self, key: str, wanted: str) -> object:
        self.say(key, "by hand", f"must be {wanted}; verl's default {BY_KEY[key].default!r} was taken")
        return BY_KEY[key].default
