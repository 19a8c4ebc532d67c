"""Custom views of envs: a script in the run folder, shown in an isolated frame."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.run_folder.env_views import VIEWS, view_name
from agentrl.run_folder.files import read_bounded

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; frame-ancestors 'self'; base-uri 'none'; form-action 'none'; sandbox allow-scripts",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Of the answer with a view; it has no origin, so it has no cookie and can ask this server for nothing."""
MAX_SCRIPT = 1 << 20
_PAGE = """<!doctype html>
<meta charset="utf-8">
<style>:root{{color-scheme:light dark}}body{{font:14px/1.4 system-ui,sans-serif;margin:8px}}</style>
<div id="view"></div>
<script>
{script}
addEventListener("message", (e) => {{
  if (e.data && e.data.type === "agentrl") render(e.data.episode, e.data.message, document.getElementById("view"));
}});
</script>
"""


def view_file(run: Path, env: str) -> Path | None:
    """The script with which an env shows its episodes; None if the run folder holds none.

    A link or a name that leads out of the folder could put any file of the reader into an export.
    """
    file = run / VIEWS / view_name(env)
    return file if file.is_file() and file.resolve().is_relative_to(run.resolve()) else None


def view_page(file: Path) -> str:
    """The page of the frame.

    Raises:
        CheckpointError: the script is too large.
    """
    script = read_bounded(file, MAX_SCRIPT).decode("utf-8", "replace")
    return _PAGE.format(script=script.replace("</script", "<\\/script").replace("<!--", "<\\!--"))
