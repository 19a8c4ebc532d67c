"""Small envs without a fault, of kinds that an exam could mistake for faulty ones."""

from __future__ import annotations

import random

from agentrl import Stop, Task, TextEnv, ToolEnv, reward, tool
from agentrl.env import Env, StepInfo, ToolResult
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.read import final_answer
from agentrl.types import Message
from tests.exam.planted import Sums, Vault


class Ledger(ToolEnv):
    """Bring the ledger to the target balance with the tools, then call submit."""

    def setup(self, start: int, target: int) -> str:
        self.balance, self.target, self.ops = start, target, 0
        return f"The balance is {start}. Make it {target}."

    @tool
    def add(self, n: int) -> str:
        """Add n."""
        self.ops += 1
        self.balance += n
        return f"balance={self.balance}"

    @tool
    def submit(self) -> Stop:
        """End the episode."""
        return Stop()

    @reward(solved=True)
    def solved(self) -> bool:
        return self.balance == self.target

    @reward(weight=-0.01)
    def cost(self) -> int:
        return self.ops

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng, low = random.Random(f"{split}/{seed}"), 20 if split == "train" else 45
        return [
            Task(f"{split}-{i}", {"start": rng.randint(1, 9), "target": rng.randint(low, low + 20)})
            for i in range(20)
        ]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("add", n=task.row["target"] - task.row["start"]), call("submit")])


class Guess(TextEnv):
    """Guess my number from 1 to 9."""

    def setup(self, number: int) -> str:
        self.number = number
        return "Your guess?"

    def reply(self, text: str):
        return Stop("Right!", reward=1.0) if text == str(self.number) else "Wrong. Your guess?"

    @classmethod
    def tasks(cls, split="train", seed=0):
        return [Task(f"{split}-{i}", {"number": i % 6 + 1 if split == "train" else i % 3 + 7}) for i in range(18)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([str(task.row["number"])])


class YesOrNo(TextEnv):
    """Answer yes or no."""

    def setup(self, question: str, answer: str) -> str:
        self.answer = answer
        return f"{question} Answer yes or no."

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def right(self, episode) -> float:
        words = [w.strip(".,") for w in final_answer(episode).lower().split()]
        said = [w for w in words if w in ("yes", "no")]
        return float(bool(said) and said[-1] == self.answer)

    @classmethod
    def tasks(cls, split="train", seed=0):
        numbers = random.Random(f"{split}/{seed}").sample(range(1000), 40)
        if split != "train":
            numbers = [n for n in numbers if f"train-{n}" not in {task.id for task in cls.tasks("train", seed)}]
        return [
            Task(f"{split}-{n}", {"question": f"Is {n} even?", "answer": "no" if n % 2 else "yes"})
            for n in numbers
        ]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([task.row["answer"]])


class Choice(YesOrNo):
    """Answer with the letter."""

    def setup(self, question: str, answer: str) -> str:
        self.answer = answer
        return question

    @reward(solved=True)
    def right(self, episode) -> float:
        return float(final_answer(episode).strip().upper()[:1] == self.answer)

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng, found = random.Random(f"{split}/{seed}"), []
        for i in range(30):
            a, b = rng.randint(1, 50), rng.randint(1, 50)
            options = [a + b, a + b + 2, a + b - 1, a + b + 10]
            rng.shuffle(options)
            listed = " ".join(f"{letter}) {o}" for letter, o in zip("ABCD", options, strict=True))
            row = {"question": f"{a} + {b} = ? {listed}", "answer": "ABCD"[options.index(a + b)]}
            found.append(Task(f"{split}-{i}", row))
        return found


class WrongCosts(Sums):
    """A wrong answer costs one, no answer nothing, and the format is worth a little."""

    @reward(solved=True)
    def correct(self, episode) -> float:
        answer = final_answer(episode)
        return 0.0 if not answer else 1.0 if self.right(episode) else -1.0


class FormatCounts(Sums):
    @reward
    def tags(self, episode) -> float:
        return 0.1 * ("<answer>" in final_answer(episode))

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([str(task.row["a"] + task.row["b"])])


class Copy(TextEnv):
    """Do as you are told."""

    def setup(self, word: str) -> str:
        self.word = word
        return f"Say the word: {word}"

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def said(self, episode) -> float:
        return float(final_answer(episode) == self.word[::-1])

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng = random.Random(f"{split}/{seed}")
        return [Task(f"{split}-{i}", {"word": "".join(rng.choices("abcdefgh", k=6))}) for i in range(20)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([task.row["word"][::-1]])


class Lookup(ToolEnv):
    """Look the value up and answer with it."""

    def setup(self, key: str, answer: str) -> str:
        self.values, self.answer = {key: answer, "other": "nothing"}, answer
        return f"What is the value of {key}?"

    @tool
    def keys(self) -> list[str]:
        """All keys."""
        return sorted(self.values)

    @tool
    def get(self, key: str) -> str:
        """The value of a key."""
        return self.values[key]

    @reward(solved=True)
    def right(self, episode) -> bool:
        return final_answer(episode) == self.answer

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng = random.Random(f"{split}/{seed}")
        return [Task(f"{split}-{i}", {"key": f"k{i}", "answer": str(rng.randint(100, 999))}) for i in range(16)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("get", key=task.row["key"]), task.row["answer"]])


class Dice(ToolEnv):
    """Roll until the sum is at least ten, then stop. All chance comes from self.rng."""

    def setup(self) -> str:
        self.sum = 0
        return "Roll."

    @tool
    def roll(self) -> ToolResult:
        """Roll a die."""
        self.sum += self.rng.randint(1, 6)
        return ToolResult(f"The sum is {self.sum}.", stop=self.sum >= 30)

    @reward(solved=True)
    def reached(self) -> bool:
        return self.sum >= 10

    @classmethod
    def tasks(cls, split="train", seed=0):
        return [Task(f"{split}-{i}", {}, seed=i + 100 * (split != "train")) for i in range(12)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("roll")] * 10)


