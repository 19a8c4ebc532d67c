"""Relative links of every page lead to a file, and their anchors to a heading."""

from __future__ import annotations

import importlib
import itertools
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.docs.blocks import ROOT, pages


def links(page: Path) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
    inline = [child for token in tokens for child in token.children or ()]
    return [str(child.attrs["href"]) for child in inline if child.type == "link_open"]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    return {
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.replace("`", "").lower()).strip()) for title in titles
    }


def broken(page: Path) -> list[str]:
    found = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path):
    assert broken(page) == []


def test_a_missing_page_and_a_missing_heading_are_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](#two) [c](none.md) [d](https://example.com)\n")
    assert broken(page) == ["#two", "none.md"]


def test_every_object_of_the_api_page_exists():
    text = (ROOT / "docs/api.md").read_text()
    found = re.findall(r"^::: (\S+)\n(?:    options:\n(?:      members: \[(.*)\])?)?", text, re.MULTILINE)
    assert len(found) > 10
    for name, members in found:
        module = importlib.import_module(name)
        assert [member for member in members.split(", ") if member and not hasattr(module, member)] == []


def test_every_page_of_docs_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    docs = ROOT / "docs"
    names = [str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.name != "index.md"]
    assert [name for name in names if f"]({name})" not in index] == []
