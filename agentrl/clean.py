"""Text from outside (a sandbox, a tool, a server, an endpoint), safe to render, to store and to print.

What cannot be encoded, what moves a terminal's cursor, what reorders a line and what is there but cannot be seen
becomes a visible escape such as `\\u202e`. Everything that a reader sees is unchanged, and so do line ends,
tabs, and the joiners and variation selectors that emoji and scripts are written with.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.types import Message

if TYPE_CHECKING:
    from pydantic import ValidationError

_ALWAYS = (
    "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # C0 but tab, line feed and carriage return; DEL; C1
    "\xad\u061c\u180e"  # soft hyphen, Arabic letter mark, Mongolian vowel separator
    "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"  # grapheme joiner, fillers and vowels without a shape
    "\u200b\u200e\u200f\u202a-\u202e"  # zero-width space; direction marks, embeddings and overrides
    "\u2060-\u206f\ufeff\ufff0-\ufffb"  # invisible operators, isolates, byte order mark, annotations
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # controls of shorthand and of music
    "\ud800-\udfff"  # halves of surrogate pairs
    "\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"  # tags (invisible ASCII), and what is reserved beside them
)
_IN_PLACE = "\u180b-\u180d\u180f\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef"  # joiners and variation selectors
_SUSPECT = re.compile(f"[{_ALWAYS}{_IN_PLACE}]")
_JOINS = "\u0300-\u1fff\u2190-\u27bf\u2900-\u303f\u3041-\ud7ff\uf900-\ufdff\ufe70-\ufefc\U00010000-\U000323af"
_VARIES = "\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_FOUND = (
    "(?P<kept>"
    "\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{2,6}\U000e007f"  # a region's flag
    f"|(?<=[{_JOINS}])[{_VARIES}](?![{_VARIES}])"  # one selector after a character that has variants
    "|(?<=[0-9#*])\ufe0f(?=\u20e3)"  # a keycap
    f"|(?<=[{_JOINS}\ufe0f])[\u200c\u200d](?=[{_JOINS}])"  # one joiner between characters that join
    f")|[{_ALWAYS}{_IN_PLACE}]"
)


def clean_text(text: str) -> str:
    """`text` with everything unsafe as a visible escape; text without any is returned unchanged, quickly.

    Cleaning again changes nothing.
    """
    if text.isascii() and text.isprintable():
        return text
    if not _SUSPECT.search(text):
        return text
    return re.sub(_FOUND, _shown, text)  # takes long to compile, and most processes never need it


def _shown(match: re.Match[str]) -> str:
    if match.lastgroup == "kept":
        return match.group()
    code = ord(match.group())
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """Text for a terminal: control characters as signs, the rest as `clean_text` has it."""
    return clean_text(text.translate(_SIGNS))


_SIGNS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    127: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


def clean_message(message: Message) -> Message:
    """A message of an env with its text and its name clean."""
    content = message.content
    parts = (
        clean_text(content)
        if isinstance(content, str)
        else tuple(clean_text(part) if isinstance(part, str) else part for part in content)
    )
    name = None if message.name is None else clean_text(message.name)
    if parts == content and name == message.name:
        return message
    return replace(message, content=parts, name=name)


def first_reason(error: ValidationError) -> str:
    """The first thing that is wrong with a file, on one line: where in it, and why."""
    wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in wrong["loc"])
    return clean_text(f"{place}: {wrong['msg']}" if place else wrong["msg"])[:300]