class Bare(Env):
    """The contract without ToolEnv, and without an oracle."""

    solved_at = 1.0

    async def reset(self, task):
        self.word = task.row["word"]
        return [Message("user", f"Spell {self.word!r} backward.")], {}

    async def step(self, message):
        return [], float(str(message.content) == self.word[::-1]), True, False, StepInfo()

    tasks = Copy.tasks


class Unanswerable(Sums):
    """Some questions have no answer, and the policy should say so."""

    def setup(self, a: int, b: int) -> str:
        self.a, self.b = a, b
        return f"What is {a} + {b}?" if a % 4 else f"What is {a} + the number I think of?"

    def right(self, episode) -> bool:
        wanted = str(self.a + self.b) if self.a % 4 else "I don't know"
        return final_answer(episode) == wanted

    @classmethod
    def oracle(cls, task):
        a, b = task.row["a"], task.row["b"]
        return ScriptedPolicy([str(a + b) if a % 4 else "I don't know"])


class Passage(TextEnv):
    """Answer with the code only."""

    def setup(self, passage: str, question: str, answer: str) -> str:
        self.answer = answer
        return f"{passage}\n{question}"

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def right(self, episode) -> float:
        return float(final_answer(episode).strip() == self.answer)

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng, found = random.Random(f"{split}/{seed}"), []
        for i in range(24):
            codes = {
                name: str(rng.randint(1000, 9999)) for name in rng.sample(["Alma", "Bert", "Cleo", "Dora"], 3)
            }
            asked = rng.choice(list(codes))
            passage = " ".join(f"The code of {name} is {code}." for name, code in codes.items())
            row = {"passage": passage, "question": f"What is the code of {asked}?", "answer": codes[asked]}
            found.append(Task(f"{split}-{i}", row))
        return found

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([task.row["answer"]])


class Login(ToolEnv):
    """Log in and read the balance."""

    def setup(self, password: str, balance: int) -> str:
        self.password, self.balance, self.inside = password, balance, False
        return f"My password is {password}. What is my balance?"

    @tool
    def login(self, password: str) -> str:
        """Log in."""
        self.inside = password == self.password
        return "welcome" if self.inside else "wrong password"

    @tool
    def get_balance(self) -> str:
        """The balance."""
        return str(self.balance) if self.inside else "log in first"

    @reward(solved=True)
    def right(self, episode) -> bool:
        return final_answer(episode) == str(self.balance)

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng = random.Random(f"{split}/{seed}")
        return [
            Task(
                f"{split}-{i}",
                {"password": "".join(rng.choices("abcdefgh", k=8)), "balance": rng.randint(100, 9999)},
            )
            for i in range(16)
        ]

    @classmethod
    def oracle(cls, task):
        login = call("login", password=task.row["password"])
        return ScriptedPolicy([login, call("get_balance"), str(task.row["balance"])])


