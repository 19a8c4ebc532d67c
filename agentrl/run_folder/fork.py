"""Fork a run: a new run folder that begins with a checkpoint of another."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from agentrl.config import RunConfig, dump_config
from agentrl.config.changes import Change
from agentrl.errors import CheckpointError, ConfigError
from agentrl.run_folder import checkpoints
from agentrl.run_folder.earlier_configs import config_at, copy_configs, keep_config
from agentrl.run_folder.files import write_atomic
from agentrl.run_folder.history import Lineage, add_history, copy_history, read_lineage, write_lineage
from agentrl.run_folder.lock import LOCK
from agentrl.run_folder.moved import INPUTS_FILE, changes_of_run
from agentrl.run_folder.own_start import WEIGHTS, starting_with
from agentrl.run_folder.records import MAX_LINE, bounded_lines, episodes_file, parse_metrics, recorded_steps
from agentrl.run_folder.redraws import read_redraws, redraws_file, redraws_line
from agentrl.run_folder.store import CODE_FILE
from agentrl.run_folder.task_digests import TASKS_FILE
from agentrl.run_folder.token_records import tokens_file

OF_THE_RUN = frozenset(
    ("config.yaml", CODE_FILE, TASKS_FILE, "renderer.json", "learner.json", "sampler.json", checkpoints.MANIFEST)
)
"""Files of a checkpoint that belong to the run, not to its model."""
TRIES = 3
"""How often the newest checkpoint is looked for; a run in progress may remove the one that was found."""


def parse_source(text: str, said: str = "--from ") -> tuple[Path, int]:
    """The run folder and step of `RUN`, `RUN@STEP` or `RUN@best`; without a step, the newest checkpoint.

    Args:
        said: what stands before it, for errors.

    Raises:
        CheckpointError: there is no such run or checkpoint. Names those that are there.
    """
    path, at = _parts(text)
    if not (path / "config.yaml").is_file():
        raise CheckpointError(f"{said}{text}: {path} is not a run folder; give RUN or RUN@STEP")
    if (path / checkpoints.MANIFEST).is_file():
        run, step = path.resolve().parents[1], path.resolve().name.removeprefix("step-")
        raise CheckpointError(f"{said}{text}: {path} is a checkpoint; give its run and step: {run}@{step}")
    steps = checkpoints.steps_saved(path / "checkpoints")
    if at == "best" and (best := checkpoints.pointed(path / "checkpoints" / "best")) is not None:
        at = str(best)
    wanted = int(at) if at.isdecimal() else max(steps, default=0) if not at else -1
    if wanted not in steps:
        kept = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"{said}{text}: there is no checkpoint{f' of step {at}' if at else ''} in {path} (kept: {kept}; see "
            "checkpoint.keep)"
        )
    return path, wanted


def fork_run(config: RunConfig, source: str, *, run_dir: Path | None = None, weights_only: bool = False) -> Path:
    """Make the folder of a run that continues another one's checkpoint; training then resumes it.

    The new run has the metrics, episodes and checkpoint of the other one up to that step, with its optimizer and
    its position in the data. The same call finds the folder again.

    Args:
        config: of the new run. Its fixed keys are those of the other run; other changes enter its history.
        source: `RUN`, `RUN@STEP` or `RUN@best`.
        run_dir: the new folder; by default `runs/<name>`, or `runs/<name>-from-STEP` if that is the other run.
        weights_only: take only the weights, as the start policy (and reference) of a run from step 1. The model
            and the cold start of the configuration then do not apply.

    Raises:
        ConfigError: a fixed key differs, or the folder is not empty or is inside the parent run's folder.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    for _ in range(1 if _parts(source)[1] else TRIES):
        parent, step = parse_source(source)
        target = _target(config, parent, step, run_dir)
        lineage = Lineage(os.path.abspath(parent), step, weights_only)
        if (target / "config.yaml").is_file() and _is_that_fork(read_lineage(target), lineage, source):
            return target
        if target.resolve().is_relative_to(parent.resolve()):
            raise ConfigError(
                f"{target}: is inside the folder of the run being forked, {parent}; choose a folder outside it "
                "with --run-dir, or another `name` (--set name=...)"
            )
        if other := next((child.name for child in _listed(target) if child.name != LOCK), None):
            raise ConfigError(
                f"{target}: holds another run, or other files ({other[:80]}); give the fork another `name` "
                "(--set name=...), or --run-dir"
            )
        try:
            return _make_fork(config, parent, target, lineage)
        except (OSError, CheckpointError):
            if step in checkpoints.steps_saved(parent / "checkpoints"):
                raise
    raise CheckpointError(f"--from {source}: the run removed its checkpoint of step {step} meanwhile; try again")


def fork_again(source: str, folder: Path) -> str:
    """The `RUN@STEP` that finds a fork again, whatever its source does meanwhile."""
    lineage = read_lineage(folder)
    return source if lineage is None else f"{parse_source(source)[0]}@{lineage.step}"


