"""The environment: look at the tables, try queries, hand in one SELECT."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sqlite3
from collections.abc import Sequence

from agentrl.env import Stop, ToolEnv, reward, tool
from agentrl.env.play import ScriptedPolicy, call
from agentrl.env.tasks import Split, generated
from agentrl.envs.sqlite.database import SCHEMA, QueryError, as_table, build, run
from agentrl.envs.sqlite.questions import draw
from agentrl.types import Task

Rows = list[tuple[object, ...]]


class Sqlite(ToolEnv):
    """Answer the question about the database with one SQLite SELECT. Try queries first, then call submit."""

    def setup(self, question: str, sql: str, database: int) -> str:
        self.gold, self.submitted, self.database = sql, "", database
        self.connection = build(database)
        return question

    def teardown(self) -> None:
        self.connection.close()

    @tool
    def schema(self) -> str:
        """Show the tables."""
        return SCHEMA.strip()

    @tool
    def query(self, sql: str) -> str:
        """Run a SELECT and see up to 20 rows."""
        return as_table(*run(self.connection, sql))

    @tool
    def submit(self, sql: str) -> Stop:
        """Hand in the SELECT whose rows are the answer. Ends the task."""
        self.submitted = sql
        return Stop("Submitted.")

    @reward(solved=True)
    def solved(self) -> bool:
        """The same rows as the reference on this database and on another one with the same tables."""
        if not self.submitted:
            return False
        with contextlib.closing(build(self.database + 1)) as hidden:
            return all(same_rows(c, self.gold, self.submitted) for c in (self.connection, hidden))

    @classmethod
    def tasks(cls, split: Split = "train", seed: int = 0, *, size: int | None = None) -> Sequence[Task]:
        """Questions on databases; a hash of the question decides the split."""

        def row(rng: random.Random) -> dict[str, object]:
            while True:
                question = draw(rng)
                digest = hashlib.blake2b(question.text.encode(), digest_size=2).digest()
                if (int.from_bytes(digest) % 10 == 0) == (split == "held_out"):
                    return {"question": question.text, "sql": question.sql, "database": rng.getrandbits(30)}

        return generated(
            "sqlite", split, seed, (1_000_000 if split == "train" else 1_000) if size is None else size, row
        )

    @classmethod
    def oracle(cls, task: Task) -> ScriptedPolicy:
        """Tries the reference query and hands it in."""
        sql = task.row["sql"]
        return ScriptedPolicy([call("schema"), call("query", sql=sql), call("submit", sql=sql)])


def same_rows(connection: sqlite3.Connection, gold: str, submitted: str) -> bool:
    """Whether both return the same rows; their order counts where the reference orders them."""
    _, wanted = run(connection, gold)
    try:
        _, found = run(connection, submitted)
    except QueryError:
        return False
    a, b = _plain(wanted), _plain(found)
    return a == b if "ORDER BY" in gold else sorted(a, key=repr) == sorted(b, key=repr)


def _plain(rows: Rows) -> Rows:
    return [tuple(round(float(v), 6) if isinstance(v, int | float) else v for v in row) for row in rows]
