"""Checks for tools that return images to a text-only model."""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

from agentrl.env.env import Env
from agentrl.env.toolenv.dispatch import BoundTool
from agentrl.env.toolenv.spec import MethodTool
from agentrl.errors import ConfigError
from agentrl.types import Image


def refuse_images(env: Env) -> None:
    """Raises ConfigError if a tool's return type includes `Image`, which a text-only model cannot read."""
    for name in env.image_tools():
        raise ConfigError(
            f"{type(env).__name__}: tool {name!r} returns an Image by its type, and the chat template of this "
            "model takes text only: return text, leave the tool out, or play with a model that sees "
            "(agentrl eval --base-url)"
        )


def returns_image(tool: BoundTool) -> bool:
    """Whether a tool's return type includes `Image`; only methods have one."""
    if not isinstance(tool, MethodTool):
        return False
    try:
        returned = get_type_hints(inspect.unwrap(tool.function)).get("return")
    except (NameError, TypeError):
        return False
    return _mentions(returned)


def _mentions(hint: Any) -> bool:
    return hint is Image or any(_mentions(inner) for inner in get_args(hint))
