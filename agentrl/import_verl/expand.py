"""What a word of a shell script stands for: quotes, variables with their defaults, arithmetic, known commands.

Nothing is run. What cannot be known here (a variable of the environment, the output of a command) stays in the
text as it was written, so that it can be seen and filled in.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl.syntax import parse_expression

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9@*#?$!-])(\[[^\]]*\])?(.*)", re.DOTALL)
_OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_CLOSING = {"(": ")", "{": "}"}


@dataclass(slots=True)
class Variables:
    """The variables of a script so far: text, or the words of an array."""

    script: str = ""
    """Path of the script, which is `$0`."""
    values: dict[str, str | list[str]] = field(default_factory=dict)
    run: Callable[[str], str | None] = lambda command: None
    """Output of `$(command)`; None where it cannot be known."""

    def text(self, name: str) -> str | None:
        """The value of one variable; None where it is not set in the script."""
        if name in ("0", "BASH_SOURCE"):
            return self.script
        if name.isdigit() or name in "@*":
            return ""
        found = self.values.get(name, {"HOME": "~", "PWD": "."}.get(name))
        return (found[0] if found else "") if isinstance(found, list) else found


def closing(text: str, at: int) -> int:
    """Where the bracket at `at` closes (the place of its partner), quotes and nesting respected."""
    opening, partner, depth = text[at], _CLOSING[text[at]], 0
    while at < len(text):
        c = text[at]
        if c == "\\":
            at += 1
        elif c in "'\"":
            at = quote_end(text, at)
        elif c == opening:
            depth += 1
        elif c == partner:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return len(text) - 1


def quote_end(text: str, at: int) -> int:
    """The place of the quote that ends the one at `at`; the last place of the text where none does."""
    quote = text[at]
    at += 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "\\":
            at += 1
        elif quote == '"' and text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = closing(text, at + 1)
        at += 1
    return min(at, len(text) - 1)


class _Fields:
    """The words that one word becomes: text is joined, an unquoted value is split at its blanks."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.open: str | None = None

    def join(self, text: str) -> None:
        self.open = (self.open or "") + text

    def split(self, text: str) -> None:
        if text[:1].isspace():
            self.cut()
        for number, part in enumerate(text.split()):
            if number:
                self.cut()
            self.join(part)
        if text.strip() and text[-1:].isspace():
            self.cut()

    def cut(self) -> None:
        if self.open is not None:
            self.done.append(self.open)
        self.open = None

    def splice(self, words: list[str], quoted: bool) -> None:
        for number, word in enumerate(words):
            if number:
                self.cut()
            (self.join if quoted else self.split)(word)


def expand(word: str, variables: Variables) -> list[str]:
    """The words that a raw `word` expands to: none, one or several."""
    fields, at = _Fields(), 0
    while at < len(word):
        c = word[at]
        if c == "\\":
            fields.join(word[at + 1 : at + 2])
            at += 2
        elif c == "'":
            end = quote_end(word, at)
            fields.join(word[at + 1 : end])
            at = end + 1
        elif c == '"':
            end = quote_end(word, at)
            _double_quoted(word[at + 1 : end], fields, variables)
            at = end + 1
        elif c in "$`":
            at = _dollar(word, at, fields, variables, quoted=False)
        else:
            fields.join(c)
            at += 1
    fields.cut()
    return fields.done


def expand_one(word: str, variables: Variables) -> str:
    """The text of `word`, several words joined by blanks."""
    return " ".join(expand(word, variables))


