"""A safe evaluator: + - * / ( ) on whole numbers, exact, with errors that say what is wrong and where."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_LENGTH = 200
MAX_DEPTH = 20
MAX_DIGITS = 30

_TOKEN = re.compile(r"\s*(?:(\d+)|([-+*/()]))")


class CalculatorError(ValueError):
    """The expression cannot be evaluated."""


def evaluate(expression: str) -> Fraction:
    """The exact value of `expression`.

    Raises:
        CalculatorError: it is empty, too long or too deep, has an unknown character, does not parse, divides by
            zero, or a number in it grows beyond `MAX_DIGITS` digits.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculatorError(f"longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(expression))
    value = parser.sum(0)
    if parser.here < len(parser.tokens):
        raise CalculatorError(f"unexpected {parser.peek()!r}")
    return value


def as_text(value: Fraction) -> str:
    """A whole number as such, anything else as a reduced fraction `p/q`."""
    return str(value)


def _tokens(expression: str) -> list[str]:
    tokens, position = [], 0
    text = expression.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or not match[0].isascii():
            bad = text[position:].lstrip()[0]
            raise CalculatorError(f"unknown character {bad!r}")
        tokens.append(match[1] or match[2])
        position = match.end()
    if not tokens:
        raise CalculatorError("empty expression")
    return tokens


class _Parser:
    """Recursive descent: a sum of products of factors; a factor is a number, a signed factor or a sum in ( )."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.here = tokens, 0

    def peek(self) -> str:
        return self.tokens[self.here] if self.here < len(self.tokens) else ""

    def take(self) -> str:
        self.here += 1
        return self.tokens[self.here - 1]

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = _bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                value = _bounded(value * self.factor(depth))
                continue
            divisor = self.factor(depth)
            if divisor == 0:
                raise CalculatorError("division by zero")
            value = _bounded(value / divisor)
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise CalculatorError(f"nested deeper than {MAX_DEPTH}")
        if self.here == len(self.tokens):
            raise CalculatorError("unexpected end")
        token = self.take()
        if token in ("-", "+"):
            value = self.factor(depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self.sum(depth + 1)
            if self.peek() != ")":
                raise CalculatorError(f"expected ')' at {self.peek() or 'the end'!r}")
            self.here += 1
            return value
        if not token.isdigit():
            raise CalculatorError(f"unexpected {token!r}")
        return _bounded(Fraction(int(token)))


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MAX_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise CalculatorError(f"a number has more than {MAX_DIGITS} digits")
    return value
