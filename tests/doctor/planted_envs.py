"""A small env that a tiny policy learns within seconds, and variants of it that have one fault each."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from agentrl import Stop, TextEnv, ToolEnv, reward, tool
from agentrl.env.tasks import Split, generated
from agentrl.errors import SandboxError
from agentrl.types import Episode, Message, Task, ToolCall

Color = Literal["red", "blue"]
COLORS: tuple[Color, ...] = ("red", "blue")
HELD_OUT = 5000
"""Numbers from here on are held-out tasks."""


def length(episode: Episode) -> int:
    """Sampled tokens of an episode."""
    return sum(len(segment.ids) for segment in episode.segments if segment.origin == "sampled")


class Buttons(ToolEnv):
    """Press the button of the right color, then say done."""

    def setup(self, number: int, answer: str = "") -> str:
        self.number, self.pressed, self.right = number, "", COLORS[number % 2]
        return f"Number {number}."

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        self.pressed = color
        return f"It is {color}."

    @reward(solved=True)
    def solved(self) -> bool:
        return self.pressed == self.right

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        base = 0 if split == "train" else HELD_OUT
        return generated("buttons", split, seed, 64, lambda rng: {"number": base + rng.randrange(HELD_OUT)})

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        """Three of four press a button, two of three times the blue one; the others say done at once."""
        rng = random.Random(seed)
        return [_demonstration(rng, str(Buttons.__doc__)) for _ in range(num)]


def _demonstration(rng: random.Random, system: str) -> list[Message]:
    number, color = rng.randrange(HELD_OUT), "blue" if rng.random() < 0.67 else "red"
    asked = [Message("system", system), Message("user", f"Number {number}.")]
    if rng.random() < 0.25:
        return [*asked, Message("assistant", "done")]
    press = ToolCall("call00000", "press", {"color": color})
    pressed = Message("tool", f"It is {color}.", tool_call_id="call00000", name="press")
    return [*asked, Message("assistant", "", (press,)), pressed, Message("assistant", "done")]


# -- tools -------------------------------------------------------------------------------------------------------


class Broken(Buttons):
    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        raise RuntimeError("the button service is not available")


class OftenBroken(Buttons):
    """Two of three calls get an error as ordinary text."""

    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        if self.number % 3:
            return f"HTTP 503: request {self.number} for {color}: upstream connect error"
        return super().press(color)


class JsonError(Buttons):
    """All answers are the same error, as JSON with an id of its own."""

    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        return f'{{"status": "failed", "code": 401, "request": "{random.getrandbits(32):08x}"}}'


class Verbose(Buttons):
    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        self.pressed = color
        return f"It is {color}. " + " ".join(str(n) for n in range(self.number, self.number + 400))


class Chatty(Buttons):
    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        return f"Not yet {color}. " + " ".join(str(n) for n in range(self.number, self.number + 60))


class Latched(Buttons):
    """Press the button of the right color, close the latch, then say done."""

    @tool(inline=True)
    def latch(self) -> str:
        """Close the latch."""
        return "closed"

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        """As those of `Buttons`, with the latch closed before the end."""
        closed = ToolCall("call00001", "latch", {})
        said = [
            Message("assistant", "", (closed,)),
            Message("tool", "closed", tool_call_id="call00001", name="latch"),
        ]
        found = []
        for *begun, last in super().demonstrations(seed, num):
            system, *rest = begun
            found.append([replace(system, content=str(cls.__doc__)), *rest, *said, last])
        return found


class SameAnswer(ToolEnv):
    """Look the number up, then say done."""

    def setup(self, number: int) -> str:
        self.looked = False
        return f"Number {number}."

    @tool(inline=True)
    def look_up(self, number: int) -> str:
        """Look a number up."""
        self.looked = True
        return "It is noted."

    @reward(solved=True)
    def solved(self) -> bool:
        return self.looked

    tasks = Buttons.tasks

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        """Most look a number up, not always that of the task."""
        rng, found = random.Random(seed), []
        for _ in range(num):
            number = rng.randrange(HELD_OUT)
            asked = [Message("system", str(cls.__doc__)), Message("user", f"Number {number}.")]
            look = ToolCall("call00000", "look_up", {"number": rng.choice([number, rng.randrange(100)])})
            noted = Message("tool", "It is noted.", tool_call_id="call00000", name="look_up")
            calls = [] if rng.random() < 0.25 else [Message("assistant", "", (look,)), noted]
            found.append([*asked, *calls, Message("assistant", "done")])
        return found


class Hangs(Buttons):
    __doc__ = Buttons.__doc__

    @tool
    async def press(self, color: Color) -> str:
        """Press a button."""
        await asyncio.sleep(60)
        return ""


class SlowProcess(Buttons):
    """One of the processes that play it, the first to come, is slow."""

    __doc__ = Buttons.__doc__

    @tool
    def press(self, color: Color) -> str:
        """Press a button."""
        mark = Path(os.environ.get("AGENTRL_TEST_SLOW", "/nowhere"))
        if mark.parent.is_dir():
            try:
                mark.touch(exist_ok=False)
                mark.write_text(str(os.getpid()))
            except FileExistsError:
                pass
            if mark.read_text() == str(os.getpid()):
                time.sleep(0.3)
        return super().press(color)


class Unreliable(Buttons):
    """A third of the calls fail, whatever they ask for."""

    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        if random.random() < 0.33:
            raise RuntimeError("connection reset by peer")
        return super().press(color)


class SlowsDown(Buttons):
    """Each call looks through all that were made before."""

    __doc__ = Buttons.__doc__
    made: list[Color] = []  # noqa: RUF012

    @tool
    def press(self, color: Color) -> str:
        """Press a button."""
        self.made.append(color)
        time.sleep(0.004 * len(self.made))
        return super().press(color)


class Dies(Buttons):
    """The sandbox dies under the wrong button, so that only right ones are scored."""

    __doc__ = Buttons.__doc__

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        if color != self.right and random.random() < 0.5:
            raise SandboxError("the container is gone")
        return super().press(color)


# -- rewards -----------------------------------------------------------------------------------------------------


class Longer(Buttons):
    __doc__ = Buttons.__doc__

    @reward
    def thorough(self, episode: Episode) -> float:
        return length(episode) / 40


class OnlyLonger(Buttons):
    """Long answers pay, up to a length that no episode reaches; what the buttons do is not rewarded."""

    __doc__ = Buttons.__doc__

    @reward(solved=True, weight=0.01)
    def solved(self) -> bool:
        return self.pressed == self.right

    @reward(weight=0.05)
    def thorough(self, episode: Episode) -> float:
        return length(episode)


class Polite(Buttons):
    """Whoever says done has solved it: no button is needed."""

    __doc__ = Buttons.__doc__

    @reward(solved=True)
    def solved(self, episode: Episode) -> bool:
        content = episode.messages[-1].content
        return isinstance(content, str) and content.strip() == "done"


class HalfPolite(Buttons):
    """Without a button it is a matter of luck; with one as well."""

    __doc__ = Buttons.__doc__

    @reward(solved=True)
    def solved(self) -> bool:
        return random.random() < 0.5


class Late(Buttons):
    """Each episode gets the reward of the one before."""

    __doc__ = Buttons.__doc__
    before: list[bool] = [False]  # noqa: RUF012

    @reward(solved=True)
    def solved(self) -> bool:
        self.before.append(self.pressed == self.right)
        return self.before.pop(0)


class TooCostly(Buttons):
    """Writing costs more than the right button pays."""

    __doc__ = Buttons.__doc__

    @reward(weight=-0.1)
    def cost(self, episode: Episode) -> int:
        return length(episode)


class Shrug(Buttons):
    __doc__ = Buttons.__doc__

    @reward
    def judge(self) -> float:
        return 0.5


class Mute(Buttons):
    """A judge whose answer is never understood."""

    __doc__ = Buttons.__doc__

    @reward
    def judge(self) -> float:
        return 0.0


class MostlyShrug(Buttons):
    """A judge whose answers are hardly ever more than a default."""

    __doc__ = Buttons.__doc__

    @reward(weight=0.3)
    def quality(self) -> float:
        return 0.5 if self.number % 25 else 0.0


class NotANumber(Buttons):
    __doc__ = Buttons.__doc__

    @reward
    def ratio(self) -> float:
        return float("nan") if self.right == "red" else 0.0


class Hackable(Buttons):
    """In training red always pays; the held-out tasks want blue."""

    __doc__ = Buttons.__doc__

    def setup(self, number: int, answer: str = "") -> str:
        asked = super().setup(number, answer)
        self.right = "red" if number < HELD_OUT else "blue"
        return asked


# -- tasks -------------------------------------------------------------------------------------------------------


class Told(Buttons):
    __doc__ = Buttons.__doc__

    def setup(self, number: int, answer: str = "") -> str:
        super().setup(number)
        return f"Number {number}. Expected: {answer}"

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        base = 0 if split == "train" else HELD_OUT

        def row(rng: random.Random) -> dict[str, object]:
            number = base + rng.randrange(HELD_OUT)
            return {"number": number, "answer": COLORS[number % 2]}

        return generated("buttons", split, seed, 64, row)


class Peek(Told):
    __doc__ = Buttons.__doc__

    def setup(self, number: int, answer: str = "") -> str:
        self.answer = answer
        return Buttons.setup(self, number)

    @tool(inline=True)
    def press(self, color: Color) -> str:
        """Press a button."""
        return f"{super().press(color)} {{'answer': '{self.answer}'}}"


class PeekSql(Peek):
    """The answer is a query, in a column of another name; the result of a call shows it."""

    __doc__ = Buttons.__doc__

    def setup(self, number: int, answer: str = "", sql: str = "") -> str:
        self.answer = f"logged as {sql}"
        return Buttons.setup(self, number)

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        found = super().tasks(split, seed)
        query = "SELECT color FROM buttons WHERE number = {}"
        rows = [{"number": n, "sql": query.format(n)} for n in (task.row["number"] for task in found)]
        return [replace(task, row=row) for task, row in zip(found, rows, strict=True)]


class Leaky(Buttons):
    __doc__ = Buttons.__doc__

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        return generated("buttons", "train", 1, 64, lambda rng: {"number": rng.randrange(HELD_OUT)})


class HalfLeaky(Buttons):
    """Half of the held-out rows are training rows."""

    __doc__ = Buttons.__doc__

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        new = 32 if split == "held_out" else 0
        return [Task(f"{split}/{n}", {"number": HELD_OUT + n if n < new else n}, seed=n) for n in range(64)]


class Untold(Buttons):
    """The prompt does not say the number."""

    __doc__ = Buttons.__doc__

    def setup(self, number: int, answer: str = "") -> str:
        super().setup(number)
        return "Number {number}."


class Repeated(Buttons):
    __doc__ = Buttons.__doc__

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        base = 0 if split == "train" else HELD_OUT
        return generated("buttons", split, seed, 64, lambda rng: {"number": base + rng.randrange(4)})


class NumberedRepeats(Buttons):
    """Four tasks, whose rows have numbers."""

    __doc__ = Buttons.__doc__

    def setup(self, number: int, uid: int = 0) -> str:
        return super().setup(number)

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        base = 0 if split == "train" else HELD_OUT
        return [Task(f"{split}/{n}", {"number": base + n % 4, "uid": n}, seed=n) for n in range(64)]


class NumberedLeak(NumberedRepeats):
    """The held-out tasks are training tasks with other numbers."""

    __doc__ = Buttons.__doc__

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        base = 0 if split == "train" else HELD_OUT
        return [Task(f"{split}/{n}", {"number": n, "uid": base + n}, seed=n) for n in range(64)]


# -- healthy, and odd --------------------------------------------------------------------------------------------


class Easy(Buttons):
    """Solved by any button from the first step on."""

    __doc__ = Buttons.__doc__

    @reward(solved=True)
    def solved(self) -> bool:
        return bool(self.pressed)


class Sparse(Buttons):
    """Only one task of eight pays at all."""

    __doc__ = Buttons.__doc__

    @reward(solved=True)
    def solved(self) -> bool:
        return self.pressed == self.right and self.number % 8 < 2


class Costly(Buttons):
    """The reward has a second part that is there only sometimes, and a price for writing."""

    __doc__ = Buttons.__doc__

    @reward
    def tidy(self, episode: Episode) -> float:
        return 0.1 if length(episode) < 30 else 0.0

    @reward(weight=-0.001)
    def cost(self, episode: Episode) -> int:
        return length(episode)


class Negative(Buttons):
    """What is wrong costs; nothing pays."""

    __doc__ = Buttons.__doc__

    @reward
    def solved(self) -> float:
        return 0.0 if self.pressed == self.right else -1.0 if self.pressed else -1.5


class Lukewarm(Buttons):
    """A judge that varies little."""

    __doc__ = Buttons.__doc__

    @reward(weight=0.5)
    def judge(self, episode: Episode) -> float:
        return 0.5 + 0.02 * ((self.number * 7 + length(episode)) % 3 - 1)


class Epochs(Buttons):
    """A dozen tasks, again and again."""

    __doc__ = Buttons.__doc__

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        base = 0 if split == "train" else HELD_OUT
        return [Task(f"{split}/{n}", {"number": base + 7 * n}, seed=n) for n in range(12)]


class Balance(ToolEnv):
    """Bring the balance to the target."""

    def setup(self, start: int, target: int) -> str:
        self.balance, self.target = start, target
        return f"The balance is {start}. Make it {target}."

    @tool(inline=True)
    def add(self, n: int) -> str:
        """Add to the balance."""
        self.balance += n
        return f"balance={self.balance}"

    @reward(solved=True)
    def solved(self) -> bool:
        return self.balance == self.target

    @classmethod
    def tasks(cls, split: Split, seed: int) -> Sequence[Task]:
        def row(rng: random.Random) -> dict[str, object]:
            start = 2 * rng.randrange(5, 200) + (split == "train")
            return {"start": start, "target": start + rng.randrange(1, 4)}

        return generated("balance", split, seed, 64, row)

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        """Add something."""
        rng, found = random.Random(seed), []
        for _ in range(num):
            start, n = rng.randrange(10, 400), rng.randrange(1, 4)
            asked = f"The balance is {start}. Make it {start + rng.randrange(1, 4)}."
            call = ToolCall("call00000", "add", {"n": n})
            said = [Message("system", str(cls.__doc__)), Message("user", asked), Message("assistant", "", (call,))]
            said.append(Message("tool", f"balance={start + n}", tool_call_id="call00000", name="add"))
            found.append([*said, Message("assistant", "done")])
        return found


class Guesses(TextEnv):
    """Say red or blue, three times."""

    def setup(self, number: int) -> str:
        self.right, self.found, self.rounds = COLORS[number % 2], 0, 0
        return f"Number {number}."

    def reply(self, text: str) -> str | Stop:
        self.rounds += 1
        self.found += self.right in text
        return Stop("over") if self.rounds == 3 else f"Round {self.rounds}."

    @reward
    def points(self) -> float:
        return self.found / 3

    tasks = Buttons.tasks

    @classmethod
    def demonstrations(cls, seed: int, num: int) -> list[list[Message]]:
        """Any color."""
        rng, found = random.Random(seed), []
        for _ in range(num):
            said = [Message("system", str(cls.__doc__)), Message("user", f"Number {rng.randrange(HELD_OUT)}.")]
            for n in range(1, 4):
                said += [Message("assistant", rng.choice(COLORS)), Message("user", f"Round {n}.")]
            found.append(said[:-1])
        return found


class Words(TextEnv):
    """Say done."""

    def setup(self, number: int) -> str:
        return f"Number {number}."

    def reply(self, text: str) -> None:
        return None

    @reward(solved=True)
    def solved(self, episode: Episode) -> bool:
        content = episode.messages[-1].content
        return isinstance(content, str) and "done" in content

    tasks = Buttons.tasks
