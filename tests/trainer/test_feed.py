"""Which tasks a run plays: the old order by default, the same again after a resume, and only what fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat.template import Renderer
from agentrl.config.run import RunConfig
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import CheckpointError, ConfigError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.admission import Admission, Batch
from agentrl.rollout.content import Content, mixed
from agentrl.rollout.prompts import fitting, prompt_tokens
from agentrl.trainer.feed import SAMPLER_FILE, check_feed, load_feed, make_admission, save_feed
from agentrl.types import Episode, Group, Message, StopReason, Task, Turn

TASKS = [Task(f"t{i}", {"number": i}) for i in range(10)]


def config(**more: object) -> RunConfig:
    return RunConfig.model_validate({"env": "a:B", "model": {"tiny": {}}, **more})


def feed(order: str = "sequential", done: int = 0, **rollout: object) -> Admission:
    wanted = {"groups_per_step": 4, **rollout}
    return make_admission(config(rollout=wanted, data={"sampler": {"order": order}}, seed=3), TASKS, done=done)


def group(task: Task, rewards: tuple[float, ...]) -> Group:
    turn = Turn(Message("assistant", "x"), (), 0.0, "stop", 1, 0.0, 0.0)
    return Group(
        task,
        tuple(
            Episode(f"{task.id}/{i}", task, (), (turn,), (), StopReason.ANSWERED, r, solved=r > 0)
            for i, r in enumerate(rewards)
        ),
    )


def play(admission: Admission, version: int, only: int | None = None) -> Batch:
    """Admit, complete all groups (or the first few) and form the next batch; tasks below t3 are solved often."""
    tickets = admission.admit(version)
    for ticket in [*admission.under_way] if only is None else tickets[:only]:
        number = int(ticket.task.id[1:])
        ticket.group = ticket.group or group(ticket.task, (float(number < 7), float(number < 3)))
    batch = admission.form()
    assert batch is not None
    return batch


OWN = "tests.env.test_own_sampler:Learning"


@pytest.mark.parametrize("order", ["sequential", "shuffled", "weighted", OWN])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_feed_draws_what_the_first_would_have_drawn(tmp_path: Path, order: str, max_staleness: int):
    through = feed(order, max_staleness=max_staleness)
    for step in range(2):
        play(through, step)
    save_feed(through, tmp_path)
    again = feed(order, done=2, max_staleness=max_staleness)
    load_feed(again, tmp_path)
    for step in range(2, 8):
        ours, theirs = play(again, step), play(through, step)
        assert [g.task.id for g in ours.groups] == [g.task.id for g in theirs.groups]


def test_the_weighted_order_prefers_what_is_solved_now_and_then():
    source = feed("weighted", groups_per_step=10)
    late = [g.task.id for step in range(60) for g in play(source, step).groups][200:]
    assert sum(name in ("t3", "t4", "t5", "t6") for name in late) > 0.6 * len(late)  # four of ten tasks


def test_a_damaged_or_missing_state_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"sampler\.json: cannot read"):
        load_feed(feed("weighted", done=2), tmp_path)
    for text in ('{"drawn": 3}', '{"drawn": 3, "results": {}, "again": [[1, 2]]}', "[]"):
        (tmp_path / SAMPLER_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=r"sampler\.json: damaged"):
            load_feed(feed(), tmp_path)


@pytest.mark.parametrize(
    ("order", "effect"),
    [
        ("sequential", "repeat or skip"),
        ("shuffled", "repeat or skip"),
        ("weighted", "measured from scratch"),
        (OWN, "Learning starts from its initial state"),
    ],
)
def test_another_number_of_tasks_is_noted(tmp_path: Path, order: str, effect: str):
    save_feed(feed(order), tmp_path)
    assert load_feed(feed(order), tmp_path) == []
    wanted = config(rollout={"groups_per_step": 4}, data={"sampler": {"order": order}}, seed=3)
    (note,) = load_feed(make_admission(wanted, TASKS[:7]), tmp_path)
    assert note.startswith("7 training tasks, 10 when the checkpoint was saved: ")
    assert effect in note


def test_an_env_with_another_number_of_tasks_is_named(tmp_path: Path):
    envs = {"envs": {name: {"use": "a:B"} for name in ("math", "sql")}, "env": None}
    save_feed(make_admission(config(**envs), {"math": TASKS, "sql": TASKS}), tmp_path)
    (note,) = load_feed(make_admission(config(**envs), {"math": TASKS, "sql": TASKS[:9]}), tmp_path)
    assert note.startswith("envs.sql: 9 training tasks, 10 when")


def test_a_state_of_another_class_is_noted(tmp_path: Path):
    save_feed(feed(OWN), tmp_path)
    (note,) = load_feed(feed("tests.env.test_own_sampler:Backward"), tmp_path)
    assert note == "the checkpoint has the state of the order Learning: Backward starts from its initial state"
    assert load_feed(feed(OWN), tmp_path) == []
    assert load_feed(feed("weighted"), tmp_path) == []


def test_the_trial_expects_only_what_the_run_chooses_before_reports():
    queue = "tests.env.test_own_sampler:Queue"  # it has as many choices as tasks
    order, content = {"sampler": {"order": queue}}, Content(ToolEnv, TASKS, (), ())
    envs = {"sql": {"use": "a:B", "share": 3, "data": order}, "math": {"use": "a:B"}}
    for key, settings, given in (
        ("data", {"data": order}, content),
        ("envs.sql.data", {"env": None, "envs": envs}, mixed({"sql": content, "math": content})),
    ):
        check_feed(config(**settings, rollout={"groups_per_step": 4}), given)
        with pytest.raises(ConfigError, match=rf"^{key}.sampler.order {queue}: choose\(10\) raised IndexError"):
            check_feed(config(**settings, rollout={"groups_per_step": 40}), given)


def test_a_checkpoint_without_a_state_goes_on_in_order(tmp_path: Path):
    source = feed(done=2)
    load_feed(source, tmp_path)
    assert [t.task.id for t in source.admit(2)] == ["t8", "t9", "t0", "t1"]
    assert [t.name for t in source.under_way] == [f"s3/g{n}" for n in range(4)]


class Long(ToolEnv):
    """Repeat."""

    def setup(self, number: int) -> str:
        if number < 0:
            raise RuntimeError("no such number")
        return "word " * number


class Notes:
    """A reporter that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    text = '{"name": "calculator", "arguments": {"expression": "1+2"}} Use the calculator, then answer. '
    make_tokenizer(directory, [text] * 4, vocab=320, max_context=4096)
    return Renderer.from_directory(directory)


