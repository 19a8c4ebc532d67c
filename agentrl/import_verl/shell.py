"""The commands of a shell script with their words, as far as they can be told without running anything.

Assignments, arrays, `if`, `case` and `for` are followed; a condition that only the machine could answer counts as
false, and a loop runs once.
"""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from agentrl.import_verl.expand import Variables, closing, expand, expand_one, known_output, quote_end

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_CONTINUED = re.compile(r"\\[ \t]*(#[^\n]*)?\r?\n|\\[ \t]+(?=#)")
_OPERATOR = re.compile(r"\n|;;|&&|\|\||;|\||&(?!>)|\(|\)")
_REDIRECTION = re.compile(r"(\d*)(<<<|<<-?|&>>|&>|>>|>&|<&|>\||>|<)[ \t]*")
_ORDER: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-lt": operator.lt,
    "-ge": operator.ge,
    "-le": operator.le,
}
_CHANGED_FOLDER = re.compile(r"\s*cd\s+(?:--\s+)?(.+?)(?:\s*[12]?>\S*(?:\s+2>&1)?)*\s*&&\s*pwd(?:\s+-P)?\s*")


@dataclass(slots=True)
class Command:
    """A simple command as written: its raw words, array assignments among them, and what follows it."""

    words: list[str | tuple[str, list[str]]] = field(default_factory=list)
    after: str = "\n"


@dataclass(slots=True)
class _Frame:
    """An open `if`, `case` or loop."""

    kind: Literal["if", "case", "loop"]
    outer: bool
    active: bool = False
    taken: bool = False
    subject: str = ""
    patterns: list[str] | None = None


def commands_of(text: str) -> Iterator[Command]:
    """The simple commands of a script, in order."""
    reader = _Reader(text)
    while (command := reader.command()) is not None:
        yield command


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.documents: list[str] = []

    def command(self) -> Command | None:
        """The next one that has words or ends with an operator; None at the end."""
        if self.at >= len(self.text):
            return None
        command = Command()
        while self.at < len(self.text):
            self._blanks()
            if match := _OPERATOR.match(self.text, self.at):
                self.at = match.end()
                if match[0] == "\n":
                    self._documents()
                command.after = match[0]
                return command
            if match := _REDIRECTION.match(self.text, self.at):
                self.at = match.end()
                target = self._word()
                if match[2] in ("<<", "<<-"):
                    self.documents.append(target.strip("'\"\\"))
                continue
            if self.at < len(self.text):
                self._take(command)
        return command

    def _take(self, command: Command) -> None:
        array = re.compile(r"[A-Za-z_]\w*\+?=\(").match(self.text, self.at)
        if array:
            end = closing(self.text, array.end() - 1)
            inside = _Reader(self.text[array.end() : end])
            command.words.append((array[0][:-2], inside.all_words()))
            self.at = end + 1
        elif word := self._word():
            command.words.append(word)
        else:
            self.at += 1

    def all_words(self) -> list[str]:
        """The words of an array: line ends and comments between them do not matter."""
        found: list[str] = []
        while (command := self.command()) is not None:
            found += [word for word in command.words if isinstance(word, str)]
        return found

    def _blanks(self) -> None:
        """Skip blanks, continued lines and comments (also one behind the backslash of a continued line)."""
        while self.at < len(self.text):
            if match := _CONTINUED.match(self.text, self.at):
                self.at = match.end()
            elif self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                # Whoever comments out a line of a long command means it to go on.
                self.at = end + 1 if self.text[self.at : end].rstrip().endswith("\\") else end
            else:
                return

    def _documents(self) -> None:
        for end in self.documents:
            match = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
            self.at = match.end() if match else len(self.text)
        self.documents = []

    def _word(self) -> str:
        text, start = self.text, self.at
        while self.at < len(text):
            c = text[self.at]
            if c == "\\":
                if _CONTINUED.match(text, self.at):
                    break
                self.at += 2
            elif c in "'\"":
                self.at = quote_end(text, self.at) + 1
            elif c == "`":
                end = text.find("`", self.at + 1)
                self.at = len(text) if end < 0 else end + 1
            elif c == "$" and text[self.at + 1 : self.at + 2] in ("(", "{"):
                self.at = closing(text, self.at + 1) + 1
            elif c.isspace() or c in ";|()<>&":
                break
            else:
                self.at += 1
        return text[start : self.at]


