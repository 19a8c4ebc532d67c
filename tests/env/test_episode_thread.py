"""All plain methods of one episode share a thread; a call that outlives its limit is the policy's timeout."""

import asyncio
import contextlib
import contextvars
import itertools
import sqlite3
import threading
import time
import warnings
from collections.abc import Generator, Iterator

import pytest

from agentrl import Stop, ToolEnv, ToolResult, reward, tool
from agentrl.env import ToolSettings
from agentrl.env.compose import ComposedEnv
from agentrl.env.read import all_calls
from agentrl.env.toolenv import threads
from agentrl.env.toolenv.threads import EpisodeThread, stuck
from agentrl.errors import InfraError
from agentrl.rollout.lifecycle import (
    EpisodeStatus,
    OpenEpisode,
    attribution,
    closing,
    episode_clock,
    reset_env,
    score_env,
    step_env,
)
from agentrl.testing.policy import ScriptedPolicy, call, play, say
from agentrl.types import Message, StopReason, Task, ToolCall, Turn

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
COUNT = "SELECT count(*) FROM t"


class Sql(ToolEnv):
    """Count the rows."""

    settings = ToolSettings(tool_timeout_s=0.2)

    def setup(self, rows: int = 3) -> str:
        self.db = sqlite3.connect(":memory:")
        self.db.execute("CREATE TABLE t (a)")
        self.db.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(rows)])
        self.answer: int | None = None
        return "How many rows?"

    def system(self) -> str:
        return f"Tables: {self.db.execute('SELECT name FROM sqlite_master').fetchall()}"

    def teardown(self) -> None:
        self.db.close()

    def respond(self, message: Message) -> str | None:
        return str(self.db.execute(COUNT).fetchone()) if message.content == "?" else None

    @tool(timeout_s=30)
    def query(self, sql: str) -> str:
        """Run SQL."""
        return str(self.db.execute(sql).fetchall())

    @tool
    def endless(self, sql: str) -> str:
        """Run SQL with a short limit."""
        return str(self.db.execute(sql).fetchall())

    @tool(timeout_s=30)
    def submit(self, sql: str) -> Stop:
        """Answer."""
        self.answer = self.db.execute(sql).fetchone()[0]
        return Stop("ok")

    @reward(per="turn", weight=0.0)
    def rows(self) -> int:
        return int(self.db.execute(COUNT).fetchone()[0])

    @reward
    def correct(self) -> bool:
        return self.answer == self.db.execute(COUNT).fetchone()[0]


class Interruptible(Sql):
    interrupted: list[str] = []  # noqa: RUF012  # all instances of a test together

    def on_timeout(self, name: str) -> None:
        self.interrupted.append(name)
        self.db.interrupt()


async def play_framed(env: ToolEnv, messages: list[Message], timeout_s: float = 60.0):
    """One episode as the rollout plays it: what fails is in `error`."""

    episode = OpenEpisode(Task("t"), EpisodeStatus("e", "t"))
    with attribution(episode):
        async with closing(lambda: env, episode, timeout_s):
            async with episode_clock(episode, timeout_s):
                episode.messages = list(await reset_env(env, episode))
                for message in messages:
                    if episode.stop is None:
                        await step_env(env, Turn(message, (), 0.0, "stop", 0, 0.0, 0.0), episode, 10)
                episode.stop = episode.stop or StopReason.MAX_TURNS
            await score_env(env, episode, timeout_s)
    return episode.result()


@pytest.fixture
def quick_grace(monkeypatch):
    monkeypatch.setattr(threads, "GRACE_S", 0.2)
    monkeypatch.setattr(threads, "PROMPT_S", 0.2)


async def all_ended() -> bool:
    for _ in range(500):
        if not stuck():
            return True
        await asyncio.sleep(0.02)
    return False


class Numbered(ToolResult):
    def __init__(self, count: int) -> None:
        super().__init__(iter(range(count)))


class Ended(Stop):
    def __init__(self, count: int) -> None:
        super().__init__(f"over after {count}", reward=0.5)