def _double_quoted(text: str, fields: _Fields, variables: Variables) -> None:
    fields.join("")
    at = 0
    while at < len(text):
        c = text[at]
        if c == "\\" and text[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n"):
            fields.join("" if text[at + 1] == "\n" else text[at + 1])
            at += 2
        elif c in "$`":
            at = _dollar(text, at, fields, variables, quoted=True)
        else:
            fields.join(c)
            at += 1


def _dollar(text: str, at: int, fields: _Fields, variables: Variables, *, quoted: bool) -> int:
    """Expand what begins at `at`; returns the place behind it."""
    put = fields.join if quoted else fields.split
    if text[at] == "`":
        end = text.find("`", at + 1)
        end = len(text) - 1 if end < 0 else end
        put(_output(text[at + 1 : end], variables))
        return end + 1
    following = text[at + 1 : at + 2]
    if text.startswith("$((", at):
        end = closing(text, at + 1)
        inner = text[at + 3 : end - 1]
        value = arithmetic(inner, variables)
        put(text[at : end + 1] if value is None else str(value))
        return end + 1
    if following == "(":
        end = closing(text, at + 1)
        put(_output(text[at + 2 : end], variables))
        return end + 1
    if following == "{":
        end = closing(text, at + 1)
        _parameter(text[at : end + 1], text[at + 2 : end], fields, variables, quoted)
        return end + 1
    if following == "'":  # $'...'
        end = quote_end(text, at + 1)
        fields.join(text[at + 2 : end])
        return end + 1
    name = _NAME.match(text, at + 1)
    end = name.end() if name else at + 1 + (following in tuple("0123456789@*#?$!"))
    if end == at + 1:
        fields.join("$")
        return end
    if following in ("@", "*"):
        return end  # what the script is called with
    value_of = variables.text(text[at + 1 : end])
    if value_of is None:
        fields.join(text[at:end])
    else:
        put(value_of)
    return end


def _output(command: str, variables: Variables) -> str:
    found = variables.run(command)
    first = (command.split() or [""])[0]
    return f"$({first})" if found is None else found


def _parameter(whole: str, inner: str, fields: _Fields, variables: Variables, quoted: bool) -> None:
    """`${inner}`."""
    put = fields.join if quoted else fields.split
    match = _PARAMETER.fullmatch(inner)
    if match is None or re.match(r"\w*\.", inner):
        fields.join(whole)  # an interpolation of the configuration, `${data.seed}`
        return
    length, name, index, rest = match.groups()
    known = variables.values.get(name)
    if index in ("[@]", "[*]"):
        words = known if isinstance(known, list) else [known] if known is not None else []
        if length:
            put(str(len(words)))
        elif not rest:
            fields.splice(words, quoted)
        else:
            fields.splice([_changed(w, rest, variables) or "" for w in words], quoted)
        return
    value = variables.text(name)
    if index and index[1:-1].lstrip("-").isdigit() and isinstance(known, list):
        place = int(index[1:-1])
        value = known[place] if -len(known) <= place < len(known) else ""
    if length:
        put(whole if value is None else str(len(value)))
        return
    if match_default := re.match(r":?[-=+?]", rest):
        sign, word = match_default[0], rest[match_default.end() :]
        missing = value is None or (sign[0] == ":" and value == "")
        if sign[-1] == "+":
            value = "" if missing else expand_one(word, variables)
        elif missing and sign[-1] == "?":
            value = None
        elif missing:
            value = _default(word, variables, quoted)
            if sign[-1] == "=":
                variables.values[name] = value
    elif value is not None and rest:
        value = _changed(value, rest, variables)
    if value is None:
        fields.join(whole)
    else:
        put(value)


def _default(word: str, variables: Variables, quoted: bool) -> str:
    """A default inside double quotes keeps its single quotes."""
    if quoted and "'" in word:
        return "'".join(expand_one(part, variables) if part else "" for part in word.split("'"))
    return expand_one(word, variables)


def _changed(value: str, rest: str, variables: Variables) -> str | None:
    """`${x//a/b}`, `${x%suffix}`, `${x#prefix}`, `${x:from:length}`, `${x,,}`; None for what is none of them."""
    if rest[0] == "/":
        every = rest[1:2] == "/"
        old, _, new = rest[1 + every :].partition("/")
        return value.replace(expand_one(old, variables), expand_one(new, variables), -1 if every else 1)
    if rest[0] in "%#":
        longest = rest[1:2] == rest[0]
        pattern = expand_one(rest[1 + longest :], variables)
        cuts = range(len(value) + 1)
        for cut in cuts if (rest[0] == "%") == longest else reversed(cuts):
            kept, tail = (value[:cut], value[cut:]) if rest[0] == "%" else (value[cut:], value[:cut])
            if fnmatch.fnmatchcase(tail, pattern):
                return kept
        return value
    if rest in (",,", ","):
        return value.lower()
    if rest in ("^^", "^"):
        return value.upper()
    if rest[0] == ":":
        start, _, length = rest[1:].partition(":")
        if (first := arithmetic(start, variables)) is None:
            return None
        count = arithmetic(length, variables) if length else len(value)
        return None if count is None else value[first:][:count]
    return None


def arithmetic(text: str, variables: Variables) -> int | None:
    """The value of `$((text))`; None where a name in it is no number here."""
    numbers = _NAME.sub(
        lambda m: _number(m[0], variables), expand_one(re.sub(r"\$\{?(\w+)\}?", r"\1", text), variables)
    )
    try:
        return _evaluate(parse_expression(numbers.strip()))
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return None


def _number(name: str, variables: Variables) -> str:
    value = (variables.text(name) or "").strip()
    return value if re.fullmatch(r"-?\d{1,18}", value) else name


def _evaluate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    raise ValueError(f"{ast.dump(node)} is not integer arithmetic")


def known_output(words: list[str]) -> str | None:
    """What a simple command prints, where that can be said without running it."""
    match words:
        case ["pwd", *_]:
            return "."
        case ["echo" | "printf", *said]:
            return " ".join(w for w in said if w not in ("-n", "-e"))
        case ["dirname", *_, path]:
            return os.path.dirname(path) or "."
        case ["basename", path]:
            return os.path.basename(path)
        case ["realpath" | "readlink", *_, path]:
            return os.path.normpath(path)
    return None
