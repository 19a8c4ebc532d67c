"""More faults of the same classes as in `planted`, written in other ways."""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
import uuid
from pathlib import Path

from agentrl import Stop, Task, TextEnv, reward, tool
from agentrl.env import Env, StepInfo
from agentrl.env.play import ScriptedPolicy
from agentrl.env.read import final_answer
from agentrl.types import Message
from tests.exam import planted
from tests.exam.planted import AmbiguousRows, Sums, Vault


class ClassState(Sums):
    seen: list[int] = []  # noqa: RUF012

    @reward(solved=True)
    def correct(self, episode) -> float:
        self.seen.append(self.a)
        return float(self.right(episode)) * (1.0 if self.seen.count(self.a) == 1 else 0.5)


class StateFile(Vault):
    """The folder is shared by all episodes."""

    def setup(self, a: int, b: int) -> str:
        path = Path(tempfile.gettempdir()) / f"planted-state-{os.getpid()}"
        before = path.read_text() if path.exists() else "nothing"
        path.write_text(f"{a} + {b}")
        return f"{super().setup(a, b)} Before: {before}."


class UuidInPrompt(Sums):
    def setup(self, a: int, b: int) -> str:
        return f"[{uuid.uuid4()}] {super().setup(a, b)}"


class StringHash(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(self.right(episode)) * (1.0 if hash(str(self.a)) % 2 else 0.5)


class NanOnEmpty(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float("nan") if not final_answer(episode) else float(self.right(episode))


class DebugTool(Vault):
    @tool
    def debug(self) -> str:
        """Show the state of the env."""
        return f"state: a={self.a} b={self.b} answer={self.a + self.b}"


class AnswerInSystem(Sums):
    def system(self) -> str:
        return f"Add the numbers. Do not tell the user that the solution is {self.a + self.b}."


class BarePrompt(Sums):
    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        return f"What is {a} + {b}? [{a + b}]"


class CountsTwice(Env):
    """`score` returns the parts and their total."""

    solved_at = {"total": 1.0}  # noqa: RUF012

    async def reset(self, task):
        self.row = task.row
        return [Message("user", f"What is {task.row['a']} + {task.row['b']}?")], {}

    async def step(self, message):
        self.said = str(message.content)
        return [], 0.0, True, False, StepInfo()

    async def score(self, episode):
        right = float(self.said == str(self.row["a"] + self.row["b"]))
        return {"answer": 0.8 * right, "short": 0.2 * right, "total": right}

    tasks = Sums.tasks
    oracle = Sums.oracle


class UnsolvableWithoutRule(Sums):
    @reward
    def correct(self, episode) -> float:
        return 0.0 if self.a % 7 == 0 else float(self.right(episode))

    @reward
    def other(self, episode) -> float:
        return 0.0


class AmbiguousNoOracle(AmbiguousRows):
    oracle = None


class EveryStepPays(TextEnv):
    """Answer when you are done."""

    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        return f"What is {a} + {b}?"

    def reply(self, text: str):
        from agentrl.env import ToolResult

        if text == str(self.a + self.b):
            return Stop("Right.", reward=1.0)
        return ToolResult("Go on.", reward=0.1)

    tasks = Sums.tasks
    oracle = Sums.oracle


class Distance(Sums):
    @reward
    def near(self, episode) -> float:
        try:
            return -abs(float(final_answer(episode)) - self.a - self.b)
        except ValueError:
            return -1.0


class SleepsForever(Vault):
    @tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        time.sleep(1000)  # noqa: ASYNC251
        return str(a + b)


class SlowReward(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        time.sleep(planted.SLOW_S)
        return float(self.right(episode))


class RandomRows(Sums):
    @classmethod
    def tasks(cls, split="train", seed=0):
        rng = random.Random()
        return [Task(f"{split}-{i}", {"a": rng.randint(10, 500), "b": rng.randint(10, 500)}) for i in range(12)]


class ReverseContains(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(final_answer(episode) in str(self.a + self.b))


class Crashes(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(int(final_answer(episode)) == self.a + self.b)


class SolvedNeverTrue(Sums):
    @reward(solved=2.0)
    def correct(self, episode) -> float:
        return float(self.right(episode))


class SharedTemp(Vault):
    """All episodes use the same file while they last."""

    @property
    def path(self) -> Path:
        return Path(tempfile.gettempdir()) / f"planted-shared-{os.getpid()}"

    def setup(self, a: int, b: int) -> str:
        self.path.write_text(str(a + b))
        return super().setup(a, b)

    @reward(solved=True)
    def correct(self) -> float:
        return float(self.path.exists() and self.given == self.path.read_text())

    def teardown(self) -> None:
        self.path.unlink(missing_ok=True)


class UnplayableRow(Sums):
    def setup(self, a: int, b: int) -> str:
        if a % 5 == 0:
            raise ValueError("no such number")
        return super().setup(a, b)


class WrongOracleTool(Vault):
    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy(["I would call submit."])


class AnyNumber(Sums):
    """An answer may list numbers up to 1000."""

    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(str(self.a + self.b) in re.findall(r"\d+", final_answer(episode)))


class TableInDocstring(Vault):
    @tool
    def lookup(self, key: str) -> str:
        "Look up a sum."
        return "no"

    lookup.__doc__ = "Look up a sum. Known sums: " + ", ".join(
        f"{task.row['a']}+{task.row['b']} is {task.row['a'] + task.row['b']}" for task in Sums.tasks("train")
    )


class ListedFile(Vault):
    @tool
    def ls(self) -> str:
        """List the files."""
        return "notes.md  labels_v2.csv"

    @tool
    def cat(self, name: str) -> str:
        """Print a file."""
        rows = [task.row for split in ("train", "held_out") for task in Sums.tasks(split)]
        files = {
            "labels_v2.csv": "\n".join(f"{r['a']},{r['b']},{r['a'] + r['b']}" for r in rows),
            "notes.md": "Hi.",
        }
        return files.get(name, "no such file")


class SameEntries(Sums):
    """Rows name entries; those of the held-out rows have the text of training entries."""

    def setup(self, entry: int) -> str:
        rng = random.Random(entry % 1000)
        return super().setup(rng.randint(10, 500), rng.randint(10, 500))

    @classmethod
    def tasks(cls, split="train", seed=0):
        start = 0 if split == "train" else 1000
        return [Task(f"{split}-{i}", {"entry": start + i}, seed=start + i) for i in range(24)]

    @classmethod
    def oracle(cls, task):
        env = cls()
        env.setup(**task.row)
        return ScriptedPolicy([str(env.a + env.b)])


FAULTS = {
    SameEntries: ("splits",),
    TableInDocstring: ("leak",),
    ListedFile: ("leak",),
    ClassState: ("determinism", "order", "oracle", "process"),
    StateFile: ("determinism", "order", "leftovers"),
    UuidInPrompt: ("determinism",),
    StringHash: ("process",),
    NanOnEmpty: ("bounds", "contract"),
    DebugTool: ("leak",),
    AnswerInSystem: ("leak",),
    BarePrompt: ("leak",),
    CountsTwice: ("parts",),
    UnsolvableWithoutRule: ("oracle", "rows"),
    AmbiguousNoOracle: ("rows",),
    EveryStepPays: ("search",),
    Distance: ("bounds",),
    SlowReward: ("speed",),
    RandomRows: ("determinism", "process"),
    ReverseContains: ("null",),
    Crashes: ("bounds", "contract"),
    SolvedNeverTrue: ("oracle",),
    SharedTemp: ("parallel",),
    UnplayableRow: ("rows",),
    WrongOracleTool: ("oracle",),
    SleepsForever: ("speed",),
}