async def test_what_a_tool_yields_is_read_on_its_thread_and_within_its_time():
    class Yielding(Sql):
        @tool(timeout_s=30)
        def rows_of(self, form: str) -> Iterator[int]:
            """Yield rows."""
            found = self._read()
            return found if form == "generator" else map(abs, found)

        def _read(self) -> Iterator[int]:
            yield from (a for (a,) in self.db.execute("SELECT a FROM t"))

        @tool
        def endlessly(self) -> Iterator[int]:
            """Do not stop in time."""
            for i in range(3000):
                time.sleep(0.001)
                yield i

        @tool
        def in_c(self) -> Iterator[None]:
            """Run none of Python's own instructions."""
            return map(time.sleep, itertools.repeat(0.01, 3000))

        @tool
        def partly(self) -> Iterator[int]:
            """Fail halfway."""
            yield 1
            raise LookupError("no more")

        @tool
        async def asked(self, form: str) -> object:
            """Give rows that are read only afterwards."""
            found = self._read()
            return found if form == "generator" else ToolResult(map(abs, found), metrics={"asked": 1.0})

        @tool
        async def asked_endlessly(self) -> Iterator[None]:
            """Give rows without end."""
            return map(time.sleep, itertools.repeat(0.01))

        @tool
        def counted(self) -> ToolResult:
            """Give the rows with a metric."""
            return ToolResult(self._read(), metrics={"counted": 1.0})

        @tool
        def yields_stop(self) -> Iterator[Stop]:
            """Yield the end of the episode."""
            yield Stop("over")

        @tool
        def numbered(self) -> ToolResult:
            """Give a result of a class whose arguments are its own."""
            return Numbered(3)

        @tool
        def ends(self) -> Stop:
            """End the episode in the same way."""
            return Ended(4)

        @tool
        def stops(self) -> Generator[int, None, Stop]:
            """Yield and then end the episode."""
            yield 1
            return Stop("over", reward=1.0)

    calls = [call("rows_of", form="generator"), call("rows_of", form="map"), call("partly")]
    calls += [call("endlessly"), call("in_c"), call("counted"), call("stops"), call("yields_stop")]
    calls += [call("asked", form="generator"), call("asked", form="map"), call("asked_endlessly")]
    calls += [call("numbered"), call("ends")]
    episode = await play(Yielding(), Task("t", {}), ScriptedPolicy([*calls, "done"]))
    answers = [(record.outcome, record.result) for record in all_calls(episode)]
    assert answers[:3] == [("ok", "[0, 1, 2]")] * 2 + [("tool_exception", "Error: LookupError: no more")]
    assert answers[3] == ("tool_timeout", "Error: endlessly timed out: no result after 0.2 s")
    assert answers[4] == ("tool_timeout", "Error: in_c timed out: no result after 0.2 s")
    assert (answers[5], episode.metrics["counted"]) == (("ok", "[0, 1, 2]"), 1.0)
    assert answers[6][0] == "tool_exception"
    assert "cannot also return a value, and this one returned Stop: return a list" in str(answers[6][1])
    assert answers[7][0] == "tool_exception"
    assert "a Stop has an effect only if it is returned itself" in str(answers[7][1])
    assert answers[8:10] == [("ok", "[0, 1, 2]")] * 2
    assert answers[10] == ("tool_timeout", "Error: asked_endlessly timed out: no result after 0.2 s")
    assert answers[11:] == [("ok", "[0, 1, 2]"), ("ok", "over after 4")]
    assert sum(turn.reward for turn in episode.turns) == 0.5
    assert not stuck()


async def test_forty_episodes_at_a_time_of_an_env_that_opens_sqlite_in_setup():
    script = [call("query", sql=COUNT), say("?"), call("submit", sql=COUNT)]
    episodes = await asyncio.gather(
        *[play(Sql(), Task(f"t{i}", {"rows": 2000 + i}), ScriptedPolicy(script)) for i in range(40)]
    )
    assert [e.reward for e in episodes] == [1.0] * 40
    assert [e.turns[0].observation[0].content for e in episodes] == [f"[({2000 + i},)]" for i in range(40)]
    assert {e.messages[0].content for e in episodes} == {"Tables: [('t',)]"}


async def test_no_episode_runs_where_another_ran_and_what_setup_left_on_the_thread_is_there():
    local, mode = threading.local(), contextvars.ContextVar("mode", default="none")

    class Sees(ToolEnv):
        def setup(self) -> str:
            self.found = [getattr(local, "owner", None)]
            local.owner = self
            mode.set("mine")
            return "go"

        @tool
        def look(self) -> str:
            """Look."""
            return f"{local.owner is self} {mode.get()}"

        @reward
        def alone(self) -> bool:
            return self.found == [None] and local.owner is self

    env = Sees()
    for _ in range(3):
        episode = await play(env, Task("t"), ScriptedPolicy([call("look"), say("x")]))
        assert (episode.turns[0].calls[0].result, episode.reward) == ("True mine", 1.0)


