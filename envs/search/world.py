"""A made-up world from a seed: countries, cities, people, companies and books, each with a short article."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from agentrl.tools.search import Corpus

_STARTS = (
    "Ba",
    "Cor",
    "Del",
    "Fen",
    "Gor",
    "Hal",
    "Jun",
    "Kel",
    "Lor",
    "Mar",
    "Nor",
    "Pel",
    "Quin",
    "Ros",
    "Tal",
    "Ver",
)
_MIDDLES = ("", "a", "i", "o", "an", "er", "il", "on", "ur")
_ENDS = ("bek", "dan", "fel", "gard", "hem", "lin", "mont", "nia", "rex", "sby", "tov", "vale", "wick", "zan")
_JOBS = ("architect", "botanist", "chemist", "engineer", "painter", "sailor")
_PRODUCTS = ("bicycles", "clocks", "glass", "lamps", "paper", "pianos", "ropes", "tea")


@dataclass(frozen=True, slots=True)
class Fact:
    """A question, its answer, and the titles that lead from one to the other."""

    question: str
    answer: str
    way: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """The articles, and what there is to ask."""

    corpus: Corpus
    facts: tuple[Fact, ...]


@functools.lru_cache(maxsize=64)
def world(seed: int) -> World:
    """The world of `seed`; the same one whenever it is asked for."""
    rng = random.Random(f"search/{seed}")
    name = _names(rng)
    countries = [name() for _ in range(8)]
    cities = {name(): rng.choice(countries) for _ in range(40)}
    people = {f"{name()} {name()}": (rng.choice(list(cities)), rng.randint(1850, 1990)) for _ in range(80)}
    companies = {f"{name()} Works": (rng.choice(list(people)), rng.choice(list(cities))) for _ in range(50)}
    books = {f"The {name()} Letters": rng.choice(list(people)) for _ in range(50)}
    articles = {c: f"{c} is a country. Its language is {name()}ish." for c in countries}
    for city, country in cities.items():
        articles[city] = f"{city} is a city in {country}. About {rng.randint(10, 900)} thousand people live there."
    for person, (city, year) in people.items():
        articles[person] = f"{person} was a {rng.choice(_JOBS)}, born in {city} in {year}."
    for company, (founder, city) in companies.items():
        articles[company] = (
            f"{company} makes {rng.choice(_PRODUCTS)}. It was founded by {founder} and sits in {city}."
        )
    for book, author in books.items():
        articles[book] = f"{book} is a book by {author}, first printed in {rng.randint(1880, 2020)}."
    facts: list[Fact] = []
    for company, (founder, city) in companies.items():
        birthplace, year = people[founder]
        facts.append(
            Fact(
                f"In which country was the founder of {company} born?",
                cities[birthplace],
                (company, founder, birthplace),
            )
        )
        facts.append(Fact(f"In which year was the founder of {company} born?", str(year), (company, founder)))
        facts.append(Fact(f"In which country does {company} sit?", cities[city], (company, city)))
    for book, author in books.items():
        birthplace, _ = people[author]
        facts.append(Fact(f"In which city was the author of {book} born?", birthplace, (book, author)))
        facts.append(
            Fact(
                f"In which country was the author of {book} born?", cities[birthplace], (book, author, birthplace)
            )
        )
    return World(Corpus(articles), tuple(facts))


def _names(rng: random.Random) -> Callable[[], str]:
    used: set[str] = set()

    def name() -> str:
        while True:
            made = rng.choice(_STARTS) + rng.choice(_MIDDLES) + rng.choice(_ENDS)
            if made not in used:
                used.add(made)
                return made

    return name
