"""`agentrl export`: what it writes is read back as what was said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.cli import main
from agentrl.config import RunConfig
from agentrl.eval.finetune_rows import conversations
from agentrl.rollout.content import load_content, message_of
from agentrl.run_folder.records import EpisodeRecord, decode, read_records
from agentrl.run_folder.store import RunStore
from agentrl.types import CallRecord, Episode, Image, Message, Segment, StopReason, Task, ToolCall, Turn

TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


def episode(name: str, reward: float | None, *, error: str = "", picture: bool = False) -> Episode:
    call = ToolCall("c1", "calculator", {"expression": "1 / 3", "deep": {"list": [1, 2.5, None, "é"]}})
    asked = Message("assistant", "let me see", (call,), reasoning="hm", parse_errors=(error,) if error else ())
    answer = Message("tool", "0.3", tool_call_id="c1", name="calculator")
    last = Message("assistant", f"it is {name}")
    question = Message("user", ("look:", Image(b"\x89PNG")) if picture else "1 / 3?")
    return Episode(
        id=name,
        task=Task("t"),
        messages=(Message("system", "Use it."), question, asked, answer, last),
        turns=(
            Turn(asked, (answer,), 0.0, "stop", 2, 0.1, 0.1, (CallRecord(call, "0.3", "ok", 0.1),)),
            Turn(last, (), 0.0, "stop", 2, 0.1, 0.0),
        ),
        segments=(Segment((1,), "prompt", -1, 1), Segment((2, 3), "sampled", 0, 2, (-1.0, -0.5), (0, 0))),
        stop_reason=StopReason.ANSWERED if reward is not None else StopReason.INFRA,
        reward=reward,
        rewards={"solved": reward or 0.0},
        solved=None if reward is None else reward > 0,
        error=None if reward is not None else "SandboxError: gone",
        tools=(TOOL,),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps."""
    config = RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}})
    with RunStore.open(config, tmp_path / "r") as store:
        store.write_episodes(1, [EpisodeRecord(1, 0, episode("a", 1.0)), EpisodeRecord(1, 0, episode("b", 0.0))])
        more = [episode("c", 1.0), episode("d", None), episode("e", 1.0, error="half a call")]
        store.write_episodes(2, [EpisodeRecord(2, 0, one) for one in more])
    return tmp_path / "r"


def test_greedy_baselines_are_exported_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}})
    with RunStore.open(config, tmp_path / "r") as store:
        both = [EpisodeRecord(1, 0, episode("a", 1.0)), EpisodeRecord(1, 0, episode("b", 1.0), baseline=True)]
        store.write_episodes(1, both)
    assert agentrl(tmp_path / "r", "--format", "jsonl", "--out", tmp_path / "plain") == 0
    assert capsys.readouterr().err.startswith("1 episode to ")
    assert [decode(line).episode.id for line in (tmp_path / "plain").read_bytes().splitlines()] == ["a"]
    assert agentrl(tmp_path / "r", "--baselines", "--format", "jsonl", "--out", tmp_path / "all") == 0
    assert len((tmp_path / "all").read_bytes().splitlines()) == 2


def test_parquet_in_several_row_groups_is_read_back(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.eval.finetune_rows.ROW_GROUP", 1)
    assert agentrl(run, "--format", "hf", "--out", tmp_path / "rows.parquet") == 0
    said = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups == len(said) == 3
    assert [row["messages"][-1]["content"] for row in said] == ["it is a", "it is b", "it is c"]


def agentrl(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, words)])
    return int(left.value.code or 0)


