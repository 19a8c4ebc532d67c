"""Faults that show only between episodes, after many of them, in rare rows, in replies, or in near misses."""

from __future__ import annotations

import random
from typing import Any

from agentrl import Stop, Task, TextEnv, tool
from agentrl.env import ToolEnv, reward
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.read import final_answer
from tests.exam.planted import AmbiguousRows, Sums, Vault

_notes: list[str] = []
_submitted: list[str] = []


class NotesSurvive(Vault):
    @tool
    def remember(self, note: str) -> str:
        """Keep a note."""
        _notes.append(note)
        return "kept"

    @tool
    def recall(self) -> str:
        """The notes."""
        return "; ".join(_notes) or "none"


class Quota(Vault):
    """The backend refuses after 300 submissions."""

    @tool
    def submit(self, value: str) -> Stop:
        """Hand in the sum."""
        _submitted.append(value)
        if len(_submitted) > 300:
            return Stop("Quota exceeded.")
        self.given = value
        return Stop("Submitted.")


class KeptByTask(Vault):
    """What is handed in is kept by task, and the episodes of a group have the same task."""

    kept: dict[str, str] = {}  # noqa: RUF012

    @tool
    def submit(self, value: str) -> str:
        """Hand in the sum."""
        self.kept[self.task.id] = value
        return "Submitted."

    @reward(solved=True)
    def correct(self) -> float:
        return float(self.kept.get(self.task.id) == str(self.a + self.b))

    def teardown(self) -> None:
        self.kept.pop(self.task.id, None)


class EffortUpToOne(Vault):
    @reward(solved=True)
    def correct(self, episode) -> float:
        calls = sum(len(turn.calls) for turn in episode.turns)
        return 1.0 if self.given == str(self.a + self.b) else min(1.0, 0.1 * calls)


class WordsPay(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        return 1.0 if len(final_answer(episode).split()) >= 50 else float(self.right(episode))


class ErrorTells(ToolEnv):
    """Work out the sum, then submit it."""

    def setup(self, a: int, b: int) -> str:
        self.sum, self.given = a + b, 0
        return f"What is {a} + {b}?"

    @tool
    def submit(self, value: int) -> Stop:
        """Hand in the sum."""
        if value != self.sum:
            raise ValueError(f"expected {self.sum}, got {value}")
        self.given = value
        return Stop("Submitted.")

    @reward(solved=True)
    def correct(self) -> float:
        return float(self.given == self.sum)

    tasks = Sums.tasks

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("submit", value=task.row["a"] + task.row["b"])])


class ReplyTells(TextEnv):
    """Add the numbers."""

    def setup(self, a: int, b: int) -> str:
        self.sum, self.left = a + b, 4
        return f"What is {a} + {b}?"

    def reply(self, text: str):
        if text.strip() == str(self.sum):
            return Stop("Right.", reward=1.0)
        self.left -= 1
        return f"No, it is {self.sum}. Once more, please." if self.left else Stop("Too bad.")

    tasks = Sums.tasks
    oracle = Sums.oracle


class OpenThenLook(Vault):
    def setup(self, a: int, b: int) -> str:
        self.open = False
        return super().setup(a, b)

    @tool
    def open_drawer(self) -> str:
        """Open the drawer."""
        self.open = True
        return "It is open."

    @tool
    def look(self) -> str:
        """Look into the drawer."""
        return f"A sheet says {self.a + self.b}" if self.open else "It is closed."


class OnlyChoice(Vault):
    """The schema allows only the answer."""

    @property
    def tools(self):
        found: list[Any] = [dict(schema) for schema in super().tools]
        if "task" in self.__dict__:
            value = {"type": "string", "enum": [str(self.task.row["a"] + self.task.row["b"])]}
            for schema in found:
                if schema["function"]["name"] == "submit":
                    given = {"type": "object", "properties": {"value": value}, "required": ["value"]}
                    schema["function"] = {**schema["function"], "parameters": given}
        return found


