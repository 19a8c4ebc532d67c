"""A YAML file as plain data that remembers where every key and value was written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from agentrl.config.address import hide_credentials
from agentrl.config.place import Loc, dotted
from agentrl.errors import ConfigError

MAX_DEPTH = 50
"""Maximum nesting depth of sections."""
MAX_NODES = 100_000
"""Maximum keys and values per file: nested aliases could otherwise fill the memory."""

MAX_DIGITS = 4000
"""Maximum digits of a whole number."""

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a key and its value were written: 1-based lines and columns of the file, or the flag that set it.

    For a flag `key_line` is its number among the flags.
    """

    key_line: int = 0
    key_column: int = 0
    line: int = 0
    column: int = 0
    flag: str | None = None
    blank: bool = False
    """Whether the key has nothing after the colon."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with the input. `text` begins with "must" if it continues a sentence that starts with the
    key."""

    loc: Loc
    text: str
    spot: Spot | None = None
    on_key: bool = False
    """The key is wrong rather than its value: the caret points there."""


@dataclass
class Source:
    """The data of one YAML file (or of the value of one flag) with its spots and what is wrong so far."""

    name: str
    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    spots: dict[Loc, Spot] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def spot(self, loc: Loc) -> Spot | None:
        """The spot of `loc`, or of the nearest section around it."""
        for length in range(len(loc), 0, -1):
            if loc[:length] in self.spots:
                return self.spots[loc[:length]]
        return None

    def forget(self, loc: Loc) -> None:
        """Drop the spots of `loc` and of all below it."""
        for known in [known for known in self.spots if known[: len(loc)] == loc]:
            del self.spots[known]


