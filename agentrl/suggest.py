"""What a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that looks most like `name`, None where none is at least as similar as `cutoff` (0 to 1)."""
    known = list(known)
    if len(name) > 2 and len(longer := [other for other in known if other.startswith(name)]) == 1:
        return longer[0]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "", cutoff: float = 0.6) -> str:
    """`did you mean 'x'?`, or `otherwise` where no known name is similar."""
    near = nearest(name, known, cutoff)
    return otherwise if near is None else f"did you mean {near!r}?"
