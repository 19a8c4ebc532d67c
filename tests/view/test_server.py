"""The server of the page: what it answers, and whom it refuses."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import numpy as np
import pytest
import zstandard
from starlette.testclient import TestClient
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError
from agentrl.run_folder import search_index
from agentrl.run_folder.history import Lineage, add_history, write_lineage
from agentrl.run_folder.records import EpisodeRecord, episodes_file, read_records
from agentrl.run_folder.search_index import Query, cache_folder, open_index
from agentrl.run_folder.tags import write_tags
from agentrl.run_folder.token_records import SKIPPED, TRAINED, TokenColumns, encode_tokens, tokens_file
from agentrl.types import Image, Message, Segment
from agentrl.view import episode_page, step_page
from agentrl.view.bundle import static_text
from agentrl.view.export import Extent, export
from agentrl.view.library import Library, NotFoundError
from agentrl.view.preferences import Preferences, preferences_file
from agentrl.view.redaction import redacted
from agentrl.view.view_server import COOKIE, Events, create_view
from tests.view.runs import PNG, episode, make_run, write_step

TOKEN = "secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs", "calc")
    make_run(tmp_path / "runs", "other", seed=1, env="n:F")
    return tmp_path / "runs"


@pytest.fixture
def library(folder: Path, tmp_path: Path) -> Library:
    return Library([folder], index=tmp_path / "index.sqlite")


@pytest.fixture
def client(library: Library) -> Iterator[TestClient]:
    app = create_view(library, TOKEN, {"127.0.0.1:80"})
    with TestClient(
        app, "http://127.0.0.1:80", headers={"host": "127.0.0.1:80"}, cookies={f"{COOKIE}_80": TOKEN}
    ) as found:
        yield found


def test_the_table_has_a_row_for_each_run(client: TestClient):
    rows = {row["id"]: row for row in client.get("/api/runs").json()["runs"]}
    assert set(rows) == {"calc", "other"}
    row = rows["calc"]
    assert (row["status"], row["step"], row["steps"], row["wall_seconds"]) == ("finished", 3, 3, 300.0)
    assert (row["held_out_before"], row["held_out_after"]) == (0.25, 0.75)
    assert (row["model"], row["env"], row["estimator"], row["loss"]) == ("tiny 64x2", "m:E", "grpo", "gspo")


def test_the_wall_time_of_a_resumed_run_includes_its_steps_since_it_ended(folder: Path, library: Library):
    (folder / "calc/summary.json").write_text(json.dumps({"finished": False, "steps": 3, "wall_seconds": 300.0}))
    with (folder / "calc/metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "seconds": 2.5}) + "\n" for step in (4, 5))
    assert library.about("calc")["wall_seconds"] == 305


def test_a_finished_run_that_is_resumed_with_more_steps_is_not_finished(folder: Path, library: Library):
    (folder / "calc/summary.json").write_text(json.dumps({"finished": True, "steps": 3}))
    assert library.about("calc")["status"] == "finished"
    config = folder / "calc/config.yaml"
    config.write_text(config.read_text().replace('"steps": 3', '"steps": 10'))
    assert library.about("calc")["status"] == "stopped"
    (folder / "calc/.lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    assert library.about("calc")["status"] == "running"
    (folder / "calc/.lock").write_text(f"process {'9' * 5000} on {socket.gethostname()}\n")  # no run wrote this
    assert library.about("calc")["status"] == "stopped"


def test_held_out_results_before_and_after_are_of_before_and_after_training(folder: Path, library: Library):
    def shown(*lines: dict[str, float]) -> tuple[float | None, float | None]:
        (folder / "calc" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        row = next(row for row in library.all_runs()["runs"] if row["id"] == "calc")
        return row["held_out_before"], row["held_out_after"]

    start, first, second = ({"step": step, "held_out": step / 8} for step in range(3))
    assert shown(start) == (0, None)
    assert shown({"step": 0}, first) == (None, 0.125)
    assert shown(start, first, second) == (0, 0.25)


def test_a_run_has_its_notes_series_and_configuration(client: TestClient):
    run = client.get("/api/runs/calc").json()
    assert run["config"]["env"] == {"use": "m:E"}
    assert {"step": 2, "kind": "note"}.items() <= next(n for n in run["notes"] if "no signal" in n["text"]).items()
    names = [one["name"] for one in run["series"]]
    assert names[:2] == ["reward", "held_out"]
    assert "kl" not in names  # it has no value at all
    data = client.get("/api/runs/calc/series?names=reward,held_out,unknown&after=1").json()
    assert data == {"steps": [2, 3], "values": {"reward": [0.77, 0.78], "held_out": [None, 0.75]}}


def test_a_step_is_a_matrix_that_says_what_became_of_each_episode(client: TestClient):
    step = client.get("/api/runs/calc/steps/2").json()
    mixed, equal = step["groups"]
    assert [e["reward"] for e in mixed["episodes"]] == [1.0, 0.0]
    assert [e["no_signal"] for g in (mixed, equal) for e in g["episodes"]] == [False, False, True, True, False]
    assert [e["failed"] for e in equal["episodes"]] == [False, False, True]
    first = mixed["episodes"][0]
    assert (first["trained"], first["advantage"], first["tokens"], first["versions"]) == (
        True,
        [-0.5, 0.5],
        7,
        [3, 4],
    )
    spans = [s for s in step["timings"]["episodes"] if s["episode"] == "s2/g0/e0"]
    assert [(s["kind"], s["start_s"], s["end_s"]) for s in spans] == [
        *(("engine", 0.0, 1.0), ("tool", 1.0, 1.25), ("env", 1.25, 1.5), ("engine", 1.5, 2.0)),
    ]
    assert step["timings"]["phases"] == [{"name": "generate", "start_s": 0.0, "end_s": 2.0}]
    assert client.get("/api/runs/calc/steps/9").status_code == 404


def test_an_asynchronous_step_is_drawn_on_the_clock(client: TestClient, folder: Path):
    zero = 1.7e9
    records = read_records(folder / "calc", 2)[:2]
    first, last = records[0].episode.turns
    # one began during the update before; the other after it, and waited before its second turn
    early = replace(records[0].episode, start_s=zero - 3.0, turns=(replace(first, start_s=0.5),), seconds=2.5)
    late = replace(records[1].episode, start_s=zero, turns=(first, replace(last, start_s=2.0)), seconds=2.5)
    write_step(folder / "calc", 2, [replace(r, episode=e) for r, e in zip(records, (early, late), strict=True)])
    lines = [
        {"step": 1, "rollout_seconds": 1.0, "update_seconds": 2.0, "update_began_seconds": zero - 4.0},
        {"step": 2, "rollout_seconds": 4.0, "update_seconds": 1.0, "update_began_seconds": zero + 3.0},
    ]
    (folder / "calc" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timings = client.get("/api/runs/calc/steps/2").json()["timings"]
    assert timings["phases"] == [
        {"name": "generate", "start_s": 2.0, "end_s": 6.0},
        {"name": "update", "start_s": 6.0, "end_s": 7.0},
        {"name": "update", "start_s": 0.0, "end_s": 1.0, "step": 1},
    ]
    spans = [(s["episode"][-2:], s["kind"], s["start_s"], s["end_s"]) for s in timings["episodes"]]
    assert spans == [
        *(
            ("e0", "env", 0.0, 0.5),
            ("e0", "engine", 0.5, 1.5),
            ("e0", "tool", 1.5, 1.75),
            ("e0", "env", 1.75, 2.0),
        ),
        ("e0", "env", 2.0, 2.5),  # its rewards
        *(("e1", "engine", 3.0, 4.0), ("e1", "tool", 4.0, 4.25), ("e1", "env", 4.25, 4.5)),
        *(("e1", "wait", 4.5, 5.0), ("e1", "engine", 5.0, 5.5)),
    ]


def test_ranks_and_servers_have_lanes(client: TestClient, folder: Path):
    line = {"step": 2, "seconds": 7.0, "rollout_seconds": 4.0, "update_seconds": 2.0, "publish_seconds": 0.5}
    line |= {"rank/0/forward_seconds": 0.5, "rank/0/tokens": 100, "rank/10/forward_seconds": 1.0, "rank/x/y": 1.0}
    line |= {"server/0/busy_seconds": 3.0, "server/0/tokens": 50, "server/0/token_seconds": 0.25}
    line |= {"server/1/busy_seconds": 0.0, "server/1/tokens": 0}
    (folder / "calc" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    parts = client.get("/api/runs/calc/steps/2").json()["timings"]["parts"]
    assert [(p["name"], p["start_s"], p["end_s"], p["tokens"], p["token_seconds"]) for p in parts] == [
        *(("rank 0", 4.0, 4.5, 100, 0.005), ("rank 10", 4.0, 5.0, 0, None)),
        *(("server 0", 0.0, 3.0, 50, 0.25), ("server 1", 0.0, 0.0, 0, None)),
    ]
    assert {p["kind"] for p in parts} == {"rank", "server"}


def test_turns_of_sub_agents_are_drawn_side_by_side(client: TestClient, folder: Path):
    record = read_records(folder / "calc", 2)[0]
    turn = replace(record.episode.turns[0], engine_seconds=1.0, env_seconds=0.0, calls=())
    turns = tuple(replace(turn, start_s=start) for start in (1.0, 3.0, 2.5))  # in the order in which they ended
    agent = replace(record.episode, start_s=1.7e9, turns=turns, seconds=4.5)
    write_step(folder / "calc", 2, [replace(record, episode=agent)])
    spans = client.get("/api/runs/calc/steps/2").json()["timings"]["episodes"]
    assert [(s["kind"], s["start_s"], s["end_s"]) for s in spans] == [
        *(("env", 0.0, 1.0), ("engine", 1.0, 2.0), ("wait", 2.0, 2.5)),
        *(("engine", 2.5, 3.5), ("engine", 3.0, 4.0), ("env", 4.0, 4.5)),
    ]


def test_the_numbers_of_a_step_and_of_tokens_are_explained(client: TestClient):
    step = client.get("/api/runs/calc/steps/2").json()
    assert step["words"]["reward"] == "Mean reward of the step's scored episodes."
    assert step["words"].keys() >= step["metrics"].keys() - {"step"}
    words = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()["words"]
    source = static_text("episode.js")
    card = source[source.index("const rows =") : source.index("export function TokenCard")]
    headings = set(re.findall(r'\["([a-zA-Z ]+)", ', card)) - {"position", "id"}
    assert len(headings) == 11
    colorings = static_text("tokens.js").partition("COLORINGS = {")[2].partition("\n};")[0]
    names = set(re.findall(r"^\t(\w+): \{ title", colorings, re.MULTILINE))
    assert words.keys() >= headings | names
    glyphs = re.findall(r'^\t\["(\w+)", "', static_text("step.js"), re.MULTILINE)
    assert len(glyphs) == 6
    assert step["words"].keys() >= set(glyphs)
    assert redacted({"words": words}) == {"words": words}


def test_an_episode_places_turns_calls_rewards_and_branches(client: TestClient):
    found = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()
    assert [turn["message"] for turn in found["turns"]] == [2, 4]
    (call,) = found["calls"]
    assert (call["turn"], call["message"], call["name"], call["outcome"]) == (0, 3, "calculator", "ok")
    total = sum(part["value"] * part["weight"] for part in found["rewards"]["parts"])
    assert total == found["rewards"]["total"] == 1.0
    assert [(p["name"], p["turn"]) for p in found["rewards"]["parts"]] == [("solved", None), ("progress", 0)]
    assert [(b["segment"], b["parent"], b["kind"], b["tokens"]) for b in found["branches"]] == [
        *((0, -1, "root", 11), (4, 0, "fork", 1)),
    ]
    assert found["siblings"] == ["s2/g0/e1"]
    assert found["messages"][1]["content"][1] == {"image": 1, "mime_type": "image/png", "bytes": len(PNG)}
    anywhere = client.get("/api/runs/calc/episodes/s3/g1/e0").json()
    assert anywhere["step"] == 3


def test_turns_and_their_calls_are_told_from_conversations_of_the_env(client: TestClient, folder: Path):
    records = read_records(folder / "calc", 2)
    episode = records[0].episode
    system, user, called, result, answer = episode.messages
    messages = (system, called, user, called, user, answer, result, answer)  # in `setup`, and while the tool runs
    turns = tuple(replace(turn, place=place) for turn, place in zip(episode.turns, (3, 7), strict=True))
    episode = replace(episode, messages=messages, turns=turns, segments=())
    write_step(folder / "calc", 2, [replace(records[0], episode=episode), *records[1:]])
    found = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()
    assert [(turn["message"], turn["observation"]) for turn in found["turns"]] == [(3, [6]), (7, [])]
    assert [call["message"] for call in found["calls"]] == [6]


def test_a_branch_of_a_compacted_context_says_so(client: TestClient, folder: Path):
    records = read_records(folder / "calc", 2)
    episode = records[0].episode
    counts = {"compact/times": 1.0, "compact/tokens_before": 900.0, "compact/tokens_after": 300.0}
    episode = replace(episode, metrics={**episode.metrics, **counts})
    write_step(folder / "calc", 2, [replace(records[0], episode=episode), *records[1:]])
    found = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()
    wanted = "compacted: rollout.compact shortened the context: 900 tokens became 300"
    assert [b["reason"] for b in found["branches"]] == [None, wanted]


def test_turns_are_placed_once_however_many_branches_there_are(
    client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    records = read_records(folder / "calc", 2)
    episode = records[0].episode
    again = tuple(replace(segment, parent=-1) for segment in episode.segments for _ in range(20))
    turns = (episode.turns[0], replace(episode.turns[1], branch="rewind"))
    episode = replace(episode, segments=again, turns=turns)
    write_step(folder / "calc", 2, [replace(records[0], episode=episode), *records[1:]])
    calls, place = list[int](), episode_page._turns
    monkeypatch.setattr(episode_page, "_turns", lambda said: calls.append(1) or place(said))
    found = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()["branches"]
    assert (len(found), len(calls)) == (100, 1)
    assert sum(branch["reason"] == "the client went back to an earlier turn" for branch in found) == 40


def test_tokens_are_columns_with_their_pieces(client: TestClient):
    found = client.get("/api/runs/calc/tokens/s2/g0/e0?step=2&from=2&count=4").json()
    assert (found["total"], found["from"], found["ids"]) == (12, 2, [7, 8, 9, 10])
    assert found["origin"] == [0, 1, 1, 1]
    assert found["logprob"] == [None, -0.5, -1.0, -0.25]
    assert found["advantage"] == [None, 0.5, 0.5, 0.5]
    assert found["version"] == [None, 3, 3, 3]
    assert found["flags"] == [None, 1, 1, 1]
    assert found["learner_logprob"] == [None] * 4
    assert all(len(column) == 4 for name, column in found.items() if isinstance(column, list))
    assert "".join(found["pieces"])


def test_images_are_served_with_safe_types_only(client: TestClient, folder: Path):
    answer = client.get("/api/image/calc/s2/g0/e0?step=2&message=1&part=1")
    assert (answer.content, answer.headers["content-type"]) == (PNG, "image/png")
    assert client.get("/api/image/calc/s2/g0/e0?step=2&message=0&part=0").status_code == 404
    records = read_records(folder / "calc", 2)
    evil = Message("user", (Image(b"<svg onload=alert(1)>", "image/svg+xml"),))
    write_step(folder / "calc", 2, [replace(records[0], episode=replace(records[0].episode, messages=(evil,)))])
    assert client.get("/api/image/calc/s2/g0/e0?step=2&message=0&part=0").status_code == 404


def test_tools_count_the_steps_asked_for(client: TestClient):
    def steps(query: str) -> list[int]:
        return client.get(f"/api/runs/calc/tools{query}").json()["steps"]

    every = steps("?steps=0")
    assert len(every) > 1
    assert steps("") == every[-20:]
    assert steps("?steps=1") == every[-1:]


def test_tools_are_counted_and_one_that_was_never_called_is_there(client: TestClient):
    found = {tool["name"]: tool for tool in client.get("/api/runs/calc/tools").json()["tools"]}
    assert found["web"]["never_called"]
    calculator = found["calculator"]
    assert calculator["calls"] == 15
    assert calculator["outcomes"] == {"ok": 9, "tool_exception": 6}
    assert calculator["p50_ms"] == 250.0
    assert calculator["failing"][0]["arguments"] == {"expression": "1+2"}
    assert calculator["failing"][0]["count"] == 6


def test_search_finds_text_calls_and_rewards(client: TestClient, folder: Path):
    assert client.get("/api/search?q=tool").json()["total"] == 30
    assert client.get("/api/search?q=tool&run=calc&step_min=2&limit=3").json()["total"] == 10
    assert len(client.get("/api/search?q=tool&limit=3").json()["hits"]) == 3
    assert client.get("/api/search?regex=1&q=1%5C%2B%5Cd").json()["total"] == 30
    assert client.get("/api/search?tool=calculator&outcome=tool_exception&run=calc").json()["total"] == 6
    assert client.get("/api/search?tool=web").json()["total"] == 0
    assert client.get("/api/search?stop=infra&reward_max=9").json()["total"] == 0
    assert client.get("/api/search?stop=infra").json()["total"] == 6
    for wrong in ("step_min=99999999999999999999", "reward_min=nan", "limit=x"):
        assert client.get(f"/api/search?{wrong}").status_code == 400
    bad = client.get("/api/search?regex=1&q=%28")
    assert bad.status_code == 400
    assert "not a regular expression" in bad.json()["error"]["message"]
    write_step(folder / "calc", 4, [EpisodeRecord(4, 0, episode("s4/g0/e0", text="a new zebra"))])
    (hit,) = client.get("/api/search?q=zebr").json()["hits"]
    assert (hit["run"], hit["step"], hit["episode"]) == ("calc", 4, "s4/g0/e0")
    assert "zebra" in hit["snippet"]


def test_an_index_that_is_damaged_between_two_searches_is_rebuilt(folder: Path, tmp_path: Path):
    index = open_index([folder / "calc"], tmp_path / "index.sqlite")
    index.refresh()
    there = index.search(Query())
    assert there.total > 0
    for leftover in ("-wal", "-shm"):
        Path(f"{index.file}{leftover}").unlink(missing_ok=True)
    size = index.file.stat().st_size
    for damage in (b"nonsense" * 1000, index.file.read_bytes()[:4096] + b"\xff" * (size - 4096)):
        index.file.write_bytes(damage)
        assert index.problems() == []
        index.file.write_bytes(damage)
        assert [hit.episode for hit in index.search(Query()).hits] == [hit.episode for hit in there.hits]


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_has_an_index_among_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_folder().parent == tmp_path
    assert preferences_file() is None


def test_an_index_of_an_older_version_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old, other = (cache_folder() / name for name in ("episodes-1.sqlite", "other.sqlite"))
    for file in (old, other):
        file.write_bytes(b"old")
    index = open_index([])
    index.refresh()
    assert (old.exists(), other.exists(), index.file.exists()) == (False, True, True)


@pytest.mark.skipif(sys.platform == "darwin", reason="names there are UTF-8")
def test_a_folder_whose_name_is_not_utf8_is_searched(folder: Path, tmp_path: Path):
    moved = folder.rename(folder.with_name(os.fsdecode(b"lat-\xfc")))
    library = Library([moved], index=tmp_path / "index.sqlite")
    assert library.search(Query(run=moved / "calc"))["hits"][0]["run"] == "calc"
    assert library.indexed().problems() == []


def test_pages_work_without_room_for_an_index(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    schema = f"pragma max_page_count = 2; {search_index._SCHEMA}"
    monkeypatch.setattr(search_index, "_SCHEMA", schema)  # SQLite says the same of a full disk
    refused = client.get("/api/search?q=zebra")
    assert refused.status_code == 400
    assert "index.sqlite: the search index cannot be written" in refused.json()["error"]["message"]
    assert client.get("/api/runs/calc").status_code == 200


def test_the_command_serves_without_a_folder_for_its_index(folder: Path, tmp_path: Path):
    (tmp_path / f"agentrl-{os.getuid()}").touch()
    env = {**os.environ, "XDG_CACHE_HOME": "/dev/null/cache", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "agentrl", "view", str(folder)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None
            assert view.stderr is not None
            address, _, token = view.stdout.readline().strip().partition("/?token=")
            assert view.stderr.readline().startswith("no search: no folder for the search index")
            request = Request(f"{address}/api/runs", headers={"Authorization": f"Bearer {token}"})
            with urlopen(request) as answer:
                assert {row["id"] for row in json.load(answer)["runs"]} == {"calc", "other"}
        finally:
            view.terminate()  # not SIGINT, which a background job of a shell ignores


def places_in(folder: Path, file: Path, said: list[str]) -> Callable[..., list[int]]:
    """Index episodes in which the policy says these texts; return a search for their places."""
    records = read_records(folder / "calc", 2)
    episodes = [
        replace(r, episode=replace(r.episode, messages=(Message("assistant", text),)))
        for r, text in zip(records, said, strict=False)
    ]
    write_step(folder / "calc", 2, episodes)
    index = open_index([folder / "calc"], file)
    index.refresh()
    ids = [record.episode.id for record in episodes]

    def places(text: str, *, regex: bool = False) -> list[int]:
        return [ids.index(hit.episode) for hit in index.search(Query(text, regex, step_min=2, step_max=2)).hits]

    return places


def test_a_part_of_a_word_is_found_whatever_signs_it_has(folder: Path, tmp_path: Path):
    said = [r"100%_off!", "100 x off!", "Ünder\0 the NUL-mark", "x" * 20_000]
    places = places_in(folder, tmp_path / "index.sqlite", said)
    assert places("0%_OFF!") == places(r"100%_o(f)+!", regex=True) == [0]
    assert places("0 x o") == places("100 x*.OFF", regex=True) == [1]
    assert places("Ünder") == places("l-MARK") == places("(nul|zzz)-", regex=True) == [2]
    assert places("x" * 15_000) == [3]
    assert places("100.*!", regex=True) == [0, 1]


def test_a_text_is_found_wherever_it_is_in_a_word_and_nowhere_else(folder: Path, tmp_path: Path):
    said = ["tool calls", "a retooled saw", "tool, calls", "ÜNDER und über, ΟΔΟΣ"]
    places = places_in(folder, tmp_path / "index.sqlite", said)
    assert places("tool") == [0, 1, 2]  # the beginning of a word in one episode, the middle of one in another
    assert places("Tool Calls") == [0]
    assert places("tooled ") == [1]
    assert places("ünder") == places("ÜBER") == [3]
    assert places("οδος") == places("οδοσ") == places("ΔΟΣ") == [3]


def test_the_end_of_a_long_episode_is_searched_and_what_is_not_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    records = read_records(folder / "calc", 2)
    said = Message("assistant", "word " * 50_000 + "needle" + " word" * 50_000)
    long = replace(records[0].episode, messages=(*records[0].episode.messages, said))
    write_step(folder / "calc", 2, [replace(records[0], episode=long), *records[1:]])
    index = open_index([folder / "calc"], tmp_path / "index.sqlite")
    index.refresh()
    found = index.search(Query("needle"))
    assert ([hit.episode for hit in found.hits], found.cut) == ([long.id], 0)
    assert "needle" in found.hits[0].snippet
    monkeypatch.setattr("agentrl.run_folder.search_index.MAX_TEXT", 1000)
    index.file.unlink()
    index.refresh()
    found = index.search(Query("needle"))
    assert (found.total, found.cut) == (0, 1)
    assert index.search(Query("needle", step_min=3)).cut == 0  # none of those was cut


def test_a_damaged_file_and_a_damaged_index_cost_nothing_else(client: TestClient, folder: Path, tmp_path: Path):
    path = episodes_file(folder / "calc", 2)
    path.write_bytes(path.read_bytes()[:-9])
    assert client.get("/api/search?q=tool&run=calc").json()["total"] >= 10
    assert client.get("/api/runs/calc/steps/2").status_code == 404
    assert client.get("/api/runs/calc/steps/3").status_code == 200
    (tmp_path / "index.sqlite").write_bytes(b"nonsense" * 1000)
    assert client.get("/api/search?q=tool&run=other").json()["total"] == 15


def test_runs_are_compared_by_configuration_and_task(client: TestClient, folder: Path):
    found = client.get("/api/compare?runs=calc,other").json()
    keys = {row["key"]: row["values"] for row in found["config_diff"]}
    assert keys["seed"] == {"calc": 0, "other": 1}
    assert {task["task"]: task["delta"] for task in found["tasks"]} == {"t0": 0.0, "t1": 0.0}
    assert "reward" in found["series_common"]
    assert client.get("/api/compare?runs=calc,nobody").status_code == 404
    (folder / "other" / "config.yaml").write_text("")
    rows = client.get("/api/compare?runs=calc,other").json()["config_diff"]
    assert "seed" in (keys := [row["key"] for row in rows])
    assert "" not in keys, "the configuration as a whole"


def test_nobody_without_the_token_from_elsewhere_or_by_another_name(library: Library):
    app = create_view(library, TOKEN, {"127.0.0.1:80"})
    with TestClient(
        app, "http://127.0.0.1:80", headers={"host": "127.0.0.1:80"}, follow_redirects=False
    ) as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/?token=wrong").status_code == 401
        person = client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (person.status_code, person.headers["content-type"]) == (401, "text/html; charset=utf-8")
        assert "Open the address that `agentrl view` printed." in person.text
        opened = client.get(f"/?token={TOKEN}")
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert client.get("/api/runs").status_code == 200
        assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 403
        shown = {"hash": "#/run/calc"}
        assert client.post("/api/view", json=shown, headers={"origin": "http://evil.example"}).status_code == 403
        assert client.post("/api/view", json=shown, headers={"origin": "null"}).status_code == 403
        assert client.post("/api/view", json=shown).status_code == 200
        assert client.post("/api/view", json={"hash": "javascript:1"}).status_code == 400
    with TestClient(app, "http://127.0.0.1:80", headers={"host": "127.0.0.1:80"}) as bearer:
        answer = bearer.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/static/../x", "/%2e%2e/%2e%2e/etc/passwd", "/__init__.py"]
)
def test_nothing_but_the_page_is_served_from_disk(client: TestClient, path: str):
    assert client.get(path).status_code == 404


def test_a_person_who_mistyped_an_address_reads_so_without_running_it(client: TestClient):
    answer = client.get("/<script>alert(1)</script>", headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "There is nothing at /&lt;script&gt;" in answer.text


@pytest.mark.parametrize("id", ["..", "../calc", "calc/../../x", "%2e%2e", "a" * 5000, "\x00"])
def test_a_run_is_found_by_its_id_only(client: TestClient, id: str):
    assert client.get(f"/api/runs/{quote(id, safe='')}").status_code == 404


def test_hostile_text_arrives_as_json(client: TestClient, folder: Path):
    text = "</script><script>alert(1)</script>\x00\u202e \x1b[31m"
    write_step(folder / "calc", 5, [EpisodeRecord(5, 0, episode("s5/g0/e0", float("inf"), text=text))])
    answer = client.get("/api/runs/calc/episodes/s5/g0/e0?step=5")
    assert answer.headers["content-type"] == "application/json"
    assert text in json.dumps(answer.json()["messages"], ensure_ascii=False).encode().decode(
        "unicode_escape", "replace"
    ) or (answer.json()["messages"][1]["content"][0] == text)
    assert client.get("/api/runs/calc/steps/5").status_code == 200


def test_an_episode_is_found_by_an_id_beyond_ascii(folder: Path, library: Library):
    ids = ["é日本", "a b#c?d%2F"]
    write_step(folder / "calc", 5, [EpisodeRecord(5, 0, episode(id)) for id in ids])
    assert [library.episode("calc", 5, id)["id"] for id in ids] == ids


def test_a_step_of_thousands_of_digits_is_not_found(client: TestClient):
    assert client.get(f"/api/runs/calc/steps/{'9' * 5000}").status_code == 400
    answer = client.get(f"/api/runs/calc/episodes/s{'9' * 5000}/g0/e0")
    assert (answer.status_code, answer.json()["error"]["message"][:27]) == (404, "Run calc has no episode 's9")


async def test_pages_hear_of_changes_and_of_views(folder: Path, library: Library):
    events = Events(library)
    await events.look()
    waiting = asyncio.ensure_future(events.after(events.next))
    await asyncio.sleep(0.05)
    with (folder / "calc" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward": 0.5}\n')
    assert await asyncio.wait_for(waiting, 10) == [{"changed": ["calc"]}]
    assert library.run("calc").metrics.after("reward") == 0.5
    waiting = asyncio.ensure_future(events.after(events.next))
    await asyncio.sleep(0.05)
    events.add({"hash": "#/run/calc"})
    assert await asyncio.wait_for(waiting, 10) == [{"hash": "#/run/calc"}]


async def test_pages_hear_of_the_first_run_and_of_one_that_is_gone(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    made = make_run(tmp_path, "made", steps=1)
    events = Events(Library([tmp_path / "runs"], index=tmp_path / "index.sqlite"))
    await events.look()
    made.rename(tmp_path / "runs/calc")
    assert await asyncio.wait_for(events.after(0), 10) == [{"changed": ["calc"]}]
    (tmp_path / "runs/calc").rename(made)
    assert await asyncio.wait_for(events.after(1), 10) == [{"changed": ["calc"]}]
    with pytest.raises(NotFoundError, match="no run 'calc'"):
        events.library.about("calc")
    assert await events.after(2, 0) == []


def test_ctrl_c_answers_the_pages_that_wait(folder: Path, tmp_path: Path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    with subprocess.Popen(
        [sys.executable, "-m", "agentrl", "view", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        url = urlsplit(server.stdout.readline().strip())
        assert server.stdout.readline() == "stop with Ctrl-C\n"
        headers = {"authorization": f"Bearer {url.query.removeprefix('token=')}"}
        pages = [HTTPConnection(url.netloc, timeout=60) for _ in range(3)]
        for page in pages[:2]:
            page.request("GET", "/api/events?after=0", headers=headers)
        pages[2].request("GET", "/api/runs", headers=headers)  # answered after the others have arrived
        assert pages[2].getresponse().status == 200
        server.send_signal(signal.SIGINT)
        assert [json.load(page.getresponse()) for page in pages[:2]] == [{"next": 0, "events": []}] * 2
        for page in pages:
            page.close()
        assert server.wait() == 0
        assert server.stderr.read() == ""


def test_metrics_follow_a_file_that_grows_is_torn_and_is_rewound(folder: Path, library: Library):
    run, path = library.run("calc"), folder / "calc" / "metrics.jsonl"
    assert run.metrics.steps == [0, 1, 2, 3]
    with path.open("a") as file:
        file.write('{"step": 4, "reward": 0.1}\n{"step": 5, "rew')
    assert run.metrics.steps == [0, 1, 2, 3, 4]
    with path.open("a") as file:
        file.write('ard": 0.2}\n')
    assert run.metrics.after("reward") == 0.2
    kept = path.read_text().splitlines(keepends=True)[:3]
    path.write_text("".join(kept))
    assert run.metrics.steps == [0, 1, 2]
    with path.open("a") as file:
        file.write('{"step": 3, "reward": 0.1}\n')
    assert run.metrics.steps == [0, 1, 2, 3]
    path.write_text("".join([*kept, *(f'{{"step": {step}, "reward": 0.375}}\n' for step in (3, 4))]))
    assert run.metrics.values["reward"][3:] == [0.375, 0.375], "rewound, and longer than before"


def test_the_command_names_what_is_missing(tmp_path: Path):
    for words, said in (
        ([tmp_path / "nothing"], "no such folder"),
        ([tmp_path], "no run is there"),
        (["--redact"], "--redact: has an effect with --export only"),
        (["--steps", "5"], "--steps: has an effect with --export only"),
        (["--episodes", "0"], "--episodes: has an effect with --export only"),
        (["--export", "a.html", "--port", "0"], "--port has no effect with --export"),
        (["--export", "a.html", "--open"], "--open has no effect with --export"),
    ):
        found = CliRunner().invoke(app, ["view", *map(str, words)])
        assert isinstance(found.exception, ConfigError)
        assert said in str(found.exception)


@pytest.mark.parametrize("target", ["report.html", "report"])
def test_an_export_carries_spread_steps_and_the_best_and_worst_episodes(
    library: Library, tmp_path: Path, target: str
):
    said = export(library, tmp_path / target, Extent(steps=2, episodes=2))
    assert said == "2 runs, 4 of 6 steps, 8 episodes in full"
    text = "".join(
        path.read_text() for path in [tmp_path / target, *(tmp_path / target).rglob("*")] if path.is_file()
    )
    assert "/api/runs/calc/episodes/s3/g1/e2?step=3" in text
    assert "/api/runs/calc/steps/2" not in text
    assert "data:image/png;base64" in text
    with pytest.raises(ConfigError, match="is there already"):
        export(library, tmp_path / target, Extent())


def test_a_redacted_export_has_no_text_of_the_run(library: Library, tmp_path: Path):
    export(library, tmp_path / "report.html", Extent(redact=True))
    text = (tmp_path / "report.html").read_text()
    for secret in (
        "What is 1+2",
        "I call.",
        "Let me think",
        "1+2",
        str(tmp_path),
        "the engine is lost",
        "tiny 64x2",
    ):
        assert secret not in text
    assert "/api/runs/calc/tokens/" not in text
    assert "s3/g1/e2" in text
    data = dict(re.findall(r'data-path="([^"]*)">(.*?)</script>', text))
    (key,) = (key for key in data if key.startswith("/api/runs/calc/episodes/s2/g0/e0?"))
    shown = json.loads(data[key])
    assert [message["role"] for message in shown["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert shown["messages"][1]["content"] == ["[12 characters]", "[an image]"]
    assert [part["value"] for part in shown["rewards"]["parts"]] == [0.5, 0.5]
    assert (shown["calls"][0]["name"], shown["calls"][0]["arguments"]) == ("calculator", {})
    assert (shown["row"], shown["renderer"], shown["seed"]) == ({}, None, None)
    cell = json.loads(data["/api/runs/calc/steps/2"])["groups"][0]["episodes"][0]
    assert (cell["reward"], cell["parts"], cell["stop_reason"]) == (
        1.0,
        {"solved": 0.5, "progress": 0.5},
        "answered",
    )
    series = json.loads(data["/api/runs/calc/series"])
    assert series["values"]["reward"] == [None, 0.76, 0.77, 0.78]
    (tool, _) = json.loads(data["/api/runs/calc/tools"])["tools"]
    assert (tool["calls"], tool["outcomes"], tool["failing"]) == (15, {"ok": 9, "tool_exception": 6}, [])


def test_what_no_list_names_is_left_out_of_a_redacted_export():
    known = {"id": "e0", "reward": 1.0, "metrics": {"reward/a": 0.5, "note": "secret", "list": ["secret", 1]}}
    assert redacted(known) == {
        **{"id": "e0", "reward": 1.0},
        "metrics": {"reward/a": 0.5, "note": None, "list": [None, 1]},
    }
    assert redacted({"estimator": "grpo", "loss": "/home/me/own.py:f"}) == {
        "estimator": "grpo",
        "loss": "[17 characters]",
    }
    new = {"surprise": "secret", "key": {"id": "secret"}, "more": [{"id": "secret"}], "count": 5}
    assert redacted(new) == {"surprise": "[6 characters]", "key": {}, "more": [], "count": None}
    assert redacted({"runs": ["secret", {"new": "secret"}]}) == {
        "runs": ["[6 characters]", {"new": "[6 characters]"}]
    }


def test_what_a_policy_called_a_tool_is_hidden_if_no_tool_is_called_so():
    call = {"name": "The patient is Ann", "outcome": "unknown_tool"}
    shown = redacted(
        {"calls": [call], "tools": [call, {"name": "mcp/read_file"}], "by_step": [{"calls": {"a b": 1}}]}
    )
    assert [one["name"] for one in (*shown["calls"], *shown["tools"])] == [
        *("[18 characters]", "[18 characters]", "mcp/read_file"),
    ]
    assert shown["by_step"] == [{"calls": {"[3 characters]": 1}}]


def test_a_fork_says_where_it_came_from_and_what_was_changed(client: TestClient, folder: Path):
    for name, origin in (("other", "calc"), ("calc", "elsewhere")):
        write_lineage(folder / name, Lineage(str(folder / origin), 2, weights_only=name == "other"))
    secret = {"forked from": "x", "optim.lr": [1e-6, 1e-5], "judge.api_key": ["hush1", "hush2"]}
    add_history(folder / "other", 2, secret)
    heads = {run["id"]: run["forked_from"] for run in client.get("/api/runs").json()["runs"]}
    known = {"run": "calc", "name": "calc", "step": 2, "weights_only": True}
    assert heads == {"other": known, "calc": {"run": None, "name": "elsewhere", "step": 2, "weights_only": False}}
    about = client.get("/api/runs/other").json()
    assert about["forked_from"] == known == redacted(about)["forked_from"]
    changes = [(n["step"], n["text"]) for n in about["notes"] if n["kind"] == "change"]
    assert changes == [(2, "optim.lr: 1e-06 -> 1e-05"), (2, "judge.api_key: (hidden)")]
    (folder / "other" / "lineage.json").write_text("nonsense")
    assert client.get("/api/runs/other").json()["forked_from"] is None


def test_the_headings_of_tables_are_explained(client: TestClient):
    for path, file, known in (
        ("/api/runs", "runs.js", 10),
        ("/api/runs/calc/tools", "tools.js", 10),
        ("/api/compare?runs=calc,other", "compare.js", 5),
    ):
        titles = set(re.findall(r'title: "([^"]+)"', static_text(file)))
        words = client.get(path).json()["words"]
        assert len(titles) >= known - 1
        assert words.keys() >= titles
        assert redacted({"words": words}) == {"words": words}


def test_a_conversation_of_a_sub_agent_is_no_fork(client: TestClient, folder: Path):
    record = read_records(folder / "calc", 2)[0]
    asked, said = Message("user", "What is the color?"), Message("assistant", "red")
    *segments, _ = record.episode.segments
    apart = (Segment((5, 6), "prompt", -1, 5), Segment((7,), "sampled", 4, 6, (-1.0,), (4,)))
    episode = replace(
        record.episode, messages=(*record.episode.messages, asked, said), segments=(*segments, *apart)
    )
    write_step(folder / "calc", 2, [replace(record, episode=episode)])
    found = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()["branches"]
    wanted = "a conversation with another system prompt, or without one"
    assert [(b["kind"], b["reason"]) for b in found] == [("root", None), ("sub_agent", wanted)]


def test_credentials_in_a_configuration_are_neither_shown_nor_exported(
    client: TestClient, library: Library, folder: Path, tmp_path: Path
):
    config = folder / "calc" / "config.yaml"
    secret = {"api_key": "sk-hush", "url": "http://me:hush@host/v1"}
    config.write_text(json.dumps({**json.loads(config.read_text()), "reward_model": secret}))
    run = client.get("/api/runs/calc").json()
    assert run["config"]["reward_model"] == {"api_key": "(hidden)", "url": "http://(hidden)@host/v1"}
    export(library, tmp_path / "report.html", Extent())
    assert "hush" not in (tmp_path / "report.html").read_text()
    assert "hush" not in client.get(f"/api/compare?runs={','.join(library.runs)}").text


PAGES = (
    *("/api/runs", "/api/runs/calc", "/api/runs/calc/series", "/api/runs/calc/steps", "/api/runs/calc/steps/2"),
    *("/api/runs/calc/tools", "/api/runs/calc/episodes/s2/g0/e0?step=2", "/api/runs/calc/episodes/s2/g0/e0"),
    *("/api/runs/calc/tokens/s2/g0/e0?step=2", "/api/image/calc/s2/g0/e0?step=2&message=1&part=1"),
    *("/api/search?q=what", "/api/compare?runs=calc,other"),
)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *(
            (("group",), None),
            (("group",), math.inf),
            (("step",), None),
            (("episode",), 5),
            (("episode", "id"), 7),
        ),
        *(
            (("episode", "task"), [None]),
            (("episode", "segments"), [{}]),
            (("episode", "turns", 0, "calls"), [{}]),
        ),
        *((("episode", "segments", 0, "ids", 1), 10**30), (("episode", "segments", 1, "parent"), 99)),
        *((("episode", "tools", 0, "function"), 5), (("episode", "messages"), "x"), (("advantages",), 5)),
        (("episode", "messages", 1, "content"), None),
    ],
    ids=str,
)
def test_a_damaged_record_is_one_message_and_spoils_nothing_else(
    client: TestClient, folder: Path, at: tuple[str | int, ...], value: object
):
    file = episodes_file(folder / "calc", 2)
    records = [json.loads(line) for line in zstandard.decompress(file.read_bytes(), 1 << 20).splitlines()]
    place = records[0]
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    file.write_bytes(zstandard.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    for page in PAGES:
        answer = client.get(page)
        assert answer.status_code in (200, 404), answer.text
        if answer.status_code == 404 and "/image/" not in page:
            assert "step-000002.jsonl.zst" in answer.json()["error"]["message"] or "has no episode" in answer.text
    assert client.get("/api/runs/calc/steps/3").status_code == 200
    calls = {tool["name"]: tool["calls"] for tool in client.get("/api/runs/calc/tools").json()["tools"]}
    assert calls["calculator"] >= 10, "those of the other steps"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "env: {use: 2024-01-01}\nsteps: .inf\nrollout: {group_size: x}\n? [1, 2]\n: .nan\n"),
        ("config.yaml", "- a"),
        ("summary.json", '{"wall_seconds": "long", "finished": [1]}'),
        (
            "metrics.jsonl",
            '{"step": 1, "seconds": 1e999, "kl": ' + "9" * 400 + ', "reward": {}}\n{"step": true}\n',
        ),
        ("events.log", "9999999999-01-01 x\n\x00\n"),
        ("events.log", f"0001-01-01 checkpoint step-x\nZ checkpoint step-{'9' * 5000}\nZ step {'9' * 5000}: x\n"),
        ("tasks.json", '{"train": 5, "held_out": {"a": []}}'),
        ("redrawn.jsonl", '{"step": [], "redrawn": "x"}\n5\n'),
    ],
)
def test_other_files_of_a_run_that_no_run_wrote(client: TestClient, folder: Path, name: str, text: str):
    (folder / "calc" / name).write_text(text)
    for page in PAGES:
        assert client.get(page).status_code == 200, page


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.log", "summary.json"])
def test_a_file_of_a_run_that_is_a_folder(client: TestClient, folder: Path, name: str):
    (folder / "calc" / name).unlink()
    (folder / "calc" / name).mkdir()
    rows = {row["id"]: row for row in client.get("/api/runs").json()["runs"]}
    assert rows["other"]["step"] == 3
    for page in PAGES:
        assert client.get(page).status_code == 200, page


BOARD = "function render(episode, message, place) { place.textContent = `${episode.id} at ${message} </script>`; }"


def test_the_view_of_an_env_has_no_origin_and_only_its_own_script(client: TestClient, folder: Path):
    assert client.get("/api/runs/calc/episodes/s3/g1/e2?step=3").json()["renderer"] is None
    assert client.get("/api/renderer/calc/env").status_code == 404
    (folder / "calc/views").mkdir()
    (folder / "calc/views/env.js").write_text(BOARD)
    address = client.get("/api/runs/calc/episodes/s3/g1/e2?step=3").json()["renderer"]
    assert address == "/api/renderer/calc/env"
    answer = client.get(address)
    assert answer.headers["content-security-policy"].endswith("sandbox allow-scripts")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers.get("x-frame-options") is None
    assert answer.text.count("</script>") == 1, "the script cannot end its element"
    assert client.get("/api/renderer/calc/..%2f..%2fconfig").status_code == 404
    assert client.get("/api/runs").headers["x-frame-options"] == "DENY"
    client.cookies.clear()
    assert client.get(address).status_code == 401


def test_two_viewers_of_one_browser_keep_their_cookies_apart(library: Library):
    """A browser sends a cookie to all ports of a host, so those of one name would replace one another."""
    tokens = {8001: "first" * 6, 8002: "second" * 5}
    cookies: dict[str, str] = {}
    for port, token in tokens.items():
        place = f"127.0.0.1:{port}"
        with TestClient(create_view(library, token, {place}), f"http://{place}") as client:
            cookies |= client.get(f"/?token={token}", follow_redirects=False).cookies
    for port, token in tokens.items():
        place = f"127.0.0.1:{port}"
        with TestClient(create_view(library, token, {place}), f"http://{place}", cookies=cookies) as client:
            assert client.get("/api/runs").status_code == 200


def test_an_export_carries_the_view_unless_it_is_redacted(library: Library, folder: Path, tmp_path: Path):
    (folder / "calc/views").mkdir()
    (folder / "calc/views/env.js").write_text(BOARD)
    export(library, tmp_path / "report.html", Extent())
    export(library, tmp_path / "hidden.html", Extent(redact=True))
    assert "/api/renderer/calc/env" in (tmp_path / "report.html").read_text()
    (tmp_path / "private.js").write_text("what_is_private")
    (folder / "calc/views/other.js").symlink_to(tmp_path / "private.js")
    export(library, tmp_path / "linked.html", Extent())
    assert "what_is_private" not in (tmp_path / "linked.html").read_text()
    assert "renderer/calc" not in (tmp_path / "hidden.html").read_text()


def test_a_pattern_that_would_take_years_is_given_up(client: TestClient, folder: Path, monkeypatch):
    monkeypatch.setattr("agentrl.run_folder.search_index.REGEX_S", 0.3)
    slow = [EpisodeRecord.of(1, 0, episode(f"a{n}", text="a" * 40 + "b"), 0.5) for n in range(3)]
    write_step(folder / "calc", 1, slow)
    answer = client.get("/api/search", params={"q": "(a|aa|a?a)+$", "regex": "1"})
    if answer.status_code != 200:
        assert "took more than 0.3 s" in answer.json()["error"]["message"]
    assert client.get("/api/search", params={"q": "a{40}b", "regex": "1"}).json()["total"] == 3


def test_tags_are_shown_and_searched(client: TestClient, folder: Path):
    assert client.get("/api/runs").json()["runs"][0]["tags"] == []
    assert write_tags(folder / "calc", ["lr-1e-4", "baseline", "baseline "]) == ("baseline", "lr-1e-4")
    assert client.get("/api/runs/calc").json()["tags"] == ["baseline", "lr-1e-4"]
    hits = client.get("/api/search?tag=baseline&limit=1000").json()["hits"]
    assert {hit["run"] for hit in hits} == {"calc"}
    assert client.get("/api/search?tag=baseline&run=other").json()["total"] == 0
    (folder / "calc" / "tags.json").write_text('{"not": "a list"}')
    assert client.get("/api/runs/calc").json()["tags"] == []


def test_what_a_user_prefers_outlives_the_server(library: Library, tmp_path: Path):
    def opened() -> TestClient:
        app = create_view(library, TOKEN, {"127.0.0.1:80"}, Preferences(tmp_path / "config" / "view.json"))
        return TestClient(
            app, "http://127.0.0.1:80", headers={"host": "127.0.0.1:80"}, cookies={f"{COOKIE}_80": TOKEN}
        )

    filters = [{"name": "\u2028</script>", "text": "q=1"}]
    assert opened().post("/api/preferences", json={"theme": "dark"}).json() == {"theme": "dark"}
    assert opened().post("/api/preferences", json={"filters": filters}).status_code == 200
    assert opened().get("/api/preferences").json() == {"theme": "dark", "filters": filters}
    first = opened().get("/page.js").text.partition("\n")[0]
    assert first.startswith("window.AGENTRL_KEPT = JSON.parse(")
    assert json.loads(json.loads(first[len("window.AGENTRL_KEPT = JSON.parse(") : -2]))["theme"] == "dark"
    wrong = opened().post("/api/preferences", json={"colour": 1})
    assert (wrong.status_code, "choose from color" in wrong.text) == (400, True)
    assert opened().post("/api/preferences", json={"filters": "x" * 70_000}).status_code == 400
    assert opened().post("/api/preferences", content=b"[1").status_code == 400
    elsewhere = {"origin": "http://evil.example"}
    assert opened().post("/api/preferences", json={"theme": "dark"}, headers=elsewhere).status_code == 403
    (tmp_path / "config" / "view.json").write_text("{")
    assert opened().get("/api/preferences").json() == {}


def test_each_turn_has_its_rewards_by_name(client: TestClient, folder: Path):
    records = read_records(folder / "calc", 2)
    first, last = records[0].episode.turns
    turns = (replace(first, rewards={"progress": 0.3, "mistakes": -0.1}), replace(last, rewards={}))
    write_step(folder / "calc", 2, [replace(records[0], episode=replace(records[0].episode, turns=turns))])
    found = client.get("/api/runs/calc/episodes/s2/g0/e0?step=2").json()
    assert found["turns"][0]["rewards"] == {"progress": 0.3, "mistakes": -0.1}
    of_turns = [(p["name"], p["turn"], round(p["value"], 9)) for p in found["rewards"]["parts"] if p["turn"] == 0]
    assert of_turns == [("progress", 0, 0.3), ("mistakes", 0, -0.1), ("turn reward", 0, 0.3)]


def test_an_export_counts_the_calls_of_all_steps(tmp_path: Path):
    make_run(tmp_path / "runs", "long", steps=25)
    library = Library([tmp_path / "runs"])
    export(library, tmp_path / "out.html", Extent(steps=1, episodes=1))
    text = (tmp_path / "out.html").read_text()
    (tools,) = re.findall(r'data-path="/api/runs/long/tools">(.*?)</script>', text)
    assert len(json.loads(tools)["steps"]) == 25


def test_a_step_counts_the_episodes_whose_tokens_were_under_the_loss(client: TestClient, folder: Path):
    flags = {f"s2/g1/e{n}": np.array([flag] * 7) for n, flag in enumerate((TRAINED, SKIPPED))}
    tokens_file(folder / "calc", 2).parent.mkdir()
    tokens_file(folder / "calc", 2).write_bytes(
        encode_tokens({id: TokenColumns(flags=found) for id, found in flags.items()})
    )
    cells = [e for g in client.get("/api/runs/calc/steps/2").json()["groups"] for e in g["episodes"]]
    # a KL penalty trains the third, which has no advantage; the first two are not recorded and have one
    assert [cell["trained"] for cell in cells] == [True, True, True, False, False]


def test_equal_rewards_are_a_signal_where_advantages_differ_from_0(client: TestClient, folder: Path):
    records = [replace(r, advantages=(0.5,) * 3) for r in read_records(folder / "calc", 2)]  # of a critic
    write_step(folder / "calc", 2, records)
    groups = client.get("/api/runs/calc/steps/2").json()["groups"]
    assert not any(episode["no_signal"] for group in groups for episode in group["episodes"])


def test_the_parts_of_a_reward_in_a_step_include_those_of_turns(client: TestClient):
    first = client.get("/api/runs/calc/steps/2").json()["groups"][0]["episodes"][0]
    assert first["reward"] == 1.0
    assert first["parts"] == {"solved": 0.5, "progress": 0.5}


def test_a_series_is_found_by_a_name_with_a_comma(client: TestClient, folder: Path):
    with (folder / "calc" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "env/a,b": 2.0, "kl": 0.5}) + "\n")
    names = [("names", "env/a,b"), ("names", "reward,kl"), ("after", "3")]
    found = client.get("/api/runs/calc/series", params=names).json()
    assert found == {"steps": [4], "values": {"env/a,b": [2.0], "reward": [None], "kl": [0.5]}}


def test_a_mean_reward_is_told_from_a_share(client: TestClient, folder: Path):
    (folder / "other" / "metrics.jsonl").write_text('{"step": 1, "held_out_reward": 0.3}\n')
    rows = {row["id"]: row["held_out_metric"] for row in client.get("/api/runs").json()["runs"]}
    assert rows == {"calc": "held_out", "other": "held_out_reward"}


def test_tasks_of_several_envs_are_not_taken_for_each_other(client: TestClient, folder: Path):
    for run in ("calc", "other"):
        records = read_records(folder / run, 3)
        for n, record in enumerate(records):
            task = replace(record.episode.task, id="t0", env=("sums", "terms")[n // 2 % 2])
            records[n] = replace(record, episode=replace(record.episode, task=task))
        for step in (1, 2, 3):
            write_step(folder / run, step, records)
    assert client.get("/api/runs/calc/steps/3").json()["groups"][1]["env"] == "terms"
    tasks = client.get("/api/compare?runs=calc,other").json()["tasks"]
    assert {task["task"]: task["before"] for task in tasks} == {"sums: t0": 0.5, "terms: t0": 1.0}


def test_greedy_baselines_do_not_count_in_the_mean_of_a_task(client: TestClient, folder: Path):
    for run in ("calc", "other"):
        records = [replace(record, baseline=n % 2 == 1) for n, record in enumerate(read_records(folder / run, 3))]
        rewards = iter((0.5, 1.0) * len(records))
        records = [replace(r, episode=replace(r.episode, reward=next(rewards))) for r in records]
        for step in (1, 2, 3):
            write_step(folder / run, step, records)
    tasks = client.get("/api/compare?runs=calc,other").json()["tasks"]
    assert tasks
    assert {task["before"] for task in tasks} == {0.5}


def test_half_of_the_calls_took_at_most_the_median():
    assert [step_page._percentile([1.0, 2.0, 3.0, 9.0][:n], 0.5) for n in range(5)] == [None, 1e3, 1e3, 2e3, 2e3]
    assert step_page._percentile([float(n) for n in range(1, 101)], 0.99) == 99_000.0


def test_tasks_of_one_id_and_different_rows_are_not_compared(client: TestClient, folder: Path):
    for step in (1, 2, 3):
        records = [
            replace(r, episode=replace(r.episode, task=replace(r.episode.task, row={"inserted": "line"})))
            if r.episode.task.id == "t0"
            else r
            for r in read_records(folder / "other", step)
        ]
        write_step(folder / "other", step, records)
    found = client.get("/api/compare?runs=calc,other").json()["tasks"]
    assert [task["task"] for task in found] == ["t1"]


def test_an_export_of_metrics_that_are_not_finite_is_json(library: Library, folder: Path, tmp_path: Path):
    (folder / "calc" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "loss": NaN, "kl": Infinity}\n')
    export(library, tmp_path / "report.html", Extent())
    text = (tmp_path / "report.html").read_text()
    data = dict(re.findall(r'data-path="([^"]*)">(.*?)</script>', text))
    series = json.loads(data["/api/runs/calc/series"], parse_constant=pytest.fail)
    assert series["values"] == {"reward": [0.5], "loss": [None], "kl": [None]}


def test_an_export_holds_one_answer_at_a_time(folder: Path, tmp_path: Path):
    written = []

    class Watched(Library):
        def tokens(self, *args: Any) -> Any:
            written.append(len(list((tmp_path / "export").glob("data/0*.js"))))
            return super().tokens(*args)

    library = Watched([folder / "calc"], index=tmp_path / "index.sqlite")
    export(library, tmp_path / "export", Extent())
    assert 0 < written[0] < written[-1]


def test_an_export_that_cannot_be_written_says_so(library: Library, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file: is there already"):
        export(library, tmp_path / "file", Extent())
    for target in ("report.html", "report"):
        with pytest.raises(ConfigError, match=f"{target}: cannot be written: .*/file"):
            export(library, tmp_path / "file" / target, Extent())


class Stopped(Library):
    """Stopped while an export asks it for the tools."""

    def tools(self, id: str, last: int = 0) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("target", ["report.html", "report"])
def test_nothing_is_left_of_an_export_that_was_stopped(folder: Path, tmp_path: Path, target: str):
    with pytest.raises(KeyboardInterrupt):
        export(Stopped([folder], index=tmp_path / "index.sqlite"), tmp_path / target, Extent())
    assert not (tmp_path / target).exists()


def test_the_empty_folder_that_was_named_stays_when_an_export_is_stopped(folder: Path, tmp_path: Path):
    (tmp_path / "report").mkdir()
    with pytest.raises(KeyboardInterrupt):
        export(Stopped([folder], index=tmp_path / "index.sqlite"), tmp_path / "report", Extent())
    assert list((tmp_path / "report").iterdir()) == []


def test_what_may_not_be_read_does_not_keep_the_rest_from_being_shown(folder: Path, tmp_path: Path):
    hidden = make_run(folder, "hidden"), episodes_file(folder / "calc", 2)
    (folder / "link").symlink_to(hidden[0] / "episodes")
    without_rights = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.getuid() == 0 else []
    command = [*without_rights, sys.executable, "-m", "agentrl", "view", str(folder), "--export"]
    for path in hidden:
        path.chmod(0)
    try:
        done = subprocess.run([*command, str(tmp_path / "report.html")], capture_output=True, text=True)
    finally:
        for path in hidden:
            path.chmod(0o700)
    assert (done.returncode, done.stderr) == (0, "")
    assert "report.html: 2 runs, 5 of 6 steps," in done.stdout
