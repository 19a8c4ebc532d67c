"""The environment: search, read, answer with the name or the number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from agentrl.env import ToolEnv, reward, tool
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.read import final_answer
from agentrl.env.tasks import Split, generated
from agentrl.envs.search.world import world
from agentrl.tools.bm25 import words
from agentrl.types import Episode, Task

_NUM_TRAIN_WORLDS = 50


class Search(ToolEnv):
    """Answer the question with the articles at hand. Reply with the name or the number only."""

    def setup(self, corpus: int, fact: int) -> str:
        made = world(corpus)
        self.corpus, self.fact = made.corpus, made.facts[fact]
        return self.fact.question

    @tool(parallel=True)
    def search(self, query: str, num: Annotated[int, Field(ge=1, le=10)] = 3) -> str:
        """Titles and first words of the articles that fit best."""
        return self.corpus.find(query, num)

    @tool(parallel=True)
    def read(self, title: str) -> str:
        """The whole article of that title."""
        return self.corpus.article(title)

    @reward(solved=True)
    def solved(self, episode: Episode) -> bool:
        return words(final_answer(episode)) == words(self.fact.answer)

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """Questions on 50 worlds to train and on 10 others that are held out."""

        def row(rng: random.Random) -> dict[str, object]:
            corpus = rng.randrange(_NUM_TRAIN_WORLDS)
            if split == "held_out":
                corpus = _NUM_TRAIN_WORLDS + rng.randrange(10)
            return {"corpus": corpus, "fact": rng.randrange(len(world(corpus).facts))}

        return generated(
            "search", split, seed, (100_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Searches for and reads what leads to the answer."""
        fact = world(task.row["corpus"]).facts[task.row["fact"]]
        way = [call("search", query=fact.way[0]), *[call("read", title=title) for title in fact.way]]
        return ScriptedPolicy([*way, fact.answer])
