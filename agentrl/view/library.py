"""All runs that one page shows: found, followed and read, for the server and for exports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from agentrl.doctor.examine import findings
from agentrl.doctor.finding import Finding
from agentrl.errors import CheckpointError, ConfigError
from agentrl.run_folder.env_views import VIEWS
from agentrl.run_folder.records import iter_records, likely_steps, recorded_file
from agentrl.run_folder.run_reader import Json, RecordCache, RunReader, find_runs, is_run, stamp
from agentrl.run_folder.search_index import Index, Query, open_index
from agentrl.run_folder.token_records import NOTHING_RECORDED, read_tokens, tokens_file
from agentrl.view import episode_page, run_page, step_page
from agentrl.view.env_view import view_file, view_page
from agentrl.view.episode_page import Span
from agentrl.view.pieces import Decode
from agentrl.view.words import RUNS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RECENT = 20
"""Steps at the end of a run whose calls the page of tools counts unless told otherwise."""
KEPT_STEPS = 4
"""Steps whose matrix is kept: every page of an episode asks for that of its step."""
MAX_TOKENIZER = 64 << 20


T = TypeVar("T")


class NotFoundError(Exception):
    """There is no such run, step, episode or image."""


class Library:
    """The runs among some paths. Safe to use from several threads.

    Args:
        paths: run folders, or folders with run folders; new runs appear by themselves.
        index: the file of the search index; by default in the user's cache.
    """

    def __init__(self, paths: Sequence[Path], *, index: Path | None = None) -> None:
        self.paths, self.cache = list(paths), RecordCache()
        self._index_file = index
        self._runs: dict[str, RunReader] = {}
        self._ids: dict[Path, str] = {}
        self._tokenizers: dict[Path, tuple[tuple[str, int, int], Tokenizer] | None] = {}
        self._steps: dict[tuple[str, int], tuple[object, Json]] = {}
        self._examined: dict[Path, tuple[object, list[Json]]] = {}
        self._lock, self._indexing = threading.Lock(), threading.Lock()

    @property
    def runs(self) -> Mapping[str, RunReader]:
        """The runs by id, in the order of their folders."""
        with self._lock:
            found = find_runs(self.paths)
            for path in found:
                if path not in self._ids:
                    reader = RunReader(path)
                    self._ids[path] = run_page.run_id(reader, self._runs)
                    self._runs[self._ids[path]] = reader
            return {self._ids[path]: self._runs[self._ids[path]] for path in found}

    def run(self, id: str) -> RunReader:
        """A run by its id. Raises NotFoundError."""
        found = self._runs.get(id)
        if found is None or not is_run(found.path):  # it may be new, or gone
            found = self.runs.get(id)
        if found is None:
            raise NotFoundError(f"There is no run {id!r}.")
        return found

    def all_runs(self) -> Json:
        """The table of runs."""
        ids = self._places()
        return {"runs": [run_page.header(i, self.run(i), ids) for i in ids.values()], "words": dict(RUNS)}

    def about(self, id: str) -> Json:
        """A run. Raises NotFoundError."""
        reader = self.run(id)
        known = self._tokenizer(reader) is not None
        return run_page.about(id, reader, self._places(), self._findings(reader), tokenizer=known)

    def _places(self) -> dict[Path, str]:
        """The ids of all runs by folder."""
        return {reader.path: id for id, reader in self.runs.items()}

    def _findings(self, reader: RunReader) -> list[Json]:
        """What the doctor finds, examined again when the run has changed."""
        state = reader.state
        with self._lock:
            kept = self._examined.get(reader.path)
        if kept is None or kept[0] != state:
            kept = (state, _examined(reader))
            with self._lock:
                self._examined[reader.path] = kept
        return kept[1]

    def step(self, id: str, step: int) -> Json:
        """The matrix of a step. Raises NotFoundError."""
        reader = self.run(id)
        state = (reader.state, stamp(recorded_file(reader.path, step)), stamp(tokens_file(reader.path, step)))
        with self._lock:
            kept = self._steps.get((id, step))
        if kept is None or kept[0] != state:
            kept = (state, _found(reader, step, lambda: step_page.step(reader, step, self.cache)))
            with self._lock:
                self._steps[id, step] = kept
                while len(self._steps) > KEPT_STEPS:
                    del self._steps[next(iter(self._steps))]
        return kept[1]

    def tools(self, id: str, last: int = RECENT) -> Json:
        """The calls of the last steps of a run; 0 for all steps. Raises NotFoundError."""
        reader = self.run(id)
        steps = reader.steps[-max(0, last) :]
        try:
            return step_page.tools(reader, self.cache, steps)
        except DAMAGES:
            whole = [step for step in steps if _damage(reader, step) is None]
            if len(whole) == len(steps):
                raise
            return step_page.tools(reader, self.cache, whole)

    def record(self, id: str, step: int | None, episode: str) -> Json:
        """The raw record of an episode, in any step where none is given. Raises NotFoundError."""
        reader = self.run(id)
        steps = likely_steps(episode, reader.steps) if step is None else [step]
        for number in steps:
            try:
                found = _found(reader, number, partial(self.cache.record, reader, number, episode))
            except NotFoundError:
                if step is not None:
                    raise
                continue
            if found is not None:
                return {**found, "step": number}
        raise NotFoundError(
            f"Run {id} has no episode {episode!r}{f' in step {step}' if step is not None else ''}."
        )

    def episode(self, id: str, step: int | None, name: str) -> Json:
        """An episode without its tokens. Raises NotFoundError."""
        record, path = self.record(id, step, name), self.run(id).path
        found = _found(self.run(id), record["step"], lambda: self._episode(id, record, name))
        files = recorded_file(path, record["step"]), tokens_file(path, record["step"])
        # a resumed run records the step again, and the learner's side of a token comes later than the token
        return {**found, "recorded": str([*map(stamp, files)])}

    def _episode(self, id: str, record: Json, name: str) -> Json:
        groups = self.step(id, record["step"])["groups"]
        group = next((g["episodes"] for g in groups if g["group"] == record["group"]), ())
        siblings = [e["id"] for e in group if e["id"] != name]
        env = str(record["episode"]["task"].get("env") or "")
        shown = view_file(self.run(id).path, env) is not None
        url = f"/api/renderer/{quote(id, safe='')}/{quote(env or 'env', safe='')}" if shown else None
        return episode_page.episode(record, id, siblings, url)

    def renderer(self, id: str, env: str) -> str:
        """The page with which an env shows its episodes. Raises NotFoundError."""
        file = view_file(self.run(id).path, env)
        if file is None:
            raise NotFoundError(f"The env {env!r} of run {id} has no view.")
        return _of_file(file)

    def renderers(self) -> dict[str, str]:
        """All such pages by their address."""
        return {
            f"/api/renderer/{quote(id, safe='')}/{quote(file.stem, safe='')}": _of_file(file)
            for id, reader in self.runs.items()
            for file in sorted((reader.path / VIEWS).glob("*.js"))
            if view_file(reader.path, file.stem) is not None
        }

    def tokens(self, id: str, step: int | None, name: str, span: Span) -> Json:
        """The tokens of an episode. Raises NotFoundError."""
        reader, record = self.run(id), self.record(id, step, name)
        try:
            columns = read_tokens(reader.path, record["step"]).get(name, NOTHING_RECORDED)
        except CheckpointError:
            columns = NOTHING_RECORDED
        decode = self._decode(reader)
        return _found(reader, record["step"], lambda: episode_page.tokens(record, span, decode, columns))

    def image(self, id: str, step: int | None, name: str, message: int, part: int) -> tuple[bytes, str]:
        """An image and its type. Raises NotFoundError."""
        record = self.record(id, step, name)
        found = _found(self.run(id), record["step"], lambda: episode_page.image(record, message, part))
        if found is None:
            raise NotFoundError("There is no image in a format that browsers can show.")
        return found

    def search(self, query: Query) -> Json:
        """A page of hits. Raises ConfigError for an invalid regular expression."""
        found = self.indexed().search(query)
        ids = self._places()
        hits = [
            {
                "run": ids[hit.run],
                "step": hit.step,
                "episode": hit.episode,
                "group": hit.group,
                "task": hit.task,
                "reward": hit.reward,
                "stop_reason": hit.stop_reason,
                "snippet": hit.snippet,
            }
            for hit in found.hits
            if hit.run in ids  # a run may be deleted meanwhile
        ]
        return {"total": found.total, "cut": found.cut, "took_ms": round(1000 * found.seconds, 1), "hits": hits}

    def compare(self, ids: Sequence[str]) -> Json:
        """Several runs side by side. Raises NotFoundError."""
        return run_page.compare({id: self.run(id) for id in ids}, self.cache, self._places())

    def indexed(self) -> Index:
        """The index of all episodes so far; the first call takes a second for each 10,000 of them or so."""
        index = open_index([reader.path for reader in self.runs.values()], self._index_file)
        with self._indexing:
            index.refresh()
        return index

    def _decode(self, reader: RunReader) -> Decode | None:
        tokenizer = self._tokenizer(reader)
        if tokenizer is None:
            return None

        def decode(ids: Sequence[int]) -> str:
            try:
                return tokenizer.decode(list(ids), skip_special_tokens=False)
            except OverflowError:  # ids that no vocabulary has
                return ""

        return decode

    def _tokenizer(self, reader: RunReader) -> Tokenizer | None:
        """The tokenizer of a run's model: of its start policy, a checkpoint, or the model folder it began from."""
        for file in _tokenizer_files(reader):
            try:
                stat = file.stat()
            except OSError:
                continue
            stamp = (str(file), stat.st_size, stat.st_mtime_ns)
            with self._lock:
                kept = self._tokenizers.get(reader.path)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            if (found := _load(file)) is not None:
                with self._lock:
                    self._tokenizers[reader.path] = (stamp, found)
                return found
        return None


