"""`agentrl show` with filters, `agentrl runs` and `agentrl compare`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.run_folder.records import EpisodeRecord
from agentrl.types import Message, ToolCall, Turn
from tests.view.runs import episode, make_run, write_step


@pytest.fixture(autouse=True)
def narrow(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def calc(tmp_path: Path) -> Path:
    """Three steps of five episodes; one of step 2 is unlike the others."""
    run = make_run(tmp_path / "runs")
    odd = replace(episode("s2/odd", -2.47, text="A PURPLE apple", task="t9"), stop_reason="max_turns")
    write_step(run, 2, [EpisodeRecord(2, 0, odd, (-2.471, -2.469)), EpisodeRecord(2, 1, episode("s2/good"))])
    return run


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as e:
        code = int(e.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def found(capsys, *words: object) -> list[str]:
    code, out, err = run(capsys, "show", *words, "--json", "-n", 99)
    assert code == 0, err
    said = json.loads(out)
    assert said["total"] == len(said["episodes"])
    return [record["episode"]["id"] for record in said["episodes"]]


@pytest.mark.parametrize(
    "filters",
    [
        ("--stop", "max_turns"),
        ("--reward-max", -1),
        ("--task", "t9"),
        ("--grep", "purple APPLE"),
        ("--regex", "p[u]rple a.ple"),
        ("--step", 2, "--reward-min", -3, "--reward-max", 0.5),
    ],
)
def test_a_filter_finds_the_one_episode_in_any_step(capsys, calc: Path, filters: tuple[object, ...]):
    assert found(capsys, calc, *filters) == ["s2/odd"]


def test_tool_and_outcome_belong_to_one_call(capsys, calc: Path):
    failed = found(capsys, calc, "--tool", "calculator", "--outcome", "tool_exception")
    assert sorted(failed) == ["s1/g0/e1", "s1/g1/e2", "s3/g0/e1", "s3/g1/e2"]
    assert found(capsys, calc, "--tool", "web") == []
    assert found(capsys, calc, "--step", 1, "--outcome", "tool_exception") == ["s1/g0/e1", "s1/g1/e2"]


def test_a_call_that_could_not_be_parsed_is_an_outcome_of_no_tool(capsys, calc: Path):
    unread = Message("assistant", "<tool_call>{", parse_errors=("tool call 1: not valid JSON",))
    wrote = replace(episode("s4/unread"), turns=(Turn(unread, (), 0.0, "stop", 5, 0.1, 0.0),))
    write_step(calc, 4, [EpisodeRecord(4, 0, wrote, (1.0,))])
    assert found(capsys, calc, "--outcome", "parse_error") == ["s4/unread"]
    assert found(capsys, calc, "--outcome", "parse_error", "--tool", "calculator") == []
    hint = run(capsys, "show", calc, "--tool", "web")[2]
    assert hint == "--tool web: no call in this run has it; there are calculator\n"


def test_calls_that_nobody_made_are_named(capsys, calc: Path):
    for words, hint in (
        (("--tool", "calculater"), "--tool calculater: no call in this run has it; did you mean 'calculator'?"),
        (("--tool", "web"), "--tool web: no call in this run has it; there are calculator"),
        (("--outcome", "broken"), "--outcome broken: no call in this run has it; there are ok, tool_exception"),
    ):
        code, out, err = run(capsys, "show", calc, *words)
        assert code == 0
        assert "0 episodes" in out
        assert err.splitlines() == [hint]
    assert run(capsys, "show", calc, "--tool", "calculator", "--reward-min", 50)[2] == "", "there are such calls"


def test_a_call_is_found_as_it_is_printed_and_as_it_was_written(capsys, calc: Path):
    call = ToolCall("c9", "python", {"code": 'print("a")\nx = 1', "limits": [1, None], "quiet": True})
    wrote = replace(episode("s4/code"), messages=(Message("user", "q"), Message("assistant", "", (call,))))
    write_step(calc, 4, [EpisodeRecord(4, 0, wrote, (1.0,))])
    for text in ('code="print(', 'print("a")', '"a")\nx = 1', "limits=[1, null], quiet=true"):
        assert found(capsys, calc, "--grep", text) == ["s4/code"]


def test_worst_looks_at_all_steps(capsys, calc: Path):
    worst = found(capsys, calc, "--worst")
    assert len(worst) == 12
    assert set(worst[:2]) == {"s1/g1/e2", "s3/g1/e2"}  # failed
    assert worst[2] == "s2/odd"
    assert found(capsys, calc, "--worst", "--step", 2) == ["s2/odd", "s2/good"]


def test_json_gives_the_first_records_and_the_number_of_all(capsys, calc: Path):
    said = json.loads(run(capsys, "show", calc, "--worst", "--json", "-n", 1)[1])
    assert said["total"] == 12
    assert len(said["episodes"]) == 1
    assert found(capsys, calc, "--episode", "s1/g0/e0") == ["s1/g0/e0"]


def test_a_row_stays_on_one_line_of_80_columns(capsys, calc: Path):
    long = replace(episode("s1234/g127/e15", -12.5), stop_reason="stopped_by_tool")
    write_step(calc, 4, [EpisodeRecord(4, 0, long, (-2.47, -1.31))])
    _, out, _ = run(capsys, "show", calc, "-n", 0)
    assert any("s1234/g127/e15" in x and "-2.47 to -1.31" in x and "stopped_by_tool" in x for x in out.split("\n"))
    _, out, _ = run(capsys, "show", calc, "--stop", "max_turns", "-n", 0)
    assert "-2.47" in out
    assert " to -2.47" not in out  # both ends look the same


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stop", "max_turn"), "did you mean 'max_turns'"),
        (("--reward-min", 1, "--reward-max", 0), "--reward-min 1 is above --reward-max 0"),
        (("--reward-min", "nan"), "not a number"),
        (("--grep", "a", "--regex", "b"), "give one of them"),
        (("--regex", "("), "is not a regular expression"),
        (("--grep", ""), "--grep: is empty"),
        (("--grep", "a\udcff"), r"--grep 'a\udcff': not UTF-8; look for a part of it that is"),
        (("--episode", "s1/g0/e0", "--tool", "web"), "leave out the filters"),
        (("--episode", f"s{'9' * 5000}/g0/e0"), "not in any step of"),
        (("--episode", "s1/g0/e0", "--worst"), "--worst has no effect with --episode"),
    ],
)
def test_show_refuses_what_no_episode_can_pass(capsys, calc: Path, words: tuple[object, ...], said: str):
    code, out, err = run(capsys, "show", calc, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_show_says_what_to_write_for_a_step_and_for_a_checkpoint(capsys, calc: Path):
    code, _, err = run(capsys, "show", f"{calc}@2")
    assert (code, f"no run folder; write `agentrl show {calc} --step 2`" in err) == (1, True)
    checkpoint = calc / "checkpoints/step-2"
    checkpoint.mkdir(parents=True)
    for name in ("manifest.json", "config.yaml"):
        (checkpoint / name).write_text("{}")
    code, _, err = run(capsys, "show", checkpoint)
    assert (code, "a checkpoint; its episodes are in the folder of the run" in err) == (1, True)


def test_episodes_of_a_run_without_its_configuration_are_not_promised_to_other_commands(capsys, calc: Path):
    (calc / "config.yaml").unlink()
    code, _, err = run(capsys, "doctor", calc)
    assert (code, "it has no config.yaml" in err, "view" in err) == (1, True, False)


def test_a_filter_with_a_step_that_is_not_there(capsys, calc: Path):
    code, _, err = run(capsys, "show", calc, "--step", 9, "--tool", "web")
    assert code == 1
    assert "step 9" in err


def test_runs_lists_the_runs_of_a_folder(capsys, calc: Path):
    make_run(calc.parent, "evil[red]\x1b", steps=1)
    code, out, _ = run(capsys, "runs", calc.parent)
    assert code == 0
    (row,) = [line.split() for line in out.splitlines() if line.startswith("calc")]
    assert row == ["calc", "finished", "3/3", "0.25", "0.75", "5", "min"]
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    said = json.loads(run(capsys, "runs", calc.parent, "--json")[1])
    assert [r["name"] for r in said["runs"]] == ["calc", "evil[red]\x1b"]


def test_a_run_behind_a_link_has_the_name_of_the_link(capsys, tmp_path: Path):
    run_folder, linked = make_run(tmp_path / "disk"), tmp_path / "runs"
    linked.mkdir()
    (linked / "mine").symlink_to(run_folder)
    (linked / "gone").symlink_to(tmp_path / "nowhere")
    assert run(capsys, "runs", linked)[1].splitlines()[1].split()[0] == "mine"
    assert run(capsys, "runs", linked / "mine")[1].splitlines()[1].split()[0] == run_folder.name


def test_runs_and_compare_refuse_what_is_no_run(capsys, tmp_path: Path, calc: Path):
    (tmp_path / "empty").mkdir()
    for words in (
        ("runs", tmp_path / "no"),
        ("runs", tmp_path / "empty"),
        ("compare", calc, tmp_path / "empty"),
        ("compare", calc, calc),
    ):
        code, out, err = run(capsys, *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1), words


def test_runs_of_one_name_are_told_apart_by_their_folders(capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old, new = (make_run(Path(name)) for name in ("old", "new"))
    assert (str(old), str(new)) == ("old/calc", "new/calc")
    assert [line.split()[0] for line in run(capsys, "runs", ".")[1].splitlines()[1:]] == ["new/calc", "old/calc"]
    out = run(capsys, "compare", old, new)[1]
    assert out.split()[:2] == ["old/calc", "new/calc"]
    assert "with a lower reward in new/calc" in out


def test_compare_says_what_differs_and_what_got_worse(capsys, calc: Path):
    other = make_run(calc.parent, "other", seed=7)
    records = [EpisodeRecord(3, 0, episode("s3/g0/e0", 0.25, task="t1")), EpisodeRecord(3, 1, episode("x", 1.0))]
    for step in (1, 2, 3):
        write_step(other, step, [replace(record, step=step) for record in records])
    code, out, _ = run(capsys, "compare", other, calc)
    assert code == 0
    assert ["seed", "7", "0"] in [line.split() for line in out.splitlines()]
    assert "2 tasks in common, 1 with a lower reward in calc" in out
    # t0: 1 in `other`; 1, 0 | 1 | 1, 0 in `calc`. t1: 0.25 in `other`, always 1 in `calc`.
    assert ["t0", "1", "0.6", "-0.4"] in [line.split() for line in out.splitlines()]
    assert ["t1", "0.25", "1", "+0.75"] in [line.split() for line in out.splitlines()]
    said = json.loads(run(capsys, "compare", other, calc, "--json")[1])
    assert [r["name"] for r in said["runs"]] == ["other", "calc"]
    assert [task["task"] for task in said["regressions"]] == ["t0"]
    assert {row["key"]: list(row["values"].values()) for row in said["config_diff"]}["seed"] == [7, 0]


def test_runs_are_tagged_and_found_by_their_tags(capsys, calc: Path):
    assert run(capsys, "tag", calc) == (0, "", "")
    assert run(capsys, "tag", calc, "wip", "baseline", "wip") == (0, "baseline\nwip\n", "")
    assert run(capsys, "tag", calc, "--remove", "wip") == (0, "baseline\n", "")
    code, out, _ = run(capsys, "runs", calc.parent, "--tag", "baseline")
    assert (code, "baseline" in out, "calc" in out) == (0, True, True)
    code, _, err = run(capsys, "runs", calc.parent, "--tag", "baselin")
    assert (code, err.count("did you mean 'baseline'?")) == (2, 1)
    code, _, err = run(capsys, "tag", calc, "--remove", "wip")
    assert (code, "no such tag; it has: baseline" in err) == (2, True)
    code, _, err = run(capsys, "tag", calc, "two\nlines")
    assert (code, "printable characters" in err) == (2, True)
    code, _, err = run(capsys, "tag", calc.parent, "x")
    assert (code, "no run is there" in err) == (2, True)
    assert run(capsys, "tag", calc, "--remove", "baseline") == (0, "", "")
    assert not (calc / "tags.json").exists()