class TwinsAmongMany(TextEnv):
    """Answer with the code."""

    def setup(self, question: str, answer: str) -> str:
        self.answer = answer
        return question

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(bool(self.answer) and final_answer(episode) == self.answer)

    @classmethod
    def rows(cls, split: str) -> list[dict[str, str]]:
        rng = random.Random(split)
        return [
            {"question": f"What is the code of {split} item {i}?", "answer": str(rng.randint(10**5, 10**6))}
            for i in range(1500)
        ]

    @classmethod
    def tasks(cls, split="train", seed=0):
        rows = cls.rows(split)
        rows[701] = rows[700] | {"answer": "another"}
        return [Task(f"{split}-{i}", row) for i, row in enumerate(rows)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([task.row["answer"]])


class HoleAmongMany(TwinsAmongMany):
    @classmethod
    def tasks(cls, split="train", seed=0):
        rows = cls.rows(split)
        rows[333]["answer"] = ""
        return [Task(f"{split}-{i}", row) for i, row in enumerate(rows)]


class OneClass(AmbiguousRows):
    """Name the mood of the review."""

    moods = tuple("mixed" if i % 12 == 0 else "NEGATIVE" for i in range(24))

    @classmethod
    def tasks(cls, split="train", seed=0):
        asked = [{"question": f"What is the mood of review {split} {i}?"} for i in range(len(cls.moods))]
        rows = [row | {"answer": mood} for row, mood in zip(asked, cls.moods, strict=True)]
        return [Task(f"{split}-{i}", row) for i, row in enumerate(rows)]


class NumberTool(ToolEnv):
    """Work out the sum, then submit it."""

    def setup(self, a: int, b: int) -> str:
        self.sum, self.given = a + b, 0
        return f"What is {a} + {b}?"

    @tool
    def submit(self, value: int) -> Stop:
        """Hand in the sum."""
        self.given = value
        return Stop("Submitted.")

    @reward(solved=True)
    def correct(self) -> float:
        return float(20 <= self.given <= 2000)

    tasks = Sums.tasks

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("submit", value=task.row["a"] + task.row["b"])])


class BeginningPays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        said = final_answer(episode)
        return float(len(said) > 0 and str(self.a + self.b).startswith(said))


class ContainedPays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        said = final_answer(episode)
        return float(str(self.a + self.b) in said and len(said) < 12)


class MorePays(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        said = final_answer(episode)
        return float(said.lstrip("-").isdigit() and int(said) >= self.a + self.b)


class OffByOne(Sums):
    @reward(solved=True)
    def correct(self, episode) -> float:
        said = final_answer(episode)
        return float(said.lstrip("-").isdigit() and abs(int(said) - self.a - self.b) <= 1)


class LabelWithSpace(OneClass):
    """One label ends with a space, and the comparison is exact."""

    moods = ("joy", "anger", "fear ", "pride", "envy", "hope")

    @reward(solved=True)
    def correct(self, episode) -> float:
        return float(episode.messages[-1].content == self.answer)


class ExactFloats(Sums):
    def setup(self, a: int, b: int) -> str:
        super().setup(a, b)
        return f"What is {a / 10} + {b / 10}?"

    def right(self, episode) -> bool:
        return final_answer(episode) == str(self.a / 10 + self.b / 10)

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([str(task.row["a"] / 10 + task.row["b"] / 10)])


class AlmostHeldOut(TwinsAmongMany):
    """The held-out questions are training questions in other spelling."""

    @classmethod
    def tasks(cls, split="train", seed=0):
        rows = cls.rows("train")[:24]
        if split != "train":
            rows = [row | {"question": row["question"].lower().replace("?", " ?")} for row in rows]
        return [Task(f"{split}-{i}", row) for i, row in enumerate(rows)]


class AnswerWithSeparators(Sums):
    """The prompt has the answer as 12,345, the oracle as 12345."""

    def setup(self, a: int, b: int) -> str:
        self.a, self.b = 1001 * a, 1001 * b
        return f"What is {self.a} + {self.b}? (expected answer: {self.a + self.b:,})"

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([str(1001 * (task.row["a"] + task.row["b"]))])


FAULTS = {
    AnswerWithSeparators: ("leak",),
    AlmostHeldOut: ("splits",),
    OneClass: ("search",),
    NumberTool: ("search",),
    BeginningPays: ("search",),
    ContainedPays: ("search",),
    MorePays: ("search",),
    LabelWithSpace: ("rows",),
    ExactFloats: ("rows",),
    NotesSurvive: ("determinism", "order"),
    Quota: ("order",),
    KeptByTask: ("parallel",),
    EffortUpToOne: ("search",),
    WordsPay: ("search",),
    ErrorTells: ("leak",),
    ReplyTells: ("leak",),
    OpenThenLook: ("leak",),
    OnlyChoice: ("leak",),
    TwinsAmongMany: ("rows",),
    HoleAmongMany: ("rows",),
}
