import contextlib

import pytest

from agentrl.envs.sqlite.database import QueryError, as_table, build, run
from agentrl.envs.sqlite.env import Sqlite
from agentrl.testing.policy import ScriptedPolicy, call, play
from agentrl.types import Task

COUNT = {"question": "How many?", "sql": "SELECT COUNT(*) FROM orders", "database": 7}


async def submitted(sql: str, gold: str = COUNT["sql"]) -> float:
    task = Task("t", COUNT | {"sql": gold})
    episode = await play(Sqlite(), task, ScriptedPolicy([call("submit", sql=sql)]))
    return episode.rewards["solved"]


async def test_another_query_with_the_same_rows_counts_and_a_constant_does_not():
    assert await submitted("SELECT COUNT(id) AS n FROM orders WHERE 1") == 1
    with contextlib.closing(build(7)) as connection:
        seen = run(connection, COUNT["sql"])[1][0][0]
    assert await submitted(f"SELECT {seen}") == 0
    assert await submitted("SELECT nothing FROM nowhere") == 0
    assert await submitted("") == 0


async def test_order_counts_only_where_it_is_asked_for():
    plain, ordered = "SELECT name FROM products", "SELECT name FROM products ORDER BY name DESC"
    assert await submitted(ordered, gold=plain) == 1
    assert await submitted(plain, gold=ordered) == 0
    assert await submitted(ordered, gold=ordered) == 1


BOMB = (
    "WITH RECURSIVE t(i, z) AS (SELECT 1, zeroblob(3900) UNION ALL SELECT i + 1, z FROM t LIMIT 500) "
    "SELECT {} FROM t"
)
"""One value in many columns and rows: little work for SQLite, and gigabytes for whoever fetches them."""


SLOW = f"SELECT SUM(('{'a' * 1500}' || name) LIKE '{'%a' * 700}b') FROM customers, orders, items"
"""Few steps, each of which compares thousands of characters: 15 seconds in all."""


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("DELETE FROM orders", "not authorized"),
        ("PRAGMA table_info(orders)", "not authorized"),
        ("ATTACH 'x.db' AS x", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n", "too long"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("SELECT nme FROM customers", "no such column: nme"),
        ("SELECT\x00 1", "null character"),
        ("x" * 6000, "too large|too big"),
        (BOMB.format("z" + ", z" * 49), "the answer is too large"),
        (BOMB.format("z" + ", z" * 1000), "too many"),
        (SLOW, "takes too long"),
    ],
)
def test_only_bounded_reading_is_possible(sql, text):
    connection = build(1)
    with pytest.raises(QueryError, match=text):
        run(connection, sql)
    assert run(connection, "SELECT COUNT(*) > 0 FROM orders")[1] == [(1,)]
    connection.close()


def test_long_tables_are_cut_and_say_so():
    table = as_table(["a", "b"], [(i, None) for i in range(25)])
    assert table.splitlines()[:2] == ["a | b", "0 | NULL"]
    assert table.splitlines()[-1] == "(5 more rows)"
