"""An env that is not a ToolEnv has every hook of the contract."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.chat.template import Renderer
from agentrl.env.env import DeclaredReward, Env, StepInfo
from agentrl.env.images import refuse_images
from agentrl.env.judge import Judge
from agentrl.env.load import load_env
from agentrl.env.rows import load_rows
from agentrl.env.solved import SolvedAt
from agentrl.env.toolenv.dispatch import no_exit
from agentrl.env.toolenv.threads import ToolRaised
from agentrl.errors import ConfigError, EnvError, InfraError, JudgeAnswerError, JudgeError
from agentrl.rollout.episode import Player
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.lifecycle import opening_messages
from agentrl.rollout.limits import EpisodeLimits
from agentrl.rollout.task_tools import task_tools
from agentrl.sandbox import SandboxBroken
from agentrl.sandbox.errors import SandboxDied
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import play, say
from agentrl.trainer.rewardless import no_reward
from agentrl.types import Episode, Message, Sampling, StopReason, Task


class Plain(Env):
    """Asks the policy for its opinion of the policy's answer, and pays the longest answer of a group."""

    closed = 0

    async def reset(self, task: Task) -> tuple[Sequence[Message], dict[str, Any]]:
        return [Message("user", "Say something.")], {}

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
        assert self.model is not None
        self.opinion = await self.model.chat([Message("user", str(message.content))], train=True)
        self.tokens = self.count_tokens(str(message.content))
        assert self.decode is not None
        self.decoded = self.decode([])
        return [], 0.0, True, False, StepInfo()

    async def score(self, episode: Episode) -> Mapping[str, float]:
        return {"tokens": float(self.tokens), "opinion": float(self.opinion.content == "good")}

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
        return [{"rank": float(n)} for n, _ in enumerate(episodes)]

    async def close(self) -> None:
        type(self).closed += 1


def player(renderer: Renderer, make_env: Any = Plain) -> Player:
    engine = ScriptedEngine(renderer, [say("good")])
    return Player(engine, renderer, make_env, EpisodeLimits(), Sampling())


async def test_a_plain_env_asks_the_policy_and_counts_with_its_tokenizer(renderer: Renderer):
    episode = await player(renderer).play(Task("t"), episode_id="e", seed=1)
    assert episode.error is None
    assert episode.faults == {}
    assert episode.rewards == {"tokens": float(len(renderer.encode_text("good"))), "opinion": 1.0}
    assert sum(segment.origin == "sampled" for segment in episode.segments) == 2, "its sub-agent trains"


async def test_a_plain_env_scores_groups_on_an_instance_that_is_closed(renderer: Renderer):
    Plain.closed = 0
    group = await GroupPlayer(player(renderer), 3, 0).play(Task("t"), "s", 0)
    assert [e.rewards["rank"] for e in group.episodes] == [0.0, 1.0, 2.0]
    assert [e.reward for e in group.episodes] == [sum(e.rewards.values()) for e in group.episodes]
    assert Plain.closed == 4


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("raise", "score_group raised KeyError"),
        ("short", "returned 1 mappings for 2 episodes"),
        ("long", "returned 3 mappings for 2 episodes"),
        ("nan", "is nan: a reward must be a finite number"),
        ("hang", "took longer than 0.05 s"),
    ],
)
async def test_group_rewards_that_fail_count_nothing(renderer: Renderer, what: str, fault: str):
    class Failing(Plain):
        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            if what == "raise":
                raise KeyError("rank")
            if what == "hang":
                await asyncio.sleep(60)
            return [{"rank": float("nan")}] * {"short": 1, "long": 3}.get(what, 2)

    group = await GroupPlayer(player(renderer, Failing), 2, 0, timeout_s=0.05).play(Task("t"), "s", 0)
    for episode in group.episodes:
        assert fault in " ".join(episode.faults.values())
        assert episode.reward == episode.rewards["tokens"] + 1.0


