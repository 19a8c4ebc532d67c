"""A policy that is right 70 % of the time and breaks things when it is wrong earns what it would earn without.

Real env, real sandbox, scripted policy. `WAYS` holds what it runs before, or hands in instead of, a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agentrl.chat.template import Renderer
from agentrl.envs.python_code import PythonCode
from agentrl.envs.python_code.problems import describe
from agentrl.rollout.collect import collect
from agentrl.rollout.episode import Player
from agentrl.rollout.limits import EpisodeLimits
from agentrl.run_folder.redraws import RedrawGuard
from agentrl.sandbox import close_pools
from agentrl.testing.engine import ScriptedEngine
from agentrl.testing.policy import call
from agentrl.types import Message, Sampling, Task

GROUPS, SIZE = 2, 10
RIGHT = 7
"""Of ten episodes of a task."""
WRONG = "def solve(value):\n    return 'wrong'\n"
HANDED_IN = {
    "is wrong": WRONG,
    "answers JSON without an end": (
        "import sys\nfor frame in [sys._getframe(1)]:\n    mark = frame.f_globals['asked']['mark']\n"
        "print('\\n' + mark + '[' * 60000, flush=True)\nimport os\nos._exit(0)\n"
    ),
    "answers numbers that are too long": (
        "import sys\nmark = sys._getframe(1).f_globals['asked']['mark']\n"
        "print('\\n' + mark + '9' * 60000, flush=True)\nimport os\nos._exit(0)\n"
    ),
    "answers no text": "import os\nos.write(1, b'\\n' + bytes(range(256)) * 200)\nos._exit(0)\n",
    "defines what JSON cannot say": "class X:\n    pass\ndef solve(value):\n    return X()\n",
    "returns a structure without an end": "def solve(value):\n    x = []\n    x.append(x)\n    return x\n",
    "returns half of a surrogate pair": "def solve(value):\n    return '\\ud800'\n",
    "recurses without an end": "def solve(value):\n    return solve(value)\n",
    "never ends": "while True:\n    pass\n",
    "uses all its memory": "x = bytearray(1 << 40)\n",
    "exits": "import os\nos._exit(7)\n",
    "does not compile": "def solve(:",
    "holds a zero byte": "x = 1\x00",
}
RUN_BEFORE = {
    "plants modules that the harness imports": (
        "for name in ('json', 'sys', 'tarfile', 'sqlite3', 'codecs'):\n"
        "    open(name + '.py', 'w').write('raise SystemExit(0)')\n"
    ),
    "prints control characters": "print('\\x1b[2J\\x9b\\u202e\\u200b' * 100)",
    "writes half of a character": "import sys\nsys.stdout.buffer.write(b'\\xed\\xa0\\x80\\xff' * 100)",
}
WAYS: dict[str, Sequence[Message]] = {
    **{name: [call("submit", code=code)] for name, code in HANDED_IN.items()},
    **{name: [call("python", code=code), call("submit", code=WRONG)] for name, code in RUN_BEFORE.items()},
}


class Code(PythonCode):
    """The env with less patience."""

    sandbox = replace(PythonCode.sandbox, wall_s=1.5)


class Flawed(ScriptedEngine):
    """Right in 7 of 10 episodes of each task, and in what is played again; `wrong` in the others."""

    def __init__(self, renderer: Renderer, tasks: Sequence[Task], wrong: Sequence[Message]) -> None:
        super().__init__(renderer, [], tools=PythonCode().tools, max_context=200_000)
        self._wrong, self._playing = wrong, {}
        self._right = [[call("submit", code=source(task))] for task in tasks]

    async def generate(self, ids, sampling, *, session=None):
        if session not in self._playing:
            _, group, place = session.split("/")
            number, _, again = place[1:].partition("r")
            lines = self._right[int(group[1:])] if again or int(number) < RIGHT else self._wrong
            self._playing[session] = ScriptedEngine(self._renderer, lines, tools=self._tools)
        return await self._playing[session].generate(ids, sampling, session=session)


def source(task: Task) -> str:
    """The reference of a task."""
    return describe(tuple((name, value) for name, value in task.row["steps"]), task.row["takes"]).source


@pytest.mark.parametrize("way", WAYS)
async def test_breaking_things_earns_what_being_wrong_earns(renderer: Renderer, way: str):
    tasks = [PythonCode.tasks("train", 3)[number] for number in range(GROUPS)]
    engine = Flawed(renderer, tasks, WAYS[way])
    player = Player(engine, renderer, Code, EpisodeLimits(token_budget=150_000, max_tokens=50_000), Sampling())
    guard = RedrawGuard(redrawn_above=0.1, faults_above=0.5)
    try:
        groups = await collect(player, tasks, group_size=SIZE, label="s", seed=0, guard=guard)
    finally:
        await close_pools()
    assert [episode.error for group in groups for episode in group.failed] == []
    rewards = [episode.reward for group in groups for episode in group.episodes]
    assert sum(rewards) / len(rewards) == RIGHT / SIZE
