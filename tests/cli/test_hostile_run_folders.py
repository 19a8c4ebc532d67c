"""Run folders that somebody else wrote: each command that reads one ends soon, with one clear line."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from agentrl.cli import main
from agentrl.config import RunConfig
from agentrl.eval.result import EvalResult, EvalSpec
from agentrl.eval.stats import Estimate
from agentrl.run_folder.records import EpisodeRecord, encode, episodes_file
from agentrl.run_folder.store import RunStore
from agentrl.types import Episode, Message, StopReason, Task

pytestmark = pytest.mark.timeout(60)

EPISODE = Episode("a", Task("t"), (Message("user", "1 / 3?"),), (), (), StopReason.ANSWERED, 1.0, {}, {})
LINE = encode(EpisodeRecord(1, 0, EPISODE))
DEEP = b"[" * 200_000
Make = Callable[[Path], None]


def packed(head: bytes, filler: bytes = b"", mib: int = 0) -> Make:
    """`head` and so many MiB of one byte, compressed when the file is written."""

    def write(path: Path) -> None:
        path.write_bytes(zstandard.ZstdCompressor(level=3).compress(head + filler * (mib << 20)))

    return write


def plain(data: bytes) -> Make:
    return lambda path: path.write_bytes(data) and None


def changed(**values: object) -> bytes:
    return json.dumps(json.loads(LINE) | values).encode() + b"\n"


SPECIAL: dict[str, Make] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nowhere": lambda path: path.symlink_to("missing"),
}
EPISODES: dict[str, Make] = SPECIAL | {
    "not compressed": plain(LINE + b"\n"),
    "bomb": packed(b"", b"\0", 300),
    "bomb of lines": packed(b"", b"\n", 80),
    "NULs": packed(bytes(1000)),
    "no end of line": packed(LINE),
    "half a line": packed(LINE + b"\n" + LINE[:40]),
    "deep": packed(DEEP + b"\n"),
    "deep in a record": packed(LINE.replace(b'"rewards":{}', b'"rewards":' + DEEP) + b"\n"),
    "wrong type": packed(changed(step="many")),
    "no episode": packed(changed(episode=[])),
    "control codes": packed(changed(**{"\x1b[2J\ud800": 1, "group": "\x1b]0;x\x07\u202e"})),
    "long line": packed(b'{"step": ', b"1", 60),
    "two frames": lambda path: path.write_bytes(2 * zstandard.compress(LINE + b"\n")) and None,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of an evaluation."""
    config = RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}})
    with RunStore.open(config, tmp_path / "r") as store:
        store.write_episodes(1, [EpisodeRecord(1, 0, EPISODE)])
        (store.path / "results.json").write_text(RESULT.to_json())
    return tmp_path / "r"


RESULT = EvalResult(
    folder="r",
    spec=EvalSpec("p", "e", "held_out", 1, 1, 1.0, 0, ""),
    estimates={"reward": Estimate(1.0, 0.0, 1.0)},
    episodes=1,
)


