"""Notes for the user: repeated notes are shown once and counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = re.compile(r"\d[\d,.]*")


@dataclass
class _Repeated:
    latest: str
    count: int = 1
    told: int = 1
    """The count that was last shown."""


class Notes:
    """Counts notes; those that differ in their numbers alone ("step 3: ...", "step 4: ...") are the same."""

    def __init__(self) -> None:
        self._seen: dict[str, _Repeated] = {}

    def add(self, text: str) -> bool:
        """Whether the note is new and should be shown."""
        known = self._seen.get(key := _NUMBER.sub("#", text))
        if known is None:
            self._seen[key] = _Repeated(text)
            return True
        known.latest, known.count = text, known.count + 1
        return False

    def repeated(self) -> list[str]:
        """The latest wording of each note that came more than once, with its count."""
        return [f"{note.latest} ({note.count} times)" for note in self._seen.values() if note.count > 1]

    def untold(self) -> list[str]:
        """Those of `repeated` whose count has grown since they were last asked for here."""
        grown = [note for note in self._seen.values() if note.count > note.told]
        for note in grown:
            note.told = note.count
        return [f"{note.latest} ({note.count} times)" for note in grown]
