import asyncio
import functools
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel

from agentrl.env import Stop, ToolEnv, ToolResult, ToolSettings, TurnView, reward, tool
from agentrl.env.read import all_calls, assistant_text, final_answer
from agentrl.env.toolenv.dispatch import MISTAKES
from agentrl.env.toolenv.json_schema import InvalidArguments, describe_callable
from agentrl.env.toolenv.observe import cut_content
from agentrl.env.toolenv.threads import stuck
from agentrl.env.toolenv.toolbox import toolbox_tools
from agentrl.errors import ConfigError, InfraError, RewardError, SandboxError
from agentrl.types import Episode, Image, Message, StopReason, Task, ToolCall, Turn


class Ledger(ToolEnv):
    """Bring the ledger to the target balance with the tools, then call submit."""

    def setup(self, start: int, target: int) -> str:
        self.balance, self.target, self.ops = start, target, 0
        return f"The balance is {start}. Make it {target}."

    @tool
    def apply(self, op: Literal["add", "double"], n: int = 1) -> str:
        """Change the balance: "add" adds n, "double" doubles it n times."""
        self.ops += 1
        self.balance = self.balance + n if op == "add" else self.balance * 2**n
        return f"balance={self.balance}"

    @tool
    def submit(self) -> Stop:
        """End the episode."""
        return Stop()

    @reward
    def solved(self) -> bool:
        return self.balance == self.target

    @reward(weight=-0.01)
    def cost(self) -> int:
        return self.ops


def calling(*calls: tuple[str, dict]) -> Message:
    return Message(
        "assistant", tool_calls=tuple(ToolCall(f"c{i}", name, args) for i, (name, args) in enumerate(calls))
    )


def episode_of(*turns: Message) -> Episode:
    played = tuple(Turn(m, (), 0.0, "stop", 1, 0.0, 0.0) for m in turns)
    return Episode("e", Task("t"), turns, played, (), StopReason.ANSWERED, None)


async def started(env: ToolEnv, **row: object) -> ToolEnv:
    await env.reset(Task("t", row))
    return env


