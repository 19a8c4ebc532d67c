"""Bundle the inside programs into one text, so that they run where agentrl is not installed."""

from __future__ import annotations

import binascii
import functools
import marshal
import zlib
from importlib import resources
from types import CodeType

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
        code = SOURCES[name]
        if isinstance(code, str):
            code = compile(code, module.__file__, "exec", dont_inherit=True)
        exec(code, module.__dict__)
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
def program(module: str, *, compiled: bool = False) -> str:
    """Return Python code that makes the inside modules importable as `agentrl_inside` and calls `main` of one of
    them.

    The text ends in an open call: append arguments and a closing parenthesis.

    Args:
        compiled: bring the modules as bytecode, which only this version of Python reads. It starts in half the
            time, and the text is longer than an argument of a program may be.
    """
    modules: dict[str, str | CodeType] = {**sources()}
    if compiled:
        modules = {name: compile(text, f"<{name}>", "exec", dont_inherit=True) for name, text in sources().items()}
    # Whatever is imported here costs each start: base64 and ast, 10 ms. Every Python 3 reads text of version 2.
    data = marshal.dumps(modules, marshal.version if compiled else 2)
    packed = binascii.b2a_base64(zlib.compress(data, 9), newline=False).decode()
    return (
        "import sys\nsys.path[:] = [place for place in sys.path if place]\n"  # not from the working directory
        f"import binascii, marshal, zlib\nPACKAGE = {PACKAGE!r}\n"
        f"SOURCES = marshal.loads(zlib.decompress(binascii.a2b_base64({packed!r})))\n"
        f"{_LOADER}\nfrom {PACKAGE} import {module}\n"
        f"sys.meta_path.remove(finder)\ndel SOURCES, finder, binascii, marshal, zlib\n{module}.main("
    )