class Script:
    """Follows a script and collects the words of its commands."""

    def __init__(self, path: str) -> None:
        self.variables = Variables(path, run=self._substitute)
        self.commands: list[list[str]] = []
        self._frames: list[_Frame] = []

    def read(self, text: str) -> None:
        """Follow `text` from its beginning."""
        last: bool | None = True
        joined = ""
        for command in commands_of(text):
            skipped = (joined == "&&" and last is False) or (joined == "||" and last is not False)
            if not self._control(command) and self._running and not skipped:
                last = self._simple(command.words)
            joined = command.after
            if joined not in ("&&", "||"):
                last = True
            if joined == ";;" and self._frames and self._frames[-1].kind == "case":
                self._frames[-1].active, self._frames[-1].patterns = False, []

    @property
    def _running(self) -> bool:
        return self._frames[-1].active if self._frames else True

    def _control(self, command: Command) -> bool:
        """Whether the command was a part of `if`, `case` or a loop; a command behind `then` or `do` is left in."""
        frame = self._frames[-1] if self._frames else None
        if frame and frame.kind == "case" and frame.patterns is not None:
            return self._pattern(frame, command)
        while command.words:
            first = command.words[0]
            if first in ("{", "}", "!", "time", "do", "then", "function"):
                command.words = command.words[1 + (first == "function") :]
            elif first in ("if", "while", "until"):
                outer = self._running
                self._frames.append(_Frame("if" if first == "if" else "loop", outer))
                return self._condition(command.words[1:])
            elif first in ("elif", "else") and frame and frame.kind == "if":
                if first == "elif":
                    return self._condition(command.words[1:])
                frame.active = frame.outer and not frame.taken
                command.words = command.words[1:]
            elif first == "for":
                self._loop([word for word in command.words if isinstance(word, str)])
                return True
            elif first == "case":
                subject = expand_one(str(command.words[1]), self.variables) if len(command.words) > 1 else ""
                self._frames.append(_Frame("case", self._running, subject=subject, patterns=[]))
                rest = command.words[3:]
                return self._pattern(self._frames[-1], Command(rest, command.after)) if rest else True
            elif first in ("fi", "done", "esac"):
                if self._frames:
                    self._frames.pop()
                return True
            else:
                return command.after == "(" and len(command.words) == 1  # the head of a function
        return True

    def _condition(self, words: list[str | tuple[str, list[str]]]) -> bool:
        frame = self._frames[-1]
        holds = self._test([expand_one(w, self.variables) for w in words if isinstance(w, str)]) is True
        frame.active = frame.outer and not frame.taken and holds
        frame.taken = frame.taken or holds
        return True

    def _loop(self, words: list[str]) -> None:
        if len(words) > 3 and words[2] == "in":
            values = [value for word in words[3:] for value in expand(word, self.variables)]
            if values and self._running:
                self.variables.values[words[1]] = values[0]
        self._frames.append(_Frame("loop", self._running, active=self._running))

    def _pattern(self, frame: _Frame, command: Command) -> bool:
        words = [word for word in command.words if isinstance(word, str)]
        if words[:1] == ["esac"]:
            self._frames.pop()
            return True
        assert frame.patterns is not None
        frame.patterns += [expand_one(word, self.variables) for word in words]
        if command.after == ")":
            fits = any(fnmatch.fnmatchcase(frame.subject, pattern) for pattern in frame.patterns)
            frame.active = frame.outer and not frame.taken and fits
            frame.taken, frame.patterns = frame.taken or fits, None
        return True

    def _simple(self, raw: list[str | tuple[str, list[str]]]) -> bool | None:
        """Assign, or note the words of a command; whether it succeeds, None where that cannot be known."""
        words = list(raw)
        while words and words[0] in ("export", "declare", "local", "readonly", "typeset"):
            words = [word for word in words[1:] if not (isinstance(word, str) and word.startswith("-"))]
        while words and self._assign(words[0]):
            words.pop(0)
        found = [field for word in words if isinstance(word, str) for field in expand(word, self.variables)]
        if not found:
            return True
        if found[0] in ("[", "[[", "test"):
            return self._test(found)
        if found[0] == "unset":
            for name in found[1:]:
                self.variables.values.pop(name, None)
        self.commands.append(found)
        return None

    def _assign(self, word: str | tuple[str, list[str]]) -> bool:
        values = self.variables.values
        if isinstance(word, tuple):
            name, more = word[0].rstrip("+"), word[0].endswith("+")
            new = [value for item in word[1] for value in expand(item, self.variables)]
            old = values.get(name, [])
            values[name] = [*(old if isinstance(old, list) else [old]), *new] if more else new
            return True
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            return False
        text = expand_one(match[4], self.variables)
        values[match[1]] = (self.variables.text(match[1]) or "") + text if match[3] else text
        return True

    def _test(self, words: list[str]) -> bool | None:
        """Whether `[ ... ]` holds; None where only the machine could tell."""
        words = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        if words[:1] == ["!"]:
            inner = self._test(words[1:])
            return None if inner is None else not inner
        match words:
            case ["true"]:
                return True
            case ["false"] | []:
                return False
            case ["-z", *rest]:
                return _known("".join(rest), lambda text: text == "", unset=True)
            case ["-n", *rest]:
                return _known("".join(rest), lambda text: text != "", unset=False)
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right)
            case ["=" | "==", right]:
                return right == ""
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right)
            case [left, order, right] if order in _ORDER:
                try:
                    a, b = int(left), int(right)
                except ValueError:
                    return None
                return _ORDER[order](a, b)
            case [text] if not text.startswith("-"):
                return text != ""
        return None

    def _substitute(self, command: str) -> str | None:
        """What `$(command)` prints, where that can be told: the end of a chain in which the others are probes."""
        if match := _CHANGED_FOLDER.fullmatch(command):
            return os.path.normpath(expand_one(match[1], self.variables))
        done = True
        printed: list[str] = []
        known, joined = True, ""
        for part in commands_of(command):
            if (joined == "&&" and not done) or (joined == "||" and done):
                joined = part.after
                continue
            words = [
                field for word in part.words if isinstance(word, str) for field in expand(word, self.variables)
            ]
            said = known_output(words) if words else ""
            done = said is not None
            known = known and (done or part.after in ("&&", "||"))
            printed += [said] if said else []
            joined = part.after
        return "\n".join(printed) if known and (printed or done) else None


def _known(text: str, holds: Callable[[str], bool], *, unset: bool) -> bool:
    """A test of a variable that the script does not set (its name is still there) counts it as unset."""
    if re.fullmatch(r"\$\{?\w+\}?", text):
        return unset
    return holds(text)
