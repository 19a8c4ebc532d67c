"""Doors that open with a color: which one, only a hint tells. For `bench/self_distill.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl import Stop, Task, ToolEnv, reward, tool
from agentrl.testing import ScriptedPolicy, call

COLORS = ("red", "blue", "green", "black", "white", "pink", "gold", "gray")


class Doors(ToolEnv):
    """Open the door with its color."""

    @classmethod
    def tasks(cls, split: str, seed: int, size: int = 8, reading: str = "") -> Sequence[Task]:
        """Doors whose colors never change.

        With `reading`, half of the training prompts and all held-out ones name a random color, which can only be
        read there. Behind the other prompts is one of the two colors that the door may have (`guess`), or always
        the wrong one (`certain`).
        """
        rng = random.Random(f"{split}/{seed}")
        tasks = []
        for n in range(size):
            door, named = n % 8, bool(reading) and (split == "held_out" or rng.random() < 0.5)
            own = COLORS[(3 * door + 1) % 8], COLORS[(3 * door + 4) % 8]
            behind = {"guess": own, "certain": own[1:]}.get(reading, own[:1])
            color = rng.choice(COLORS if named else behind)
            tasks.append(Task(f"{split}-{n}", {"door": door, "color": color, "named": named}))
        return tasks

    def setup(self, door: int, color: str, named: bool) -> str:
        self.color, self.right = color, False
        return f"Open door {door}" + (f"\n\n{self.teacher_hint()}" if named else "")

    def teacher_hint(self) -> str:
        return f"The color is {self.color}"

    @tool
    def open_door(self, color: str) -> Stop:
        """Open the door.

        Args:
            color: its color.
        """
        self.right = color == self.color
        return Stop("open" if self.right else "closed")

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        return ScriptedPolicy([call("open_door", color=task.row["color"])])

    @reward
    def opened(self) -> bool:
        return self.right
