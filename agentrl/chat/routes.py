"""Routes of the tokens in a transcript: which experts a model chose, from completions to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.types import Routes, Segment


def routed(segments: list[Segment], path: Sequence[int], routes: Routes) -> None:
    """Give the segments of a path the routes of their tokens, from those of the whole path.

    A token keeps the first route that it is given: that of the pass from which the next token was sampled.
    """
    size = _bytes_per_token(routes)
    at, start = 0, routes.start * size
    stop = start + len(routes.data)
    for number in path:
        segment = segments[number]
        known = b"" if segment.routes is None else segment.routes.data
        end = at + len(segment.ids) * size
        if max(at + len(known), start) < min(end, stop):
            data = known.ljust(start - at, _UNKNOWN)
            data += routes.data[at + len(data) - start : end - start]
            segments[number] = replace(segment, routes=replace(routes, data=data, start=0))
        at = end


def routes_of(segments: Sequence[Segment]) -> Routes | None:
    """The routes of all tokens of consecutive segments, -1 where they are not known; None if none is."""
    first = next((segment.routes for segment in segments if segment.routes is not None), None)
    if first is None:
        return None
    size = _bytes_per_token(first)
    parts = [
        (b"" if segment.routes is None else segment.routes.data).ljust(len(segment.ids) * size, _UNKNOWN)
        for segment in segments
    ]
    return replace(first, data=b"".join(parts))


_UNKNOWN = b"\xff"
"""Every byte of -1, in any width and byte order."""


def _bytes_per_token(routes: Routes) -> int:
    return routes.layers * routes.top_k * routes.width