async def test_a_judge_of_groups_that_cannot_be_reached_is_asked_again(renderer: Renderer):
    asked: list[int] = []

    class Unsteady(Plain):
        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            asked.append(1)
            if len(asked) == 1:
                raise JudgeError("no answer")
            return await super().score_group(episodes)

    group = await GroupPlayer(player(renderer, Unsteady), 2, 0).play(Task("t"), "s", 0)
    assert [e.rewards["rank"] for e in group.episodes] == [0.0, 1.0]
    assert len(asked) == 2


class Quit(BaseException):
    """Not a plain Exception, like SystemExit, which argparse raises for words that it does not know."""


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words for it")


RAISED = {
    "its sandbox died": SandboxDied("gone"),
    "its sandbox was broken": SandboxBroken("gone", -1.0),
    "it quit": Quit("enough"),
    "a task that it awaited was canceled": asyncio.CancelledError(),
    "it said nothing": Silent(),
    "its judge refused": JudgeAnswerError("no"),
    "it raised an error of agentrl": EnvError("no"),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a group"])
@pytest.mark.parametrize("method", ["reset", "step", "score", "score_group"])
@pytest.mark.parametrize("what", RAISED)
async def test_whose_fault_it_was_does_not_depend_on_how_it_was_raised(
    renderer: Renderer, method: str, what: str, grouped: bool
):
    async def fails(env: Plain, *args: object) -> Any:
        raise BaseExceptionGroup("several", [RAISED[what]]) if grouped else RAISED[what]

    failing = type("Failing", (Plain,), {method: fails})
    playing = GroupPlayer(player(renderer, failing), 1, 0, infra_retries=0).play(Task("t"), "s", 0)
    infra = ("its sandbox died", "its sandbox was broken") if method == "score_group" else ("its sandbox died",)
    if method == "reset" or what in infra:
        with pytest.raises(InfraError):
            await playing
        return
    (episode,) = (await playing).episodes
    assert episode.error is None
    if what == "its sandbox was broken":
        assert (episode.stop_reason, episode.reward, len(episode.turns)) == (StopReason.SANDBOX_BROKEN, -1.0, 1)
        return
    assert list(episode.faults) == [method]
    assert (episode.stop_reason is StopReason.FAULT) == (method == "step")
    assert len(episode.turns) == 1


@pytest.mark.parametrize("method", ["score", "score_group"])
async def test_a_plain_env_that_waits_for_a_judge_which_hangs_is_not_scored(renderer: Renderer, method: str):
    hung = socket.create_server(("127.0.0.1", 0))
    judge = Judge(f"http://127.0.0.1:{hung.getsockname()[1]}/v1", "m")

    async def asks(env: Plain, *args: object) -> Any:
        return [{"quality": await judge.score("?")}]

    asking = type("Asking", (Plain,), {method: asks})
    plays = replace(player(renderer, asking), limits=EpisodeLimits(timeout_s=1.0))
    with pytest.raises(InfraError, match=rf"Asking\.{method}: no answer of judge m at http://127.*in 1 s"):
        await GroupPlayer(plays, 1, 0, infra_retries=0, timeout_s=1.0).play(Task("t"), "s", 0)
    hung.close()


@pytest.mark.parametrize("what", ["it quit", "a task that it awaited was canceled"])
async def test_an_env_that_leaves_while_it_is_made_is_an_infrastructure_failure(renderer: Renderer, what: str):
    class Failing(Plain):
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            if self.made > 1:  # the first one is only asked whether it scores groups
                raise RAISED[what]

    with pytest.raises(InfraError, match=f"making the env: {type(RAISED[what]).__name__}"):
        await GroupPlayer(player(renderer, Failing), 1, 0, infra_retries=0).play(Task("t"), "s", 0)


async def failing_group() -> None:
    """Before Python 3.13, it leaves a request to cancel the task around it."""

    async def fails() -> None:
        raise OSError("gone")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())