async def test_ledger_schema_is_exactly_this():
    assert list(Ledger().tools) == [
        {
            "type": "function",
            "function": {
                "name": "apply",
                "description": 'Change the balance: "add" adds n, "double" doubles it n times.',
                "parameters": {
                    "type": "object",
                    "properties": {
                        "op": {"type": "string", "enum": ["add", "double"]},
                        "n": {"type": "integer", "default": 1},
                    },
                    "required": ["op"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "submit",
                "description": "End the episode.",
                "parameters": {"type": "object", "properties": {}},
            },
        },
    ]


async def test_ledger_plays_from_opening_to_reward():
    env = Ledger()
    opening, _ = await env.reset(Task("t", {"start": 1, "target": 6}))
    assert [m.role for m in opening] == ["system", "user"]
    assert opening[0].content == "Bring the ledger to the target balance with the tools, then call submit."
    assert opening[1].content == "The balance is 1. Make it 6."
    observation, _, terminated, _, info = await env.step(calling(("apply", {"op": "add", "n": 2})))
    assert (observation[0].content, observation[0].tool_call_id, observation[0].name) == (
        "balance=3",
        "c0",
        "apply",
    )
    assert not terminated
    _, _, terminated, truncated, info = await env.step(calling(("apply", {"op": "double"}), ("submit", {})))
    assert (terminated, truncated, info.stop_reason) == (True, False, StopReason.STOPPED_BY_TOOL)
    assert await env.score(episode_of()) == {"solved": 1.0, "cost": -0.02}


async def test_bad_arguments_never_reach_the_tool():
    env = await started(Ledger(), start=1, target=2)
    observation, _, terminated, _, info = await env.step(
        calling(("apply", {"op": "mul"}), ("apply", {"op": "add", "n": "two"}), ("apply", {"op": "add", "m": 1}))
    )
    assert [m.content for m in observation] == [
        "Error: invalid arguments: args.op: expected 'add' or 'double', got 'mul'",
        "Error: invalid arguments: args.n: expected integer, got 'two'",
        "Error: invalid arguments: args.m: unknown argument (known: op, n)",
    ]
    assert (env.ops, terminated, info.metrics) == (0, False, {"invalid_args": 3.0})


async def test_state_lives_on_the_instance_and_not_in_the_next_episode():
    class Counter(ToolEnv):
        def setup(self) -> str:
            self.count = getattr(self, "count", 0)
            return "count"

        @tool
        def more(self) -> int:
            self.count += 1
            return self.count

    env = Counter()
    for _ in range(2):
        await env.reset(Task("t"))
        answers = [(await env.step(calling(("more", {}))))[0][0].content for _ in range(3)]
        assert answers == ["1", "2", "3"]
        await env.close()


async def test_results_keep_the_order_of_calls_and_only_parallel_tools_overlap():
    class Slow(ToolEnv):
        def setup(self) -> str:
            self.running = self.most = 0
            return ""

        async def busy(self, seconds: float) -> None:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(seconds)
            self.running -= 1

        @tool(parallel=True)
        async def together(self, seconds: float) -> str:
            await self.busy(seconds)
            return f"slept {seconds}"

        @tool
        async def alone(self, seconds: float) -> str:
            await self.busy(seconds)
            return f"slept {seconds}"

    env = await started(Slow())
    observation, *_ = await env.step(calling(*[("together", {"seconds": s}) for s in (0.05, 0.0, 0.02)]))
    assert [m.content for m in observation] == ["slept 0.05", "slept 0.0", "slept 0.02"]
    assert env.most == 3
    env.most = 0
    observation, *_ = await env.step(calling(*[("alone", {"seconds": s}) for s in (0.01, 0.0)]))
    assert [m.tool_call_id for m in observation] == ["c0", "c1"]
    assert env.most == 1


async def test_calls_after_a_stop_are_answered_but_not_run():
    env = await started(Ledger(), start=1, target=1)
    observation, _, terminated, *_ = await env.step(calling(("submit", {}), ("apply", {"op": "add"})))
    assert [m.content for m in observation] == ["", "Not run: the episode has ended."]
    assert terminated
    env = await started(Ledger(), start=1, target=1)
    add = ("apply", {"op": "add"})
    observation, *_, info = await env.step(calling(("submit", {}), add, add))
    assert [m.content for m in observation[1:]] == ["Not run: the episode has ended."] * 2
    assert not set(info.metrics) & {"not_run", *MISTAKES}
    assert env.ops == 0


class Spot(BaseModel):
    x: float


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_no_number_for_is_refused_whatever_the_type(value: float):
    def tool(
        number: float = 0.0, some: object = None, of: dict[str, object] | None = None, spot: Spot | None = None
    ) -> None: ...

    signature = describe_callable(tool, where="tool", method=False)
    for arguments in ({"number": value}, {"some": value}, {"of": {"x": [value]}}, {"spot": {"x": value}}):
        with pytest.raises(InvalidArguments, match="finite number, got"):
            signature.validate(arguments)


class Quit(BaseException):
    """Not a plain Exception; pytest raises some."""


class Clumsy(ToolEnv):
    def setup(self, how: str = "") -> str:
        self.closed = 0
        return "go"

    def teardown(self) -> None:
        self.closed += 1

    @tool
    def fail(self, how: str) -> str:
        if how == "divide":
            return str(1 / 0)
        if how == "exit":
            raise SystemExit(3)
        if how == "stop":
            raise StopIteration
        raise SandboxError("gone")

    @tool(timeout_s=0.05)
    async def sleep(self) -> str:
        await asyncio.sleep(1e6)
        return "never"

    @tool(timeout_s=0.05)
    def spin(self) -> str:
        while True:
            time.sleep(0.001)

    @tool(timeout_s=0.05)
    async def stubborn(self) -> str:
        while True:
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                return "too late"

    @tool
    async def leaves(self) -> str:
        raise SystemExit(4)

    @tool(inline=True)
    def leaves_at_once(self) -> str:
        raise SystemExit(5)

    @tool(inline=True)
    def stops_at_once(self) -> str:
        raise StopIteration

    @tool
    async def quits(self) -> str:
        raise Quit("enough")

    @tool(inline=True)
    def quits_at_once(self) -> str:
        raise Quit("enough")

    @tool
    async def cancels_itself(self) -> str:
        raise asyncio.CancelledError

    @tool
    def strange(self) -> object:
        return object()

    @tool
    def long(self, size: int) -> str:
        return "".join(f"line {i} äöü\n" for i in range(size))


@pytest.mark.parametrize(
    ("call", "text", "metric"),
    [
        (("fail", {"how": "divide"}), "Error: ZeroDivisionError: division by zero", "tool_exception"),
        (("fail", {"how": "exit"}), "Error: SystemExit: 3", "tool_exception"),
        (("fail", {"how": "stop"}), "Error: StopIteration", "tool_exception"),
        (("leaves", {}), "Error: SystemExit: 4", "tool_exception"),
        (("leaves_at_once", {}), "Error: SystemExit: 5", "tool_exception"),
        (("stops_at_once", {}), "Error: StopIteration", "tool_exception"),
        (("quits", {}), "Error: Quit: enough", "tool_exception"),
        (("quits_at_once", {}), "Error: Quit: enough", "tool_exception"),
        (("cancels_itself", {}), "Error: CancelledError", "tool_exception"),
        (("sleep", {}), "Error: sleep timed out: no result after 0.05 s", "tool_timeout"),
        (("spin", {}), "Error: spin timed out: no result after 0.05 s", "tool_timeout"),
        (("stubborn", {}), "Error: stubborn timed out: no result after 0.05 s", "tool_timeout"),
        (("gone", {}), "Error: unknown tool 'gone'; the tools are: fail, sleep, spin, ", "unknown_tool"),
        (("strange", {}), "Error: TypeError: the result is object, which has no JSON form", "tool_exception"),
    ],
)
async def test_what_the_policy_causes_is_an_observation_and_a_count(call, text, metric):
    env = await started(Clumsy())
    observation, _, terminated, truncated, info = await env.step(calling(call))
    assert observation[0].content.startswith(text)
    assert info.metrics == {metric: 1.0}
    assert not terminated
    assert not truncated
    await env.close()
    await env.close()
    assert env.closed == 1


@dataclass
class Held:
    value: object


@pytest.mark.parametrize(
    "wrap", [lambda end: [end], lambda end: {"end": [end]}, lambda end: ("bye", end), Held, Stop]
)
@pytest.mark.parametrize("end", [Stop("bye", 1.0), ToolResult("bye", stop=True)])
async def test_an_end_inside_another_value_is_an_error_not_text(wrap, end):
    class Ends(ToolEnv):
        @tool
        def leave(self) -> object:
            """Leave."""
            return wrap(end)

    env = await started(Ends())
    observation, reward, *_, info = await env.step(calling(("leave", {})))
    assert (info.calls[0].outcome, reward) == ("tool_exception", 0.0)
    said = f"a {type(end).__name__} has an effect only if it is returned itself, not inside another value"
    assert observation[0].content.endswith(said)
    await env.close()


async def test_an_infrastructure_error_is_no_observation():
    env = await started(Clumsy())
    with pytest.raises(SandboxError, match="gone"):
        await env.step(calling(("fail", {"how": "sandbox"})))


async def test_one_hung_tool_among_64_episodes_holds_nobody_up():
    async def play(number: int) -> str:
        env = await started(Clumsy())
        observation, *_ = await env.step(
            calling(("spin" if number == 7 else "long", {} if number == 7 else {"size": 1}))
        )
        await env.close()
        return observation[0].content

    async with asyncio.timeout(45):
        texts = await asyncio.gather(*[play(n) for n in range(64)])
    assert sum("timed out" in t for t in texts) == 1
    for _ in range(100):
        if not stuck():
            break
        await asyncio.sleep(0.01)
    assert not stuck()


async def test_a_tool_may_have_no_time_limit():
    class Unlimited(ToolEnv):
        @tool(timeout_s=math.inf)
        def plain(self) -> str:
            return "one"

        @tool(timeout_s=math.inf)
        async def awaited(self) -> str:
            await asyncio.sleep(0)
            return "two"

    observation, *_ = await (await started(Unlimited())).step(calling(("plain", {}), ("awaited", {})))
    assert [message.content for message in observation] == ["one", "two"]


async def test_slow_plain_tools_run_beside_one_another():
    everybody = threading.Barrier(16)

    class Waiting(ToolEnv):
        @tool
        def meet(self) -> str:
            everybody.wait(timeout=60)  # one after another they would never meet
            return "met"

    envs = [await started(Waiting()) for _ in range(16)]
    steps = await asyncio.gather(*[env.step(calling(("meet", {}))) for env in envs])
    assert [observation[0].content for observation, *_ in steps] == ["met"] * 16


async def test_cancelling_a_step_ends_the_tool_and_close_still_runs_once():
    env = await started(Clumsy())
    task = asyncio.ensure_future(env.step(calling(("sleep", {}))))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await env.close()
    assert env.closed == 1


async def test_parse_errors_get_a_repair_turn_next_to_the_calls_that_parsed():
    env = await started(Ledger(), start=1, target=2)
    message = Message(
        "assistant",
        tool_calls=(ToolCall("c0", "apply", {"op": "add"}),),
        parse_errors=("tool call 2 is not JSON: trailing comma",),
    )
    observation, _, terminated, _, info = await env.step(message)
    assert [m.content for m in observation] == ["balance=2", "Error: tool call 2 is not JSON: trailing comma"]
    assert not terminated
    assert info.metrics == {"parse_error": 1.0}
    _, _, terminated, _, _ = await env.step(Message("assistant", "<tool_call>{", parse_errors=("no end",)))
    assert not terminated


async def test_limits_on_calls_answer_every_call():
    env = Ledger()
    env.settings = ToolSettings(max_calls_per_turn=2, max_tool_calls=3)
    await env.reset(Task("t", {"start": 0, "target": 0}))
    add = ("apply", {"op": "add"})
    observation, _, _, truncated, info = await env.step(calling(add, add, add))
    assert observation[2].content == "Error: not run: more than 2 calls in one message"
    assert (env.ops, truncated, info.metrics) == (2, False, {"too_many_calls": 1.0})
    observation, _, terminated, truncated, info = await env.step(calling(add))
    assert observation[0].content == "Error: not run: more than 3 calls in this episode"
    assert (terminated, truncated, info.stop_reason) == (False, True, StopReason.TOOL_CALL_LIMIT)


async def test_mistakes_can_cost_or_end_the_episode():
    env = Clumsy()
    env.settings = ToolSettings(
        mistakes={"invalid_args": "penalise", "unknown_tool": "terminate"}, mistake_penalty=0.25
    )
    await env.reset(Task("t"))
    _, reward_, terminated, _, _ = await env.step(calling(("fail", {}), ("fail", {"how": 3})))
    assert (reward_, terminated) == (-0.5, False)
    _, reward_, terminated, _, info = await env.step(calling(("nope", {})))
    assert (reward_, terminated, info.stop_reason) == (0.0, True, StopReason.TERMINATED)


async def test_long_results_keep_head_and_tail_within_the_budget():
    env = Clumsy()
    env.settings = ToolSettings(observation_tokens=100)
    env.count_tokens = lambda text: len(text.encode())  # one token a byte
    await env.reset(Task("t"))
    observation, *_, info = await env.step(calling(("long", {"size": 100_000})))
    text = observation[0].content
    assert len(text.encode()) <= 100
    assert text.startswith("line 0 äöü\n")
    assert text.endswith("line 99999 äöü\n")
    assert "characters left out" in text
    assert info.metrics == {"output_truncated": 1.0}
    observation, *_ = await env.step(calling(("x" * 10_000, {})))
    assert len(observation[0].content.encode()) <= 100


async def test_tool_results_carry_rewards_and_metrics_and_json():
    class Rich(ToolEnv):
        @tool
        def look(self) -> ToolResult:
            return ToolResult({"found": [1, 2]}, reward=0.5, metrics={"looked": 1})

        @reward(per="turn", weight=2)
        def calls_made(self, turn: TurnView) -> int:
            return len(turn.calls)

    env = await started(Rich())
    observation, reward_, _, _, info = await env.step(calling(("look", {})))
    assert observation[0].content == '{"found": [1, 2]}'
    assert reward_ == 2.5
    assert info.metrics == {"looked": 1, "reward/tools": 0.5, "reward/calls_made": 2.0}


@pytest.mark.parametrize("value", [float("nan"), "much", None])
async def test_a_tool_cannot_give_a_reward_that_is_no_number(value):
    class Generous(ToolEnv):
        @tool
        def give(self) -> ToolResult:
            return ToolResult("here", reward=value)

    env = await started(Generous())
    if value is None:
        assert (await env.step(calling(("give", {}))))[1] == 0
        return
    _, earned, *_, info = await env.step(calling(("give", {})))
    assert earned == 0
    assert info.faults["give"].startswith("reward of tool 'give' of Generous: it returned")


async def test_images_pass_and_their_text_is_cut():
    class Camera(ToolEnv):
        @tool
        def look(self) -> tuple[object, ...]:
            return ("a picture: " + "x" * 1000, Image(b"png"), "seen")

        @tool
        def end(self) -> Stop:
            return Stop({"done": True}, reward=0.5)

    env = Camera()
    env.settings = ToolSettings(observation_tokens=100)
    env.count_tokens = len
    await env.reset(Task("t"))
    observation, *_, info = await env.step(calling(("look", {})))
    text, image, _ = observation[0].content
    assert text.startswith("a picture: ")
    assert "characters left out" in text
    assert len(text) <= 100
    assert image == Image(b"png")
    assert info.metrics == {"output_truncated": 1.0}
    observation, reward_, terminated, *_ = await env.step(calling(("end", {})))
    assert (observation[0].content, reward_, terminated) == ('{"done": true}', 0.5, True)


def test_many_parts_of_text_are_together_no_longer_than_allowed():
    content = (*["x" * 1000] * 200, Image(b"png"))
    (text, image), was_cut = cut_content(content, 100, len)
    assert (len(text) <= 100, image, was_cut) == (True, Image(b"png"), True)
    assert "of 200000 characters left out" in text
    (_, _, last), _ = cut_content(("x" * 1000, Image(b"png"), "y" * 1000), 100, len)
    assert last == "[... 1000 of 1000 characters left out ...]\n", "the first text has taken all"
    short = ("a", "b", Image(b"png"), "c")
    assert cut_content(short, 100, len) == (short, False)


async def test_a_setup_that_failed_is_what_is_reported_not_its_teardown():
    class Half(ToolEnv):
        def setup(self) -> str:
            raise OSError("no disk")

        def teardown(self) -> None:
            self.connection.close()

    env = Half()
    with pytest.raises(InfraError, match="no disk"):
        await env.reset(Task("t"))
    await env.close()


async def test_a_user_answers_until_it_has_nothing_to_say():
    class Chat(ToolEnv):
        def setup(self) -> str:
            self.lines = ["and then?"]
            return "Tell me."

        async def respond(self, message: Message) -> str | None:
            return self.lines.pop() if self.lines else None

    env = await started(Chat())
    observation, _, terminated, *_ = await env.step(Message("assistant", "First this."))
    assert [(m.role, m.content) for m in observation] == [("user", "and then?")]
    assert not terminated
    _, _, terminated, _, info = await env.step(Message("assistant", "Then that."))
    assert terminated
    assert info.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "returned nan; rewards must be finite"),
        (float("inf"), "returned inf"),
        ("1.0", "returned '1.0', not a number"),
        (None, "returned None, not a number"),
        (ValueError("no judge"), "raised ValueError: no judge"),
        (0.0, "no result after 0.05 s"),
    ],
)
async def test_a_broken_reward_says_so_and_the_others_are_kept(value, text):
    class Judged(ToolEnv):
        @reward(timeout_s=0.05)
        async def score_(self) -> object:
            if isinstance(value, Exception):
                raise value
            if value == 0.0:
                await asyncio.sleep(1e6)
            return value

        @reward
        def good(self) -> float:
            return 1.0

    env = await started(Judged())
    with pytest.raises(RewardError, match="reward 'score_' of Judged") as caught:
        await env.score(episode_of())
    error = pickle.loads(pickle.dumps(caught.value))
    assert text in error.faults["score_"]
    assert error.rewards == {"score_": 0.0, "good": 1.0}