class TestOverlongPrompts:
    def content(self, *numbers: int) -> Content:
        tasks = [Task(f"n{n}", {"number": n}) for n in numbers]
        return Content(Long, tasks, tasks[:1], ())

    async def test_those_that_leave_no_room_are_dropped_and_reported(self, renderer):
        content, notes = self.content(1, 400, 2, 500), Notes()
        most = await prompt_tokens(content, content.train_tasks[2], renderer)
        drop = config(data={"overlong_prompts": "drop"})
        kept = await fitting(content, drop, renderer, most + 1, notes)
        assert [task.id for task in kept.train_tasks] == ["n1", "n2"]
        assert [task.id for task in kept.held_out_tasks] == ["n1"]
        (note,) = notes.notes
        assert f"2 of 4 training tasks are left out: their prompts have more than {most} tokens" in note
        assert "(the longest, n500, has" in note
        kept = await fitting(content, drop, renderer, most, notes)  # no room for a single token any more
        assert [task.id for task in kept.train_tasks] == ["n1"]

    async def test_the_token_budget_counts_as_well_as_the_context(self, renderer):
        content = self.content(1, 400)
        tight = config(data={"overlong_prompts": "drop"}, rollout={"token_budget": 100})
        assert len((await fitting(content, tight, renderer, 4096, Notes())).train_tasks) == 1

    async def test_refuse_stops_and_nothing_is_looked_at_by_default(self, renderer):
        content = self.content(1, 400)
        with pytest.raises(ConfigError, match=r"task 'n400': its prompt has .* tokens, more than 99"):
            await fitting(content, config(data={"overlong_prompts": "refuse"}), renderer, 100, Notes())
        assert await fitting(content, config(), renderer, 100, Notes()) is content

    async def test_a_task_that_cannot_be_set_up_and_too_many_are_errors(self, renderer):
        drop = config(data={"overlong_prompts": "drop"})
        with pytest.raises(ConfigError, match="task n-1: its prompt cannot be measured"):
            await fitting(self.content(1, -1), drop, renderer, 100, Notes())
        endless = Content(Long, [Task("n", {"number": 1})] * 100_001, (), ())
        with pytest.raises(ConfigError, match="100,001 training tasks are too many"):
            await fitting(endless, drop, renderer, 100, Notes())