def test_chat_rows_read_back_as_the_same_messages(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert agentrl(run, "--out", tmp_path / "sft.jsonl") == 0
    assert "3 episodes to" in (err := capsys.readouterr().err)
    assert "1 failed in the infrastructure" in err
    assert "1 with a malformed call" in err
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [row["tools"] for row in rows] == [[TOOL]] * 3
    for row, name in zip(rows, "abc", strict=True):
        assert tuple(message_of(m, "row") for m in row["messages"]) == episode(name, 1.0).messages
    first = rows[0]["messages"][2]
    assert isinstance(first["tool_calls"][0]["function"]["arguments"], str), "as OpenAI's files have it"


def test_chat_rows_are_demonstrations_for_a_run(run: Path, tmp_path: Path):
    assert agentrl(run, "--solved", "--out", tmp_path / "sft.jsonl") == 0
    config = RunConfig.model_validate(
        {
            "name": "r",
            "env": "agentrl.envs.calculator:Calculator",
            "model": {"tiny": {}},
            "warmup": {"demonstrations": str(tmp_path / "sft.jsonl")},
        }
    )
    assert [messages[-1].content for messages in load_content(config).demonstrations] == ["it is a", "it is c"]


def test_a_parquet_file_reads_back_as_the_same_messages(run: Path, tmp_path: Path):
    assert agentrl(run, "--format", "hf", "--out", tmp_path / "sft.parquet") == 0
    rows = pq.ParquetFile(tmp_path / "sft.parquet").read().to_pylist()
    assert [json.loads(row["tools"]) for row in rows] == [[TOOL]] * 3
    assert tuple(message_of(m, "row") for m in rows[0]["messages"]) == episode("a", 1.0).messages


def test_token_rows_are_what_was_sampled_each_token_labeled_once(run: Path, tmp_path: Path):
    prompt, said = Segment((1, 5), "prompt", -1, 0), Segment((2, 3), "sampled", 0, 1, (-1.0, -0.5), (0, 0))
    more = Segment((4,), "observation", 1, 2), Segment((6,), "sampled", 2, 3, (-1.0,), (0,))
    branch = Segment((7, 8), "observation", 1, 4), Segment((9,), "sampled", 4, 5, (-1.0,), (0,))
    branched = replace(episode("f", 1.0), segments=(prompt, said, *more, *branch, Segment((99,), "glue", 5)))
    with RunStore.open(RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}}), run) as store:
        store.write_episodes(3, [EpisodeRecord(3, 0, branched)])
    assert agentrl(run, "--format", "tokens", "--steps", "1", "--solved", "--out", tmp_path / "one.parquet") == 0
    (row,) = pq.read_table(tmp_path / "one.parquet").to_pylist()
    assert row == {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}
    assert agentrl(run, "--format", "tokens", "--steps", "3", "--out", tmp_path / "tree.parquet") == 0
    assert pq.read_table(tmp_path / "tree.parquet").to_pylist() == [
        {"input_ids": [1, 5, 2, 3, 4, 6], "labels": [-100, -100, 2, 3, -100, 6]},
        {"input_ids": [1, 5, 2, 3, 7, 8, 9], "labels": [-100] * 6 + [9]},
    ]


def test_whole_records_read_back_to_the_bit(run: Path, capsysbinary: pytest.CaptureFixture[bytes]):
    assert agentrl(run, "--format", "jsonl", "--malformed") == 0
    lines = capsysbinary.readouterr().out.splitlines()
    kept = [r for step in (1, 2) for r in read_records(run, step) if r.episode.error is None]
    assert [decode(line) for line in lines] == kept


def test_a_call_that_could_be_read_but_not_run_is_malformed_as_well(run: Path, capsys: pytest.CaptureFixture[str]):
    one = episode("f", 1.0)
    call = replace(one.turns[0].calls[0], outcome="invalid_args")
    with RunStore.open(RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}}), run) as store:
        wrong = replace(one, turns=(replace(one.turns[0], calls=(call,)), one.turns[1]))
        store.write_episodes(3, [EpisodeRecord(3, 0, wrong)])
    assert agentrl(run, "--steps", "3") == 0
    assert "1 with a malformed call" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--solved"], "ac"),
        (["--min-reward", "0.5", "--malformed"], "ace"),
        (["--min-reward", "1.00000001"], "ac"),  # but for rounding
        (["--steps", "2:"], "c"),
        (["--steps", ":1"], "ab"),
        (["--steps", "1"], "ab"),
    ],
)
def test_filters(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], names: str):
    assert agentrl(run, *words) == 0
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["messages"][-1]["content"] for row in rows] == [f"it is {name}" for name in names]