async def test_weights_come_from_the_run_where_it_names_them():
    env = Ledger()
    env.settings = ToolSettings(reward_weights={"cost": -1.0})
    await env.reset(Task("t", {"start": 0, "target": 0}))
    await env.step(calling(("apply", {"op": "double"})))
    assert await env.score(episode_of()) == {"solved": 1.0, "cost": -1.0}
    env.settings = ToolSettings(reward_weights={"price": 1.0})
    with pytest.raises(ConfigError, match="Ledger has no such reward; the rewards are: solved, cost"):
        await env.reset(Task("t", {"start": 0, "target": 0}))


async def test_group_rewards_see_the_siblings():
    class Contest(ToolEnv):
        @reward(per="group", weight=0.5)
        def best(self, episodes: list[Episode]) -> list[float]:
            longest = max(len(final_answer(e)) for e in episodes)
            return [float(len(final_answer(e)) == longest) for e in episodes]

    group = [episode_of(Message("assistant", text)) for text in ("a", "bbb", "cc")]
    assert await Contest().score_group(group) == [{"best": 0.0}, {"best": 0.5}, {"best": 0.0}]


@pytest.mark.parametrize("form", ["generator", "expression"])
async def test_group_rewards_that_are_yielded_are_computed_on_the_thread_of_rewards(form: str):
    threads = set()

    def measured(episode: Episode) -> float:
        threads.add(threading.current_thread())
        return float(len(final_answer(episode)))

    class Yielding(ToolEnv):
        @reward(per="group")
        def length(self, episodes: list[Episode]) -> Iterator[float]:
            if form == "expression":
                return (measured(e) for e in episodes)
            return self._each(episodes)

        def _each(self, episodes: list[Episode]) -> Iterator[float]:
            for e in episodes:
                yield measured(e)

    group = [episode_of(Message("assistant", text)) for text in ("a", "bbb")]
    assert await Yielding().score_group(group) == [{"length": 1.0}, {"length": 3.0}]
    assert threading.current_thread() not in threads


