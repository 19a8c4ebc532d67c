"""The code that a run depends on: a digest of every definition, so that a resumed run can name what changed."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from weakref import WeakKeyDictionary

from agentrl.config.facts import NamesCode, facts
from agentrl.config.run import RunConfig
from agentrl.config.schema import fields
from agentrl.config.schemes import scheme_of
from agentrl.errors import CheckpointError, ConfigError
from agentrl.importing import function_of, load_object, values_of
from agentrl.rollout.content import Content
from agentrl.rollout.source_files import module_file, source_names, with_imports
from agentrl.run_folder.files import read_bounded
from agentrl.run_folder.task_digests import MOST, MOST_GENERATED
from agentrl.syntax import parse, source_of

NAMED = 5
"""Definitions or rows that a message names; more are counted."""
_VALUES = "<values of "
_first_values: WeakKeyDictionary[object, Mapping[str, str]] = WeakKeyDictionary()
"""The values of what functions made, as this process first saw them: an env may count its episodes in one."""


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """What envs, rewards and own functions are made of.

    Attributes:
        files: by name, the digest of each definition in it: `tool Shop.buy`, `reward Shop.solved`, `Shop.setup`.
        texts: the text of each file.
        portable: whether the digests are the same under every version of Python; earlier records had others.
    """

    files: Mapping[str, Mapping[str, str]]
    texts: Mapping[str, str] = field(default_factory=dict)
    portable: bool = True

    def to_json(self) -> bytes:
        """The digests, for code.json."""
        return (json.dumps({"portable": self.portable, "files": self.files}, indent=1) + "\n").encode()

    @staticmethod
    def read(path: Path) -> CodeRecord | None:
        """The record in a file; None if there is no file.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not path.is_file():
            return None
        try:
            record = json.loads(read_bounded(path))
            files = {name: dict(parts) for name, parts in record["files"].items()}
            return CodeRecord(files, portable=bool(record.get("portable")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise CheckpointError(f"{path}: damaged: {type(e).__name__}: {e}") from None


def code_of(config: RunConfig, content: Content) -> CodeRecord:
    """The code of a run whose env is loaded: the files of env classes and their bases, of every function and class
    that the configuration names, and of all that they import."""
    envs = [part.make_env() for part in content.by_env.values()]
    objects = [*map(type, envs), *(_code_object(each) for env in envs for each in env.own_code()), *_named(config)]
    kinds = dict.fromkeys(
        kind for found in objects for kind in (found.__mro__ if isinstance(found, type) else (found,))
    )
    files = {file for kind in kinds if (file := module_file(getattr(kind, "__module__", "")))}
    sources = with_imports(files)
    names = source_names(sources, files)
    texts = {names[path]: text for path, text in sources.items()}
    for kind in kinds:  # of a notebook or script
        if getattr(kind, "__module__", "") == "__main__" and (text := _source(kind)):
            texts[f"<{getattr(kind, '__qualname__', kind)}>"] = text
    return CodeRecord(_all_definitions(texts) | _all_values(kinds), texts)


def code_changes(old: CodeRecord, new: CodeRecord) -> list[str]:
    """What differs, a line for each file; `new` is the code of this process."""
    said = []
    files = new.files if old.portable else _all_definitions(new.texts, portable=False)
    for name in sorted({*old.files, *files}):
        before, after = old.files.get(name), files.get(name)
        if before is None and name.startswith(_VALUES):
            continue  # records of earlier versions have no values
        if before is None or after is None:
            said.append(f"{name}: {'new' if before is None else 'no longer used'}")
            continue
        changed = [f"{part} changed" for part in after if part in before and before[part] != after[part]]
        changed += [f"{part} added" for part in after if part not in before]
        changed += [f"{part} removed" for part in before if part not in after]
        if changed:
            said.append(f"{name}: {_first(changed)}")
    return said


def row_changes(
    old: Mapping[str, Sequence[str]],
    new: Mapping[str, Sequence[str]],
    splits: Sequence[str] = ("train", "held_out"),
) -> list[str]:
    """Which tasks differ, a line for each of the splits; from the digests in tasks.json."""
    said = []
    for split in splits:
        before, after = old.get(split, ()), new.get(split, ())
        rows = [str(n) for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
        if rows:
            said.append(f"{split} tasks: {len(rows)} differ (numbers {_first(rows)}, counted from 0)")
        if len(before) != len(after) and not {len(before), len(after)} <= {MOST, MOST_GENERATED}:
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


def _name(found: object) -> str:
    return str(getattr(found, "__qualname__", ""))


def _all_values(kinds: Iterable[object]) -> dict[str, Mapping[str, str]]:
    """The values of what functions made, by its name, which the results of one function share."""
    digests: dict[str, dict[str, set[str]]] = {}
    for kind in kinds:
        if "<locals>" not in (name := _name(kind)):
            continue
        made = getattr(kind, "__func__", kind)
        if made not in _first_values:
            values = values_of(made).items()
            _first_values[made] = {part: _digest(repr(value)) for part, value in values if _is_constant(value)}
        for part, digest in _first_values[made].items():
            digests.setdefault(f"{_VALUES}{name}>", {}).setdefault(part, set()).add(digest)
    return {
        name: {part: " ".join(sorted(each)) for part, each in parts.items()} for name, parts in digests.items()
    }


def _is_constant(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    if type(value) is str:  # paths and addresses may differ from job to job
        return "/" not in value or len(value.split()) > 1
    return value is None or type(value) in (bool, int, float)


def _source(found: object) -> str:
    """The source of a class or function; of a class of a notebook, whose own is not kept, that of its methods."""
    with suppress(OSError, TypeError):  # TypeError: it is no code
        return source_of(found)
    texts = []
    for member in vars(found).values() if isinstance(found, type) else ():
        with suppress(OSError, TypeError, ValueError):  # ValueError: it answers to every name, `__wrapped__` too
            texts.append(textwrap.indent(textwrap.dedent(source_of(function_of(member))), "    "))
    return "\n".join([f"class {found.__name__}:", *texts]) if isinstance(found, type) and texts else ""


def _all_definitions(texts: Mapping[str, str], *, portable: bool = True) -> dict[str, Mapping[str, str]]:
    return {name: _definitions(text, portable=portable) for name, text in sorted(texts.items())}


@lru_cache(maxsize=256)
def _definitions(text: str, *, portable: bool) -> Mapping[str, str]:
    """Each definition of a file with a digest that ignores comments and layout."""
    texts: dict[str, list[str]] = {}  # several of one name: overloads, the getter and setter of a property
    try:
        tree = parse(textwrap.dedent(text) if text.startswith((" ", "\t")) else text)
        for name, node in _named_nodes(tree):
            texts.setdefault(name, []).append(ast.unparse(_Portable().visit(node) if portable else node))
    except (SyntaxError, ValueError, RecursionError):
        return {"(text)": _digest(text)}
    return {name: _digest("\n".join(each)) for name, each in texts.items()}


class _Portable(ast.NodeTransformer):
    """Takes f-strings apart: versions of Python write them with other quotes, and 3.12 adds empty parts."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        parts = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
        return ast.Tuple([ast.Constant("f"), *parts], ast.Load())

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        spec = node.format_spec or ast.Constant(None)
        return ast.Tuple([node.value, ast.Constant(node.conversion), spec], ast.Load())


def _named_nodes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            for method in methods:
                yield f"{_mark(method)}{node.name}.{method.name}", method
            node.body = [each for each in node.body if each not in methods]
            yield node.name, node
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        else:
            yield "(module)", node


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
