import json

import pytest

from agentrl.env.compose import ComposedEnv
from agentrl.errors import ConfigError
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.tools.bm25 import Index
from agentrl.tools.search import Corpus
from agentrl.types import Task


def test_the_rarest_shared_word_decides():
    index = Index(["a red house", "a blue house by the sea", "a red red boat"])
    assert index.search("red", 3) == [2, 0]
    assert index.search("blue house", 3) == [1, 0]
    assert index.search("nothing at all", 3) == []


async def results(tools, base, *script):
    env = ComposedEnv(tools=[tools], base=base)
    episode = await play(env, Task("t", {"prompt": "Look it up."}), ScriptedPolicy(script))
    return [turn.observation[0].content for turn in episode.turns if turn.observation]


async def test_a_folder_of_texts_is_searched_and_read_from_yaml(tmp_path):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "cats.md").write_text("Cats purr\n  and sleep. " + "z" * 100)
    (tmp_path / "docs" / "deep" / "dogs.txt").write_text("Dogs bark at cats.")
    (tmp_path / "docs" / "photo.png").write_bytes(b"cats")
    entry = {"use": "agentrl.tools.search:Search", "options": {"corpus": "docs"}}
    found, article, missing, nothing = await results(
        entry,
        tmp_path,
        call("search", query="cats"),
        call("read", title="deep/dogs.txt"),
        call("read", title="birds"),
        call("search", query="birds"),
    )
    first, second = found.splitlines()
    assert first.startswith("cats.md: Cats purr and sleep. zzz")
    assert len(first) == len("cats.md: ") + 60
    assert second == "deep/dogs.txt: Dogs bark at cats."
    assert article == "Dogs bark at cats."
    assert missing == "Error: KeyError: \"no article 'birds'; search gives the titles\""
    assert nothing == "Nothing found."


def test_rows_with_title_and_text_are_a_corpus(tmp_path):
    path = tmp_path / "wiki.jsonl"
    rows = [{"title": "A", "text": "about a", "id": 1}, {"title": "B", "text": "about b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Corpus.load(path).articles == {"A": "about a", "B": "about b"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"title": "A"}', r"wiki\.jsonl:1: an article has a `title` and a `text`, got title"),
        ('{"title": "A", "text": "x"}\n{"title": "A", "text": "y"}', "2: a second article titled 'A'"),
        ("", "no articles"),
    ],
)
def test_a_corpus_that_cannot_be_read_says_why(tmp_path, text, error):
    (tmp_path / "wiki.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=error):
        ComposedEnv(
            tools=[{"use": "agentrl.tools.search:Search", "options": {"corpus": "wiki.jsonl"}}], base=tmp_path
        )


def test_a_corpus_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no-such"):
        Corpus.load(tmp_path / "no-such.jsonl")
