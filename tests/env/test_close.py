"""Whatever ends an episode in the rollout: the env is closed exactly once, and nothing goes on running."""

import asyncio
import json
import time

import pytest

from agentrl.chat.template import Renderer
from agentrl.env import ToolEnv, reward, tool
from agentrl.env.compose import ComposedEnv
from agentrl.env.toolenv.threads import stuck
from agentrl.errors import EngineError, InfraError, SandboxError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.episode import Player, run_episode
from agentrl.rollout.limits import EpisodeLimits
from agentrl.sandbox import Sandbox, close_pools, pool_for
from agentrl.sandbox.contract import Link, Process
from agentrl.sandbox.errors import SandboxUnavailable
from agentrl.sandboxes.process import Backend
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call, say
from agentrl.types import Sampling, StopReason, Task


class Counter(ToolEnv):
    """Count."""

    closed: list[str] = []  # noqa: RUF012  # all instances of a test together

    def setup(self) -> str:
        self.count = 0
        return "Count to three."

    def teardown(self) -> None:
        Counter.closed.append(self.task.id)

    @tool
    def count_on(self) -> int:
        """Count."""
        self.count += 1
        return self.count

    @tool
    def fail(self) -> str:
        """Raise."""
        raise ValueError("no")

    @tool
    def lose(self) -> str:
        """Lose the sandbox."""
        raise SandboxError("gone")

    @tool
    async def sleep(self) -> str:
        """Sleep for ever."""
        await asyncio.sleep(1e9)
        return ""

    @tool
    def spin(self) -> str:
        """Spin for ever."""
        while True:
            time.sleep(0.001)

    @reward
    def three(self) -> bool:
        return self.count == 3


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, [json.dumps(list(Counter().tools))] * 4, vocab=400, max_context=4096)
    return Renderer.from_directory(directory)


@pytest.fixture(autouse=True)
def nothing_closed():
    Counter.closed.clear()


def player(renderer, script, timeout_s=5.0, **options) -> Player:
    engine = ScriptedEngine(renderer, script, tools=Counter().tools, **options)
    return Player(engine, renderer, Counter, EpisodeLimits(timeout_s=timeout_s), Sampling())


async def test_three_calls_count_to_three(renderer):
    play = player(renderer, [call("count_on"), call("count_on"), call("count_on"), say("Three.")])
    episode = await run_episode(play, Task("t"), episode_id="e", seed=0)
    assert [r.result for t in episode.turns for r in t.calls] == ["1", "2", "3"]
    assert (episode.reward, episode.stop_reason, Counter.closed) == (1.0, StopReason.ANSWERED, ["t"])
    assert play.engine.released == ["e"]


@pytest.mark.parametrize(
    ("script", "stop", "error"),
    [
        ([call("fail"), say("x")], StopReason.ANSWERED, None),
        ([call("sleep")], StopReason.TIMEOUT, None),
        ([call("spin")], StopReason.TIMEOUT, None),
        ([call("lose")], StopReason.INFRA, "SandboxError: gone"),
        ([EngineError("lost")], StopReason.INFRA, "EngineError: lost"),
    ],
)
async def test_the_env_is_closed_once_however_it_ends(renderer, script, stop, error):
    episode = await run_episode(player(renderer, script, timeout_s=0.3), Task("t"), episode_id="e", seed=0)
    assert (episode.stop_reason, Counter.closed) == (stop, ["t"])
    assert (episode.error is None) if error is None else (error in episode.error)
    assert (episode.reward is None) == (error is not None)


async def test_a_bug_of_agentrl_is_raised_and_the_env_is_closed_once(renderer):
    with pytest.raises(RuntimeError, match="a bug"):
        await run_episode(player(renderer, [RuntimeError("a bug")]), Task("t"), episode_id="e", seed=0)
    assert Counter.closed == ["t"]


async def test_a_cancelled_episode_closes_its_env(renderer):
    episode = asyncio.ensure_future(
        run_episode(player(renderer, [call("sleep")]), Task("t"), episode_id="e", seed=0)
    )
    await asyncio.sleep(0.1)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert Counter.closed == ["t"]


