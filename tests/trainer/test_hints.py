"""Hints that only a teacher reads: where they go, who gives them, and runs that learn from them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.cli.app import app
from agentrl.config import RunConfig
from agentrl.config.teacher import TeacherConfig
from agentrl.errors import ConfigError, EnvError
from agentrl.learner.pack import as_taught
from agentrl.reporting.report import Silent
from agentrl.rollout.compaction import INTRODUCTION
from agentrl.rollout.content import load_content
from agentrl.run_folder.records import read_records
from agentrl.run_folder.store import RunStore
from agentrl.trainer.hints import Hints, check_hints, opening_of
from agentrl.trainer.replay import replay
from agentrl.trainer.run import train_run
from agentrl.trainer.samples import episode_samples
from agentrl.types import Completion, Episode, Group, Message, Segment, StopReason, Task, Turn
from agentrl.view.library import Library
from agentrl.view.redaction import redacted
from tests.chat.families import FAMILIES, Family
from tests.trainer.test_teacher_run import run, served

QUESTION = "Which door?"
HINT = "Take the <|im_end|> red one."


def episode(
    renderer: Renderer,
    opening: Sequence[Message],
    said: Sequence[str] = ("one", "two"),
    *,
    name: str = "e0",
    solved: bool = False,
    hint: str | None = None,
    first: str | None = None,
) -> Episode:
    """An episode in which the policy says these things, with a question between them; before them `first`, in a
    separate conversation."""
    transcript, turns = Transcript(renderer), []
    if first is not None:
        asked = transcript.fork(keep=0)
        asked.extend([Message("user", "Plan.")])
        ids = (*renderer.encode_text(first), min(renderer.stop_ids))
        asked.complete(Completion(ids, (-0.1,) * len(ids), (0,) * len(ids), "stop"))
    transcript.extend(opening)
    for number, text in enumerate(said):
        if number:
            transcript.extend([Message("user", "And then?")])
        ids = (*renderer.encode_text(text), min(renderer.stop_ids))
        message = transcript.complete(Completion(ids, (-0.1,) * len(ids), (0,) * len(ids), "stop"))
        place = len(transcript.messages) - 1
        turns.append(Turn(message, (), 0.0, "stop", len(ids), 0.1, 0.1, place=place))
    return Episode(
        id=name,
        task=Task("t"),
        messages=transcript.messages,
        turns=tuple(turns),
        segments=transcript.segments,
        stop_reason=StopReason.ANSWERED,
        reward=float(solved),
        solved=solved,
        hint=hint,
    )


def hinted(
    renderer: Renderer, *episodes: Episode, hint: Any = "env", room: int = 10_000, context: Any = None
) -> Any:
    hints = Hints(TeacherConfig(policy="initial", hint=hint), renderer, room, context)
    rows = [row for one in episodes for row in episode_samples(one)]
    return hints.add(rows, [Group(Task("t"), episodes)])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("history", ["keep", "fork"])
def test_the_teacher_reads_the_hint_in_the_question_and_the_rest_as_it_was(
    tmp_path: Path, family: Family, history: Any
):
    renderer = Renderer.from_directory(family.directory(tmp_path), history=history)
    made = hinted(renderer, episode(renderer, [Message("user", QUESTION)], hint=HINT))
    for row in made.rows:
        taught = as_taught(row)
        assert renderer.decode(taught.ids) == renderer.decode(row.ids).replace(
            QUESTION, f"{QUESTION}\n\n{HINT}", 1
        )
        assert taught.ids[taught.loss_mask.index(True) :] == row.ids[row.loss_mask.index(True) :]
        for id in renderer.stop_ids:
            assert taught.ids.count(id) == row.ids.count(id), "text of a hint is no control token"
        assert row.columns["taught"] == (1.0,) * sum(row.loss_mask)
    assert {name: metric.value for name, metric in made.metrics.items()} == {
        "hinted_episodes": 1.0,
        "hints_too_long": 0.0,
        "hints_misplaced": 0.0,
    }


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.from_directory(FAMILIES[0].directory(tmp_path_factory.mktemp("renderer")))


@pytest.mark.parametrize(
    ("opening", "where"),
    [
        ([Message("system", "S"), Message("user", QUESTION)], QUESTION),
        ([Message("system", "S"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")], "c"),
        ([Message("system", "Only a system prompt")], "Only a system prompt"),
        ([Message("user", "first"), Message("system", "last")], "first"),
    ],
)
def test_the_hint_is_at_the_end_of_the_last_user_message(renderer: Renderer, opening: list[Message], where: str):
    one = episode(renderer, opening, hint="HINT")
    assert opening_of(one) == tuple(opening)
    (row,) = hinted(renderer, one).rows
    assert f"{where}\n\nHINT" in renderer.decode(as_taught(row).ids)


def test_examples_and_conversations_before_the_opening_are_told_apart_from_the_policy(renderer: Renderer):
    examples = [Message("user", "1+1"), Message("assistant", "two"), Message("user", "5-3")]
    same = episode(renderer, examples, ("two", "yes"), hint="HINT", solved=True)
    assert opening_of(same) == tuple(examples), "the policy says what the example says"
    (row,) = hinted(renderer, same).rows
    assert "5-3\n\nHINT" in renderer.decode(as_taught(row).ids)
    planned = episode(renderer, examples, ("red",), name="e1", hint="HINT", first="A plan")
    assert opening_of(planned) == tuple(examples), "`self.model` was called in setup"
    plan, row = hinted(renderer, planned).rows
    assert plan.hinted is None
    assert "5-3\n\nHINT" in renderer.decode(as_taught(row).ids)
    shown = hinted(renderer, same, planned, hint="solved").texts["e1"]
    assert "1+1" not in shown, "examples are no part of an attempt"
    assert "assistant:\ntwo" in shown


@pytest.mark.parametrize("from_file", [False, True])
def test_a_conversation_before_the_opening_may_say_what_the_policy_says_first(renderer: Renderer, from_file: bool):
    one = episode(renderer, [Message("user", QUESTION)], ("red", "blue"), hint="HINT", first="red")
    if from_file:
        one = replace(one, turns=deepcopy(one.turns))
    assert opening_of(one) == (Message("user", QUESTION),)
    plan, row = hinted(renderer, one).rows
    assert plan.hinted is None
    assert f"{QUESTION}\n\nHINT" in renderer.decode(as_taught(row).ids)


def test_a_conversation_without_an_answer_is_no_part_of_the_opening(renderer: Renderer):
    plain = episode(renderer, [Message("user", QUESTION)], ("red",), first="A plan")
    asked = Message("user", "Too long to answer.")
    lost = Segment(tuple(renderer.encode_text("Too long")), "prompt", -1, 2)
    start = next(i for i, segment in enumerate(plain.segments) if segment.message == 2)
    moved = [
        replace(
            segment,
            parent=segment.parent + (segment.parent >= start),
            message=None if segment.message is None else segment.message + (segment.message >= 2),
        )
        for segment in plain.segments
    ]
    segments = (*moved[:start], lost, *moved[start:])
    turns = tuple(replace(turn, place=1 + (turn.place or 0)) for turn in plain.turns)
    messages = (*plain.messages[:2], asked, *plain.messages[2:])
    one = replace(plain, messages=messages, turns=turns, segments=segments)
    assert opening_of(one) == (Message("user", QUESTION),)


def test_a_hint_that_repeats_the_question_is_behind_it(renderer: Renderer):
    one = episode(renderer, [Message("user", "red or blue")], hint="red or blue")
    (row,) = hinted(renderer, one).rows
    assert row.hinted is not None
    assert renderer.decode(row.ids[: row.hinted.length]).endswith("user\nred or blue")
    other = episode(renderer, [Message("user", "What else")], hint="red or blue")
    made = hinted(renderer, replace(one, segments=other.segments))
    assert made.metrics["hints_misplaced"].value == 1.0


def test_another_attempt_that_solved_the_task_is_the_hint(renderer: Renderer):
    opening = [Message("user", QUESTION)]
    failed = episode(renderer, opening, ("blue",), name="failed")
    long = episode(renderer, opening, ("long thoughts about colors", "red"), name="long", solved=True)
    short = episode(renderer, opening, ("red",), name="short", solved=True)
    made = hinted(renderer, failed, long, short, hint="solved")
    assert list(made.texts) == ["failed", "long", "short"]
    assert "assistant:\nred" in made.texts["failed"]
    assert made.texts["failed"] == made.texts["long"], "the shortest"
    assert "long thoughts" in made.texts["short"], "never itself"
    alone = hinted(renderer, failed, short, hint="solved")
    assert list(alone.texts) == ["failed"]
    assert [set(row.columns["taught"]) for row in alone.rows] == [{1.0}, {0.0}]
    told = replace(failed, hint="It is warm.")
    both = hinted(renderer, told, short, hint="both")
    assert both.texts["failed"].endswith("\n\nIt is warm.")
    assert "red" in both.texts["failed"]
    assert hinted(renderer, told, short, hint="env").texts == {"failed": "It is warm."}


def test_an_episode_that_gets_too_long_has_no_teacher(renderer: Renderer):
    one = episode(renderer, [Message("user", QUESTION)], hint="word " * 200)
    length = len(episode_samples(one)[0].ids)
    made = hinted(renderer, one, room=length + 50)
    assert made.rows[0].hinted is None
    assert (made.texts, made.metrics["hints_too_long"].value) == ({}, 1.0)


def test_a_context_limits_each_row_and_micro_batches_all_rows_of_an_episode(renderer: Renderer):
    one = episode(renderer, [Message("user", QUESTION)], hint=HINT, first="plan " * 30)
    lengths = [len(as_taught(row).ids) for row in hinted(renderer, one).rows]
    assert len(lengths) == 2
    assert list(hinted(renderer, one, context=max(lengths)).texts) == ["e0"]
    assert hinted(renderer, one, context=max(lengths) - 1).metrics["hints_too_long"].value == 1.0
    assert hinted(renderer, one, room=max(lengths)).metrics["hints_too_long"].value == 1.0


def test_rows_that_do_not_begin_with_the_opening_have_no_teacher(renderer: Renderer):
    one = episode(renderer, [Message("user", QUESTION)], hint=HINT)
    other = episode(renderer, [Message("user", "Something else")], hint=HINT)
    made = hinted(renderer, replace(one, segments=other.segments))
    assert made.rows[0].hinted is None
    assert made.metrics["hints_misplaced"].value == 1.0


@pytest.mark.parametrize("merged", ["?", "?\n", "?\n\n"])
@pytest.mark.parametrize("hint", [HINT, "Is it the red one?"])
def test_the_hint_is_before_a_summary_whatever_tokens_join_them(tmp_path: Path, merged: str, hint: str):
    folder = FAMILIES[0].directory(tmp_path)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"] |= {"use_regex": False}
    size = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])) + 1
    tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    written = merged.replace("\n", "Ċ")  # as byte-level tokenizers write a newline
    for n in range(1, len(written)):
        tokenizer["model"]["vocab"][written[: n + 1]] = size + n
        tokenizer["model"]["merges"].insert(n - 1, [written[:n], written[n]])
    file.write_text(json.dumps(tokenizer))
    renderer = Renderer.from_directory(folder)
    assert len(renderer.encode_text(merged)) == 1
    before = Transcript(renderer)
    before.extend([Message("user", QUESTION)])
    ids = (*renderer.encode_text("one"), min(renderer.stop_ids))
    said = Completion(ids, (-0.1,) * len(ids), (0,) * len(ids), "stop")
    before.complete(said)
    after = before.fork(keep=0)
    after.extend([Message("user", f"{QUESTION}{INTRODUCTION}Blue was wrong.")])
    after.complete(said)
    made = hinted(
        renderer,
        replace(episode(renderer, [Message("user", QUESTION)], hint=hint), segments=after.segments),
    )
    assert len(made.rows) == 2
    for row in made.rows:
        taught = as_taught(row)
        told = renderer.decode(row.ids).replace(QUESTION, f"{QUESTION}\n\n{hint}", 1)
        assert renderer.decode(taught.ids) == told
        assert taught.ids[taught.loss_mask.index(True) :] == row.ids[row.loss_mask.index(True) :]


ENV = '''
from agentrl import Task, ToolEnv, reward, tool


class Doors(ToolEnv):
    """Open the right door."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"door": n}) for n in range(size)]

    def setup(self, door: int) -> str:
        self.door = door
        return f"Which of {door}?"

    @tool
    def open_door(self, number: int) -> str:
        """Open it.

        Args:
            number: of the door.
        """
        return "open"

    @reward
    def opened(self, episode) -> bool:
        return sum(episode.task.row["door"] for _ in episode.turns) % 3 == 0

