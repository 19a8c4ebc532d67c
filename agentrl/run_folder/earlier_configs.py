"""The configurations that a run had before it was resumed with other settings.

`config.yaml` is the current one. `configs/to-step-N.yaml` is the one of the steps up to N, except for those of a
file with a smaller number.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig, load_config
from agentrl.run_folder.files import write_atomic
from agentrl.run_folder.moved import with_current_inputs
from agentrl.run_folder.own_start import with_own_start

FOLDER = "configs"
_NAME = re.compile(r"to-step-(\d+)\.yaml")


def keep_config(run: Path, step: int, text: bytes) -> None:
    """Keep the configuration that was in force up to a step, unless one is kept for that step.

    If there is one, no checkpoint was saved with the configuration that is replaced now, and its steps are lost.
    """
    target = run / FOLDER / f"to-step-{step}.yaml"
    if step and not target.exists():
        target.parent.mkdir(exist_ok=True)
        write_atomic(target, text)


def config_at(run: Path, step: int, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration with which a step was taken.

    Args:
        run: the run folder.
        step: the step.
        overrides: settings to use instead, as `KEY=VALUE`.

    Raises:
        ConfigError: it is invalid today.
    """
    current, file = run / "config.yaml", file_at(run, step)
    config = load_config(current, overrides, check_paths=False)
    if file != current:
        config = with_current_inputs(load_config(file, overrides, check_paths=False), config)
    return with_own_start(config, run)


def file_at(run: Path, step: int) -> Path:
    """The file with the configuration with which a step was taken."""
    end = next((last for last in ends(run) if last >= step), None)
    return run / "config.yaml" if end is None else run / FOLDER / f"to-step-{end}.yaml"


def ends(run: Path) -> list[int]:
    """The last step of each earlier configuration, in order."""
    names = (_NAME.fullmatch(path.name) for path in (run / FOLDER).glob("to-step-*.yaml"))
    return sorted(int(match[1]) for match in names if match)


def rewind_configs(run: Path, step: int) -> None:
    """Steps after `step` are forgotten: the configuration of the next one that is taken is the current one."""
    later = [end for end in ends(run) if end > step]
    if later:
        file = run / FOLDER / f"to-step-{later[0]}.yaml"
        keep_config(run, step, file.read_bytes())
    for end in later:
        (run / FOLDER / f"to-step-{end}.yaml").unlink()


def copy_configs(run: Path, target: Path, step: int) -> None:
    """Copy the earlier configurations of the steps up to `step` into the folder of a fork."""
    for end in ends(run):
        if end < step:
            (target / FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(run / FOLDER / f"to-step-{end}.yaml", target / FOLDER / f"to-step-{end}.yaml")
