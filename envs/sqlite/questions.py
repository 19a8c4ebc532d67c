"""Questions with their SQL. Each is answered by one SELECT; `ordered` ones in that very order of rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.envs.sqlite.database import CATEGORIES, CITIES, STATUSES, YEARS


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and one SELECT that answers it."""

    text: str
    sql: str


def draw(rng: random.Random) -> Question:
    """A random question."""
    return rng.choice(_MAKERS)(rng)


def _customers_in(rng: random.Random) -> Question:
    city, year = rng.choice(CITIES), rng.choice(YEARS)
    return Question(
        f"How many customers from {city} joined in {year} or later?",
        f"SELECT COUNT(*) FROM customers WHERE city = '{city}' AND joined_year >= {year}",
    )


def _expensive(rng: random.Random) -> Question:
    category, price = rng.choice(CATEGORIES), rng.randint(10, 80)
    return Question(
        f"List the names of {category} products that cost more than {price}, alphabetically.",
        f"SELECT name FROM products WHERE category = '{category}' AND price > {price} ORDER BY name",
    )


def _average(rng: random.Random) -> Question:
    category = rng.choice(CATEGORIES)
    return Question(
        f"What is the average price of {category} products?",
        f"SELECT AVG(price) FROM products WHERE category = '{category}'",
    )


def _orders_of_city(rng: random.Random) -> Question:
    city, status = rng.choice(CITIES), rng.choice(STATUSES)
    return Question(
        f"How many {status} orders were placed by customers from {city}?",
        "SELECT COUNT(*) FROM orders o JOIN customers c ON c.id = o.customer_id "
        f"WHERE c.city = '{city}' AND o.status = '{status}'",
    )


def _revenue(rng: random.Random) -> Question:
    category, year = rng.choice(CATEGORIES), rng.choice(YEARS)
    return Question(
        f"What is the total of price times quantity for {category} products in orders of {year}? "
        "Say 0 where there are none.",
        "SELECT COALESCE(SUM(p.price * i.quantity), 0) FROM items i JOIN products p ON p.id = i.product_id "
        f"JOIN orders o ON o.id = i.order_id WHERE p.category = '{category}' AND o.year = {year}",
    )


def _top_product(rng: random.Random) -> Question:
    year, count = rng.choice(YEARS), rng.randint(1, 4)
    return Question(
        f"Which {count} products sold the largest quantity in orders of {year}? Give name and quantity, "
        "largest first, equal ones by name.",
        "SELECT p.name, SUM(i.quantity) FROM items i JOIN products p ON p.id = i.product_id "
        f"JOIN orders o ON o.id = i.order_id WHERE o.year = {year} GROUP BY p.id "
        f"ORDER BY SUM(i.quantity) DESC, p.name LIMIT {count}",
    )


def _never_ordered(rng: random.Random) -> Question:
    city = rng.choice(CITIES)
    return Question(
        f"Which customers from {city} never placed an order? Give their names.",
        f"SELECT name FROM customers WHERE city = '{city}' AND id NOT IN (SELECT customer_id FROM orders)",
    )


def _per_category(rng: random.Random) -> Question:
    price = rng.randint(5, 60)
    return Question(
        f"For each category, how many products cost at least {price}? Leave out categories without any.",
        f"SELECT category, COUNT(*) FROM products WHERE price >= {price} GROUP BY category",
    )


def _frequent(rng: random.Random) -> Question:
    count, status = rng.randint(1, 3), rng.choice(STATUSES)
    return Question(
        f"Which customers have more than {count} {status} orders? Give name and number of such orders.",
        "SELECT c.name, COUNT(*) FROM customers c JOIN orders o ON o.customer_id = c.id "
        f"WHERE o.status = '{status}' GROUP BY c.id HAVING COUNT(*) > {count}",
    )


_MAKERS: tuple[Callable[[random.Random], Question], ...] = (
    _customers_in,
    _expensive,
    _average,
    _orders_of_city,
    _revenue,
    _top_product,
    _never_ordered,
    _per_category,
    _frequent,
)
