"""The source files that a piece of code depends on: its own, and those that they import, and so on."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from agentrl.syntax import parse

HOUSE = Path(__file__).resolve().parents[1]
SHIPPED = HOUSE / "envs"
"""Code of agentrl itself is no source file of a run, except for its envs."""
_INSTALLED = {"site-packages", "dist-packages"}
_NOT_OF_RUNS = (HOUSE, (HOUSE / "tools").resolve(), (HOUSE / "sandboxes").resolve())
_STDLIB = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")]


def module_file(name: str) -> Path | None:
    """The file of an imported module that is neither agentrl's own nor installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if name == "__main__" or not isinstance(file, str) else _own(Path(file))


def with_imports(files: Iterable[Path]) -> dict[Path, str]:
    """The text of these files and of all that they import, also inside of functions, in the order of the paths."""
    found: dict[Path, str] = {}
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = path.read_text(encoding="utf-8", errors="replace")
            waiting += _imported(path, found[path])
    return dict(sorted(found.items()))


def source_names(paths: Iterable[Path], begun: Iterable[Path]) -> dict[Path, str]:
    """A name for each file: its path below the folder that its imports count from, and more where two are alike.

    A folder that moves as a whole keeps the names.

    Args:
        begun: the files that imported the others.
    """
    every, tops = list(paths), sorted({_top(path) for path in begun}, key=lambda top: len(top.parts))
    names = {}
    for path in every:
        top = next((top for top in tops if path.is_relative_to(top)), _top(path))
        size = len(path.parts) - len(top.parts)
        while sum(other.parts[-size:] == path.parts[-size:] for other in every) > 1:
            size += 1
        names[path] = "/".join(path.parts[-size:]).lstrip("/")
    return names


def _own(path: Path) -> Path | None:
    path = path.resolve()
    if path.suffix != ".py" or not path.is_file() or _INSTALLED.intersection(path.parts):
        return None
    if any(map(path.is_relative_to, _STDLIB)):
        return None
    inside = any(map(path.is_relative_to, _NOT_OF_RUNS)) and not path.is_relative_to(SHIPPED.resolve())
    return None if inside else path


def _imported(path: Path, text: str) -> Iterator[Path]:
    for name, level in _import_names(text):
        roots = [path.parents[level - 1]] if 0 < level <= len(path.parents) else _roots(path)
        yield from _located(name, roots, loaded=not level)


@lru_cache(maxsize=256)
def _import_names(text: str) -> list[tuple[str, int]]:
    """What a file imports: the names, with the number of dots before each."""
    try:
        nodes = list(ast.walk(parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = (".".join(part for part in (node.module, alias.name) if part) for alias in node.names)
            found += [(name, node.level) for name in names]
    return found


def _roots(path: Path) -> list[Path]:
    """Where absolute imports of a file may be found."""
    return [path.parent, _top(path)]


def _top(path: Path) -> Path:
    """The folder of a file, or that of its outermost package."""
    top = path.parent
    while (top / "__init__.py").is_file() and top.parent != top:
        top = top.parent
    return top


def _located(name: str, roots: Iterable[Path], *, loaded: bool = True) -> Iterator[Path]:
    """The files of a module and of the packages around it; a last part that is no module is skipped."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if loaded and module in sys.modules:
            if (file := module_file(module)) is not None:
                yield file
            continue
        places = [root.joinpath(*parts[:end]) for root in roots]
        files = [each for place in places for each in (place / "__init__.py", place.with_suffix(".py"))]
        yield from {own for file in files if (own := _own(file)) is not None}
