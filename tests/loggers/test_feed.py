"""A logger that fails, hangs, is slow or is flooded never holds up its run."""

from __future__ import annotations

import html
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agentrl.reporting.loggers import log_feed as feed_module
from agentrl.reporting.loggers.hide_secrets import has_secrets, without_secrets
from agentrl.reporting.loggers.log_feed import QUEUED, Fed, LogFeed
from agentrl.reporting.loggers.protocol import RunInfo, SampleEpisode
from agentrl.reporting.loggers.sample_table import COLUMNS, markdown_table


class Kept:
    """Keeps what it gets; `fail_at` names a call that raises."""

    def __init__(self, fail_at: str = "", error: BaseException | None = None) -> None:
        self.fail_at, self.error = fail_at, error or ValueError("no\nway")
        self.calls: list[tuple[object, ...]] = []
        self.threads: set[int] = set()

    def _call(self, name: str, *what: object) -> None:
        self.calls.append((name, *what))
        self.threads.add(threading.get_ident())
        if name == self.fail_at:
            raise self.error

    def start(self, run: RunInfo) -> None:
        self._call("start", run)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._call("metrics", step, dict(values))

    def episodes(self, step: int, rows: Sequence[SampleEpisode]) -> None:
        self._call("episodes", step, rows)

    def finish(self, summary: Mapping[str, object]) -> None:
        self._call("finish", dict(summary))


