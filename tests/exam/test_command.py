"""`agentrl check --exam` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.exam.marks import ExamResult, Level, Profile, TaskProfile
from agentrl.exam.sheet import write_report
from tests.exam import planted

ENV = Path(planted.__file__)


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def call(*words):
        with pytest.raises(SystemExit) as left:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


@pytest.fixture
def both(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        f"envs:\n  good: {{use: '{ENV}:Sums'}}\n  bad: {{use: '{ENV}:PaysForEmpty'}}\n"
        "model: {tiny: {vocab: 400}}\n"
    )
    return path


def test_every_env_of_a_run_is_examined_and_reported(run, both, tmp_path):
    code, out, _ = run("check", both, "--exam", "--report", tmp_path / "report")
    assert code == 1
    assert "a policy saying nothing earns 1 of 1" in out
    report = json.loads((tmp_path / "report" / "exam.json").read_text())
    assert report["passed"] is False
    good, bad = report["envs"]
    assert (good["name"], good["findings"], good["oracle"]) == ("good", [], True)
    assert {c["name"]: c["state"] for c in bad["checks"]}["null"] == "error"
    page = (tmp_path / "report" / "exam.html").read_text()
    assert "PaysForEmpty" in page
    assert not any(outside in page for outside in ("http://", "https://", "src="))


def test_an_env_that_cannot_be_played_passes_no_check(run, tmp_path):
    (tmp_path / "env.py").write_text(
        "from agentrl.envs.python_code import PythonCode\nfrom agentrl.sandbox import Sandbox\n"
        "class Closed(PythonCode):\n    sandbox = Sandbox(readonly=('/no/such/folder',))\n"
    )
    code, _, _ = run("check", f"{tmp_path}/env.py:Closed", "--exam", "--tasks", 2, "--report", tmp_path / "report")
    assert code == 1
    (closed,) = json.loads((tmp_path / "report" / "exam.json").read_text())["envs"]
    assert "no episode of any task can be played" in closed["findings"][-1]["text"]
    assert {check["name"] for check in closed["checks"] if check["state"] == "ok"} <= {"splits"}


def test_an_env_by_name_passes(run):
    code, out, err = run("check", f"{ENV}:Sums", "--exam")
    assert code == 0
    assert "error" not in out
    assert err.splitlines()[:2] == ["exam: oracle and rows", "exam: contract"], "where a status cannot be shown"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--report", "r"], "--report has no effect without --exam"),
        (["--tasks", "3"], "--tasks has no effect without --exam"),
        (["--exam", "-k", "3"], "-k has no effect without --endpoint or --model"),
        (["--exam", "--endpoint", "http://127.0.0.1:9/v1"], "name the model there: --model NAME"),
        (["--exam", "--api-key-env", "X"], "--api-key-env has no effect without --endpoint"),
        (["--exam", "--report", str(ENV)], "is a file; name a folder"),
        (["--exam", "--model", "/no/such"], "/no/such"),
    ],
)
def test_options_without_effect_are_refused(run, both, words, said):
    code, _, err = run("check", both, *words)
    assert code in (1, 2)
    assert said in err
    assert "Traceback" not in err


def test_an_unknown_env_is_one_line(run):
    code, _, err = run("check", f"{ENV}:Nothing", "--exam")
    assert code == 2
    assert len(err.strip().splitlines()) == 1


def test_the_level_that_fails_can_be_chosen():
    result = ExamResult("", "a:B")
    result.add("rows", Level.NOTE, "n")
    result.add("random", Level.WARNING, "w")
    assert [len(result.at_least(level)) for level in (Level.ERROR, Level.WARNING, Level.NOTE)] == [0, 1, 2]
    assert (result.state("random"), result.state("oracle")) == ("warning", "ok")


def test_a_page_escapes_what_envs_say_and_shows_the_profile(tmp_path):
    result = ExamResult("", "a:<B>")
    result.add("null", Level.ERROR, "<script>alert(1)</script> \ud800", ["<t>"])
    result.profile = Profile(
        "<model>", 2, [TaskProfile("t1", 2, 1, 0.5), TaskProfile("t2", 2, None, float("nan"))]
    )
    _, page = write_report(tmp_path / "new" / "folder", [result], Level.ERROR)
    text = page.read_text()
    assert "<script>" not in text
    assert "&lt;model&gt;" in text
    assert "1 of 2" in text


def test_a_report_that_cannot_be_written_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--report"):
        write_report(tmp_path / "file" / "r", [ExamResult("", "a:B")], Level.ERROR)
