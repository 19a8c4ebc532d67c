"""Format observations: results and errors as text, and truncation of long ones."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentrl.env.env import CountTokens
from agentrl.env.toolenv.declare import Content, is_content
from agentrl.errors import first_error
from agentrl.types import Part

LEFT_OUT = "[an image, which this model cannot read, was left out]"


def to_content(value: Any) -> Content:
    """Convert a value to content: text and parts unchanged, None as empty text, everything else as JSON.

    Arrays and scalars of NumPy are lists and numbers.

    Raises:
        TypeError: the value cannot be represented as JSON.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if is_content(value):
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    try:
        return json.dumps(to_jsonable_python(value, fallback=_plain), ensure_ascii=False)
    except (PydanticSerializationError, ValueError, RecursionError) as e:
        raise TypeError(f"the result is {type(value).__name__}, which has no JSON form: {e}") from None


def _plain(value: Any) -> Any:
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    raise PydanticSerializationError(f"Unable to serialize unknown type: {type(value)}")


class ToolError(Exception):
    """An external tool reported an error; the text is the tool's message."""


NO_MODEL = "`self.model` is None while a program plays the episodes (`agent`): use a Judge, or do without it"


def error_text(error: BaseException) -> str:
    """Type and message of a tool's exception, without a traceback; for a `ToolError` only the message.

    Of a group, that of its first exception.
    """
    error = first_error(error)
    try:
        message = str(error)
    except Exception:
        message = ""
    name = type(error).__name__
    if isinstance(error, ToolError):
        return message or "the tool failed"
    if isinstance(error, AttributeError) and error.obj is None and error.name == "chat":
        message += f"; {NO_MODEL}"
    return f"{name}: {message}" if message else name


def answered_error(error: BaseException) -> str:
    """The observation for a failed tool: `Error: ...`, without repeating the prefix."""
    text = error_text(error)
    return text if text.lower().startswith("error") else f"Error: {text}"


def plain_text(content: Content) -> str:
    """The text parts of a content, in order."""
    return content if isinstance(content, str) else "".join(p for p in content if isinstance(p, str))


def text_only(content: Content) -> tuple[Content, bool]:
    """The content with each image replaced by a note, and whether there was an image."""
    if isinstance(content, str):
        return content, False
    parts = [part if isinstance(part, str) else LEFT_OUT for part in content]
    return "\n".join(parts), any(not isinstance(part, str) for part in content)


def cut_content(content: Content, max_tokens: int, count: CountTokens) -> tuple[Content, bool]:
    """Cut the text of `content` to about `max_tokens` tokens; images are kept, and text parts between two of them
    become one where they are cut. Returns (content, whether cut)."""
    if isinstance(content, str):
        return cut_text(content, max_tokens, count)
    parts: list[Part] = []
    left, was_cut = max_tokens, False
    for is_image, adjacent in groupby(content, lambda part: not isinstance(part, str)):
        same = list(adjacent)
        if is_image:
            parts += same
            continue
        text, cut = cut_text("".join(map(str, same)), left, count)
        was_cut |= cut
        left = max(0, left - count(text))
        parts += [text] if cut else same
    return tuple(parts), was_cut


def cut_text(text: str, max_tokens: int, count: CountTokens) -> tuple[str, bool]:
    """Keep the head and tail of `text` within `max_tokens` tokens, with a line between them that gives the number
    of omitted characters. Cuts fall between characters, at a nearby line end if there is one.

    `count` is called a few times on short texts only, regardless of the length of `text`.
    """
    # A token stands for at least one byte, so a text with few bytes needs no counting.
    if len(text) * 4 <= max_tokens or (len(text) <= max_tokens and text.isascii()):
        return text, False
    if len(text) <= 32 * max_tokens + 64 and count(text) <= max_tokens:
        return text, False
    low, high = 0, min(len(text) - 1, 16 * max_tokens)  # characters kept
    best = _joined(text, 0)
    while low <= high:
        kept = (low + high) // 2
        candidate = _joined(text, kept)
        if count(candidate) <= max_tokens:
            best, low = candidate, kept + max(1, kept // 50)
        else:
            high = kept - max(1, kept // 50)
    return best, True


def _joined(text: str, kept: int) -> str:
    head, tail = text[: kept - kept // 2], text[len(text) - kept // 2 :]
    at = head.rfind("\n")
    if at >= len(head) * 3 // 4:
        head = head[: at + 1]
    at = tail.find("\n")
    if 0 <= at < len(tail) // 4:
        tail = tail[at + 1 :]
    missing = len(text) - len(head) - len(tail)
    before = "" if not head or head.endswith("\n") else "\n"
    return f"{head}{before}[... {missing} of {len(text)} characters left out ...]\n{tail}"