class Hangs(Kept):
    """Hangs in its first metrics until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.entered.set()
        self.go.wait(60)
        super().metrics(step, values)


def started(tmp_path: Path, notes: list[str], *fed: Fed) -> LogFeed:
    found = LogFeed(fed, notes.append)
    found.start(RunInfo("run", tmp_path, {}))
    return found


def test_calls_arrive_in_order_on_one_other_thread(tmp_path: Path) -> None:
    logger, notes = Kept(), list[str]()
    feed = started(tmp_path, notes, Fed("kept", logger, "all"))
    for step in range(5):
        feed.metrics(step, {"a": step})
    feed.finish({"steps": 5})
    feed.finish({})
    assert [call[0] for call in logger.calls] == ["start", *["metrics"] * 5, "finish"]
    assert [call[1] for call in logger.calls[1:-1]] == list(range(5))
    assert logger.calls[-1] == ("finish", {"steps": 5})
    assert logger.threads != {threading.get_ident()}
    assert len(logger.threads) == 1
    assert notes == []


@pytest.mark.parametrize("call", ["start", "metrics", "finish"])
@pytest.mark.parametrize("error", [ValueError("no\nway"), SystemExit(3), KeyboardInterrupt()])
def test_a_logger_that_raises_is_left_alone_and_the_others_go_on(
    tmp_path: Path, call: str, error: BaseException
) -> None:
    bad, good, notes = Kept(call, error), Kept(), list[str]()
    feed = started(tmp_path, notes, Fed("bad", bad, "all"), Fed("good", good, "all"))
    for step in range(3):
        feed.metrics(step, {"a": 1.0})
    feed.finish({"steps": 3})
    assert len(notes) == 1
    assert notes[0].startswith(f"logger bad failed and gets nothing more: {type(error).__name__}")
    assert "\n" not in notes[0]
    assert bad.calls[-1][0] == call
    assert [c[0] for c in good.calls] == ["start", *["metrics"] * 3, "finish"]


def test_a_logger_that_hangs_drops_with_one_note_and_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "FLUSH_S", 0.2)
    hangs, good, notes = Hangs(), Kept(), list[str]()
    feed = started(tmp_path, notes, Fed("hangs", hangs, "all"))
    feed.metrics(0, {"a": 0.0})
    assert hangs.entered.wait(30)
    for step in range(1, QUEUED + 100):
        feed.metrics(step, {"a": 1.0})
    assert [note for note in notes if "behind" in note] == notes
    assert len(notes) == 1
    feed.finish({"steps": 1})
    assert len(notes) == 2
    assert "did not finish" in notes[1]
    hangs.go.set()
    assert good.calls == []


def test_only_finite_values_of_chosen_series_arrive(tmp_path: Path) -> None:
    values = {
        **{f"env/x{n}": 1.0 for n in range(10_000)},
        **{"reward": 0.5, "reward/größe 🎯": math.nan, "loss": math.inf, "lr": 0.1, "reward/b": 2},
    }
    fed = [
        Fed(name, Kept(), series)
        for name, series in {"few": "curated", "all": "all", "listed": ["env/x3", "missing"]}.items()
    ]
    feed = started(tmp_path, [], *fed)
    feed.metrics(1, values | {"nothing": None})
    feed.metrics(2, {"loss": math.nan})
    feed.finish({})
    few, everything, listed = (f.logger.calls[1:-1] for f in fed)
    assert few == [("metrics", 1, {"reward": 0.5, "reward/b": 2.0, "lr": 0.1})]
    assert len(everything[0][2]) == 10_003
    assert len(everything) == 1
    assert listed == [("metrics", 1, {"env/x3": 1.0})]


def test_a_feed_that_was_never_started_ends(tmp_path: Path) -> None:
    kept = Kept()
    LogFeed([Fed("kept", kept)], print).finish({})
    assert kept.calls == []


def test_ids_survive(tmp_path: Path) -> None:
    run = RunInfo("run", tmp_path / "wandb", {})
    assert run.recall("id") is None
    run.remember("id", "größe")
    assert run.recall("id") == "größe"


def test_secrets_are_hidden_and_nothing_else() -> None:
    config = {
        "model": {"path": "models/m", "max_tokens": 5, "token_budget": 9},
        "options": {
            "api_key": "abc",
            "apiKey": "abc",
            "OPENAI_API_KEY": "abc",
            "empty_token": "",
            "tokens": "words",
        },
        "agent": {"command": ["run", "--api-key", "abc", "--token=abc", "--steps", "3"]},
        "url": "https://me:abc@host/path?token=abc&x=1",
        "text": "use sk-proj1234567890abcdefgh and Bearer abc",
        "headers": {"Authorization": "abc"},
    }
    found = without_secrets(config)
    assert "abc" not in str(found)
    assert found["model"] == config["model"]
    assert found["options"]["tokens"] == "words"
    assert found["agent"]["command"][-2:] == ["--steps", "3"]
    assert found["url"] == "https://(hidden)@host/path?token=(hidden)&x=1"


@pytest.mark.parametrize(
    "config",
    [
        {"clientSecret": "hush"},
        {"accessToken": "hush"},
        {"OPENAI_API_KEY": "hush"},
        {"passwords": {"password": 1234567}, "x": [{"api_key": ["hush"]}]},
        {"auth": {"user": "me", "code": "hush"}},
        {"command": "env OPENAI_API_KEY=hush python x.py"},
        {"command": ["DB_PASSWORD=hush", "x"]},
        {"text": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.hush"},
        {"text": "-----BEGIN RSA PRIVATE KEY-----\nhush\nhush\n-----END RSA PRIVATE KEY-----"},
        {"text": "github_pat_hushhushhushhushhush"},
        {"header": "Basic aHVzaDpodXNo"},
        {"api_keys": ["hush"], "passwords": {"me": "hush"}},
        {"url": "postgres://me:p@hush@host/db"},
    ],
)
def test_secrets_in_other_places_are_hidden_too(config: dict[str, object]):
    found = str(without_secrets(config))
    assert "(hidden)" in found
    for secret in ("hush", "1234567", "aHVzaDpodXNo"):
        assert secret not in found


def test_what_only_looks_like_a_secret_stays():
    config = {"pad_token": 0, "key": 3, "max_tokens": 64, "log": {"tokens": "all"}, "monkey": "x", "token": None}
    config |= {"text": "Basic skills, a token of thanks; sort_key=size", "use_token": False}
    assert without_secrets(config) == config


@pytest.mark.parametrize("full", [False, True])
def test_a_logger_that_hangs_takes_no_time_from_those_behind_it(tmp_path, monkeypatch, full: bool):
    monkeypatch.setattr(feed_module, "FLUSH_S", 2.0)  # enough for the other, also on a busy machine
    hangs, good, notes = Hangs(), Kept(), list[str]()
    feed = started(tmp_path, notes, Fed("hangs", hangs, ["a"]), Fed("good", good, ["b"]))
    feed.metrics(0, {"a": 0.0})
    assert hangs.entered.wait(30)
    for step in range(QUEUED + 1 if full else 1):
        feed.metrics(step, {"a": 1.0})
    feed.metrics(1, {"b": 1.0})
    feed.finish({"steps": 1})
    assert [call[0] for call in good.calls] == ["start", "metrics", "finish"]
    assert not [note for note in notes if note.startswith("logger good")]
    hangs.go.set()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["train", "a.yaml", "--set", "env.options.api_key=hush"], True),
        (["train", "--set", "env.options={auth: {code: hush}}"], True),
        (["train", "a.yaml", "--set", "rollout.max_tokens=32", "--set", "name={"], False),
    ],
)
def test_a_command_that_says_a_secret_is_found(words: list[str], found: bool):
    assert has_secrets(words) is found


def test_a_logger_whose_library_would_hold_up_the_process_is_told_when_it_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(feed_module, "FLUSH_S", 0.2)

    class Clings(Hangs):
        def abandon(self) -> None:
            self.calls.append(("abandon",))

    clings = Clings()
    feed = started(tmp_path, [], Fed("clings", clings, "all"))
    feed.metrics(0, {"a": 0.0})
    assert clings.entered.wait(30)
    feed.finish({"steps": 1})
    assert clings.calls[-1] == ("abandon",)
    clings.go.set()


def test_the_last_call_is_made_although_the_queue_was_empty_before_it(tmp_path, monkeypatch):
    slow = Hangs()
    feed = started(tmp_path, [], Fed("slow", slow))
    feed.metrics(1, {"reward": 1.0})
    assert slow.entered.wait(30)
    [worker] = feed._workers
    put = worker._calls.put

    def late(call, timeout):
        slow.go.set()
        time.sleep(0.2)
        put(call, timeout=timeout)

    monkeypatch.setattr(worker._calls, "put", late)
    feed.finish({})
    assert [call[0] for call in slow.calls] == ["start", "metrics", "finish"]


def test_the_text_of_a_policy_is_no_markup_in_a_table():
    """A viewer renders the table; an image would be fetched from wherever the policy says."""
    text = "![x](http://a/b.png) [y](http://a) <i> `c` \\| z\r\r# h\n***\x85~~s~~"
    table = markdown_table([SampleEpisode("a", "b|", 1.0, True, "answered", 1, text)])
    *_, row = table.splitlines()
    assert table.count("\n") == 2
    assert len(table.splitlines()) == 3
    assert row.count("|") == 1 + len(COLUMNS)
    cell = row.split("|")[-2]
    assert set(cell.replace("&#", "").replace("<br>", "")).isdisjoint("![]<>`\\#*~_&")
    assert html.unescape(cell).replace("<br>", "\n").strip() == text.replace("\r", "\n").replace("\x85", "\n")
