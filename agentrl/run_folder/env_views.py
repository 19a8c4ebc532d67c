"""Where a run folder keeps the scripts with which envs show their episodes."""

from __future__ import annotations

VIEWS = "views"
"""The folder."""


def view_name(env: str) -> str:
    """The file of an env's script; the only env of a run has no name."""
    return f"{env or 'env'}.js"