def _parts(text: str) -> tuple[Path, str]:
    """The run and the step, which is empty if none is given."""
    path = Path(text)
    if path.is_dir() or "@" not in text:
        return path, ""
    before, _, at = text.rpartition("@")
    return Path(before), at


def _is_that_fork(found: Lineage | None, wanted: Lineage, source: str) -> bool:
    """Whether a folder is the fork that is asked for; without a step, at whatever step it was made."""
    if found is None:
        return False
    pinned = _parts(source)[1].isdecimal()
    return found == wanted or (not pinned and replace(found, step=wanted.step) == wanted)


def _make_fork(config: RunConfig, parent: Path, target: Path, lineage: Lineage) -> Path:
    step, checkpoint = lineage.step, parent / "checkpoints" / f"step-{lineage.step}"
    old = config_at(parent, step)
    checkpoints.verify(checkpoint)
    making = target.with_name(f".{target.name}.forking")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        changed: dict[str, list[str]] = {}
        if lineage.weights_only:
            _copy_weights(checkpoint, making)
            config = starting_with(config, target / WEIGHTS)
        else:
            if (parent / WEIGHTS).is_dir():  # it took only the weights of another run itself
                _link_tree(parent / WEIGHTS, making / WEIGHTS)
                old, config = starting_with(old, target / WEIGHTS), starting_with(config, target / WEIGHTS)
            changes = _allowed_changes(parent, old, config, target)
            _copy_run(parent, making, step)
            keep_config(making, step, dump_config(old).encode())
            changed = {c.key: [c.old, c.new] for c in changes if c.kind != "free"}
        write_atomic(making / "config.yaml", dump_config(config).encode())
        write_lineage(making, lineage)
        add_history(making, step, {"forked from": str(lineage), **changed})
        if target.is_dir():
            (target / LOCK).unlink(missing_ok=True)
            target.rmdir()
        making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _target(config: RunConfig, parent: Path, step: int, run_dir: Path | None) -> Path:
    if run_dir is not None:
        return run_dir.resolve() if run_dir.is_symlink() else run_dir.absolute()
    name = config.name or parent.name
    target = Path("runs", name).absolute()
    return target.with_name(f"{name}-from-{step}") if target == parent.absolute() else target


def _allowed_changes(parent: Path, old: RunConfig, new: RunConfig, target: Path) -> list[Change]:
    """What differs. Raises ConfigError if a fixed key does."""
    changes = changes_of_run(parent, old, new)
    fixed = [str(change) for change in changes if change.kind == "fixed"]
    if fixed:
        listed = "\n    ".join(fixed)
        raise ConfigError(
            f"{target}: a fork cannot change fixed keys, but these differ:\n    {listed}\n"
            "undo the change, or take only the weights with --weights-only"
        )
    return changes


def _copy_weights(checkpoint: Path, making: Path) -> None:
    """Copy the model of a checkpoint."""
    (making / WEIGHTS).mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and not file.name.startswith("optimizer") and file.name not in OF_THE_RUN:
            _link(file, making / WEIGHTS / file.name)
        elif file.is_dir() and file.name == "additional_chat_templates":
            _link_tree(file, making / WEIGHTS / file.name)


def _copy_run(parent: Path, making: Path, step: int) -> None:
    """The run up to a step. Files that are never changed in place are hard links where the disk allows it."""
    if (parent / "start").is_dir():
        _link_tree(parent / "start", making / "start")
    for copied in (parent / "code").glob("step-*"):
        if int(re.sub(r"\D", "", copied.name) or 0) < step:
            _link_tree(copied, making / "code" / copied.name)
    checkpoint = parent / "checkpoints" / f"step-{step}"
    for path in (parent / TASKS_FILE, checkpoint / TASKS_FILE, parent / INPUTS_FILE, checkpoint / CODE_FILE):
        if path.is_file():
            shutil.copyfile(path, making / path.name)
    copy_history(parent, making, step)
    copy_configs(parent, making, step)
    _link_tree(checkpoint, making / "checkpoints" / f"step-{step}")
    for folder in ("episodes", "tokens"):
        (making / folder).mkdir(exist_ok=True)
    for number in recorded_steps(parent):
        for file in (episodes_file, tokens_file):
            if number <= step and file(parent, number).is_file():
                _link(file(parent, number), file(making, number))
    (making / "metrics.jsonl").write_bytes(b"".join(_lines(parent, step)))
    lost = [redraws_line(at, found) for at, found in read_redraws(parent).items() if at <= step]
    if lost:
        redraws_file(making).write_text("".join(lost), encoding="utf-8")


def _lines(parent: Path, step: int) -> Iterator[bytes]:
    for line in bounded_lines(parent / "metrics.jsonl", MAX_LINE):
        values = parse_metrics(line)
        if values is not None and values["step"] <= step:
            yield line


def _link_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=lambda a, b: _link(Path(a), Path(b)))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
