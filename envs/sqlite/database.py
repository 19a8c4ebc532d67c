"""A small shop database made from a seed, and a connection on which only bounded reading is possible."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined_year INTEGER);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), year INTEGER,
                     status TEXT);
CREATE TABLE items (order_id INTEGER REFERENCES orders(id), product_id INTEGER REFERENCES products(id),
                    quantity INTEGER);
"""
CITIES = ("Arden", "Bellow", "Corvin", "Dunmere", "Eastwick", "Farrow")
CATEGORIES = ("garden", "kitchen", "office", "outdoor", "toys")
STATUSES = ("delivered", "pending", "returned")
YEARS = (2021, 2022, 2023, 2024)
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo", "Mia", "Nils")
_SURNAMES = ("Ash", "Birch", "Cole", "Drake", "Elm", "Frost", "Gale", "Hart")
_THINGS = ("lamp", "chair", "kettle", "spade", "puzzle", "tent", "desk", "bowl", "rope", "clock", "kite", "mug")

MAX_STEPS = 20_000
MAX_CPU_S = 1.0
"""CPU time of one query: a step may compare or store thousands of characters. The references need milliseconds."""
MAX_ROWS = 500
MAX_BYTES = 1_000_000
"""Maximum size of an answer: its rows are held in memory, and a query can repeat a value in every column."""
_STEPS_BETWEEN_CHECKS = 100


class QueryError(Exception):
    """The SQL was refused, failed, or took too long."""


@lru_cache(maxsize=256)
def _rows(seed: int) -> Mapping[str, Sequence[tuple[object, ...]]]:
    """The rows of each table; the episodes of a group share them."""
    rng = random.Random(f"sqlite/{seed}")
    customers = [
        (i, f"{rng.choice(_NAMES)} {rng.choice(_SURNAMES)} {i}", rng.choice(CITIES), rng.choice(YEARS))
        for i in range(1, rng.randint(15, 30))
    ]
    products = [
        (i, f"{rng.choice(_THINGS)} {i}", rng.choice(CATEGORIES), rng.randint(2, 99))
        for i in range(1, rng.randint(12, 25))
    ]
    orders = [
        (i, rng.choice(customers)[0], rng.choice(YEARS), rng.choices(STATUSES, (6, 2, 1))[0])
        for i in range(1, rng.randint(40, 80))
    ]
    items = [
        (order[0], product[0], rng.randint(1, 5))
        for order in orders
        for product in rng.sample(products, rng.randint(1, 3))
    ]
    return {"customers": customers, "products": products, "orders": orders, "items": items}


def build(seed: int) -> sqlite3.Connection:
    """The database of `seed`, filled; later only reading is possible on it, and not for long."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.executescript(SCHEMA)
    for table, rows in _rows(seed).items():
        places = ", ".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
    connection.commit()
    connection.set_authorizer(_authorize)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4_000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, 50)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 5_000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100)
    return connection


def _authorize(action: int, name: str | None, *_: str | None) -> int:
    reading = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    safe = action == sqlite3.SQLITE_FUNCTION and name != "load_extension"
    return sqlite3.SQLITE_OK if action in reading or safe else sqlite3.SQLITE_DENY


def run(connection: sqlite3.Connection, sql: str) -> tuple[list[str], list[tuple[object, ...]]]:
    """Column names and at most `MAX_ROWS` rows of one SELECT.

    Raises:
        QueryError: SQLite refuses it, it fails, it takes more than `MAX_STEPS` hundreds of virtual steps or
            `MAX_CPU_S`, or its answer has more than `MAX_BYTES`.
    """
    steps, until_s = 0, time.thread_time() + MAX_CPU_S

    def too_long() -> int:
        nonlocal steps
        steps += 1
        return int(steps > MAX_STEPS or time.thread_time() > until_s)

    connection.set_progress_handler(too_long, _STEPS_BETWEEN_CHECKS)
    try:
        cursor = connection.execute(sql)
        rows = _bounded(cursor)
        names = [column[0] for column in cursor.description or ()]
        cursor.close()
    except sqlite3.Error as e:
        text = "it takes too long" if "interrupted" in str(e) else str(e)
        raise QueryError(text) from None
    except (ValueError, UnicodeError, sqlite3.Warning) as e:
        raise QueryError(str(e)) from None
    finally:
        connection.set_progress_handler(None, 0)
    return names, rows


def _bounded(cursor: sqlite3.Cursor) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    size = 0
    for row in cursor:
        size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if size > MAX_BYTES:
            raise QueryError("the answer is too large")
        rows.append(row)
        if len(rows) == MAX_ROWS:
            break
    return rows


def as_table(names: list[str], rows: list[tuple[object, ...]], limit: int = 20) -> str:
    """Rows as text, one a line; says how many there are beyond `limit`."""
    lines = [
        " | ".join(names),
        *[" | ".join("NULL" if v is None else str(v) for v in row) for row in rows[:limit]],
    ]
    if len(rows) > limit:
        lines.append(f"({len(rows) - limit} more rows)")
    return "\n".join(lines)
