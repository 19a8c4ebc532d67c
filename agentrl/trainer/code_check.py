"""Compare the code and tasks of a resumed run with those it was trained on, and keep a copy of the code."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from agentrl.config.changes import Change, changes_of
from agentrl.config.load import load_config
from agentrl.config.run import RunConfig
from agentrl.env.tasks import is_generated
from agentrl.errors import CheckpointError, ConfigError
from agentrl.rollout.code_record import CodeRecord, code_changes, code_of, row_changes
from agentrl.rollout.content import Content
from agentrl.run_folder.checkpoints import steps_saved
from agentrl.run_folder.env_views import VIEWS, view_name
from agentrl.run_folder.files import write_atomic
from agentrl.run_folder.history import add_history
from agentrl.run_folder.store import CODE_FILE, RunStore
from agentrl.run_folder.task_digests import MOST_GENERATED, TASKS_FILE, read_task_digests, task_digests
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class CheckedCode:
    """The code and tasks of a run that may start.

    Attributes:
        changed: what differs from the newest checkpoint, a line each.
    """

    changed: Sequence[str]
    _code: CodeRecord
    _tasks: bytes
    _step: int
    _copied: bool

    def record(self, store: RunStore) -> None:
        """Write the digests and a copy of the code, and what changed to the history."""
        if self.changed:
            add_history(store.path, self._step, {"code": list(self.changed)})
            for line in self.changed:
                store.event(f"accepted: {line}")
        store.write_file(TASKS_FILE, self._tasks)
        store.write_file(CODE_FILE, self._code.to_json())
        if not self._copied:
            _keep(store, self._code, self._step)


def check_code(config: RunConfig, content: Content, store: RunStore, *, accept: bool) -> CheckedCode:
    """Compare the code and tasks of a run with those of its newest checkpoint.

    Args:
        accept: continue with changed code or tasks.

    Raises:
        ConfigError: something changed, and `accept` is False. Names the files, tools, rewards and rows.
    """
    _keep_views(content, store)
    step = max(steps_saved(store.path / "checkpoints"), default=0)
    new, tasks = code_of(config, content), _digests(content, sorted(content.by_env))
    settings = _changed_settings(store.path, step, config) if step else ()
    expected = any(c.kind != "free" and c.key.partition(".")[0] in ("env", "envs", "data") for c in settings)
    other_eval = any("eval" in c.key.split(".") for c in settings)
    splits = ("train",) if other_eval and not expected else ("train", "held_out")
    code = _code_changes(store.path, step, new) if step else []
    try:
        rows = _row_changes(store.path, step, json.loads(tasks), splits) if step else []
        if rows and config.envs:  # earlier versions recorded the envs in the order of the YAML
            rows = _row_changes(store.path, step, json.loads(_digests(content, content.by_env)), splits) and rows
    except CheckpointError as e:
        if not (accept or expected):
            copy = store.path / "checkpoints" / f"step-{step}" / TASKS_FILE
            raise CheckpointError(
                f"{e}; without the digests in it, nobody knows whether the tasks changed since step {step}: "
                f"replace it with {copy}, or confirm with --accept-code, in Python "
                "accept_code=True, that they did not"
            ) from None
        rows = [f"the tasks may differ: {e}"]
    if (code or (rows and not expected)) and not accept:
        listed = "\n    ".join([*code, *rows])
        raise ConfigError(
            f"{store.path}: the code or the tasks changed since step {step}:\n    {listed}\n"
            "undo the change, or confirm it with --accept-code, in Python accept_code=True (the history "
            "records it)"
        )
    return CheckedCode([*code, *rows], new, tasks, step, _copied=bool(step and not code))


def _code_changes(run: Path, step: int, new: CodeRecord) -> list[str]:
    """The code that differs from the newest checkpoint.

    It does not count where the checkpoint has no record of it, or where it was accepted since, by a run that
    ended before it saved.
    """
    old = CodeRecord.read(run / "checkpoints" / f"step-{step}" / CODE_FILE)
    accepted = CodeRecord.read(run / CODE_FILE)
    if old is None or (accepted is not None and not code_changes(accepted, new)):
        return []
    return code_changes(old, new)


def _row_changes(run: Path, step: int, new: Mapping[str, Sequence[str]], splits: Sequence[str]) -> Sequence[str]:
    """How the tasks differ from the last accepted ones; empty if the newest checkpoint has the same tasks.

    Raises:
        CheckpointError: the digests of the run are missing or damaged.
    """
    changes = row_changes(read_task_digests(run / TASKS_FILE), new, splits)
    if not changes:
        return []
    with contextlib.suppress(CheckpointError):  # without digests, nobody knows
        if not row_changes(read_task_digests(run / "checkpoints" / f"step-{step}" / TASKS_FILE), new, splits):
            return []
    return changes


def _changed_settings(run: Path, step: int, config: RunConfig) -> Sequence[Change]:
    """What differs from the settings of a checkpoint; tasks may differ because of them."""
    try:
        old = load_config(run / "checkpoints" / f"step-{step}" / "config.yaml", check_paths=False)
    except ConfigError:  # of a version that knew other keys
        return ()
    return changes_of(old, config)


def _keep_views(content: Content, store: RunStore) -> None:
    """Copy the scripts with which envs show their episodes. Raises ConfigError if one does not exist."""
    for name, part in content.by_env.items():
        kind = type(part.make_env())
        script: object = kind.view  # the name may be taken by a tool
        if isinstance(script, str):
            file = Path(inspect.getfile(kind)).parent / script
            if not file.is_file():
                raise ConfigError(f"{kind.__name__}.view is {script!r}: there is no file {file}")
            (store.path / VIEWS).mkdir(exist_ok=True)
            store.write_file(f"{VIEWS}/{view_name(name)}", file.read_bytes())


def _keep(store: RunStore, code: CodeRecord, step: int) -> None:
    """Copy the files to `code/step-N`, where N is the last step without them."""
    for name, text in code.texts.items():
        target = store.path / "code" / f"step-{step}" / name.strip("<>")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text.encode("utf-8", "replace"))


def _digests(content: Content, envs: Iterable[str]) -> bytes:
    """The content of tasks.json, with the tasks of the envs in this order."""
    parts = [content.by_env[name] for name in envs]
    train = (part.train_tasks for part in parts)
    held_out = (tasks for part in parts for tasks in part.held_out_sets)
    return task_digests(*(chain.from_iterable(map(_recorded, sets)) for sets in (train, held_out)))


def _recorded(tasks: Sequence[Task]) -> Iterator[Task]:
    """The first ones, if they are generated: their code is recorded, too."""
    return islice(tasks, MOST_GENERATED if is_generated(tasks) else None)
