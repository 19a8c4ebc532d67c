"""The code that a run depends on: a digest of every definition, so that a resumed run can name what changed."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path

from agentrl.config.facts import NamesCode, facts
from agentrl.config.run import RunConfig
from agentrl.config.schema import fields
from agentrl.config.schemes import scheme_of
from agentrl.errors import CheckpointError, ConfigError
from agentrl.importing import load_object
from agentrl.rollout.content import Content
from agentrl.run_folder.files import read_bounded

HOUSE = Path(__file__).resolve().parents[1]
SHIPPED = HOUSE / "envs"
"""Code of agentrl itself is not recorded, except for its envs."""
NAMED = 5
"""Definitions or rows that a message names; more are counted."""


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """What envs, rewards and own functions are made of.

    Attributes:
        files: by name, the digest of each definition in it: `tool Shop.buy`, `reward Shop.solved`, `Shop.setup`.
        texts: the text of each file.
    """

    files: Mapping[str, Mapping[str, str]]
    texts: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The digests, for code.json."""
        return (json.dumps({"files": self.files}, indent=1) + "\n").encode()

    @staticmethod
    def read(path: Path) -> CodeRecord | None:
        """The record in a file; None if there is no file.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not path.is_file():
            return None
        try:
            files = json.loads(read_bounded(path))["files"]
            return CodeRecord({name: dict(parts) for name, parts in files.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(f"{path}: damaged: {type(e).__name__}: {e}") from None


def code_of(config: RunConfig, content: Content) -> CodeRecord:
    """The code of a run whose env is loaded: the files of env classes and their bases, of the neighboring
    files that were imported, and of every function and class that the configuration names."""
    objects = [type(part.make_env()) for part in content.by_env.values()] + list(_named(config))
    texts: dict[str, str] = {}
    for found in objects:
        for path in _files_of(found):
            texts.setdefault(_name(path, texts), path.read_text(encoding="utf-8", errors="replace"))
        if not any(_files_of(found)) and (text := _source(found)):
            texts[f"<{getattr(found, '__qualname__', found)}>"] = text  # defined in a notebook
    return CodeRecord({name: dict(_definitions(text)) for name, text in sorted(texts.items())}, texts)


def code_changes(old: CodeRecord, new: CodeRecord) -> list[str]:
    """What differs, a line for each file."""
    said = []
    for name in sorted({*old.files, *new.files}):
        before, after = old.files.get(name), new.files.get(name)
        if before is None or after is None:
            said.append(f"{name}: {'new' if before is None else 'no longer used'}")
            continue
        changed = [f"{part} changed" for part in after if part in before and before[part] != after[part]]
        changed += [f"{part} added" for part in after if part not in before]
        changed += [f"{part} removed" for part in before if part not in after]
        if changed:
            said.append(f"{name}: {_first(changed)}")
    return said


def row_changes(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> list[str]:
    """Which tasks differ, a line for each split; from the digests in tasks.json."""
    said = []
    for split in ("train", "held_out"):
        before, after = old.get(split, ()), new.get(split, ())
        rows = [str(n) for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        if rows:
            said.append(f"{split} tasks: {len(rows)} differ (numbers {_first(rows)}, counted from 0)")
        if len(before) != len(after):
            said.append(f"{split} tasks: {len(before)} -> {len(after)}")
    return said


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _named(config: RunConfig) -> Iterator[object]:
    """The objects that the configuration names, apart from envs."""
    data = config.model_dump()
    for loc, about in fields(data=data):
        value: object = data
        for part in loc:
            value = value.get(part) if isinstance(value, Mapping) else None
        if not any(facts(about, NamesCode)) or not isinstance(value, str) or ":" not in value:
            continue
        if scheme_of(value) is None:
            try:
                yield _code_object(load_object(value))
            except ConfigError:
                continue  # reported where it is used


def _code_object(found: object) -> object:
    """The function or class that has the code of a callable."""
    while isinstance(found, partial):
        found = found.func
    return found if hasattr(found, "__qualname__") else type(found)


def _files_of(found: object) -> list[Path]:
    """The files of a class, its bases and their neighbors; or of a function."""
    kinds: Iterable[object] = found.__mro__ if isinstance(found, type) else (found,)
    own = list(
        dict.fromkeys(path for kind in kinds if (path := _file(getattr(kind, "__module__", ""))) is not None)
    )
    folders = {path.parent for path in own if not path.is_relative_to(HOUSE)}
    beside = [path for name in list(sys.modules) if (path := _file(name)) is not None and path.parent in folders]
    return sorted({*own, *beside})


def _file(module: str) -> Path | None:
    """The file of a module that is neither agentrl's own nor installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    if "site-packages" in path.parts or path.is_relative_to(sys.base_prefix):
        return None
    inside = path.is_relative_to(HOUSE) and not path.is_relative_to(SHIPPED.resolve())
    return None if inside or not path.is_file() else path


def _name(path: Path, taken: Mapping[str, str]) -> str:
    name = path.name if path.name != "__init__.py" else f"{path.parent.name}/__init__.py"
    while name in taken:
        name = f"{path.parent.name}/{name}"
        path = path.parent
    return name


def _source(found: object) -> str:
    try:
        return inspect.getsource(found)  # type: ignore[arg-type]  # what is no code raises TypeError
    except (OSError, TypeError):
        return ""


def _definitions(text: str) -> Iterator[tuple[str, str]]:
    """Each definition of a file with a digest that ignores comments and layout."""
    try:
        tree = ast.parse(inspect.cleandoc(text) if text.startswith((" ", "\t")) else text)
    except (SyntaxError, ValueError, RecursionError):
        yield "(text)", _digest(text)
        return
    rest: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            for method in methods:
                yield f"{_mark(method)}{node.name}.{method.name}", _digest(ast.dump(method))
            others = [
                ast.dump(each) for each in (*node.body, *node.bases, *node.decorator_list) if each not in methods
            ]
            yield node.name, _digest("\n".join(others))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, _digest(ast.dump(node))
        else:
            rest.append(node)
    yield "(module)", _digest("\n".join(map(ast.dump, rest)))


def _mark(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """`tool ` or `reward ` for a method that is declared as one."""
    for decorator in method.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in ("tool", "reward"):
            return f"{name} "
    return ""


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
