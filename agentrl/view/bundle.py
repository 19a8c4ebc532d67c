"""Bundle the page: three files for the server, one file or a folder for an export that opens from disk.

Twenty modules take as many requests, and browsers refuse modules from disk, so they become one classic script:
each is a function that returns what it exports, in the order of their imports.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path

from agentrl.view.as_json import json_text

Answer = tuple[str, object]
"""A path of the API and what the server answers, as JSON can say it."""


@cache
def static_text(name: str) -> str:
    """Return a file of the page."""
    return files("agentrl.view").joinpath("static", *name.split("/")).read_text(encoding="utf-8")


_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"\./([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function\*? (\w+)|class (\w+)|const (\w+))", re.MULTILINE)
_EXPORT_LIST = re.compile(r"export\s*\{([^}]*)\};?\s*$")


def _modules(name: str, found: dict[str, str]) -> None:
    """Add a module after all that it imports."""
    if name in found:
        return
    found[name] = ""  # a circle of imports would come back here
    source = static_text(name)
    folder = name.rpartition("/")[0]
    places = {path: f"{folder}/{path}" if folder else path for _, path in _IMPORT.findall(source)}
    for place in places.values():
        _modules(place, found)
    del found[name]
    found[name] = _as_function(name, source)


def _as_function(name: str, source: str) -> str:
    exports = ["".join(names) for names in _EXPORT.findall(source)]
    pairs = [f"{n}: {n}" for n in exports]
    body = _EXPORT.sub("", source)
    if listed := _EXPORT_LIST.search(body):
        inside, names = zip(*(part.split(" as ") for part in listed[1].split(",")), strict=True)
        pairs += [f"{n.strip()}: {i.strip()}" for i, n in zip(inside, names, strict=True)]
        body = body[: listed.start()]
    body = _IMPORT.sub(lambda m: f"const {{{m[1].replace(' as ', ': ')}}} = modules[{json.dumps(m[2])}];", body)
    return f"modules[{json.dumps(name)}] = (() => {{\n{body}\nreturn {{ {', '.join(pairs)} }};\n}})();\n"


@cache
def script() -> str:
    """Return the whole page as one classic script."""
    found: dict[str, str] = {}
    _modules("app.js", found)
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{"".join(found.values())}}})();\n'


def served() -> Mapping[str, str]:
    """Return what the server sends for its page, by path; the same as `static/index.html` in three requests."""
    page = static_text("index.html")
    links = re.sub(r"^<(?:link rel=\"stylesheet\"|script ).*\n", "", page, flags=re.MULTILINE)
    ours = '<link rel="stylesheet" href="page.css">\n<script src="page.js" defer></script>\n</head>'
    return {
        "/": links.replace("</head>", ours),
        "/page.css": _style(),
        "/page.js": static_text("vendor/uPlot.js") + "\n" + script(),
    }


@cache
def _style() -> str:
    return static_text("vendor/uPlot.css") + "\n" + static_text("app.css")


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
"""
_BODY = '</head>\n<body><div id="app"></div>\n'

# A Map: paths hold text of a run, and no text may reach what every object has.
_ONE_FILE = """"use strict";
window.AGENTRL_EXPORT = (() => {
  const places = new Map();
  for (const el of document.querySelectorAll("script[data-path]")) places.set(el.dataset.path, el);
  const read = async (path) => JSON.parse(places.get(path).text);
  return {
    get: (path) => (places.has(path) ? read(path) : undefined),
    keys: () => places.keys(),
  };
})();
"""
_FOLDER = """"use strict";
window.AGENTRL_EXPORT = (() => {
  const places = new Map(JSON.parse(window.AGENTRL_FILES)), loaded = new Map();
  window.AGENTRL_ANSWER = (path, text) => loaded.get(path)(text);
  const load = (path) => new Promise((resolve, reject) => {
    const el = document.createElement("script");
    loaded.set(path, (text) => { el.remove(); resolve(JSON.parse(text)); });
    el.onerror = () => reject(new Error(`${places.get(path)} is missing from this export.`));
    el.src = places.get(path);
    document.head.append(el);
  });
  return { get: (path) => (places.has(path) ? load(path) : undefined), keys: () => places.keys() };
})();
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(answer: object) -> str:
    """JSON that is inert inside HTML."""
    text = json_text(answer, ascii=False)
    # A lone half of a surrogate pair cannot be encoded; JSON's own escape can.
    return "".join(f"\\u{ord(c):04x}" if c in "<>&\u2028\u2029" or "\ud800" <= c <= "\udfff" else c for c in text)


_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL | re.IGNORECASE)


def _hashes(renderers: Mapping[str, str]) -> list[str]:
    """A frame made from text has the policy of its page, so that policy names the scripts in it."""
    return [_hash(found) for page in renderers.values() for found in _SCRIPT.findall(page)]


def single_file(data: Iterable[Answer], *, renderers: Mapping[str, str], title: str) -> Iterator[str]:
    """Yield one HTML file, piece by piece: the page, and each answer as inert JSON.

    Args:
        data: what the page can show; read once, one answer at a time.
        renderers: the HTML of env renderers by the path that episodes name.
        title: the title of the document.
    """
    parts = [static_text("vendor/uPlot.js"), _ONE_FILE, script()]
    scripts = [*map(_hash, parts), *_hashes(renderers)]
    policy = (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src 'unsafe-inline'; "
        "img-src data:; frame-src 'self'"
    )
    yield _HEAD.format(policy=policy, title=escape(title))
    yield f"<style>{_style()}</style>\n"
    yield _BODY
    for path, answer in chain(renderers.items(), data):
        yield f'<script type="application/json" data-path="{escape(path)}">{_json(answer)}</script>\n'
    yield from (f"<script>{part}</script>\n" for part in parts)
    yield "</body>\n</html>\n"


def write_folder(folder: Path, data: Iterable[Answer], *, renderers: Mapping[str, str], title: str) -> None:
    """Write the page and its answers as files of a folder; the page loads an answer when it is shown.

    Args:
        folder: created if it is missing.
        data: as for `single_file`.
        renderers: as for `single_file`.
        title: the title of the document.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    places: list[tuple[str, str]] = []
    for number, (path, answer) in enumerate(chain(renderers.items(), data)):
        name = f"data/{number:06d}.js"
        call = f"AGENTRL_ANSWER({_json(path)},{_json(_json(answer))});\n"
        (folder / name).write_text(call, encoding="utf-8")
        places.append((path, name))
    index = f"window.AGENTRL_FILES = {_json(_json(places))};\n"
    for name, text in {
        "uPlot.js": static_text("vendor/uPlot.js"),
        "style.css": _style(),
        "data/index.js": index + _FOLDER,
        "app.js": script(),
    }.items():
        (folder / name).write_text(text, encoding="utf-8")
    sources = "".join(f'<script src="{name}"></script>\n' for name in ("uPlot.js", "data/index.js", "app.js"))
    # 'self' means nothing on disk; file: is where everything of the export is.
    scripts = " ".join(["file:", "'self'", *_hashes(renderers)])
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src file: 'self' 'unsafe-inline'; "
        "img-src data:; frame-src 'self'"
    )
    head = _HEAD.format(policy=policy, title=escape(title))
    page = f'{head}<link rel="stylesheet" href="style.css">\n{_BODY}{sources}</body>\n</html>\n'
    (folder / "index.html").write_text(page, encoding="utf-8")
