"""FrozenLake, Taxi and CliffWalking: one tool `act`, solved when the game's goal is reached."""

from __future__ import annotations

import copy
import hashlib
import random
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import gymnasium
from gymnasium.utils import seeding

from agentrl.env.gym import GymnasiumEnv
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.tasks import GeneratedTasks, Split, generated
from agentrl.env.toolenv.declare import ToolResult, reward
from agentrl.types import Task


class _ToyText(GymnasiumEnv):
    """A game with a known transition table; its own rewards are left out, reaching the goal counts."""

    reward_scale = 0.0
    view = "board.js"

    def make_game(self, **options: Any) -> gymnasium.Env[Any, object]:
        """Make a game. Games with the same options share one transition table, which is slow to build and never
        changes."""
        known = _made(type(self), self.env_id, repr(sorted({**self.make_options, **options}.items())))
        if not known:
            known.append(super().make_game(**options))
        table: object = known[0].unwrapped.P  # type: ignore[attr-defined]
        return copy.deepcopy(known[0], {id(table): table})

    @reward(solved=True)
    def solved(self) -> bool:
        return self.goal

    def setup(self) -> str:
        self.goal = False
        return super().setup()

    def act(self, action: Any) -> ToolResult:
        """Play one action and note whether it reached the goal."""
        result = super().act(action)
        self.goal = self.end[0] and self.reached_goal()
        return result

    def reached_goal(self) -> bool:
        """Whether the end of the game is its goal; asked when the game terminated."""
        return True

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int = 10_000) -> Sequence[Task]:
        """Games by seed."""
        return generated(cls.env_id.lower(), split, seed, size, lambda rng: cls._row(rng, split))

    @classmethod
    def _row(cls, rng: random.Random, split: Split) -> dict[str, Any]:
        return {}

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """The shortest way through the transition table of the same game."""
        env = cls()
        env.task = task
        env.setup(**task.row)
        game: Any = env.game.unwrapped
        actions = shortest_way(game.P, int(game.s), cls.is_goal)
        return ScriptedPolicy([call("act", action=env.actions[a]) for a in actions])

    @classmethod
    def is_goal(cls, step_reward: float) -> bool:
        """Whether the game's reward of a terminating step is that of the goal."""
        return True


@lru_cache(maxsize=64)
def _made(kind: type[_ToyText], env_id: str, options: str) -> list[gymnasium.Env[Any, object]]:
    """A place for a game that was made and never played."""
    return []


def _is_held_out(game: str) -> bool:
    return int.from_bytes(hashlib.blake2b(game.encode(), digest_size=2).digest()) % 10 == 0


def shortest_way(table: Any, start: int, is_goal: Any) -> list[int]:
    """Breadth-first search over `table[state][action] = [(p, next, reward, terminated)]` of a fixed game."""
    queue, seen = deque([(start, list[int]())]), {start}
    while queue:
        state, way = queue.popleft()
        for action, [(_, following, step_reward, terminated)] in table[state].items():
            if terminated and is_goal(float(step_reward)):
                return [*way, action]
            if not terminated and following not in seen:
                seen.add(following)
                queue.append((following, [*way, action]))
    raise ValueError("the goal cannot be reached")


def random_lake(size: int, seed: int) -> list[str]:
    """The map that Gymnasium's `generate_random_map` makes from `seed`, found several times faster."""
    numbers, _ = seeding.np_random(seed)
    while True:
        cells = numbers.choice(["F", "H"], (size, size), p=[0.8, 1 - 0.8]).tolist()
        cells[0][0], cells[-1][-1] = "S", "G"
        lake = ["".join(row) for row in cells]
        if goal_in_reach(lake):
            return lake


def goal_in_reach(lake: Sequence[str]) -> bool:
    """Whether a way leads from the first cell of a map to the last one."""
    free = int("0".join(lake).translate(_FREE), 2)  # a bit for each cell, and none set between two rows
    down, start = len(lake[0]) + 1, 1 << (free.bit_length() - 1)
    reached, before = 1, 0
    while reached != before:
        before = reached
        reached |= (reached << 1 | reached >> 1 | reached << down | reached >> down) & free
    return bool(reached & start)


_FREE = str.maketrans("SFGH", "1110")


class FrozenLake(_ToyText):
    """Walk from S to G over the frozen cells F with act. H is a hole. The cell you stand on is marked."""

    env_id = "FrozenLake-v1"
    actions = ("left", "down", "right", "up")
    make_options = {"is_slippery": False}  # noqa: RUF012

    def setup(self, lake: list[str]) -> str:  # type: ignore[override]  # one map a task
        self.game = self.make_game(desc=lake)
        return super().setup()

    def describe(self, observation: Any) -> str:
        """The lake as text, the cell one stands on in square brackets."""
        lake = [[c.decode() for c in row] for row in self.game.unwrapped.desc]  # type: ignore[attr-defined]
        row, column = divmod(int(observation), len(lake[0]))
        lake[row][column] = f"[{lake[row][column]}]"
        return "\n".join("".join(f"{c:^3}" for c in line).rstrip() for line in lake)

    def reached_goal(self) -> bool:
        game: Any = self.game.unwrapped
        return bool(game.desc.flat[int(game.s)] == b"G")

    @classmethod
    def is_goal(cls, step_reward: float) -> bool:
        return step_reward > 0

    @classmethod
    def _row(cls, rng: random.Random, split: Split) -> dict[str, Any]:
        """A map; its hash decides the split, because small maps repeat."""
        while True:
            lake = random_lake(rng.randint(4, 7), rng.getrandbits(31))
            if _is_held_out("".join(lake)) == (split == "held_out"):
                return {"lake": lake}


class Taxi(_ToyText):
    """Drive the taxi with act: pick up the passenger, drop the passenger off at the destination."""

    env_id = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
    actions = ("south", "north", "east", "west", "pickup", "dropoff")

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int = 10_000) -> Sequence[Task]:
        """Games by seed; there are 300 starts, and a hash of the start decides the split."""
        game = gymnasium.make(cls.env_id).unwrapped

        def make(index: int) -> Task:
            rng = random.Random(f"{cls.env_id.lower()}/{split}/{seed}/{index}")
            while True:
                start, _ = game.reset(seed=(game_seed := rng.getrandbits(31)))
                if _is_held_out(str(start)) == (split == "held_out"):
                    return Task(f"{cls.env_id.lower()}-{split}-{seed}-{index}", {}, game_seed)

        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a whole number of at least 1, got {size!r}")
        return GeneratedTasks(make, size)

    def describe(self, observation: Any) -> str:
        """The places in words, under a map of walls."""
        game: Any = self.game.unwrapped
        row, column, passenger, destination = game.decode(int(observation))
        places = "RGYB"
        where = "in the taxi" if passenger == 4 else f"at {places[passenger]}"
        cells = "\n".join(b"".join(line).decode() for line in game.desc)
        return (
            f"{cells}\nTaxi: row {row}, column {column}. Passenger: {where}. Destination: {places[destination]}."
        )


class CliffWalking(_ToyText):
    """Walk with act from x to T along the cliff C without stepping into it; falling puts you back to the start."""

    env_id = "CliffWalking-v1"
    actions = ("up", "right", "down", "left")