def ends_with_one_line(capsys: pytest.CaptureFixture[str], *words: object, about: str) -> None:
    """The command fails as one that met a damaged file, and says so on one line without control codes."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(list(map(str, words)))
    said = capsys.readouterr()
    assert left.value.code in (1, 2), said
    assert said.err.count("\n") == 1, said.err[:2000]
    assert about in said.err
    assert said.err.rstrip("\n").isprintable()
    assert len(said.err) < 1000


def works(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(list(map(str, words)))
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", EPISODES)
def test_episodes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert "1 episode\n" in works(capsys, "show", run)
    path = episodes_file(run, 1)
    path.unlink()
    EPISODES[kind](path)
    for command in (
        ["show", run],
        ["export", run, "--out", tmp_path / "rows.jsonl"],
        ["eval", "--compare", run, run],
    ):
        ends_with_one_line(capsys, *command, about="step" if kind == "link to nowhere" else path.name)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("kind", [*SPECIAL, "deep", "huge", "no object", "wrong type", "wrong inside", "codes"])
def test_results(run: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    data = dataclasses.asdict(RESULT)
    made: dict[str, Make] = SPECIAL | {
        "deep": plain(DEEP),
        "huge": lambda path: path.touch() or os.truncate(path, 1 << 40),  # type: ignore[func-returns-value]
        "no object": plain(b"[]"),
        "wrong type": plain(json.dumps(data | {"lost": "many"}).encode()),
        "wrong inside": plain(json.dumps(data | {"estimates": {"reward": {"mean": []}}}).encode()),
        "codes": plain(json.dumps(data | {"estimates": {"\x1b[2J\u202e": 1}}).encode()),
    }
    works(capsys, "eval", "--compare", run, run)
    (run / "results.json").unlink()
    made[kind](run / "results.json")
    ends_with_one_line(capsys, "eval", "--compare", run, run, about="results.json")


@pytest.mark.parametrize(
    "line",
    [
        DEEP,
        b"\0" * 1000,
        b'{"step": 1, "redraws": []}',
        b'{"step": 1e400, "redraws": {}}',
        b'{"step": 1, "redraws": ' + json.dumps(
            {"episodes": 10**30, "reasons": {"X": 10**18}, "acted": 0, "tasks": {"t": {"played": 10**18}},
             "hit": {}, "clean": {}, "broken": {}}
        ).encode() + b"}",
        b'{"step": 1, "redraws": ' + json.dumps(
            {"episodes": 10**6, "reasons": {"\x1b[2J\n": 9 * 10**5}, "acted": 0,
             "tasks": {"\x1b[2J": {"played": 10**6, "\u202e": 9 * 10**5}},
             "hit": {"num": 9, "total": 1e308}, "clean": {"squares": 1e308}, "broken": {"t": "many"}}
        ).encode() + b"}",
        b"1" * (9 << 20),
    ],
    ids=["deep", "NULs", "no object", "infinite", "large numbers", "codes", "long"],
)  # fmt: skip
def test_redrawn_lines_that_cannot_be_are_left_out(
    run: Path, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    (run / "redrawn.jsonl").write_bytes(line + b"\n")
    assert "0 played" in works(capsys, "doctor", run)


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless device", "link to itself"])
def test_redrawn_files_that_are_none(run: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    SPECIAL[kind](run / "redrawn.jsonl")
    ends_with_one_line(capsys, "doctor", run, about="redrawn.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{chr(b)}: &{chr(b)} [{', '.join(['*' + chr(b - 1)] * 9)}]\n" for b in range(98, 112)),
        "name: \0\n",
        "name: \x1b[2J\u202e\n",
        "- 1\n",
        "\ud800",
    ],
    ids=["aliases", "NUL", "codes", "list", "surrogate"],
)
def test_config(run: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (run / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["eval", str(run)])
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert "config.yaml" in said
    assert "Traceback" not in said
    assert len(said) < 4000
    assert said.replace("\n", "").isprintable()


def test_reading_a_run_runs_no_code_that_it_names(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    text = (run / "config.yaml").read_text()
    for code in ("use: m:E", "parser: auto", "kind: local", "loggers: []"):
        assert code in text
        named = "loggers: [own.py:A]" if code == "loggers: []" else f"{code.partition(':')[0]}: own.py:A"
        text = text.replace(code, named)
    (run / "config.yaml").write_text(text)
    other = shutil.copytree(run, tmp_path / "other")
    commands = [
        ["show", run],
        ["show", run, "--worst"],
        ["runs", tmp_path],
        ["compare", run, other],
        ["doctor", run],
    ]
    commands += [["tag", run, "seen"], ["export", run, "--out", tmp_path / "rows.jsonl"]]
    commands += [["view", run, "--export", tmp_path / "run.html"], ["config", "show", run / "config.yaml"]]
    for command in commands:
        works(capsys, *command)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(SystemExit):
        main(["rescore", str(run)])
    assert (tmp_path / "ran").exists()


def test_aliases_that_stand_for_billions_of_values_are_not_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "abcdefghijklmn"
    levels = zip(names[1:], names, strict=False)
    bomb = "".join(f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for name, below in levels)
    (run / "config.yaml").write_text(f"a: &a [x]\n{bomb}z: &z {{z: *z}}\n")
    works(capsys, "compare", run, shutil.copytree(run, tmp_path / "other"))
    works(capsys, "doctor", run)
