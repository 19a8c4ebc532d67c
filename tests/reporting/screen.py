"""What a person sees of a terminal: the escapes that rich writes, applied to rows of characters."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class Screen:
    """Rows from the first one ever written; nothing scrolls out."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[list[str]] = [[]]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        """Apply what a program wrote. Raises ValueError at an escape that is not known here."""
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"unknown escape {text[at : at + 12]!r}")
            at = token.end()
            if token[2]:
                self._escape(token[1], token[2])
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self._down()
            else:
                self._put(token[0])

    def lines(self) -> list[str]:
        """The rows that are not empty."""
        return [line for row in self.rows if (line := "".join(row).strip())]

    def _escape(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self.row = max(self.row - int(numbers or 1), 0)
        elif letter == "K" and numbers == "2":
            self.rows[self.row] = []
        elif letter == "K" and numbers in ("", "0"):
            del self.rows[self.row][self.column :]
        elif letter not in "mhl":
            raise ValueError(f"unknown escape {numbers}{letter}")

    def _put(self, character: str) -> None:
        if self.column == self.width:  # only the next character wraps
            self.column = 0
            self._down()
        row = self.rows[self.row]
        row.extend(" " * (self.column + 1 - len(row)))
        row[self.column] = character
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append([])
