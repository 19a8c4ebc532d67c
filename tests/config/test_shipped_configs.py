"""Every YAML file that is shipped loads, and names an env that imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.env.load import load_env

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*/tools.yaml")])


def test_there_are_shipped_files():
    assert len(FILES) >= 2


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_shipped_file_loads_and_its_env_imports(path: Path):
    config = load_config(path, check_paths=False)
    assert load_env(config.env.use).__name__
