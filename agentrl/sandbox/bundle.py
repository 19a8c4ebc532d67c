"""Bundle the inside programs into one text, so that they run where agentrl is not installed."""

from __future__ import annotations

import base64
import functools
import zlib
from importlib import resources

PACKAGE = "agentrl_inside"

_LOADER = """
import importlib.machinery, sys
class SourceFinder:
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return importlib.machinery.ModuleSpec(name, self, origin=name, is_package=name == PACKAGE)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__spec__.name
        module.__file__ = "<" + name + ">"
        exec(compile(SOURCES[name], module.__file__, "exec", dont_inherit=True), module.__dict__)
finder = SourceFinder()
sys.meta_path.insert(0, finder)
"""


def sources() -> dict[str, str]:
    """Return the inside modules by name."""
    found = {}
    for entry in resources.files("agentrl.sandbox.inside").iterdir():
        name, dot, kind = entry.name.partition(".")
        if dot and kind == "py":
            found[PACKAGE if name == "__init__" else f"{PACKAGE}.{name}"] = entry.read_text(encoding="utf-8")
    return found


@functools.cache
def program(module: str) -> str:
    """Return Python code that makes the inside modules importable as `agentrl_inside` and calls `main` of one of
    them.

    The text ends in an open call: append arguments and a closing parenthesis.
    """
    packed = base64.b85encode(zlib.compress(repr(sources()).encode(), 9)).decode()
    return (
        "import sys\nsys.path[:] = [place for place in sys.path if place]\n"  # not from the working directory
        f"import base64, zlib, ast\nPACKAGE = {PACKAGE!r}\n"
        f"SOURCES = ast.literal_eval(zlib.decompress(base64.b85decode({packed!r})).decode())\n"
        f"{_LOADER}\nfrom {PACKAGE} import {module}\n"
        f"sys.meta_path.remove(finder)\ndel SOURCES, finder, base64, zlib, ast\n{module}.main("
    )