class Hangs:
    """A toolbox, and a tool of verl's, that does not end."""

    def __init__(self, config: object = None, tool_schema: object = None) -> None:
        self.tool_schema = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}

    @tool
    def look(self) -> str:
        """Look."""
        return ""

    async def create(self, instance_id: str, **kwargs: object) -> str:
        return instance_id

    async def execute(self, instance_id: str, parameters: object, **kwargs: object) -> tuple[str, float, object]:
        return "", 0.0, {}

    async def teardown(self) -> None:
        await asyncio.sleep(60)

    async def release(self, instance_id: str, **kwargs: object) -> None:
        await asyncio.sleep(60)


class Boxed(ToolEnv):
    """Work in a sandbox."""

    sandbox = Sandbox()
    toolboxes = (Hangs,)


def composed() -> ComposedEnv:
    return ComposedEnv(tools=[{"class_name": f"{__name__}.Hangs", "config": {}}], sandbox={})


@pytest.mark.parametrize("make", [Boxed, composed])
async def test_a_toolbox_that_does_not_end_keeps_no_sandbox(renderer, make):
    pool = pool_for(Sandbox())
    engine = ScriptedEngine(renderer, [say("done")] * 2, tools=make().tools)
    for number in range(2):
        played = Player(engine, renderer, make, EpisodeLimits(timeout_s=1.0), Sampling())
        with pytest.warns(UserWarning, match="close: took longer than 1 s"):
            await run_episode(
                played, Task("t", {"prompt": "Go."} if make is composed else {}), episode_id=f"e{number}", seed=0
            )
    assert (pool.metrics()["leases"], pool.metrics()["leased"]) == (2.0, 0.0)
    await close_pools()


async def test_one_of_64_sleeps_for_ever_and_the_step_ends_in_time(renderer):
    def run(number: int):
        script = [call("spin" if number == 5 else "count_on"), say("done")]
        return run_episode(
            player(renderer, script, timeout_s=1.0 if number == 5 else 50.0),  # a busy machine ends no other
            Task(f"t{number}"),
            episode_id=f"e{number}",
            seed=0,
        )

    async with asyncio.timeout(45):
        episodes = await asyncio.gather(*[run(number) for number in range(64)])
    assert [e.stop_reason for e in episodes].count(StopReason.TIMEOUT) == 1
    assert len(Counter.closed) == 64
    for _ in range(100):
        if not stuck():
            break
        await asyncio.sleep(0.01)
    assert not stuck()
    assert len(asyncio.all_tasks()) == 1


class StuckProcess:
    """A sandbox that cannot be removed, as when a Docker engine does not answer."""

    stuck = False

    def __init__(self, process: Process) -> None:
        self.process = process
        self.cause = process.cause

    async def kill(self) -> None:
        await self.process.kill()
        if self.stuck:
            raise SandboxUnavailable("it could not be removed")


class StuckBackend(Backend):
    async def start(self, name: str) -> tuple[Process, Link, str]:
        process, link, home = await super().start(name)
        return StuckProcess(process), link, home


class FirstBox:
    """A tool with a sandbox that cannot be removed."""

    sandbox = Sandbox(backend="tests.env.test_close:StuckBackend", trusted=True)

    @tool
    def first(self) -> str:
        """Nothing."""
        return ""


class SecondBox:
    """A tool with another sandbox."""

    sandbox = Sandbox(backend="process", trusted=True)

    @tool
    def second(self) -> str:
        """Nothing."""
        return ""


class TwoBoxes(ToolEnv):
    """Use two sandboxes."""

    toolboxes = (FirstBox, SecondBox)

    def setup(self) -> str:
        return "Begin."


async def test_a_sandbox_that_cannot_be_removed_keeps_no_other_leased(monkeypatch):
    env = TwoBoxes()
    await env.reset(Task("t"))
    pools = [pool_for(made.sandbox) for made in (FirstBox, SecondBox)]
    assert [pool.metrics()["leased"] for pool in pools] == [1.0, 1.0]
    monkeypatch.setattr(StuckProcess, "stuck", True)
    with pytest.raises(InfraError, match="it could not be removed"):
        await env.close()
    assert [pool.metrics()["leased"] for pool in pools] == [0.0, 0.0]
    assert env._thread._worker is None, "the thread of the episode is free as well"
    await close_pools()
