"""Preferences of a user (theme, saved filters, ...), in a file in the user's configuration folder.

The page's address has a new port and token each time, so the browser cannot keep them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import CheckpointError, ConfigError
from agentrl.run_folder.files import read_bounded, write_atomic

KEYS = frozenset({"theme", "color", "smooth", "filters"})
MAX_BYTES = 64 << 10


def preferences_file() -> Path | None:
    """`agentrl/view.json` below XDG_CONFIG_HOME or ~/.config; None if the user has no home."""
    base = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    return None if base.parts[0] == "~" else base / "agentrl" / "view.json"


class Preferences:
    """Values by name. Safe to use from several threads; another viewer's changes are read each time.

    Args:
        file: where they are kept; None keeps them until the server stops.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._memory, self._lock = file, dict[str, object](), threading.Lock()

    def all(self) -> dict[str, object]:
        """All preferences; none if the file cannot be read."""
        if self._file is None:
            return dict(self._memory)
        try:
            found = json.loads(read_bounded(self._file, MAX_BYTES))
        except (OSError, ValueError, RecursionError, CheckpointError):
            return dict(self._memory)
        return {key: found[key] for key in KEYS & found.keys()} if isinstance(found, dict) else {}

    def update(self, given: Mapping[str, object]) -> dict[str, object]:
        """Set some of them; a folder that cannot be written keeps them until the server stops.

        Raises:
            ConfigError: a name is unknown, or they are too large.
        """
        if unknown := sorted(given.keys() - KEYS):
            raise ConfigError(f"{unknown[0][:40]!r} is not a preference; choose from {', '.join(sorted(KEYS))}")
        with self._lock:
            kept = {**self.all(), **given}
            text = json.dumps(kept, indent=1).encode()
            if len(text) > MAX_BYTES:
                raise ConfigError(f"preferences have {len(text)} bytes; at most {MAX_BYTES} are kept")
            self._memory = kept
            if self._file is not None:
                try:
                    self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    write_atomic(self._file, text + b"\n")
                except OSError:
                    self._file = None
        return kept

    def script(self) -> str:
        """A line of JavaScript that passes them to the page."""
        return f"window.AGENTRL_KEPT = JSON.parse({json.dumps(json.dumps(self.all()))});\n"
