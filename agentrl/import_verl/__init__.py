"""Translate a verl configuration, with a line for every key: what it became, or why it has no counterpart.

Read are a YAML file (nested, or with dotted keys) and shell scripts whose command line sets `key=value`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.run import RunConfig
from agentrl.config.schema import without_kinds
from agentrl.config.section import dead_keys, problems_of
from agentrl.import_verl.found import Imported, Note
from agentrl.import_verl.objective import import_objective
from agentrl.import_verl.read_config import read_keys
from agentrl.import_verl.setting import import_setting

__all__ = ["Imported", "Note", "import_verl", "read_keys"]


def import_verl(source: Path) -> Imported:
    """Translate the configuration in `source` (.yaml, .yml, or a script with `key=value` words).

    Raises:
        ConfigError: the file cannot be read, holds no verl keys, or names a tools file that cannot be read.
    """
    found = Imported(read_keys(source))
    import_objective(found)
    import_setting(found)
    for remark in found.keys.remarks:
        found.notes.append(Note(str(source), None, "by hand", remark))
    found.note_rest()
    _refusals(found)
    found.config = {key: found.config[key] for key in RunConfig.model_fields if key in found.config}
    return found


def _refusals(found: Imported) -> None:
    """Values that agentrl refuses are left out, each with a note; so the result loads."""
    for _ in range(20):
        try:
            dead = list(dead_keys(RunConfig.model_validate(found.config), strict=True))
            left_out = [_leave_out(found, key.loc, f"{'.'.join(key.loc)} {key.text()}") for key in dead]
        except ValidationError as e:
            left_out = [_leave_out(found, without_kinds(loc), text) for loc, text in problems_of(e)]
        if not any(left_out):
            return


_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)+\b")


def _leave_out(found: Imported, loc: tuple[Any, ...], message: str) -> bool:
    """Take out what an error is about: the value at its place, else the first key that it names."""
    said = message.removeprefix("Value error, ")
    places = [".".join(map(str, loc[:end])) for end in range(len(loc), 0, -1)]
    for path in (*places, *_KEY.findall(said)):
        *sections, key = path.split(".")
        place = found.get(".".join(sections)) if sections else found.config
        if isinstance(place, dict) and key in place and not isinstance(place[key], dict):
            value = place.pop(key)
            found.notes.append(Note(path, value, "by hand", f"left out: {said[:1].lower()}{said[1:]}"))
            return True
    if said == "model is missing" and any("model.path" in note.text for note in found.notes):
        return False
    if not any(note.text == said for note in found.notes):
        found.notes.append(Note(".".join(map(str, loc)) or "the result", None, "by hand", said))
    return False
