"""Breaking the sandbox never pays: a policy that breaks it when it is wrong is scored as one that does not.

The policies are scripted: whether an episode gets the right answer follows from its name, and 70 % of them do. The
others break their sandbox in one of many ways first, or hand in code that breaks it while it is graded. Every
episode must be scored, none played again, and its reward be 1 exactly where the answer was right.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.chat.demonstrate import completion_of
from agentrl.chat.template import Renderer
from agentrl.env import ToolEnv, reward, tool
from agentrl.envs.python_code import PythonCode
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.redraws import RedrawGuard
from agentrl.sandbox import BoxSession, Sandbox, close_pools
from agentrl.testing import call, say
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.sandbox_suite.sabotage import WAYS, Sabotage
from agentrl.types import Completion, Group, Message, Sampling, Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FRESH = [way for way in WAYS if way.runs_in == "fresh"]
SHELL = [way for way in WAYS if way.runs_in == "bash"]
GROUP, RIGHT = 4, 0.7


def is_right(session: str) -> bool:
    """Whether the policy knows the answer in this episode."""
    return hashlib.blake2b(session.encode(), digest_size=1).digest()[0] < RIGHT * 256


class Policy(ScriptedEngine):
    """Says what the script of an episode says: a function of its name."""

    def __init__(self, renderer: Renderer, script_of: Callable[[str], Sequence[Message]], tools: object) -> None:
        super().__init__(renderer, [], tools=tools)  # type: ignore[arg-type]
        self._script_of = script_of
        self._left: dict[str, list[Message]] = {}

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, session: str | None = None) -> Completion:
        """The next line of the episode's script."""
        assert session is not None
        left = self._left.setdefault(session, list(self._script_of(session)))
        completion = completion_of(self._renderer, left.pop(0), self._tools)
        assert len(completion.ids) <= sampling.max_tokens
        return completion


class Code(PythonCode):
    sandbox = replace(PythonCode.sandbox, wall_s=2.0)  # many ways keep a core busy until the limit
    __doc__ = PythonCode.__doc__


class Shell(ToolEnv):
    """Write 7 into answer.txt. A session that stays runs the commands; the reward looks in the sandbox."""

    sandbox = Sandbox(wall_s=2.0, memory_mb=128)

    def setup(self) -> str:
        self.session: BoxSession | None = None
        return "Go."

    @tool
    async def sh(self, command: str) -> str:
        """Run a command line in bash."""
        if self.session is None:
            self.session = await self.box.session("bash")
        result = await self.session.run(command)
        return result.text() + result.error_text()

    @reward
    async def solved(self) -> bool:
        """Reads the file, and has a program look as well; what that meets is raised, as most authors do."""
        data = await self.box.read_file("answer.txt", max_bytes=10)
        seen = await self.box.python("print(open('answer.txt').read(10))")
        return data == b"7\n" and seen.stdout.strip() == b"7"


@pytest.fixture
async def renderer(tmp_path: Path) -> AsyncIterator[Renderer]:
    words = [
        "Go. Write the Python function. Try it with python, submit. sh command code answer 7 done <tool_call>"
    ]
    make_tokenizer(tmp_path, words * 20, vocab=320, max_context=1 << 16)
    yield Renderer.from_directory(tmp_path)
    await close_pools()


async def play(player: Player, tasks: Sequence[Task]) -> list[Group]:
    limits = RedrawGuard(redrawn_above=0.0, faults_above=0.0)
    return await collect(player, tasks, group_size=GROUP, label="s", seed=5, guard=limits)


def assert_nothing_gained(groups: Sequence[Group], name: str) -> None:
    rights = 0
    for group in groups:
        assert not group.failed, f"{name}: {[episode.error for episode in group.failed]}"
        for episode in group.episodes:
            rights += is_right(episode.id)
            assert episode.error is None
            assert episode.reward == float(is_right(episode.id)), (name, episode.id, episode.stop_reason, episode)
    assert 0 < rights < len(groups) * GROUP


async def played(renderer: Renderer, make_env: type[ToolEnv], script_of: Callable[[str], Sequence[Message]],
                 tasks: Sequence[Task]) -> list[Group]:  # fmt: skip
    env = make_env()
    tools = env.tools
    await env.close()
    engine = Policy(renderer, script_of, tools)
    limits = EpisodeLimits(max_turns=4, max_tokens=8192, token_budget=60_000, timeout_s=120)
    return await play(Player(engine, renderer, make_env, limits, Sampling()), tasks)


@pytest.mark.parametrize("half", [0, 1])
async def test_python_code(renderer: Renderer, half: int) -> None:
    ways = FRESH[half::2]
    tasks = PythonCode.tasks(size=len(ways))

    def script_of(session: str) -> Sequence[Message]:
        number = int(session.split("/")[1][1:])
        if is_right(session):
            oracle = PythonCode.oracle(tasks[number])
            return [oracle([]), oracle([])]
        wrong = call("submit", code="def solve(value): return None")
        while_graded = call("submit", code=ways[number].code)
        breaks = call("python", code=ways[number].code)
        return [breaks, wrong] if session.endswith(("0", "1")) else [while_graded]

    groups = await played(renderer, Code, script_of, tasks)
    assert_nothing_gained(groups, "python_code")


async def test_a_session_and_a_reward_that_reads_files(renderer: Renderer) -> None:
    def script_of(session: str) -> Sequence[Message]:
        way: Sabotage = SHELL[int(session.split("/")[1][1:])]
        if is_right(session):
            return [call("sh", command="echo 7 > answer.txt"), say("done")]
        return [call("sh", command="echo 8 > answer.txt"), call("sh", command=way.code), say("done")]

    groups = await played(renderer, Shell, script_of, [Task(f"t{number}") for number in range(len(SHELL))])
    assert_nothing_gained(groups, "shell")


async def test_a_home_that_is_locked_does_not_stop_the_run(renderer: Renderer) -> None:
    def script_of(session: str) -> Sequence[Message]:
        if is_right(session):
            return [call("sh", command="echo 7 > answer.txt"), say("done")]
        return [call("sh", command="chmod 000 ~"), say("done")]

    groups = await played(renderer, Shell, script_of, [Task(f"t{number}") for number in range(20)])
    assert_nothing_gained(groups, "chmod")
    faults = [episode.faults for group in groups for episode in group.episodes if episode.faults]
    assert len(faults) >= 20  # as many as would have stopped it, were they the author's
    assert all(set(found) == {"sandbox"} for found in faults)