async def test_parallel_plain_tools_run_beside_one_another_off_the_thread():
    meeting = threading.Barrier(3)

    class Two(ToolEnv):
        def setup(self) -> str:
            self.home, self.seen = threading.get_ident(), set()
            return "go"

        @tool(parallel=True)
        def meet(self) -> str:
            """Meet."""
            meeting.wait(timeout=60)
            self.seen.add(threading.get_ident())
            return "met"

        @reward
        def apart(self) -> bool:
            return len(self.seen) == 3 and self.home not in self.seen and threading.get_ident() == self.home

    calls = Message("assistant", tool_calls=tuple(ToolCall(f"c{i}", "meet", {}) for i in range(3)))
    episode = await play(Two(), Task("t"), ScriptedPolicy([calls, say("x")]))
    assert ([r.result for r in episode.turns[0].calls], episode.reward) == (["met"] * 3, 1.0)


async def test_an_endless_query_is_interrupted_and_the_episode_continues_on_its_thread():
    Interruptible.interrupted.clear()
    episode = await play_framed(Interruptible(), [call("endless", sql=ENDLESS), call("submit", sql=COUNT)])
    assert episode.turns[0].calls[0].outcome == "tool_timeout"
    assert (episode.error, episode.stop_reason, episode.reward) == (None, StopReason.STOPPED_BY_TOOL, 1.0)
    assert (Interruptible.interrupted, stuck()) == (["endless"], [])


async def test_the_episodes_own_limit_interrupts_the_query_too():
    Interruptible.interrupted.clear()

    class Patient(Interruptible):
        settings = ToolSettings(tool_timeout_s=50)

    episode = await play_framed(Patient(), [call("endless", sql=ENDLESS)], timeout_s=0.5)
    assert (episode.error, episode.stop_reason, episode.reward) == (None, StopReason.TIMEOUT, 0.0)
    assert (Interruptible.interrupted, stuck()) == (["endless"], [])


async def test_without_a_hook_an_endless_query_ends_the_episode_as_the_policys_timeout(quick_grace):
    env = Sql()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        episode = await play_framed(
            env, [call("endless", sql=ENDLESS), call("query", sql=COUNT), call("submit", sql=COUNT)]
        )
    texts = [str(w.message) for w in warned]
    assert (episode.error, episode.stop_reason, episode.reward) == (None, StopReason.TIMEOUT, 0.0)
    assert [c.outcome for t in episode.turns for c in t.calls] == ["tool_timeout", "tool_timeout"]
    assert "endless ran out of time and could not be ended" in episode.turns[1].calls[0].result
    assert episode.metrics["stuck_calls"] == 1
    assert set(episode.faults) == {"rows", "correct"}  # they use what `setup` opened on the lost thread
    assert "ProgrammingError: SQLite objects created in a thread" in episode.faults["correct"]
    assert any("Sql.close: InfraError: Sql.teardown" in text for text in texts)
    assert stuck() == ["endless"]
    env.db.interrupt()
    assert await all_ended()


async def test_python_code_that_runs_out_of_time_ends_and_the_thread_is_kept():
    class Spins(ToolEnv):
        settings = ToolSettings(tool_timeout_s=0.1)

        def setup(self) -> str:
            self.home = threading.get_ident()
            return "go"

        @tool
        def spin(self) -> str:
            """Spin."""
            while True:
                time.sleep(0.001)

        @reward
        def stayed(self) -> bool:
            return self.home == threading.get_ident()

    episode = await play_framed(Spins(), [call("spin"), call("spin"), say("x")])
    assert [c.outcome for t in episode.turns for c in t.calls] == ["tool_timeout"] * 2
    assert (episode.error, episode.reward, stuck()) == (None, 1.0, [])


async def test_a_timeout_close_to_the_end_of_the_call_never_reaches_the_next_call():
    thread = EpisodeThread()
    for _ in range(60):
        with contextlib.suppress(threads.CallTimeout):
            assert await thread.run(lambda: time.sleep(0.005) or 1, 0.005) == 1
        assert await thread.run(lambda: sum(range(2000)), 20.0) == 1999000
    assert not thread.lost
    await thread.close()