async def test_a_task_group_that_failed_earlier_is_no_cancellation():
    async def awaits_what_was_canceled() -> None:
        raise asyncio.CancelledError

    await failing_group()
    with pytest.raises(ToolRaised):
        await no_exit(awaits_what_was_canceled)
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().call_soon(current.cancel)
    with pytest.raises(asyncio.CancelledError):
        await no_exit(asyncio.sleep, 60)
    while current.uncancel():
        pass


@pytest.mark.parametrize("method", ["reset", "step", "score", "score_group", "close"])
async def test_a_task_group_leaves_no_request_to_cancel_the_episode(renderer: Renderer, method: str):
    async def groups(env: Plain, *args: Any) -> Any:
        await failing_group()
        return await getattr(Plain, method)(env, *args)

    current = asyncio.current_task()
    assert current is not None
    grouping = type("Grouping", (Plain,), {method: groups})
    plays = player(renderer, grouping)
    await plays.play(Task("t"), episode_id="e", seed=0)
    assert current.cancelling() == 0
    (episode,) = (await GroupPlayer(plays, 1, 0).play(Task("t"), "s", 0)).episodes
    assert (episode.faults, episode.error) == ({}, None)
    assert current.cancelling() == 0


@pytest.mark.parametrize("method", ["reset", "step", "score", "score_group", "close"])
async def test_time_is_limited_after_a_task_group_has_failed(renderer: Renderer, method: str):
    async def hangs(env: Plain, *args: Any) -> Any:
        await failing_group()
        await asyncio.sleep(60)

    hanging = type("Hanging", (Plain,), {method: hangs})
    limits = EpisodeLimits(timeout_s=0.5)
    plays = Player(ScriptedEngine(renderer, [say("good")]), renderer, hanging, limits, Sampling())
    playing = GroupPlayer(plays, 1, 0, infra_retries=0, timeout_s=0.5).play(Task("t"), "s", 0)
    if method == "reset":
        with pytest.raises(InfraError, match=r"Hanging\.reset took longer than 0\.5 s"):
            await playing
        return
    if method == "close":
        with pytest.warns(UserWarning, match=r"Hanging\.close: took longer than"):
            (episode,) = (await playing).episodes
        assert episode.faults == {}
        return
    (episode,) = (await playing).episodes
    assert (episode.stop_reason is StopReason.TIMEOUT) == (method == "step")
    if method != "step":
        assert "took longer than 0.5 s" in episode.faults[method]


async def test_an_episode_that_lacks_the_part_that_decides_is_scored(renderer: Renderer):
    class Graded(Plain):
        solved_at = {"correct": 1.0}  # noqa: RUF012

        async def score(self, episode: Episode) -> Mapping[str, float]:
            return {"unreadable": 0.0}  # the policy's answer cannot be parsed

    (episode,) = (await GroupPlayer(player(renderer, Graded), 1, 0).play(Task("t"), "s", 0)).episodes
    assert (episode.error, episode.reward, episode.solved) == (None, 0.0, False)
    assert "names the reward 'correct'; the episode only has: unreadable" in episode.faults["solved_at"]


@pytest.mark.parametrize("method", ["step", "score", "score_group"])
@pytest.mark.parametrize("value", [1e308, -1e200, 10**400, Fraction(10**400, 3), float("nan"), "1", None, 1j])
async def test_a_number_that_cannot_be_averaged_is_a_fault(renderer: Renderer, method: str, value: Any):
    class Odd(Plain):
        async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
            await super().step(message)
            info = StepInfo(metrics={"odd": value} if method == "step" else {})
            return [], value if method == "step" else 0.0, True, False, info

        async def score(self, episode: Episode) -> Mapping[str, float]:
            return {"odd": value, "more": value, "fine": 1.0} if method == "score" else {"fine": 1.0}

        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            return [{"odd": value, "more": value} if method == "score_group" else {} for _ in episodes]

    (episode,) = (await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)).episodes
    assert episode.reward == 1.0
    assert set(episode.faults) == ({"step"} if method == "step" else {"odd", "more"})
    if method == "step":
        assert "Odd.step returned the reward " in episode.faults["step"]
        assert " and the metric 'odd' = " in episode.faults["step"]
    assert "odd" not in episode.metrics


