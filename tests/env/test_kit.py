import asyncio
import datetime
import gc
import ipaddress
import itertools
import random
import sqlite3
import threading
import time
import uuid
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from pydantic import UUID4, AnyUrl, Field, Json

from agentrl.env import ToolEnv, reward, tool
from agentrl.env.toolenv.jsonschema import check_arguments
from agentrl.envs.calculator import Calculator
from agentrl.errors import RewardError
from agentrl.testing.env import EnvCheckError, check_env, replay
from agentrl.testing.policy import RandomPolicy, ScriptedPolicy, call, play, random_arguments, say
from agentrl.types import Message, StopReason, Task

TASKS = [Task(f"t{i}", {"n": i}, seed=i) for i in range(4)]


class Sound(ToolEnv):
    """Find the number."""

    def setup(self, n: int) -> str:
        self.n = n
        return f"Look {n} times."

    @tool
    def look(self) -> int:
        """Look."""
        return self.rng.randint(0, 9)

    @reward
    def short(self) -> bool:
        return self.n < 2


async def test_a_sound_env_passes():
    await check_env(Sound, TASKS)
    await check_env(Calculator, Calculator.tasks()[:8], oracle=Calculator.oracle)


class Global(Sound):
    counter = itertools.count()

    @tool
    def look(self) -> int:
        """Look."""
        return next(self.counter)


class Unseeded(Sound):
    @tool
    def look(self) -> float:
        """Look."""
        return random.SystemRandom().random()


class Remembers(Sound):
    memory: list[int] = []  # noqa: RUF012

    @tool
    def look(self) -> str:
        """Look."""
        self.memory.append(self.n)
        return str(self.memory)


class Generous(Sound):
    @reward
    def short(self) -> int:
        return 3


class Ajar(Sound):
    def teardown(self) -> None:
        if not hasattr(self, "n"):
            raise RuntimeError("never set up")
        raise OSError("cannot close")


class Mute(Sound):
    def setup(self, n: int) -> str:
        self.n = n
        return ""


class Fragile(Sound):
    async def step(self, message: Message):
        assert not message.parse_errors, "cannot happen"
        return await super().step(message)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (Global, "played a second time it differs"),
        (Unseeded, "replayed: ReplayDifference"),
        (Remembers, "played on one instance it differs"),
        (Generous, r"reward 3.0 is outside \[0.0, 1.0\]"),
        (Ajar, "close once after reset raised InfraError: Ajar.teardown: OSError: cannot close"),
        (Mute, "the last message is 'system', not the user's"),
        (Fragile, "raised AssertionError: cannot happen"),
    ],
)
async def test_each_broken_promise_is_found(env, text):
    with pytest.raises(EnvCheckError, match=text):
        await check_env(env, TASKS)


class Collects(Sound):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def teardown(self) -> None:
        self.seen.append(self.n)


class Mixed(Sound):
    async def setup(self, n: int) -> str:
        self.n, self.db = n, sqlite3.connect(":memory:")
        return "Look."

    async def teardown(self) -> None:
        self.db.close()

    @tool
    def look(self) -> str:
        """Look."""
        return str(self.db.execute("SELECT 1").fetchone())


class Aside(Mixed):
    def setup(self, n: int) -> str:
        self.n, self.db = n, sqlite3.connect(":memory:")
        return "Look."

    def teardown(self) -> None:
        self.db.close()

    @tool(parallel=True)
    def look(self) -> str:
        """Look."""
        return str(self.db.execute("SELECT 1").fetchone())


class Shared(Sound):
    """One connection for all instances: well as long as one episode plays at a time."""

    busy = threading.Lock()

    @tool
    def look(self) -> str:
        """Look."""
        if not self.busy.acquire(blocking=False):
            raise RuntimeError("another episode is at it")
        try:
            time.sleep(0.01)
        finally:
            self.busy.release()
        return "seen"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            Collects,
            r"Collects\.seen: made in __init__ and changed in place .* meets \[0, 1, 2, 3\]; make it in setup",
        ),
        (Mixed, r"tool look: Error: ProgrammingError: .*same thread.*make methods that share one all plain"),
        (Aside, r"tool look: Error: ProgrammingError: .*same thread.*none of them parallel"),
        (Shared, "played at the same time it differs: .* became .*another episode is at it"),
    ],
)
async def test_what_only_shows_between_episodes_or_threads_is_found(env, text):
    with pytest.raises(EnvCheckError, match=text):
        await check_env(env, TASKS)


async def test_an_oracle_that_fails_is_found():
    with pytest.raises(EnvCheckError, match=r"the oracle earned 0\.0, not 1\.0"):
        await check_env(Calculator, Calculator.tasks()[:2], oracle=lambda task: ScriptedPolicy(["no idea"]))


async def test_play_records_turns_calls_and_rewards():
    task = Calculator.tasks("held_out")[0]
    episode = await play(Calculator(), task, Calculator.oracle(task))
    assert (episode.reward, episode.rewards, episode.stop_reason) == (1.0, {"solved": 1.0}, StopReason.ANSWERED)
    assert [m.role for m in episode.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert episode.turns[0].calls[0].outcome == "ok"
    assert await replay(episode, Calculator()) == []
    endless = await play(Sound(), TASKS[0], lambda messages: call("look"), max_turns=3)
    assert (endless.stop_reason, len(endless.turns)) == (StopReason.MAX_TURNS, 3)


async def test_replay_shows_what_changed():
    class Loud(Sound):
        @tool
        def look(self) -> str:
            """Look."""
            return "LOUD"

    episode = await play(Sound(), TASKS[1], ScriptedPolicy([call("look"), "done"]))
    (difference,) = await replay(episode, Loud())
    assert (difference.turn, difference.what) == (0, "observation")
    assert "LOUD" in difference.replayed


def test_random_arguments_fit_their_schema():
    rng = random.Random(0)
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 4},
            "b": {"anyOf": [{"type": "null"}, {"enum": ["x"]}]},
            "c": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        },
        "required": ["a", "c"],
    }
    for _ in range(100):
        value = random_arguments(schema, rng, ["w"])
        assert value["a"] in (3, 4)
        assert value.get("b") in (None, "x")
        assert set(value["c"]) == {"w"}


