"""The public pages and their code blocks, read by a Markdown parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
NOT_CHECKED = re.compile(r"<!-- not checked: (\S.*?) -->")


@dataclass(frozen=True)
class Block:
    """A code block: where it is, its language, its text, and why it is not checked ("" if it is)."""

    page: str
    line: int
    language: str
    text: str
    unchecked: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that users read, the README first."""
    patterns = (
        "*.md",
        "docs/**/*.md",
        "envs/*/README.md",
        "examples/**/*.md",
        "bench/results/*.md",
        ".github/**/*.md",
    )
    return [page for pattern in patterns for page in sorted(ROOT.glob(pattern))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of one page; an indented block has the language "indented"."""
    name, reason = str(page.relative_to(ROOT)), ""
    for token in MarkdownIt().disable("inline").parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language = "indented" if token.type == "code_block" else token.info.strip()
            yield Block(name, token.map[0] + 1, language, token.content, reason)
        if token.type == "html_block":
            found = NOT_CHECKED.search(token.content)
            reason = found[1] if found else ""
        elif token.type.endswith("_open") or token.type in ("fence", "code_block"):
            reason = ""


@cache
def all_blocks() -> tuple[Block, ...]:
    """The blocks of all pages, parsed once."""
    return tuple(block for page in pages() for block in blocks_of(page))


def blocks(*languages: str) -> list[Block]:
    """All blocks in one of these languages that are checked."""
    return [block for block in all_blocks() if block.language in languages and not block.unchecked]