async def test_what_a_tool_printed_is_not_what_the_policy_said():
    call = Message("assistant", "I look.", tool_calls=(ToolCall("c", "look", {}),))
    episode = episode_of(call, Message("assistant", "It is 7."))
    assert (assistant_text(episode), final_answer(episode)) == ("I look.\nIt is 7.", "It is 7.")
    assert all_calls(episode) == ()
    assert final_answer(episode_of(call)) == ""


async def test_a_failing_setup_is_infrastructure_and_a_wrong_row_is_the_users():
    class Broken(ToolEnv):
        def setup(self, n: int) -> str:
            raise OSError("no disk")

    with pytest.raises(InfraError, match=r"Broken\.setup on task 't': OSError: no disk"):
        await Broken().reset(Task("t", {"n": 1}))
    with pytest.raises(ConfigError, match=r"task 't': argument 'n' of .*Broken\.setup is missing"):
        await Broken().reset(Task("t", {}))
    with pytest.raises(ConfigError, match="'m' is not an argument of"):
        await Broken().reset(Task("t", {"n": 1, "m": 2}))
    with pytest.raises(ConfigError, match=r"argument 'n': .*integer"):
        await Broken().reset(Task("t", {"n": "many"}))


async def test_a_row_reaches_setup_as_its_annotations_say():
    """As the arguments of a tool do: JSON lines have `"2"` and 2.0 where an int is meant, and lists for tuples."""

    class Typed(ToolEnv):
        def setup(self, n: int, share: float, place: tuple[int, int], name: str = "none", **rest: object) -> str:
            return repr((n, share, place, name, rest))

    row = {"n": "2", "share": 1, "place": [1, 2.0], "more": "3"}
    [said], _ = await Typed().reset(Task("t", row))
    assert said.content == "(2, 1.0, (1, 2), 'none', {'more': '3'})"
    assert row == {"n": "2", "share": 1, "place": [1, 2.0], "more": "3"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mistakes": {"typo": "observe"}}, "mistakes.typo: there is no such mistake"),
        ({"mistakes": {"parse_error": "ignore"}}, "must be observe, penalise or terminate"),
        ({"max_calls_per_turn": 0}, "at least 1"),
        ({"tool_timeout_s": 0}, "positive"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        ToolSettings(**settings)


@pytest.mark.parametrize("name", ["close", "reset", "step", "score", "tools", "setup", "respond", "box", "_tools"])
@pytest.mark.parametrize("decorate", [tool, reward, tool(name="other")])
def test_a_tool_or_reward_cannot_take_the_place_of_a_part_of_the_env(name, decorate):
    def method(self) -> int:
        return 1

    env = type("Taken", (ToolEnv,), {name: decorate(method)})
    with pytest.raises(ConfigError, match=rf"Taken\.{name}: `{name}` is a part of ToolEnv itself"):
        env.spec()


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property])
@pytest.mark.parametrize(("decorate", "what"), [(tool, "tool"), (reward(weight=2), "reward")])
def test_a_tool_or_reward_that_is_no_plain_method_is_not_left_out_silently(kind, decorate, what):
    def go(self) -> int:
        return 1

    env = type("Odd", (ToolEnv,), {"go": kind(decorate(go))})
    with pytest.raises(ConfigError, match=rf"test_toolenv\.py:\d+: Odd\.go: a {kind.__name__} cannot be a {what}"):
        env.spec()
    if what == "tool":
        box = type("Box", (), {"go": kind(decorate(go))})
        with pytest.raises(ConfigError, match=r"Box\.go: a .* cannot be a tool"):
            toolbox_tools(box())