class SometimesNothing(ToolEnv):
    """Ring only if you are asked to."""

    def setup(self, name: str, wanted: bool) -> str:
        self.wanted, self.rung = wanted, 0
        return f"{name}: please {'ring' if wanted else 'do not ring'} the bell."

    @tool
    def ring(self) -> str:
        """Ring the bell."""
        self.rung += 1
        return "ding"

    @reward(solved=True)
    def right(self) -> bool:
        return self.rung == int(self.wanted)

    @classmethod
    def tasks(cls, split="train", seed=0):
        return [Task(f"{split}-{i}", {"name": f"{split} {i}", "wanted": i % 3 > 0}) for i in range(40)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("ring")] if task.row["wanted"] else ["fine"])


class Walk(ToolEnv):
    """Walk to the goal; each step costs, and goals are near or far."""

    def setup(self, goal: int) -> str:
        self.at, self.goal, self.steps = 0, goal, 0
        return f"You are at 0. Go to {goal}."

    @tool
    def move(self, by: int) -> ToolResult:
        """Move by up to 3."""
        self.steps += 1
        self.at += max(-3, min(3, by))
        return ToolResult(f"You are at {self.at}.", stop=self.at == self.goal)

    @reward
    def quick(self) -> float:
        return 1.0 / self.steps if self.at == self.goal else 0.0

    @classmethod
    def tasks(cls, split="train", seed=0):
        start = 7 if split == "train" else 31
        return [Task(f"{split}-{i}", {"goal": start + i}) for i in range(12)]

    @classmethod
    def oracle(cls, task):
        goal = task.row["goal"]
        return ScriptedPolicy([call("move", by=min(3, goal - done)) for done in range(0, goal, 3)])


class Close(Sums):
    """Close answers earn a part."""

    @reward(solved=1.0)
    def correct(self, episode) -> float:
        said = final_answer(episode).strip()
        return max(0.0, 1 - abs(int(said) - self.a - self.b) / 100) if said.lstrip("-").isdigit() else 0.0


class MostlyNo(YesOrNo):
    """Two of three answers are no."""

    @reward(solved=True)
    def right(self, episode) -> float:
        return float(final_answer(episode) == self.answer)

    @classmethod
    def tasks(cls, split="train", seed=0):
        first = 0 if split == "train" else 60
        return [
            Task(f"{split}-{n}", {"question": f"Is {n} a multiple of 3?", "answer": "no" if n % 3 else "yes"})
            for n in range(first, first + 60)
        ]


class Line(ToolEnv):
    """Write the word backwards, as a line."""

    def setup(self, word: str) -> str:
        self.word, self.written = word, ""
        return f"The word is {word}."

    @tool
    def write(self, content: str) -> Stop:
        """Write the file."""
        self.written = content
        return Stop("Written.")

    @reward(solved=True)
    def exact(self) -> bool:
        return self.written == self.word[::-1] + "\n"

    @classmethod
    def tasks(cls, split="train", seed=0):
        rng = random.Random(split)
        return [Task(f"{split}-{i}", {"word": "".join(rng.choices("abcdefgh", k=7))}) for i in range(16)]

    @classmethod
    def oracle(cls, task):
        return ScriptedPolicy([call("write", content=task.row["word"][::-1] + "\n")])


class Report(Ledger):
    """Bring the ledger to the target balance with the tools; what is said at the end does not count."""

    @classmethod
    def oracle(cls, task):
        start, target = task.row["start"], task.row["target"]
        return ScriptedPolicy([call("add", n=target - start), str(97 * target)])


HEALTHY = (
    Sums, Vault, Ledger, Guess, YesOrNo, Choice, WrongCosts, FormatCounts, Copy, Lookup, Dice, Bare, Unanswerable,
    Passage, Login, SometimesNothing, Walk, Close, MostlyNo, Line, Report,
)  # fmt: skip