class Collects(Sound):
    @tool
    def keep(
        self,
        pair: Annotated[set[Literal["a", "b"]], Field(min_length=2)],
        named: Annotated[dict[str, int], Field(min_length=2)],
        texts: Annotated[set[str], Field(min_length=3)],
        id: UUID4,
        data: Json[list[int]],
    ) -> str:
        return ""


@pytest.mark.parametrize(
    "part",
    [
        {"type": ["integer", "null"]},
        {"type": "array", "items": True, "minItems": 1},
        True,
        {"allOf": [{"type": "integer"}, {"minimum": 7, "maximum": 8}]},
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "allOf": [{"$ref": "#/$defs/more"}, {"required": ["a"]}],
        },
    ],
)
def test_random_arguments_fit_schemas_of_other_servers(part: Any):
    more = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"n": part}, "required": ["n"], "$defs": {"more": more}}
    for seed in range(30):
        check_arguments(schema, random_arguments(schema, random.Random(seed)))


class Negative(Sound):
    @tool
    def keep(
        self,
        depth: Annotated[int, Field(le=-50)],
        debt: Annotated[int, Field(lt=0)],
        cold: Annotated[float, Field(le=-273.0)],
        step: Annotated[int, Field(le=-50, multiple_of=20)],
    ) -> str:
        return ""


async def test_numbers_with_an_upper_bound_alone_are_drawn_below_it():
    await check_env(Negative, TASKS)
    parameters = Negative().tools[-1]["function"]["parameters"]
    for seed in range(50):
        drawn = random_arguments(parameters, random.Random(seed))
        assert drawn["depth"] <= -50
        assert drawn["debt"] < 0
        assert drawn["cold"] <= -273.0
        assert drawn["step"] <= -60
        assert drawn["step"] % 20 == 0


async def test_arguments_that_differ_from_each_other_are_drawn_and_special_texts_are_no_finding():
    await check_env(Collects, TASKS)
    parameters = Collects().tools[-1]["function"]["parameters"]
    for seed in range(50):
        drawn = random_arguments(parameters, random.Random(seed))
        assert sorted(drawn["pair"]) == ["a", "b"]
        assert len(drawn["named"]) == 2
        assert len(set(drawn["texts"])) == 3


def test_the_random_policy_depends_on_its_seed_only():
    def played(seed: int) -> list[Message]:
        policy = RandomPolicy(Sound().tools, seed)
        return [policy([say("some words here")]) for _ in range(20)]

    assert played(1) == played(1)
    assert played(1) != played(2)


class Diary(Sound):
    """Arguments that pydantic reads from text or bounds by a step."""

    @tool
    def note(
        self,
        day: datetime.date,
        at: datetime.datetime,
        clock: datetime.time,
        length: datetime.timedelta,
        key: uuid.UUID,
        host: ipaddress.IPv4Address,
        link: AnyUrl,
        price: Decimal,
        minutes: Annotated[int, Field(ge=1, le=60, multiple_of=5)],
        share: Annotated[float, Field(gt=0, lt=1, multiple_of=0.25)],
    ) -> str:
        """Note."""
        return f"{day} {at} {clock} {length} {key} {host} {link} {price} {minutes} {share}"


async def test_arguments_that_are_read_from_text_pass():
    await check_env(Diary, TASKS)


async def test_a_check_that_is_interrupted_leaves_no_other_behind(recwarn: pytest.WarningsRecorder):
    begun = asyncio.Event()

    class Endless(Calculator):
        async def setup(self, **row: object) -> str:  # type: ignore[override]
            begun.set()
            await asyncio.Event().wait()
            return ""

    checking = asyncio.create_task(check_env(Endless, TASKS))
    await begun.wait()
    checking.cancel()
    await asyncio.wait({checking})
    del checking
    gc.collect()
    assert not recwarn.list


async def test_play_refuses_rewards_that_a_run_does_not_count():
    class Odd(Sound):
        earned, parts, counts = 0.0, {}, {}

        async def step(self, message):
            observation, _, *ended, info = await super().step(message)
            return observation, self.earned, *ended, replace(info, metrics=self.counts)

        async def score(self, episode):
            return self.parts

    odd = [
        ({"earned": float("nan")}, r"Odd\.step returned the reward nan: not a finite number"),
        ({"earned": None}, r"Odd\.step returned the reward None"),
        ({"counts": {"calls": float("inf")}}, r"Odd\.step returned the metric 'calls' = inf"),
        ({"parts": {"short": float("nan")}}, "reward 'short' of Odd is nan"),
        ({"parts": 1.0}, "the rewards of Odd are 1.0: return a mapping"),
    ]
    for given, said in odd:
        with pytest.raises(RewardError, match=said):
            await play(type("Odd", (Odd,), given)(), TASKS[0], ScriptedPolicy(["done"]))


@pytest.mark.parametrize("method", ["reset", "step", "score", "close"])
async def test_a_plain_method_that_must_be_async_is_named(method: str):
    def plain(self, *_):
        return {}

    plain.__qualname__ = f"Plain.{method}"
    env = type("Plain", (Sound,), {method: plain})
    with pytest.raises(
        TypeError, match=rf"Plain\.{method} returned {{}}, which cannot be awaited: write `async def`"
    ):
        await play(env(), TASKS[0], ScriptedPolicy(["done"]))