def _two(self) -> int:
    return 2


@pytest.mark.parametrize(("decorate", "what"), [(tool, "tool"), (reward(weight=2), "reward")])
@pytest.mark.parametrize(
    "made",
    [_two, staticmethod(_two), classmethod(_two), property(_two), functools.partialmethod(_two), 2],
    ids=lambda made: type(made).__name__,
)
def test_a_method_that_replaces_a_tool_or_reward_is_one_or_says_so(made, decorate, what):
    def go(self) -> int:
        return 1

    for root in (ToolEnv, object):
        base = type("Base", (root,), {"go": decorate(go), "other": tool(lambda self: 2)})
        odd = type("Odd", (base,), {"go": made, "__module__": __name__})
        with pytest.raises(
            ConfigError,
            match=rf"test_toolenv(\.py:\d+: |\.)Odd\.go: replaces the {what} Base\.go without `@{what}`; write "
            rf"that above a plain method, or `go = None`",
        ):
            odd.spec() if root is ToolEnv else toolbox_tools(odd())
    base = type("Base", (ToolEnv,), {"go": decorate(go)})
    less = type("Less", (base,), {"go": None})
    assert (less.spec().tools, less.spec().rewards) == ((), ())
    assert type("Own", (less,), {"go": lambda self: 3}).spec().tools == ()