def test_refusals(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "there").write_text("x")
    for words, text in (
        (["--format", "hf"], "name the file with --out FILE.parquet"),
        (["--format", "tokens"], "--format tokens writes parquet: name the file with --out FILE.parquet"),
        (["--min-reward", "nan"], "no reward is at least nan"),
        (["--out", tmp_path / "no/such/rows.jsonl"], "there is no folder"),
        (["--out", tmp_path], "is a folder; name a file in it"),
        (["--out", tmp_path / "there"], "already exists; nothing was changed"),
        (["--steps", "9:"], "it has steps 1 to 2, and the chosen range includes none"),
        (["--steps", "x"], "write FROM:TO, FROM:, :TO or one step"),
    ):
        assert agentrl(run, *words) == 2
        assert text in capsys.readouterr().err
    config = RunConfig.model_validate({"name": "r", "env": "m:E", "model": {"tiny": {}}})
    with RunStore.open(config, tmp_path / "p") as store:
        store.write_episodes(1, [EpisodeRecord(1, 0, episode("a", 1.0, picture=True))])
    for format in ("hf", "tokens"):
        assert agentrl(tmp_path / "p", "--format", format, "--out", tmp_path / "p.parquet") == 2
        assert f"--format {format}: an episode holds parts (images)" in capsys.readouterr().err
        assert not (tmp_path / "p.parquet").exists()
    assert agentrl(tmp_path / "p") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["messages"][1]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_branch_of_the_policy_is_a_conversation_of_its_own():
    user, said = Message("user", "q"), Message("assistant", "a")
    inner, thought = Message("user", "judge this"), Message("assistant", "good")
    branched = Episode(
        id="e",
        task=Task("t"),
        messages=(user, said, inner, thought),
        turns=(Turn(said, (), 0.0, "stop", 1, 0.0, 0.0),),
        segments=(
            Segment((1,), "prompt", -1, 0),
            Segment((2,), "sampled", 0, 1, (-1.0,), (0,)),
            Segment((3,), "prompt", -1, 2),
            Segment((4,), "sampled", 2, 3, (-1.0,), (0,)),
        ),
        stop_reason=StopReason.ANSWERED,
        reward=1.0,
    )
    assert conversations(branched) == [(user, said), (inner, thought)]


def test_the_branches_of_a_recorded_agent_are_conversations_and_what_is_continued_is_not_there_twice():
    said = [Message("assistant", text) for text in ("a", "b", "c")]
    asked = [Message("user", "q"), Message("user", "r"), Message("user", "lost"), Message("system", "sub")]
    branched = Episode(
        id="e",
        task=Task("t"),
        messages=(asked[0], said[0], asked[1], said[1], asked[2], asked[3], said[2]),
        turns=tuple(Turn(one, (), 0.0, "stop", 1, 0.0, 0.0) for one in said),
        segments=(
            Segment((1,), "prompt", -1, 0),
            Segment((2,), "sampled", 0, 1, (-1.0,), (0,)),
            Segment((3,), "observation", 1, 2),
            Segment((4,), "sampled", 2, 3, (-1.0,), (0,)),
            Segment((5,), "observation", 1, 4),  # its client left before the answer
            Segment((6,), "prompt", -1, 5),
            Segment((7,), "sampled", 5, 6, (-1.0,), (0,)),
        ),
        stop_reason=StopReason.ANSWERED,
        reward=1.0,
    )
    found = [[message.content for message in one] for one in conversations(branched)]
    assert found == [["q", "a", "r", "b"], ["sub", "c"]]