def _told(finding: Finding) -> Json:
    place = {"step": finding.step, "id": finding.episode} if finding.episode else None
    data = finding.data()
    return {**data, "text": f"{finding.text}. {finding.why}".rstrip(". ") + ".", "episode": place}


DAMAGES = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""What a record raises that no run wrote."""


def _examined(reader: RunReader) -> list[Json]:
    """What the doctor finds; that it cannot read the run, if so."""
    try:
        return [_told(finding) for finding in findings(reader.path)]
    except (CheckpointError, OSError, *DAMAGES) as e:
        damage = next((said for step in reader.steps if (said := _damage(reader, step)) is not None), None)
        text = f"The run cannot be examined: {damage or f'{type(e).__name__}: {e}'}"
        return [
            {"name": "damaged", "severity": "hint", "text": text, "setting": "", "step": None, "episode": None}
        ]


def _damage(reader: RunReader, step: int) -> str | None:
    """What is wrong with the records of a step; they are not validated before something fails."""
    try:
        for _ in iter_records(reader.path, step):
            pass
    except CheckpointError as e:
        return str(e)
    return None


def _found(reader: RunReader, step: int, read: Callable[[], T]) -> T:
    """What `read` returns of a step. Raises NotFoundError if its records are missing or damaged."""
    try:
        return read()
    except CheckpointError as e:
        raise NotFoundError(str(e)) from None
    except DAMAGES:
        if (damage := _damage(reader, step)) is None:
            raise
        raise NotFoundError(damage) from None


def _of_file(file: Path) -> str:
    try:
        return view_page(file)
    except CheckpointError as e:
        raise NotFoundError(str(e)) from None


def _tokenizer_files(reader: RunReader) -> list[Path]:
    model = reader.config.get("model")
    folders = [reader.path / "start", *sorted(reader.path.glob("checkpoints/step-*"), reverse=True)]
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        folders.append(Path(model["path"]))
    return [folder / name for folder in folders for name in ("tokenizer.json", "policy/tokenizer.json")]


def _load(file: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    if file.stat().st_size > MAX_TOKENIZER:
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises its own base class
        return None


def query_of(given: Mapping[str, str], library: Library) -> Query:
    """The query of a request's parameters.

    Raises:
        ConfigError: a value is not a number.
        NotFoundError: there is no such run.
    """

    def number(name: str, kind: type[int] | type[float]) -> float | None:
        text = given.get(name, "")
        if not text:
            return None
        try:
            found = kind(text)
        except ValueError:
            raise ConfigError(f"{name}: {text[:40]!r} is not a number") from None
        if found != found or abs(found) > 1e15:
            raise ConfigError(f"{name}: {text[:40]!r} is out of range")
        return found

    def whole(name: str) -> int | None:
        found = number(name, int)
        return None if found is None else int(found)

    return Query(
        text=given.get("q", ""),
        regex=given.get("regex", "") not in ("", "0", "false"),
        tool=given.get("tool") or None,
        outcome=given.get("outcome") or None,
        stop=given.get("stop") or None,
        reward_min=number("reward_min", float),
        reward_max=number("reward_max", float),
        step_min=whole("step_min"),
        step_max=whole("step_max"),
        task=given.get("task") or None,
        run=library.run(given["run"]).path if given.get("run") else None,
        tag=given.get("tag") or None,
        limit=min(1000, whole("limit") or 50),
        offset=whole("offset") or 0,
    )
