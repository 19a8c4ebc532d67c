"""Search tools: BM25 over a corpus that lies on this machine, and the article of a title."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.env.rows import read_rows
from agentrl.env.toolenv.declare import tool
from agentrl.errors import ConfigError
from agentrl.tools.bm25 import Index

SNIPPET_CHARS = 60
_SUFFIXES = (".txt", ".md", ".rst")


class Corpus:
    """Articles by title, with an index over titles and texts; never changed, so that episodes may share one."""

    def __init__(self, articles: Mapping[str, str]) -> None:
        self.articles = dict(articles)
        self.titles = tuple(self.articles)
        # The title stands twice: an article about a thing comes before those that name it.
        self.index = Index([f"{title} {title} {text}" for title, text in self.articles.items()])

    def find(self, query: str, num: int) -> str:
        """Titles and first words of the `num` articles that fit best, a line each."""
        titles = [self.titles[n] for n in self.index.search(query, num)]
        return "\n".join(f"{t}: {_snippet(self.articles[t])}" for t in titles) or "Nothing found."

    def article(self, title: str) -> str:
        """The whole article. Raises KeyError where no article has that title."""
        if title not in self.articles:
            raise KeyError(f"no article {title[:80]!r}; search gives the titles")
        return self.articles[title]

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """A folder of text files (titles are their paths), or rows with `title` and `text` (jsonl, parquet).

        Raises:
            ConfigError: there is nothing of the kind, a row lacks a column, or two articles share a title.
        """
        is_dataset = (path / "dataset_info.json").is_file()
        articles = _read_folder(path) if path.is_dir() and not is_dataset else _read_articles(path)
        if not articles:
            raise ConfigError(f"corpus {path}: no articles ({', '.join(_SUFFIXES)} files, or rows)")
        return cls(articles)


class Search:
    """Search and read a corpus of your own.

    Args:
        corpus: a folder of .txt, .md or .rst files, or .jsonl or .parquet rows with `title` and `text`.
        base: folder that a relative path counts from; the working directory where it is None.

    Raises:
        ConfigError: the corpus cannot be read.
    """

    def __init__(self, corpus: str, base: str | Path | None = None) -> None:
        self.corpus = _shared(((Path(base) if base else Path.cwd()) / Path(corpus).expanduser()).resolve())

    @tool(parallel=True)
    def search(self, query: str, num: Annotated[int, Field(ge=1, le=10)] = 3) -> str:
        """Titles and first words of the articles that fit best."""
        return self.corpus.find(query, num)

    @tool(parallel=True)
    def read(self, title: str) -> str:
        """The whole article of that title."""
        return self.corpus.article(title)


@functools.lru_cache(maxsize=8)
def _shared(path: Path) -> Corpus:
    return Corpus.load(path)


def _read_folder(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8", errors="replace") for p in files}


def _read_articles(path: Path) -> dict[str, str]:
    articles: dict[str, str] = {}
    for number, row in read_rows(path):
        title, text = row.get("title"), row.get("text")
        if not isinstance(title, str) or not isinstance(text, str):
            raise ConfigError(f"{path}:{number}: an article has a `title` and a `text`, got {', '.join(row)}")
        if title in articles:
            raise ConfigError(f"{path}:{number}: a second article titled {title[:80]!r}")
        articles[title] = text
    return articles


def _snippet(text: str) -> str:
    return " ".join(text[: 4 * SNIPPET_CHARS].split())[:SNIPPET_CHARS]
