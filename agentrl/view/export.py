"""Export the page: which data goes into a file or folder, and what is redacted."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agentrl.errors import CheckpointError, ConfigError
from agentrl.plural import plural
from agentrl.run_folder.run_reader import Json
from agentrl.view import run_page
from agentrl.view.bundle import Answer, single_file, write_folder
from agentrl.view.episode_page import Span, image_path
from agentrl.view.library import Library, NotFoundError
from agentrl.view.redaction import redacted


@dataclass(frozen=True, slots=True)
class Extent:
    """The contents of an export.

    Attributes:
        steps: that many steps of each run, spread over it, the last one included; all where it is None.
        episodes: that many episodes of each of these steps, the best and the worst; all where it is None.
        redact: keep only what `agentrl.view.redaction` lists: numbers, ids and names.
    """

    steps: int | None = 5
    episodes: int | None = 8
    redact: bool = False


def export(library: Library, target: Path, extent: Extent) -> str:
    """Write the page with its data to a file (`*.html`) or a folder; returns what it carries and what it does not.

    Raises:
        ConfigError: the target is there already, or cannot be written.
    """
    if target.exists() and (target.suffix == ".html" or not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: is there already; give another name")
    written: Counter[str] = Counter()
    data = _counted(_answers(library, extent), written)  # one answer in memory at a time
    renderers = {} if extent.redact else library.renderers()
    there = target.is_dir()  # and empty: what is in it later is the export's
    title = "agentrl" if extent.redact else ", ".join(reader.path.name for reader in library.runs.values())
    try:
        if target.suffix == ".html":
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("w", encoding="utf-8") as file:
                file.writelines(single_file(data, renderers=renderers, title=title))
        else:
            write_folder(target, data, renderers=renderers, title=title)
    except BaseException as e:  # also Ctrl-C: half an export looks like a whole one, and is in the way of the next
        with contextlib.suppress(OSError):
            for path in target.iterdir() if there else [target]:
                (shutil.rmtree if path.is_dir() else os.remove)(path)
        if isinstance(e, OSError):
            place = "" if e.filename in (None, str(target)) else f"{e.filename}: "
            raise ConfigError(f"{target}: cannot be written: {place}{e.strerror or e}") from None
        raise
    return _contents(library, written, extent)


def _counted(answers: Iterable[Answer], written: Counter[str]) -> Iterator[Answer]:
    for path, answer in answers:
        written["episodes"] += "/episodes/" in path
        written["steps"] += bool(re.search(r"/steps/\d+$", path))
        yield path, answer


def _contents(library: Library, written: Mapping[str, int], extent: Extent) -> str:
    episodes, steps = written["episodes"], written["steps"]
    recorded = sum(len(reader.steps) for reader in library.runs.values())
    runs = len(library.runs)
    text = f"{plural(runs, 'run')}, {steps} of {plural(recorded, 'step')}, {plural(episodes, 'episode')} in full"
    return f"{text}; texts, tokens and paths are left out" if extent.redact else text


def _answers(library: Library, extent: Extent) -> Iterator[Answer]:
    redact = redacted if extent.redact else _keep
    yield "/api/runs", redact(library.all_runs())
    for id, reader in library.runs.items():
        base = f"/api/runs/{quote(id, safe='')}"
        yield base, redact(library.about(id))
        yield f"{base}/series", redact(run_page.series(reader, None, -1))
        yield f"{base}/steps", redact(run_page.steps(reader))
        yield f"{base}/tools", redact(library.tools(id, last=0))
        for step in spread(reader.steps, extent.steps):
            try:
                found = library.step(id, step)
            except NotFoundError:
                continue
            yield f"{base}/steps/{step}", redact(found)
            yield from _episodes(library, id, step, found, extent)
    ids = sorted(library.runs)
    if 1 < len(ids) <= 10:
        yield f"/api/compare?runs={','.join(quote(id, safe='') for id in ids)}", redact(library.compare(ids))


def _episodes(library: Library, run: str, step: int, found: Json, extent: Extent) -> Iterator[Answer]:
    every = [episode for group in found["groups"] for episode in group["episodes"]]
    every.sort(key=lambda episode: (episode["reward"] is not None, episode["reward"] or 0.0))
    base = f"/api/runs/{quote(run, safe='')}"
    for one in ends(every, extent.episodes):
        id = one["id"]
        place = f"{quote(id, safe='/')}?step={step}"
        try:
            episode = library.episode(run, step, id)
            tokens = {} if extent.redact else library.tokens(run, step, id, Span())
        except (NotFoundError, CheckpointError):
            continue
        if extent.redact:
            yield (
                f"{base}/episodes/{place}",
                redacted({**episode, "segments": [], "branches": [], "tools": []}) | {"renderer": None},
            )
            continue
        yield f"{base}/episodes/{place}", episode
        yield f"{base}/tokens/{place}", tokens
        for message, content in enumerate(m["content"] for m in episode["messages"]):
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict):
                    try:
                        data, kind = library.image(run, step, id, message, part["image"])
                    except NotFoundError:
                        continue
                    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
                    yield image_path(run, step, id, message, part["image"]), url


def spread(items: Sequence[int], count: int | None) -> list[int]:
    """That many items at equal distances, the first and the last among them."""
    if count is None or len(items) <= count:
        return list(items)
    if count <= 1:
        return list(items[-1:]) if count else []
    places = {round(n * (len(items) - 1) / (count - 1)) for n in range(count)}
    return [items[place] for place in sorted(places)]


def ends(items: Sequence[Json], count: int | None) -> Iterable[Json]:
    """Half of the items from the beginning and half from the end."""
    if count is None or len(items) <= count:
        return items
    low = count - count // 2
    return [*items[:low], *items[len(items) - count // 2 :]]


def _keep(data: Json) -> Json:
    return data
