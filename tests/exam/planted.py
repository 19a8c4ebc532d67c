"""Small envs, each with one fault that an exam has to find: `FAULTS` names the checks, one of which must fail."""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from datetime import datetime
from pathlib import Path

from agentrl import Stop, Task, TextEnv, ToolEnv, reward, tool
from agentrl.env import Env, StepInfo
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.read import final_answer
from agentrl.types import Message

SLOW_S = 2.1
"""How long slow code sleeps; a call of two seconds is an error of the exam."""


class Sums(TextEnv):
    """Add the numbers. Answer with the sum only."""

    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        return f"What is {a} + {b}?"

    def reply(self, text: str) -> None:
        return None

    def right(self, episode) -> bool:
        return final_answer(episode).strip() == str(self.a + self.b)

    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(self.right(episode))

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng = random.Random(f"{split}/{seed}")
        return [
            Task(f"{split}-{i}", {"a": rng.randint(10, 500), "b": rng.randint(10, 500)}, seed=i) for i in range(24)
        ]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([str(task.row["a"] + task.row["b"])])


class PaysForEmpty(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        answer = final_answer(episode)
        return 1.0 if not answer or answer == str(self.a + self.b) else 0.0


class RandomInReward(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(self.right(episode) or random.random() < 0.3)


class SeedIgnored(Sums):
    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        hint = random.Random().choice(["Be quick.", "Take your time.", "Think first.", "Mind the carry."])
        return f"{hint} What is {a} + {b}?"


_history: list[str] = []


class GlobalState(Sums):
    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        before = f" (Last time it was {_history[-1]}.)" if _history else ""
        _history.append(f"{a} + {b}")
        return f"What is {a} + {b}?{before}"


class AnswerInPrompt(Sums):
    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        return f"What is {a} + {b}? (expected answer: {a + b})"


class Vault(ToolEnv):
    """Work out the sum with the tools, then submit it."""

    def setup(self, a: int, b: int) -> str:
        self.a, self.b, self.given = a, b, None
        return f"What is {a} + {b}?"

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @tool
    def submit(self, value: str) -> Stop:
        """Hand in the sum."""
        self.given = value
        return Stop("Submitted.")

    @reward(solved=True)
    def correct(self) -> float:
        return float(self.given == str(self.a + self.b))

    tasks = Sums.tasks

    @classmethod
    def oracle(cls, task):
        a, b = task.row["a"], task.row["b"]
        return ScriptedPolicy([call("add", a=a, b=b), call("submit", value=str(a + b))])


class AnswerInTool(Vault):
    @tool
    def read_file(self, path: str) -> str:
        """Read a file of the working folder."""
        files = {"notes.txt": "Nothing here.", "solution.txt": str(self.a + self.b)}
        return files.get(path) or f"no such file; there are: {', '.join(files)}"


class AnswerInSchema(Vault):
    @property
    def tools(self):
        found = [dict(schema) for schema in super().tools]
        if "task" in self.__dict__:
            row = self.task.row
            text = f"Hand in the sum, such as {row['a'] + row['b']}."
            found = [
                {**s, "function": {**s["function"], "description": text}}
                if s["function"]["name"] == "submit"
                else s
                for s in found
            ]
        return found


class WrongOracle(Sums):
    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([str(task.row["a"] - task.row["b"])])


class UnsolvableRow(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(self.right(episode) and self.task.id != "train-5")


class AmbiguousRows(TextEnv):
    """Answer with the capital."""

    def setup(self, question: str, answer: str) -> str:
        self.answer = answer
        return question

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(final_answer(episode) == self.answer)

    @classmethod
    def tasks(cls, split="train", seed=0):
        rows = [
            ("France", "Paris"), ("Peru", "Lima"), ("Japan", "Tokyo"), ("Chad", "N'Djamena"), ("Cuba", "Havana"),
            ("Bolivia", "Sucre"), ("Bolivia", "La Paz"), ("Kenya", "Nairobi"),
        ]  # fmt: skip
        asked = [{"question": f"What is the capital of {c}?", "answer": a} for c, a in rows]
        return [Task(f"{split}-{i}", row) for i, row in enumerate(asked)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([task.row["answer"]])


class Unbounded(Sums):
    @reward
    def length(self, episode) -> float:
        return 0.001 * len(final_answer(episode))


class NotANumber(Env):
    """Not finite for answers that are no number."""

    solved_at = 1.0

    async def reset(self, task):
        self.row = task.row
        return [Message("user", f"What is {task.row['a']} + {task.row['b']}?")], {}

    async def step(self, message):
        text = str(message.content)
        given = float(text) if re.fullmatch(r"-?\d+", text) else float("nan")
        return (
            [],
            max(0.0, 1 - abs(given - self.row["a"] - self.row["b"])) if given == given else given,
            True,
            False,
            StepInfo(),
        )

    tasks = Sums.tasks
    oracle = Sums.oracle


class WallClock(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(self.right(episode)) if datetime.now().year < 2027 and time.time() > 0 else 0.5


class HashSeed(Sums):
    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        return f"What is {a} + {b}? Allowed: " + ", ".join({"paper", "pencil", "abacus", "fingers", "chalk"})


_played = {"episodes": 0}


class OrderDependent(Sums):
    """The first episodes are paid differently."""

    def setup(self, a: int, b: int) -> str:
        _played["episodes"] += 1
        self.number = _played["episodes"]
        return super().setup(a, b)

    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(self.right(episode)) if self.number > 3 else 0.9 * self.right(episode)


_current: dict[str, int] = {}


class NotParallelSafe(Vault):
    """The task of the moment is global."""

    def setup(self, a: int, b: int) -> str:
        _current.update(a=a, b=b)
        return super().setup(a, b)

    @reward(solved=True)
    def correct(self) -> float:
        return float(self.given == str(_current["a"] + _current["b"]))


class GiveUpPays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return 0.5 if "don't know" in final_answer(episode) else float(self.right(episode))


class GiveUpToolPays(Vault):
    @tool
    def give_up(self) -> Stop:
        """End the task."""
        return Stop("Too bad.", reward=1.0)


class EchoPays(Sums):
    @reward
    def on_topic(self, episode) -> float:
        return float(f"{self.a} + {self.b}" in final_answer(episode))


class InjectionPays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        said = re.search(r"(?:score|reward)\W+(\d+(?:\.\d+)?)", final_answer(episode))
        return min(1.0, float(said.group(1))) if said else float(self.right(episode))


class EvalPays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        try:
            return float(eval(final_answer(episode)) == self.a + self.b)
        except Exception:
            return 0.0


class Leftovers(Vault):
    def setup(self, a: int, b: int) -> str:
        folder = Path(tempfile.gettempdir()) / f"planted-{a}-{b}-{time.monotonic_ns()}"
        folder.mkdir()
        (folder / "task.txt").write_text(f"{a} + {b}")
        return super().setup(a, b)


class SlowTool(Vault):
    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        time.sleep(SLOW_S)
        return str(a + b)


class BlockingTool(Vault):
    @tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        time.sleep(0.8)  # noqa: ASYNC251
        await asyncio.sleep(0)
        return str(a + b)


class PartsDoNotSum(Sums):
    @reward
    def parts(self, episode) -> dict[str, float]:
        right = float(self.right(episode))
        return {"answer": 0.5 * right, "format": 0.5, "total": 0.5 * right + 0.5}


class NeverSolved(Sums):
    solved_at = 1.5


class FarmingPays(Vault):
    @reward
    def effort(self, episode) -> float:
        return 0.2 * sum(len(turn.calls) for turn in episode.turns)


class AnythingPays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(len(final_answer(episode)) > 0)


class OneAnswerForAll(AmbiguousRows):
    """Is the number a prime?"""

    @classmethod
    def tasks(cls, split="train", seed=0):
        return [Task(f"{split}-{n}", {"question": f"Is {n} a prime?", "answer": "no"}) for n in range(4, 400, 8)]


class HeldOutInTraining(Sums):
    """Most held-out sums are training sums under other ids and seeds."""

    @classmethod
    def tasks(cls, split="train", seed=0):
        own = super().tasks(split, seed)
        if split == "train":
            return own
        copied = [
            Task(f"test-{i}", dict(task.row), seed + 1000 + i) for i, task in enumerate(super().tasks("train"))
        ]
        return [*copied[:20], *own[:10]]


FAULTS: dict[type[Env], tuple[str, ...]] = {
    PaysForEmpty: ("null",),
    RandomInReward: ("determinism",),
    SeedIgnored: ("determinism",),
    GlobalState: ("determinism", "order"),
    AnswerInPrompt: ("leak",),
    AnswerInTool: ("leak",),
    AnswerInSchema: ("leak",),
    WrongOracle: ("oracle",),
    UnsolvableRow: ("rows",),
    AmbiguousRows: ("rows",),
    Unbounded: ("bounds",),
    NotANumber: ("bounds",),
    WallClock: ("clock",),
    HashSeed: ("process",),
    OrderDependent: ("order", "process"),
    NotParallelSafe: ("parallel",),
    GiveUpPays: ("give-up",),
    GiveUpToolPays: ("give-up",),
    EchoPays: ("echo",),
    InjectionPays: ("injection",),
    EvalPays: ("injection",),
    Leftovers: ("leftovers",),
    SlowTool: ("speed",),
    BlockingTool: ("speed",),
    PartsDoNotSum: ("parts",),
    NeverSolved: ("oracle",),
    FarmingPays: ("search",),
    AnythingPays: ("nonsense",),
    OneAnswerForAll: ("search",),
    HeldOutInTraining: ("splits",),
}
"""Each env with the checks that find its fault."""
