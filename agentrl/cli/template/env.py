"""A shop's stock: an environment to start from. Change everything."""

import random
from collections.abc import Sequence

from agentrl import Episode, Message, Task, ToolEnv, reward, tool
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.read import final_answer
from agentrl.env.tasks import Split, generated

ITEMS = ("apples", "bananas", "cherries", "dates", "figs", "grapes", "lemons", "melons")


class Shop(ToolEnv):
    """Look the stock up, then answer with the number."""  # the system prompt

    def setup(self, stock: dict[str, int], wanted: list[str]) -> str:
        """Takes one data row as keyword arguments; returns the user message."""
        self.store, self.wanted = stock, wanted
        return f"How many {' and '.join(wanted)} are there?"

    @tool
    def stock(self, item: str) -> str:
        """Say how many of an item are there."""
        if item not in self.store:
            raise ValueError(f"there is no item {item!r}; items: {', '.join(self.store)}")
        return str(self.store[item])

    @reward(solved=True)
    def solved(self, episode: Episode) -> bool:
        return final_answer(episode).strip() == str(sum(self.store[item] for item in self.wanted))

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, num_wanted: int = 1) -> Sequence[Task]:
        """Tasks by split and seed. Name a JSON-lines file under `data:` instead if you have rows."""

        def row(rng: random.Random) -> dict[str, object]:
            stock = {item: rng.randint(0, 99) for item in ITEMS}
            return {"stock": stock, "wanted": rng.sample(ITEMS, num_wanted)}

        return generated("shop", split, seed, 100_000 if split == "train" else 500, row)

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """A policy that solves a task; `agentrl check` and tests play it."""
        stock, wanted = task.row["stock"], task.row["wanted"]
        return ScriptedPolicy([*(call("stock", item=item) for item in wanted), str(sum(stock[i] for i in wanted))])

    @classmethod
    def demonstrations(cls, seed: int, num: int, *, quality: float = 0.5) -> list[list[Message]]:
        """Conversations for the cold start, a share of `quality` right: RL training does the rest."""
        rng, found = random.Random(seed), []
        for task in cls.tasks("train", seed)[:num]:
            item = task.row["wanted"][0]
            seen = item if rng.random() < quality else rng.choice(ITEMS)
            number = str(task.row["stock"][seen])
            asked = call("stock", item=seen)
            found.append(
                [
                    Message("system", cls().system()),
                    Message("user", f"How many {item} are there?"),
                    asked,
                    Message("tool", number, tool_call_id=asked.tool_calls[0].id, name="stock"),
                    Message("assistant", number),
                ]
            )
        return found