@pytest.mark.parametrize(
    ("decorate", "said"),
    [
        (lambda: reward(0.5), r"@reward\(0\.5\): options have names; write @reward\(weight=0\.5\)"),
        (lambda: reward("right"), r"write @reward\(name='right'\)"),
        (lambda: reward("group"), r"write @reward\(per='group'\)"),
        (lambda: tool("look"), r"write @tool\(name='look'\)"),
    ],
)
def test_an_option_without_its_name_is_refused(decorate, said):
    with pytest.raises(TypeError, match=said):
        decorate()


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (reward(functools.cache(_two)), "reward"),
        (functools.lru_cache(reward(lambda self: 2)), "reward"),
        (reward(functools.partialmethod(_two)), "reward"),
        (tool(functools.cache(_two)), "tool"),
    ],
)
def test_a_cached_or_partial_method_is_not_left_out_silently(made, what):
    env = type("Odd", (ToolEnv,), {"go": made, "other": reward(lambda self: 1)})
    with pytest.raises(ConfigError, match=rf"Odd\.go: a \S+ cannot be a {what}"):
        env.spec()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"r": reward(weight=float("nan"))(lambda self: 1)}, r"Odd\.r: weight must be a finite number, got nan"),
        ({"r": reward(weight="2")(lambda self: 1)}, r"Odd\.r: weight must be a finite number, got '2'"),
        ({"r": reward(weight=None)(lambda self: 1)}, r"Odd\.r: weight must be a finite number, got None"),
        (
            {"r": reward(weight=float)(lambda self: 1)},
            r"Odd\.r: weight must be a finite number, got <class 'float'>",
        ),
        ({"r": reward(weight=10**400)(lambda self: 1)}, r"Odd\.r: weight must be a finite number, got 1000"),
        (
            {"r": reward(weight=np.float32("inf"))(lambda self: 1)},
            r"Odd\.r: weight must be a finite number, got np\.float32\(inf\)",
        ),
        (
            {"r": reward(weight=Decimal("NaN"))(lambda self: 1)},
            r"Odd\.r: weight must be a finite number, got Decimal\('NaN'\)",
        ),
        (
            {"r": reward(timeout_s=np.ones(2))(lambda self: 1)},
            r"Odd\.r: timeout_s must be a number of seconds above 0, got array",
        ),
        ({"r": reward(timeout_s=float)(lambda self: 1)}, r"Odd\.r: timeout_s must be a number of seconds above 0"),
        (
            {"r": reward(per=["turn"])(lambda self: 1)},
            r"Odd\.r: per=\['turn'\] must be 'episode', 'turn' or 'group'",
        ),
        ({"r": reward(solved=10**400)(lambda self: 1)}, "must be a finite number: the reward at which"),
        ({"r": reward(judge="http://x")(lambda self: "?")}, r"Odd\.r: judge='http://x' has no method `score`"),
        ({"setup": None}, r"Odd\.setup must be a method, got None; write `def setup\(self, \.\.\.\)`"),
        (
            {"r": reward(timeout_s=0)(lambda self: 1)},
            r"Odd\.r: timeout_s must be a number of seconds above 0, got 0",
        ),
        (
            {"t": tool(timeout_s=-1)(lambda self: 1)},
            r"Odd\.t: timeout_s must be a number of seconds above 0, got -1",
        ),
        ({"settings": {"observation_tokens": 5}}, r"Odd\.settings must be ToolSettings\(\.\.\.\), got {'obs"),
        ({"sandbox": "docker"}, r"Odd\.sandbox must be Sandbox\(\.\.\.\), got 'docker'"),
        ({"toolboxes": dict}, r"Odd\.toolboxes must be a tuple of classes"),
        ({"toolboxes": ("agentrl.tools.sql:Sql",)}, r"Odd\.toolboxes must be a tuple of classes"),
        (
            {"system": property(lambda self: "Hi")},
            r"Odd\.system must be a method, got .*write `def system\(self\)`",
        ),
        ({"system": "Hi"}, r"Odd\.system must be a method, got 'Hi'"),
        (
            {"respond": lambda self, text: None},
            r"Odd\.respond: missing a required argument: 'text'; write `def respond\(self, message\)`",
        ),
        ({"teardown": lambda self, error: None}, r"Odd\.teardown: missing a required argument: 'error'"),
    ],
)
def test_a_declaration_that_could_not_work_is_refused(members, said):
    env = type("Odd", (ToolEnv,), members)
    with pytest.raises(ConfigError, match=said):
        env.spec()