async def test_a_hook_that_hangs_or_raises_is_bounded(quick_grace, monkeypatch):
    monkeypatch.setattr("agentrl.env.toolenv.env.HOOK_S", 0.1)
    release = threading.Event()

    class Hangs(Sql):
        def on_timeout(self, name: str) -> None:
            release.wait(20)

    class Raises(Sql):
        async def on_timeout(self, name: str) -> None:
            self.db.interrupt()
            raise ValueError("no")

    env = Hangs()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        episode = await play_framed(env, [call("endless", sql=ENDLESS), say("x")])
    assert any("Hangs.on_timeout('endless'): CallTimeout" in str(w.message) for w in warned)
    assert (episode.error, episode.reward) == (None, 0.0)
    env.db.interrupt()
    release.set()
    with pytest.warns(UserWarning, match=r"Raises.on_timeout\('endless'\): ValueError: no"):
        episode = await play_framed(Raises(), [call("endless", sql=ENDLESS), call("submit", sql=COUNT)])
    assert (episode.error, episode.reward) == (None, 1.0)
    assert await all_ended()


async def test_a_teardown_that_hangs_is_bounded(quick_grace):
    release = threading.Event()

    class Stays(ToolEnv):
        settings = ToolSettings(teardown_timeout_s=0.1)

        def teardown(self) -> None:
            release.wait(20)

    with pytest.warns(UserWarning, match=r"Stays.teardown: CallTimeout: no result after 0.1 s"):
        episode = await play_framed(Stays(), [say("x")])
    assert (episode.error, episode.stop_reason) == (None, StopReason.ANSWERED)
    release.set()
    assert await all_ended()


async def test_no_thread_is_an_infrastructure_failure_and_no_answer_of_a_tool(monkeypatch):
    def full(self) -> None:
        raise RuntimeError("can't start new thread")

    class Plain(ToolEnv):
        async def setup(self) -> str:
            return "go"

        @tool
        def work(self) -> str:
            """Work."""
            return "done"

    monkeypatch.setattr(threads, "_idle", [])
    monkeypatch.setattr(threading.Thread, "start", full)
    episode = await play_framed(Plain(), [call("work"), say("x")])
    assert (episode.stop_reason, episode.turns) == (StopReason.INFRA, ())
    assert "InfraError: no thread for the plain methods of an episode: can't start new thread" in episode.error


async def test_threads_that_hang_are_counted_and_bounded(quick_grace, monkeypatch):
    monkeypatch.setattr(threads, "MAX_STUCK", 2)
    release = threading.Event()

    def hang() -> None:
        release.wait(20)

    try:
        for _ in range(2):
            thread = EpisodeThread()
            with pytest.raises(threads.CallTimeout):
                await thread.run(hang, 0.05)
            assert await thread.held()
        with pytest.raises(InfraError, match=r"2 threads hang in calls .*the last one: hang.*on_timeout"):
            await EpisodeThread().run(lambda: 1, 1.0)
    finally:
        release.set()
    assert await all_ended()
    assert await EpisodeThread().run(lambda: 1, 20.0) == 1


async def test_verl_tools_and_composed_rewards_share_the_thread():
    seen: list[int] = []

    def look() -> str:
        """Look."""
        seen.append(threading.get_ident())
        return "seen"

    def again() -> str:
        """Look again."""
        return look()

    def score(episode) -> float:
        seen.append(threading.get_ident())
        return 1.0

    class Toolbox:
        def setup(self) -> None:
            seen.append(threading.get_ident())

        def teardown(self) -> None:
            seen.append(threading.get_ident())

        @tool
        def peek(self) -> str:
            """Peek."""
            seen.append(threading.get_ident())
            return "peeked"

    class Composed(ComposedEnv):
        toolboxes = (Toolbox,)

    env = Composed(tools=[look, again], reward=score)
    script = [call("look"), call("again"), call("peek"), say("x")]
    episode = await play(env, Task("t", {"prompt": "go"}), ScriptedPolicy(script))
    assert episode.reward == 1.0
    assert (len(seen), len(set(seen))) == (6, 1)
    assert seen[0] != threading.get_ident()