@pytest.mark.parametrize("value", [None, [Message("user", "Hi")], ("text", {}), ([{"role": "user"}], {})])
async def test_an_opening_of_another_form_is_an_error_that_names_the_method(renderer: Renderer, value: Any):
    class Odd(Plain):
        async def reset(self, task: Task) -> Any:
            return value

        tools = ()

    with pytest.raises(
        InfraError,
        match=r"Odd\.reset: TypeError: it returned .*; return \(messages, info\) with a list of Message",
    ):
        await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)
    with pytest.raises(ConfigError, match=r"task t: Odd\.reset: TypeError: it returned "):
        await task_tools(Odd, [Task("t")])
    with pytest.raises(ConfigError, match=r"task t: Odd\.reset: TypeError: it returned "):
        await opening_messages(Odd(), Task("t"))


async def test_an_exception_before_the_run_is_one_error_with_its_place():
    class Raises(Plain):
        async def reset(self, task: Task) -> Any:
            raise KeyError("no such game")

    with pytest.raises(
        ConfigError, match=r"(?s)task t: Raises\.reset: KeyError: 'no such game'.*test_env_hooks\.py"
    ):
        await opening_messages(Raises(), Task("t"))


@pytest.mark.parametrize(
    "value",
    [None, ([], 0.0, True, False), ([], 0.0, True, False, {}), ("text", 0.0, True, False, StepInfo())],
)
async def test_an_answer_of_another_form_is_a_fault_that_names_the_method(renderer: Renderer, value: Any):
    class Odd(Plain):
        async def step(self, action: Message) -> Any:
            return value

    (episode,) = (await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)).episodes
    assert episode.stop_reason is StopReason.FAULT
    assert "Odd.step: TypeError: it returned" in next(iter(episode.faults.values()))
    with pytest.raises(TypeError, match=r"Odd\.step returned .*StepInfo"):
        await play(Odd(), Task("t"), lambda messages: say("good"))


@pytest.mark.parametrize("method", ["reset", "step", "score", "close", "score_group"])
async def test_a_plain_part_of_an_async_method_that_exits_ends_no_run(renderer: Renderer, method: str):
    """Wrappers often are plain methods that return the awaitable of the inner env."""

    class Wrapper(Plain):
        def exits(self, *arguments: object) -> Any:
            sys.exit("the wrapped game has ended")

    setattr(Wrapper, method, Wrapper.exits)
    playing = GroupPlayer(player(renderer, Wrapper), 1, 0).play(Task("t"), "s", 0)
    if method == "reset":
        with pytest.raises(InfraError, match=r"Wrapper\.reset: SystemExit: the wrapped game has ended"):
            await playing
        return
    with pytest.warns(UserWarning, match="SystemExit") if method == "close" else nullcontext():
        (episode,) = (await playing).episodes
    assert [*episode.faults] == [] if method == "close" else [method]


@pytest.mark.parametrize("value", [None, 1.0, [1.0], {1: 1.0}])
async def test_rewards_that_are_no_mapping_are_a_fault_with_their_place(renderer: Renderer, value: Any):
    class Odd(Plain):
        async def score(self, episode: Episode) -> Mapping[str, float]:
            return value

        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            return [{"rank": 1.0} for _ in episodes]

    (episode,) = (await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)).episodes
    assert (episode.error, episode.reward, episode.rewards) == (None, 1.0, {"rank": 1.0})
    assert "the rewards of Odd are" in episode.faults["score"]


