"""Which tasks a step plays: the old order by default, and the same again after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.chat.template import Renderer
from agentrl.config.run import RunConfig
from agentrl.env.toolenv import ToolEnv
from agentrl.errors import CheckpointError, ConfigError
from agentrl.rollout.prompts import fitting, prompt_tokens
from agentrl.rollout.setup import Content
from agentrl.testing.tiny_model import make_tokenizer
from agentrl.train.feed import SAMPLER_FILE, TaskFeed
from agentrl.types import Episode, Group, Message, StopReason, Task, Turn

TASKS = [Task(f"t{i}", {"number": i}) for i in range(10)]


def config(**more: object) -> RunConfig:
    return RunConfig.model_validate({"env": "a:B", "model": {"tiny": {}}, **more})


def feed(order: str = "sequential", refill: int = 0, per_step: int = 4) -> TaskFeed:
    rollout = {"groups_per_step": per_step, "refill_zero_signal": refill}
    return TaskFeed.of(config(rollout=rollout, data={"sampler": {"order": order}}, seed=3), TASKS)


def group(task: Task, rewards: Sequence[float]) -> Group:
    turn = Turn(Message("assistant", "x"), (), 0.0, "stop", 1, 0.0, 0.0)
    return Group(
        task,
        tuple(
            Episode(f"{task.id}/{i}", task, (), (turn,), (), StopReason.ANSWERED, r) for i, r in enumerate(rewards)
        ),
    )


class Played:
    """Plays groups whose rewards are given by task id (all equal by default), and remembers what it was asked."""

    def __init__(self, **rewards: Sequence[float]) -> None:
        self.rewards, self.asked = rewards, []

    async def __call__(self, tasks: Sequence[Task], label: str) -> list[Group]:
        self.asked.append((label, [task.id for task in tasks]))
        return [group(task, self.rewards.get(task.id, (0.0, 0.0))) for task in tasks]


async def test_by_default_tasks_come_one_after_another_and_nothing_is_refilled():
    source, play = feed(), Played()
    for step in range(1, 6):
        groups = await source.groups(play)
        assert [g.task.id for g in groups] == [f"t{i % 10}" for i in range((step - 1) * 4, step * 4)]
    assert [label for label, _ in play.asked] == [""] * 5
    assert source.metrics == {}


async def test_a_group_without_signal_gives_its_place_to_the_next_task():
    play = Played(t1=(1.0, 0.0), t4=(0.0, 1.0))
    source = feed(refill=3, per_step=3)
    groups = await source.groups(play)
    # t0 and t2 are dull: t3 and t4 take their places; t3 is dull too, and one refill is left for t5.
    assert play.asked == [("", ["t0", "t1", "t2"]), ("/refill0", ["t3", "t4"]), ("/refill2", ["t5"])]
    assert [g.task.id for g in groups] == ["t5", "t1", "t4"]
    assert source.metrics == {"refilled_groups": 3.0, "refilled_episodes": 6.0}
    assert [g.task.id for g in await source.groups(Played(**{f"t{i}": (1, 0) for i in range(10)}))] == [
        "t6",
        "t7",
        "t8",
    ]
    assert source.metrics["refilled_groups"] == 0


@pytest.mark.parametrize("order", ["sequential", "shuffled", "weighted"])
async def test_a_resumed_feed_draws_what_the_first_would_have_drawn(tmp_path: Path, order: str):
    rewards = {f"t{i}": (float(i < 7), float(i < 3)) for i in range(10)}
    through = feed(order)
    await through.groups(Played(**rewards))
    await through.groups(Played(**rewards))
    through.save(tmp_path)
    again = feed(order)
    again.load(tmp_path, 2)
    for _ in range(6):
        first, second = Played(**rewards), Played(**rewards)
        await through.groups(first)
        await again.groups(second)
        assert first.asked == second.asked


async def test_the_weighted_order_prefers_what_is_solved_now_and_then():
    rewards = {f"t{i}": (1.0, 0.0) if i < 2 else (0.0, 0.0) for i in range(10)}
    source, play = feed("weighted", per_step=10), Played(**rewards)
    for _ in range(60):
        await source.groups(play)
    late = [name for _, names in play.asked[20:] for name in names]
    assert sum(name in ("t0", "t1") for name in late) > len(late) / 2  # two of ten tasks


def test_a_damaged_or_missing_state_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"sampler\.json: cannot read"):
        feed("weighted").load(tmp_path, 2)
    (tmp_path / SAMPLER_FILE).write_text('{"drawn": 3}')
    with pytest.raises(CheckpointError, match=r"sampler\.json: damaged"):
        feed().load(tmp_path, 2)


def test_a_checkpoint_without_a_state_goes_on_in_order(tmp_path: Path):
    source = feed()
    source.load(tmp_path, 2)
    assert [task.id for _, task in source.sampler.take(3)] == ["t8", "t9", "t0"]


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