def read_source(path: Path) -> Source:
    """Read a YAML 1.2 file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, not text, empty, not YAML, or holds something other than keys and values.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_near_files(path)}") from None
    except IsADirectoryError:
        hint = "; give the file in it" + _near_files(path / "tools.yaml")
        raise ConfigError(f"{path}: is a folder, not a YAML file{hint}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}: not UTF-8 text (byte {e.start}: {e.reason})") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None

    source = Source(name=str(path), lines=text.splitlines())
    node = _compose(text, source)
    if node is None:
        raise ConfigError(f"{path}: the file is empty; at least `env` and `model` are needed")
    if not isinstance(node, MappingNode):
        kind = "a list" if isinstance(node, SequenceNode) else f"the value {node.value!r}"
        raise ConfigError(_at(source, node, f"the file must hold keys and values, found {kind}"))
    source.data = _Reader(source).mapping(node, ())
    return source


def read_value(text: str, flag: str) -> Any:
    """The value of a `--set key=value` flag, read as YAML: `8`, `1e-6`, `[0.9, 0.99]`, `{a: 1}`, or plain text.

    Raises:
        ConfigError: `text` is not YAML.
    """
    source = Source(name=flag, lines=text.splitlines())
    node = _compose(text, source)
    if node is None:
        return None
    value = _Reader(source).value(node, ())
    if source.problems:
        raise ConfigError(f"{flag}: {source.problems[0].text}")
    return value


def excerpt(source: Source, line: int, column: int) -> str:
    """The source line with a caret under the column, both 1-based; empty if there is no such line."""
    if not 1 <= line <= len(source.lines):
        return ""
    text = hide_credentials(source.lines[line - 1], "*")
    # Keep tabs before the caret, so that it lines up with the column whatever their width.
    indent = "".join("\t" if c == "\t" else " " for c in text[: column - 1])
    return f"\n{line:5d} | {text}\n      | {indent}^"


def _at(source: Source, node: Node, text: str) -> str:
    mark = node.start_mark
    line, column = mark.line + 1, mark.column + 1
    return f"{source.name}:{line}:{column}: {text}{excerpt(source, line, column)}"


def _near_files(path: Path) -> str:
    """A hint that names the YAML files which do exist next to a missing one."""
    if not path.parent.is_dir():
        return ""
    found = sorted(p.name for p in path.parent.iterdir() if p.suffix in {".yaml", ".yml"})[:5]
    return f" (there is {', '.join(found)})" if found else ""


@lru_cache(maxsize=16)
def _parse(text: str) -> Node | None:
    """The nodes of a text; nobody changes them. Starting and resuming a run reads the same files several times."""
    return YAML(typ="safe", pure=True).compose(text)  # type: ignore[no-any-return]


def _compose(text: str, source: Source) -> Node | None:
    try:
        return _parse(text)
    except MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        what = f"not valid YAML: {e.problem or e.context}"
        if mark is None:
            raise ConfigError(f"{source.name}: {what}") from None
        line, column = mark.line + 1, mark.column + 1
        while line > len(source.lines) > 0:  # the mark of a premature end is after the last line
            line, column = line - 1, len(source.lines[line - 2]) + 1
        what += _yaml_hint(source.lines[line - 1]) if line <= len(source.lines) else ""
        where = f"{source.name}:{line}:{column}"
        raise ConfigError(f"{where}: {what}{excerpt(source, line, column)}") from None
    except ReaderError as e:
        before = text[: e.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        what = f"not valid YAML: the character U+{ord(text[e.position]):04X} is not allowed"
        raise ConfigError(f"{source.name}:{line}:{column}: {what}; remove it, or escape it in quotes") from None
    except YAMLError as e:
        raise ConfigError(f"{source.name}: not valid YAML: {' '.join(str(e).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source.name}: nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as e:  # a scalar that the composer cannot read
        raise ConfigError(f"{source.name}: not valid YAML: {e}") from None


def _yaml_hint(line: str) -> str:
    """What a line that is not YAML may need."""
    if "\t" in line:
        return " (YAML is indented with spaces, not tabs)"
    if "${" in line:
        return " (environment variables are not substituted: pass the value with --set, where the shell does it)"
    if re.search(r"(^|: |- |\[|, )[@`%*&!|>]", line):
        return " (put the value in quotes)"
    return " (a space is needed after the colon)" if re.match(r"\s*[\w.-]+:\S", line) else ""


class _Reader:
    """Turns nodes into dicts, lists and scalars, and records the position of each."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.num_nodes = 0
        self.open: set[int] = set()

    def value(self, node: Node, loc: Loc) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise ConfigError(_at(self.source, node, f"the file holds more than {MAX_NODES} values"))
        if isinstance(node, ScalarNode):
            return self.scalar(node, loc)
        if len(self.open) >= MAX_DEPTH:
            raise ConfigError(_at(self.source, node, f"nested more than {MAX_DEPTH} levels deep"))
        if id(node) in self.open:
            raise ConfigError(_at(self.source, node, f"{dotted(loc)} contains itself"))
        self.open.add(id(node))
        try:
            if isinstance(node, MappingNode):
                return self.mapping(node, loc)
            return [self.item(child, (*loc, i)) for i, child in enumerate(node.value)]
        finally:
            self.open.discard(id(node))

    def item(self, node: Node, loc: Loc) -> Any:
        self.source.spots[loc] = _spot(node, node)
        return self.value(node, loc)

    def mapping(self, node: MappingNode, loc: Loc) -> dict[str, Any]:
        data: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                self.merge(value_node, loc, data, own=first)
                continue
            key = self.key(key_node, loc)
            if key is None:
                continue
            here = (*loc, key)
            spot = _spot(key_node, value_node)
            if key in first:
                text = f"written twice; the first is on line {first[key]}"
                self.source.problems.append(Problem(here, text, spot, on_key=True))
                continue
            first[key] = spot.key_line
            self.source.forget(here)  # explicit keys override merged ones
            self.source.spots[here] = spot
            data[key] = self.value(value_node, here)
        return data

    def merge(self, node: Node, loc: Loc, data: dict[str, Any], own: dict[str, int]) -> None:
        """Take the keys of `<<: *anchor` (or of a list of anchors, the first wins) that are not given yet."""
        sources: Sequence[Node] = node.value if isinstance(node, SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, MappingNode):
                problem = Problem((*loc, "<<"), "must name a section (or a list of them)", _spot(node, node))
                self.source.problems.append(problem)
                continue
            kept = {k: v for k, v in self.source.spots.items() if len(k) > len(loc) and k[len(loc)] in data}
            merged = self.value(source, loc)
            self.source.spots.update(kept)
            data.update({key: value for key, value in merged.items() if key not in data and key not in own})

    def key(self, node: Node, loc: Loc) -> str | None:
        tag = str(node.tag)
        if isinstance(node, ScalarNode) and tag.startswith(_TAG) and tag != _TAG + "null":
            return str(node.value)  # `1: x` is the key "1": every key of a run is a name
        kind = "a list" if isinstance(node, SequenceNode) else "a section"
        said = (str(node.value) or "nothing") if isinstance(node, ScalarNode) else kind
        text = f"a key must be a plain word, got {said}; write a name before the colon"
        self.source.problems.append(Problem(loc, text, _spot(node, node), on_key=True))
        return None

    def scalar(self, node: ScalarNode, loc: Loc) -> Any:
        kind, text = str(node.tag).removeprefix(_TAG), str(node.value)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return text.lower() == "true"
            if kind == "int" and len(text) <= MAX_DIGITS:
                return _int(text)
            if kind == "float":
                return _float(text)
        except ValueError:
            pass
        if kind in {"str", "timestamp"}:  # a date is text here: the configuration knows no dates
            return text
        said = f"{str(node.tag).replace(_TAG, '!!')} {text!r}"
        wanted = "must be a number, text, true, false or null"
        if kind == "int" and len(text) > MAX_DIGITS:
            wanted, said = f"must be a number of at most {MAX_DIGITS:,} digits", f"one of {len(text):,}"
        said = said if len(said) <= 80 else said[:77] + "..."
        self.source.problems.append(Problem(loc, f"{wanted}, got {said}", _spot(node, node)))
        return None


def _spot(key: Node, value: Node) -> Spot:
    blank = isinstance(value, ScalarNode) and value.value == "" and value.tag == _TAG + "null"
    at = key if blank else value
    return Spot(
        key_line=key.start_mark.line + 1,
        key_column=key.start_mark.column + 1,
        line=at.start_mark.line + 1,
        column=at.start_mark.column + 1,
        blank=blank,
    )


def _int(text: str) -> int:
    digits = text.replace("_", "").lower()
    for prefix, base in (("0x", 16), ("0o", 8), ("0b", 2)):
        if digits.lstrip("+-").startswith(prefix):
            return int(digits.replace(prefix, "", 1), base)
    return int(digits)


def _float(text: str) -> float:
    plain = text.replace("_", "").lower()
    if plain.lstrip("+-") == ".inf":
        return -math.inf if plain.startswith("-") else math.inf
    return math.nan if plain == ".nan" else float(plain)