@pytest.mark.parametrize("value", [None, 1.0, [1.0], [None]])
async def test_group_rewards_that_are_no_mappings_are_a_fault(renderer: Renderer, value: Any):
    class Odd(Plain):
        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            return value

    (episode,) = (await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)).episodes
    assert episode.reward == sum(episode.rewards.values())
    assert any("Odd.score_group" in fault for fault in episode.faults.values())


async def test_a_group_reward_with_the_name_of_an_episode_reward_is_added_to_it(renderer: Renderer):
    class Same(Plain):
        async def score(self, episode: Episode) -> Mapping[str, float]:
            return {"rank": 1.0}

        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            return [{"rank": 2.0} for _ in episodes]

    (episode,) = (await GroupPlayer(player(renderer, Same), 1, 0).play(Task("t"), "s", 0)).episodes
    assert (episode.reward, episode.rewards) == (3.0, {"rank": 3.0})


async def test_a_reward_that_changes_the_row_changes_its_own_copy(renderer: Renderer):
    class Changing(Plain):
        async def score(self, episode: Episode) -> Mapping[str, float]:
            episode.task.row["seen"].append(1)
            return {"seen": float(len(episode.task.row["seen"]))}

        async def score_group(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float]]:
            return await asyncio.gather(*[self.score(episode) for episode in episodes])

    task = Task("t", {"seen": []})
    group = await GroupPlayer(player(renderer, Changing), 3, 0).play(task, "s", 0)
    assert [episode.rewards["seen"] for episode in group.episodes] == [2.0] * 3
    assert task.row == {"seen": []}


@pytest.mark.parametrize("value", [True, np.bool_(True), np.float32(1), np.int64(1), Fraction(1), Decimal(1)])
async def test_any_finite_number_is_a_reward(renderer: Renderer, value: Any):
    class Odd(Plain):
        async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
            await super().step(message)
            return [], value, True, False, StepInfo(metrics={"counted": value})

        async def score(self, episode: Episode) -> Mapping[str, float]:
            return {"all": value}

    (episode,) = (await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)).episodes
    assert (episode.faults, episode.turns[0].reward, episode.rewards["all"]) == ({}, 1.0, 1.0)
    kinds = {type(x) for x in (episode.turns[0].reward, episode.rewards["all"], episode.metrics["counted"])}
    assert kinds == {float}


async def test_an_env_adds_nothing_to_what_agentrl_records(renderer: Renderer):
    class Odd(Plain):
        async def step(self, message: Message) -> tuple[Sequence[Message], float, bool, bool, StepInfo]:
            await super().step(message)
            given = {"counted": 2.0, "parse_error": 1.0, "tokens/failed": 1.0, "compact/times": 3.0}
            return [], 1.0, True, False, StepInfo(metrics=given)

    (episode,) = (await GroupPlayer(player(renderer, Odd), 1, 0).play(Task("t"), "s", 0)).episodes
    assert (episode.metrics["counted"], episode.metrics["parse_error"]) == (2.0, 1.0)
    assert not {"tokens/failed", "compact/times"} & episode.metrics.keys()
    assert "step returned the metric 'compact/times': agentrl records those" in episode.faults["step"]


@pytest.mark.parametrize("then", ["goes on", "raises"])
@pytest.mark.parametrize("method", ["step", "score", "score_group"])
async def test_an_env_that_catches_its_cancellation_gains_no_time(renderer: Renderer, method: str, then: str):
    class Stubborn(Plain):
        async def score(self, episode: Episode) -> Mapping[str, float]:
            return {"right": 1.0} if method == "step" else await super().score(episode)

    async def fails(env: Plain, argument: Any) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if then == "raises":
                raise KeyError("gone") from None
        return await getattr(Plain, method)(env, argument)

    setattr(Stubborn, method, fails)
    limits = EpisodeLimits(timeout_s=0.5)
    plays = Player(ScriptedEngine(renderer, [say("good")]), renderer, Stubborn, limits, Sampling())
    (episode,) = (await GroupPlayer(plays, 1, 0, timeout_s=0.5).play(Task("t"), "s", 0)).episodes
    if method == "step":
        assert (episode.stop_reason, episode.faults) == (StopReason.TIMEOUT, {})
        (late,) = episode.turns
        assert (late.observation, late.reward, late.calls, late.rewards) == ((), 0.0, (), {})
    else:
        assert "took longer than 0.5 s" in episode.faults[method]
        assert ("rank" in episode.rewards) == (method == "score")


