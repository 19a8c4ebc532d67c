"""The table of metrics: every key has one line, and every line has code that writes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.reporting.metric_docs import METRICS, curated, describe, markdown

HOUSE = Path(__file__).parent.parent.parent / "agentrl"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "reward"),
        ("reward/solved", "reward/{name}"),
        ("reward/größe/2", "reward/{name}"),
        ("rejected/veto", "rejected/veto"),
        ("rejected/seq_mean_k1", "rejected/{statistic}"),
        ("env/parse_error", "env/parse_error"),
        ("env/agent/drift_rewritten", "env/agent/drift_{kind}"),
        ("env/my_count", "env/{name}"),
        ("tokens/retokenised", "tokens/{kind}"),
        ("update/2/loss", "update/{number}/{name}"),
        ("pass^4", "pass^{k}"),
    ],
)
def test_the_most_specific_line_describes_a_key(key: str, name: str) -> None:
    found = describe(key)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("key", ["rewards", "reward/", "envparse_error", "drift/", "drift/new", "", "step2"])
def test_other_keys_have_no_line(key: str) -> None:
    assert describe(key) is None


def test_every_line_is_written_once_and_says_something() -> None:
    names = [doc.name for doc in METRICS]
    assert len(names) == len(set(names))
    assert all(doc.description.endswith(".") for doc in METRICS)
    assert all("|" not in doc.name + doc.unit + doc.description for doc in METRICS)
    assert markdown().count("\n| ") == len(METRICS) + len({doc.group for doc in METRICS})


def test_the_curated_series_are_few_and_in_the_order_of_the_table() -> None:
    assert 10 <= sum(doc.curated for doc in METRICS) <= 35
    assert curated(["lr", "drift/chi2", "reward/b", "held_out", "reward", "reward/a"]) == [
        "reward",
        "reward/a",
        "reward/b",
        "held_out",
        "lr",
    ]


@pytest.mark.parametrize("name", [doc.name for doc in METRICS])
def test_some_code_writes_a_documented_key(name: str) -> None:
    """The last part of the name stands in the code as (the beginning of) a string."""
    literal = re.split(r"\{", name)[0] if name.startswith(("pass", "update")) else name
    part = [p for p in re.split(r"/|\{[^}]*\}", literal) if p][-1]
    written = re.compile(rf"[\"'/]{re.escape(part)}(?![A-Za-z0-9])")
    files = [
        f
        for f in HOUSE.rglob("*.py")
        if f.name not in ("metric_docs.py", "display.py") and "view" not in f.relative_to(HOUSE).parts
    ]
    assert any(written.search(file.read_text(encoding="utf-8")) for file in files)
