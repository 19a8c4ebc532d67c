"""The text of an HTML page: what a reader sees, links with their targets."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "head", "iframe", "object"})
_IN_HEAD = frozenset({"base", "link", "meta", "noscript", "script", "style", "template", "title"})
"""What may stand in a head. Any other element ends it: `</head>` may be left out."""
_BLOCKS = frozenset(
    {
        *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "figure"),
        *("footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p"),
        *("pre", "section", "table", "tr", "ul"),
    }
)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden: list[str] = []
        self._in_title = False
        self._targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden[-1:] == ["head"] and tag not in _IN_HEAD:
            self._hidden.pop()
        if tag == "title":
            self._in_title = True
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag in _BLOCKS:
            self.parts.append("\n- " if tag == "li" else "\n")
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        elif tag == "img" and (text := dict(attrs).get("alt")) and not self._hidden:
            self.parts.append(f"[{text}]")
        elif tag == "a":
            self._targets.append(dict(attrs).get("href") or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        if tag in self._hidden:
            # A page that forgets to close what is inside closes it here.
            del self._hidden[self._hidden.index(tag) :]
        elif tag == "a" and self._targets:
            target = self._targets.pop()
            if target.startswith(("http://", "https://", "/")) and not self._hidden:
                self.parts.append(f" ({target})")
        elif tag in _BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.parts.append(data.strip() + "\n")
        elif not self._hidden:
            self.parts.append(data)


def html_to_text(page: str) -> str:
    """Lines of text without scripts and styles; a link keeps its target in brackets."""
    reader = _Reader()
    try:
        reader.feed(page)
        reader.close()
    except AssertionError:  # the parser's own, on declarations that are cut short
        pass
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(reader.parts).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
