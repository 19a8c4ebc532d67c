"""Parse calls while they are being written: names and argument text, for formats with JSON arguments."""

from __future__ import annotations

import re

from agentrl.chat.parsers.parser import Begun, Fragment

_INSIDE = re.compile(r"\\.|\"", re.DOTALL)
_OUTSIDE = re.compile(r"[{}\"]")


class PartialCalls:
    """Follow the inside of a block while it grows; each character is examined a bounded number of times.

    Args:
        head: matches the text before a call's arguments, with a group `name`; the next character is their "{".
    """

    def __init__(self, head: re.Pattern[str]) -> None:
        self._head = head
        self._at = 0  # scanned up to here
        self._told = 0  # argument text before this has been reported
        self._depth = 0
        self._in_string = False
        self._open = False
        self._overtaken = False
        self.any = False
        """Whether a call has started."""

    def read(self, body: str) -> list[Begun | Fragment]:
        """Return what is new in `body`, which extends the previous one.

        Calls are told in their order: none is after one in another form, such as one whose name comes last.
        """
        events: list[Begun | Fragment] = []
        while not self._overtaken:
            if not self._open:
                head = self._head.search(body, self._at)
                if head is None:
                    return events
                if "{" in body[self._at : head.start()]:
                    self._overtaken = True
                    return events
                self._open = self.any = True
                self._at = self._told = head.end()
                events.append(Begun(head["name"]))
            self._scan(body)
            end = len(body) if self._open else self._at
            if end > self._told:
                events.append(Fragment(body[self._told : end]))
                self._told = end
            if self._open:
                return events
        return events

    def _scan(self, body: str) -> None:
        """Advance to the brace that closes the arguments, or to the end of the available text."""
        while True:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(body, self._at)
            if match is None:
                # The last character may be the first half of an escape.
                self._at = max(self._at, len(body) - 1)
                return
            self._at = match.end()
            found = match.group()
            if found == '"':
                self._in_string = not self._in_string
            elif found == "{":
                self._depth += 1
            elif found == "}":
                self._depth -= 1
                if self._depth == 0:
                    self._open = False
                    return