@pytest.mark.parametrize("then", ["goes on", "raises"])
async def test_a_reset_that_catches_its_cancellation_is_no_time_of_the_policy(renderer: Renderer, then: str):
    class Stubborn(Plain):
        async def reset(self, task: Task) -> tuple[Sequence[Message], Mapping[str, Any]]:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if then == "raises":
                    raise KeyError("gone") from None
            return await super().reset(task)

    plays = Player(
        ScriptedEngine(renderer, [say("good")]), renderer, Stubborn, EpisodeLimits(timeout_s=0.5), Sampling()
    )
    episode = await plays.play(Task("t"), episode_id="e", seed=0)
    assert episode.error == "InfraError: Stubborn.reset took longer than 0.5 s"


def test_an_env_without_group_rewards_is_not_asked_for_any():
    class Alone(Plain):
        score_group = Env.score_group

    assert Plain().scores_groups
    assert not Alone().scores_groups


class Configured(Plain):
    """Takes settings, declares a reward, checks its rows and tools."""

    @classmethod
    def check_class(cls) -> None:
        if getattr(cls, "broken", False):
            raise ConfigError("broken")

    @classmethod
    def row_problem(cls, row: Mapping[str, Any]) -> str:
        return "" if "question" in row else "no question"

    def configure(
        self, settings: Mapping[str, Any], reward_weights: Mapping[str, float], solved_at: SolvedAt = None
    ) -> None:
        self.level = settings.get("level", 1)
        super().configure({}, reward_weights, solved_at)

    def declared_rewards(self) -> Mapping[str, DeclaredReward]:
        return {}

    def image_tools(self) -> Sequence[str]:
        return ["look"]


def test_a_plain_env_takes_the_configuration_of_a_run():
    env = Configured()
    env.configure({"level": 3}, {}, 0.5)
    assert (env.level, env.solved_at) == (3, 0.5)
    with pytest.raises(ConfigError, match=r"env.reward_weights has no effect: Configured is not a ToolEnv"):
        env.configure({}, {"rank": 2.0})
    with pytest.raises(ConfigError, match=r"env.settings has no effect: Plain is not a ToolEnv"):
        Plain().configure({"level": 3}, {})
    with pytest.raises(ConfigError, match=r"env.solved_at: 'x' must be a finite number"):
        Plain().configure({}, {}, "x")  # type: ignore[arg-type]


def test_a_plain_env_refuses_rows_classes_and_images(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1"}) + "\n" + json.dumps({"answer": "1"}) + "\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: no question"):
        load_rows(rows, Configured)
    with pytest.raises(ConfigError, match="tool 'look' returns an Image"):
        refuse_images(Configured())
    (tmp_path / "mine.py").write_text(
        "from tests.rollout.test_env_hooks import Configured\nclass Mine(Configured):\n    broken = True\n"
    )
    with pytest.raises(ConfigError, match="broken"):
        load_env(f"{tmp_path}/mine.py:Mine")


def test_an_env_that_declares_no_reward_is_reported_as_such():
    assert "gives no reward" in no_reward(Configured(), ())
    assert "gave every episode the reward 0" in no_reward(Plain(), ())


@pytest.mark.parametrize("tools", [None, lambda self: [], ({"name": "x"},), ({"function": "x"},)])
async def test_tools_that_are_no_schemas_are_named(tools: object):
    env = type("Odd", (Plain,), {"tools": tools})
    with pytest.raises(ConfigError, match=r"Odd\.tools is .*: it must be a property \(or attribute\) with a list"):
        await task_tools(env, [Task("t")])