HINT
'''
GIVEN = "    def teacher_hint(self):\n        return f'It is door {self.door}'"
TINY = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400, "max_context": 512}


def settings(hint: str = GIVEN, **changes: Any) -> RunConfig:
    Path("doors.py").write_text(ENV.replace("HINT", hint))
    base: dict[str, Any] = {
        "name": "student",
        "steps": 3,
        "env": {"use": f"{Path.cwd()}/doors.py:Doors"},
        "model": {"tiny": TINY},
        "teacher": {"policy": "initial", "hint": "env"},
        "rollout": {"groups_per_step": 3, "group_size": 2, "max_turns": 2, "max_tokens": 8, "token_budget": 300},
        "algorithm": {"advantage": "none", "kl": {"coef": 1.0}},
        "optim": {"lr": 1e-2, "warmup_steps": 0},
        "eval": {"every": 0, "tasks": 1},
        "checkpoint": {"every": 1, "keep": 10},
    }
    return RunConfig.model_validate(base | changes)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("policy", ["initial", "average"])
def test_a_run_that_teaches_itself_resumes_and_replays_exactly(policy: str):
    teacher = {"policy": policy, "hint": "env"}
    lines = run(settings(teacher=teacher), "whole")
    assert all(line["hinted_episodes"] == 6 and line["kl"] > 0 for line in lines)
    record = read_records(Path("whole"), 2)[0]
    assert record.hint == record.episode.hint == f"It is door {record.episode.task.row['door']}"
    shown = CliRunner().invoke(app, ["show", "whole", "--episode", record.episode.id])
    assert f"the teacher also read: {record.hint}" in shown.output
    page = Library([Path("whole")], index=Path("index.sqlite")).episode("whole", 2, record.episode.id)
    assert page["hint"] == record.hint
    assert record.hint not in str(redacted(page))
    assert replay(Path("whole"), 3).equal
    run(settings(teacher=teacher, steps=2), "parts")
    run(settings(teacher=teacher), "parts")
    a, b = (
        load_file(next(Path(f"{n}/checkpoints/step-3").glob("model*.safetensors"))) for n in ("whole", "parts")
    )
    assert all(a[name].equal(b[name]) for name in a)


TURNS = "    async def teacher_hint(self, episode):\n        return f'{len(episode.turns)} {episode.reward:g}'"
SOME = "    def teacher_hint(self, told):\n        return self.door and str(told.task.row['door'])"
RAISES = "    def teacher_hint(self):\n        raise KeyError('gone')"
RAISES_LATER = "    async def teacher_hint(self):\n        raise KeyError('gone')"
NUMBER = "    def teacher_hint(self):\n        return 7"


@pytest.mark.parametrize(("hint", "pattern"), [(TURNS, r"[12] [01]"), (SOME, r"\d+")])
def test_a_hint_may_be_async_and_read_the_scored_episode(hint: str, pattern: str):
    run(settings(hint, steps=1), "r")
    found = [record.hint for record in read_records(Path("r"), 1)]
    assert any(found)
    assert all(one is None or re.fullmatch(pattern, one) for one in found)


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (RAISES, "teacher_hint raised KeyError: 'gone'"),
        (RAISES_LATER, "teacher_hint raised KeyError: 'gone'"),
        (NUMBER, "teacher_hint returned 7; return text, or None for no hint"),
    ],
)
def test_a_hint_that_fails_is_a_fault_of_the_env_and_not_of_the_episode(hint: str, text: str):
    config = settings(hint, steps=1)
    rollout = config.rollout.model_copy(update={"faults_stop_above": None})
    run(config.model_copy(update={"rollout": rollout}), "r")
    for record in read_records(Path("r"), 1):
        assert text in record.episode.faults["teacher_hint"]
        assert record.episode.reward is not None
        assert record.hint is None
        assert record.episode.solved is not None


def test_hints_that_always_fail_stop_the_run_and_say_so():
    with pytest.raises(EnvError, match=r"'teacher_hint' failed in .* fix it so that it returns text or None"):
        run(settings(RAISES, steps=8), "r")


def test_hints_reach_a_teacher_on_a_server(tmp_path: Path):
    run(settings(steps=1), "start")
    model = Path("start/start").absolute()
    given = {"steps": 2, "model": {"path": str(model)}}
    kl = {"algorithm": {"advantage": "none", "kl": {"coef": 1.0, "kind": "centered"}}}
    here = run(settings(teacher={"path": str(model), "hint": "env"}, **given, **kl), "here")
    with served(model) as url:
        there = run(settings(teacher={"url": url, "model": "tiny", "hint": "env"}, **given, **kl), "there")
    for a, b in zip(here, there, strict=True):
        assert b["hinted_episodes"] == 6
        assert b["kl"] == pytest.approx(a["kl"], rel=1e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)


def test_adapters_learn_from_the_policy_without_them():
    run(settings(steps=1), "start")
    model = {"path": str(Path("start/start").absolute())}
    lines = run(settings(model=model, learner={"lora": {"rank": 4}}, steps=4), "adapters")
    whole = run(settings(model=model, steps=1), "whole")
    assert lines[0]["kl"] == pytest.approx(whole[0]["kl"], rel=1e-4)
    assert replay(Path("adapters"), 2).equal


def test_hints_that_a_server_cannot_read_do_not_stop_the_run():
    long = GIVEN.replace("{self.door}", "{self.door} ' + 'or another ' * (200 * (self.door % 2)) + f'")
    run(settings(long, steps=1), "start")
    model = Path("start/start").absolute()
    with served(model) as url:
        given = {"teacher": {"url": url, "model": "tiny", "hint": "env"}, "model": {"path": str(model)}}
        lines = run(settings(long, **given), "r")
    assert sum(line["hints_too_long"] for line in lines)
    assert sum(line["hinted_episodes"] for line in lines)


def test_envs_of_a_mixture_have_hints_or_a_weight_of_zero():
    envs = {"a": {"use": f"{Path.cwd()}/doors.py:Doors"}, "b": {"use": "agentrl.envs.calculator:Calculator"}}
    rollout = {"groups_per_step": 4, "group_size": 2, "max_turns": 1, "max_tokens": 8, "token_budget": 900}
    mixed = {"env": None, "envs": envs, "rollout": rollout, "steps": 1}
    mixed |= {"algorithm": {"kl": {"coef": 1.0}}, "model": {"tiny": {**TINY, "max_context": 1000}}}
    with pytest.raises(ConfigError, match=r"envs\.b: teacher\.hint env needs a method `teacher_hint"):
        run(settings(**mixed), "r")
    envs["b"]["algorithm"] = {"kl_coef": 0.0}
    envs["c"] = {**envs["a"], "algorithm": {"kl_coef": 0.0}}
    (line,) = run(settings(**mixed), "r2")
    records = read_records(Path("r2"), 1)
    assert {record.hint is not None for record in records if record.episode.task.env == "a"} == {True}
    others = [record for record in records if record.episode.task.env != "a"]
    assert {record.episode.task.env for record in others} == {"b", "c"}
    assert not any(record.hint or record.episode.hint for record in others), "not even asked"
    assert line["hinted_episodes"] == sum(record.hint is not None for record in records)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"teacher": {"policy": "initial"}}, "teacher.policy initial knows nothing that the policy does not"),
        ({"teacher": {"policy": "initial", "path": "T", "hint": "env"}}, "one of path .* got path and policy"),
        ({"teacher": {"policy": "initial", "hint": "env", "rate": 0.1}}, "rate has no effect unless"),
        ({"teacher": {"policy": "average", "hint": "env", "rate": 0.0}}, "greater than 0"),
        (
            {"learner": {"reference_ranks": 1}, "teacher": {"policy": "current", "hint": "env"}},
            "own ranks evaluate",
        ),
        ({"learner": {"lora": {"rank": 2}}, "teacher": {"policy": "average", "hint": "env"}}, "trained whole"),
        ({"learner": {"lora": {"rank": 2}, "reference_ranks": 1}}, "the teacher is the policy without"),
        ({"algorithm": {"kl": {"coef": 1.0, "where": "reward"}}}, "only those with a hint have a teacher"),
        ({"rollout": {"group_size": 1}, "teacher": {"policy": "initial", "hint": "solved"}}, "group_size is 1"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        settings(**changes)


def test_attempts_are_shown_where_the_teacher_counts():
    use = {"use": f"{Path.cwd()}/doors.py:Doors"}
    envs = {"a": {**use, "rollout": {"group_size": 1}}, "b": use}
    envs["b"] = {**use, "algorithm": {"kl_coef": 0.0, "advantage": "rloo"}}
    given = {"env": None, "envs": envs, "teacher": {"policy": "initial", "hint": "solved"}}
    with pytest.raises(ValueError, match="shows another attempt"):
        settings(**given)


def test_a_step_without_tokens_does_not_blame_the_hints():
    rollout = {"groups_per_step": 3, "group_size": 2, "max_turns": 2, "max_tokens": 8, "token_budget": 300}
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    config = settings(rollout={**rollout, "overlong": "mask"}, steps=1)
    with RunStore.open(config, Path("r")) as store:
        train_run(config, store, Notes())
    assert any("the policy is unchanged" in note for note in notes)
    assert not any("has a hint" in note for note in notes)


def test_an_env_without_hints_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"needs a method `teacher_hint\(self, episode\)` of Doors"):
        run(settings(""), "r")
    unscored = ENV.replace("HINT", "").replace("-> bool", "-> float")
    config = settings("", teacher={"policy": "initial", "hint": "solved"}, algorithm={"kl": {"coef": 1.0}})
    Path("doors.py").write_text(unscored)
    with pytest.raises(ConfigError, match=r"teacher\.hint: solved"):
        run(config, "r2")
    calculator = {"use": "agentrl.envs.calculator:Calculator"}
    unweighted = {"use": config.sole_env.use, "algorithm": {"kl_coef": 0.0}}
    given = {"env": None, "envs": {"calculator": calculator, "doors": unweighted}}
    mixed = settings("", teacher={"policy": "initial", "hint": "solved"}, algorithm={"kl": {"coef": 1.0}}, **given)
    Path("doors.py").write_text(unscored)
    check_hints(mixed, load_content(mixed))


def test_evaluations_and_rescoring_ask_for_no_hints():
    opened = f"with open({str(Path.cwd() / 'asked')!r}, 'a') as file"
    marks = f"    def teacher_hint(self):\n        {opened}:\n            file.write('x')"
    greedy = {"advantage": "remax", "kl": {"coef": 1.0}}
    run(settings(marks, steps=1, eval={"every": 1, "tasks": 4}, algorithm=greedy), "r")
    asked = Path("asked")
    assert asked.read_text() == "x" * 6, "once for each episode that trains"
    asked.unlink()
    for arguments in (["eval", "r", "--tasks", "2"], ["rescore", "r", "--json"]):
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
        assert not asked.exists(), arguments


def test_the_average_of_another_run_is_no_teacher():
    first = {"teacher": {"policy": "average", "hint": "env", "rate": 0.01}}
    run(settings(**first), "first")
    model = {"model": {"path": str(Path("first/checkpoints/step-3").absolute())}, "steps": 1}
    (initial,) = run(settings(**model), "initial")
    (average,) = run(settings(**first, **model), "average")
    assert average["kl"] == initial["kl"], "it starts from this run's policy"


def test_a_run_without_hints_never_asks_for_them():
    config = settings("    def teacher_hint(self):\n        raise KeyError", teacher=None, algorithm={}, steps=1)
    run(config, "r")
    assert not any(record.episode.faults for record in read_records(Path("r"), 1))
    assert "hinted_episodes" not in json.loads(Path("r/metrics.jsonl").read_text().splitlines()[-1])
