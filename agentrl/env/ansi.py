"""Turn terminal colors of a game into text markers that a language model can read."""

from __future__ import annotations

import re

_COLORED = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0?m")
_ANY = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_NAMES = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def without_colors(text: str) -> str:
    """Text without control sequences: highlighted parts are put in brackets, colored ones name their color.

    FrozenLake's `\\x1b[41mS\\x1b[0mFFF` becomes `[S]FFF`. A highlight other than red is also named, because Taxi
    uses it to show whether the passenger is aboard.
    """
    return _ANY.sub("", _COLORED.sub(_marked, text))


def _marked(match: re.Match[str]) -> str:
    codes, text = [int(code) for code in match[1].split(";") if code], match[2]
    back = next((_NAMES[code % 10] for code in codes if 40 <= code <= 47 or 100 <= code <= 107), None)
    front = next((_NAMES[code % 10] for code in codes if 30 <= code <= 37 or 90 <= code <= 97), None)
    if back is not None:
        return f"[{text}]" if back == "red" else f"[{text} {back}]"
    return text if front is None else f"{text}({front})"
