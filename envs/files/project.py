"""A small project made from a seed, and what is wanted of it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["setting", "rename", "bug"]
_NOUNS = ("price", "stock", "order", "weight", "score", "invoice", "ticket", "parcel")
_VERBS = ("compute", "adjust", "update", "combine", "reduce", "derive")
_KEYS = ("retries", "timeout", "width", "depth", "budget", "workers")
_SECTIONS = ("network", "display", "limits", "storage")


@dataclass(frozen=True, slots=True)
class Project:
    """The files at the start, the request, and what decides.

    `edits` are (path, old, new) replacements that serve the request. `calls` are (module, function, arguments,
    result): all must hold at the end. `gone` and `there` are words of the Python files, `settings` the wanted
    content of settings.json.
    """

    kind: Kind
    request: str
    files: dict[str, str]
    edits: tuple[tuple[str, str, str], ...]
    calls: tuple[tuple[str, str, tuple[int, ...], int], ...]
    settings: dict[str, Any]
    gone: str = ""
    there: str = ""


def build(seed: int) -> Project:
    """The project of `seed`."""
    rng = random.Random(f"files/{seed}")
    kind: Kind = rng.choice(("setting", "rename", "bug"))
    names = [f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS]
    rng.shuffle(names)
    helper, main, new_name, other = names[:4]
    module, user = rng.sample(_NOUNS, 2)
    factor, offset = rng.randint(2, 9), rng.randint(10, 99)
    body = f"    return a * {factor} + b - {offset}\n"
    settings: dict[str, Any] = {s: {k: rng.randint(1, 50) for k in rng.sample(_KEYS, 3)} for s in _SECTIONS}
    files = {
        f"app/{module}.py": (
            f'"""Work on {module}."""\n\n\ndef {helper}(a, b):\n{body}\n\n'
            f"def {other}(a):\n    return a + {offset}\n"
        ),
        f"app/{user}.py": (
            f'"""Work on {user}."""\n\nfrom app.{module} import {helper}\n\n\n'
            f"def {main}(a, b):\n    return {helper}(a, b) + {helper}(b, a)\n"
        ),
        "app/__init__.py": "",
        "README.md": f"# {module}\n\nStart with `{main}` in app/{user}.py.\n",
        "settings.json": json.dumps(settings, indent=2) + "\n",
    }

    def right(a: int, b: int) -> int:
        return a * factor + b - offset

    pairs = [(rng.randint(-50, 50), rng.randint(-50, 50)) for _ in range(5)]
    calls = tuple((f"app.{user}", main, pair, right(*pair) + right(*pair[::-1])) for pair in pairs)
    if kind == "setting":
        section = rng.choice(_SECTIONS)
        key = rng.choice(list(settings[section]))
        value = settings[section][key] + rng.randint(1, 9)
        wanted = {s: dict(v) for s, v in settings.items()} | {section: settings[section] | {key: value}}
        request = f"Set {key} of the section {section} in settings.json to {value}. Leave the rest as it is."
        edits: tuple[tuple[str, str, str], ...] = (
            ("settings.json", json.dumps(settings, indent=2), json.dumps(wanted, indent=2)),
        )
        return Project(kind, request, files, edits, calls, wanted)
    if kind == "rename":
        request = f"Rename the function {helper} to {new_name} everywhere in app/. Nothing else may change."
        edits = tuple((p, helper, new_name) for p in (f"app/{module}.py", f"app/{user}.py"))
        return Project(kind, request, files, edits, calls, settings, gone=helper, there=new_name)
    wrong = rng.choice(
        [
            f"    return a * {factor} - b - {offset}\n",
            f"    return a * {factor} + b + {offset}\n",
            f"    return a + {factor} + b - {offset}\n",
            f"    return b * {factor} + a - {offset + 1}\n",
        ]
    )
    path = f"app/{module}.py"
    files[path] = files[path].replace(body, wrong)
    request = (
        f"The function {helper} somewhere in app/ is wrong: it must return {factor} times a, plus b, "
        f"minus {offset}. Repair it."
    )
    return Project(kind, request, files, ((path, wrong, body),), calls, settings)
