"""The tags of a run: words that its user gave it, in `tags.json` of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from agentrl.clean import clean_text
from agentrl.errors import CheckpointError, ConfigError
from agentrl.run_folder.files import read_bounded, write_atomic

FILE = "tags.json"
MAX_TAGS, MAX_CHARACTERS = 50, 60
_MAX_BYTES = 64 << 10


def read_tags(run: Path) -> tuple[str, ...]:
    """The tags of a run folder; none if the file is missing or is not a list of text."""
    try:
        found = json.loads(read_bounded(run / FILE, _MAX_BYTES))
    except (OSError, ValueError, RecursionError, CheckpointError):
        return ()
    if not isinstance(found, list):
        return ()
    return tuple(clean_text(tag)[:MAX_CHARACTERS] for tag in found if isinstance(tag, str) and tag)[:MAX_TAGS]


def write_tags(run: Path, tags: Iterable[str]) -> tuple[str, ...]:
    """Replace the tags of a run folder; returns them in order, each once.

    Raises:
        ConfigError: a tag is empty or too long, or there are too many.
    """
    given = sorted(dict.fromkeys(tag.strip() for tag in tags))
    for tag in given:
        if not tag or len(tag) > MAX_CHARACTERS or not tag.isprintable():
            raise ConfigError(
                f"{tag[: 2 * MAX_CHARACTERS]!r} is not a tag: give 1 to {MAX_CHARACTERS} printable characters"
            )
    if len(given) > MAX_TAGS:
        raise ConfigError(f"{run}: {len(given)} tags; a run has at most {MAX_TAGS}")
    if given:
        write_atomic(run / FILE, json.dumps(given, ensure_ascii=False).encode() + b"\n")
    else:
        (run / FILE).unlink(missing_ok=True)
    return tuple(given)
