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
    def tasks(cls, split: str, seed: int, size: int = 8, reading: bool = False) -> Sequence[Task]:
        """Doors whose colors never change; with `reading`, colors drawn anew for each task, which half of the
        training prompts and all of the held-out ones name: only reading helps."""
        rng = random.Random(f"{split}/{seed}")
        return [
            Task(
                f"{split}-{n}",
                {
                    "door": n % 8,
                    "color": rng.choice(COLORS) if reading else COLORS[(3 * n + 1) % 8],
                    "named": reading and (split == "held_out" or n % 2 == 0),
                },
            )
            for n in range(size)
        ]

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