async def test_hooks_may_be_static_or_decorated():
    def of_the_text(method: Callable[[object, str], str]) -> Callable[..., str]:
        @functools.wraps(method)
        def of_the_message(self, message: Message) -> str:
            return method(self, str(message.content))

        return of_the_message

    class Polite(ToolEnv):
        @staticmethod
        def system() -> str:
            return "Be polite."

        @of_the_text
        def respond(self, text: str) -> str:
            return text.upper()

    class Brief(Polite):
        @staticmethod
        def respond(message: Message) -> str:
            return "ok"

    for env, answer in ((Polite, "PLEASE"), (Brief, "ok")):
        env.check_class()
        opened = env()
        assert (await opened.reset(Task("t")))[0] == [Message("system", "Be polite.")]
        assert (await opened.step(Message("assistant", "please")))[0] == [Message("user", answer)]
        await opened.close()


async def test_setup_may_be_static():
    class Fixed(ToolEnv):
        @staticmethod
        def setup(first: int, second: int) -> str:  # type: ignore[override]
            return f"{first} {second}"

    assert (await Fixed().reset(Task("t", {"first": 1, "second": "2"})))[0] == [Message("user", "1 2")]
    assert "second" in Fixed.row_problem({"first": 1})


def test_a_tool_may_be_called_as_a_part_of_the_env_is():
    class Door(ToolEnv):
        @tool(name="close")
        def close_door(self) -> str:
            """Close the door."""
            return "closed"

    assert [t["function"]["name"] for t in Door().tools] == ["close"]


def test_a_toolbox_class_may_get_tools_after_its_first_use():
    class Box:
        @tool
        def early(self) -> int:
            return 1

    assert [one.name for one in toolbox_tools(Box())] == ["early"]

    def late(self, number: int) -> int:
        return number

    Box.late = tool(late)  # type: ignore[attr-defined]
    assert [one.name for one in toolbox_tools(Box())] == ["early", "late"]

    def early(self, text: str) -> str:
        return text

    Box.early = tool(early)  # type: ignore[method-assign, assignment]
    parameters = [one.schema["function"]["parameters"]["properties"].keys() for one in toolbox_tools(Box())]
    assert parameters == [{"text"}, {"number"}]
