"""The tutorial works as printed: its files pass `check` and its own test, and train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the tutorial: the blocks whose first line is a file name."""
    names = []
    for block in blocks_of(ROOT / "docs/tutorial.md"):
        first, _, text = block.text.partition("\n")
        if first.startswith("# depot/"):
            file = tmp_path / first.removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
            names.append(file.name)
    assert names == ["env.py", "tools.yaml", "test_env.py"]
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_its_environment_passes_check_and_its_test(folder: Path):
    assert "good  next: agentrl train depot/tools.yaml" in run(folder, "agentrl", "check", "depot/tools.yaml")
    assert "1 passed" in run(folder / "depot", "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_trains_shows_and_evaluates(folder: Path):
    small = (
        "steps=1",
        "warmup.num=16",
        "warmup.max_epochs=1",
        "warmup.at_least=0",
        "rollout.groups_per_step=2",
        "eval.tasks=2",
    )
    run(folder, "agentrl", "train", "depot/tools.yaml", *(word for text in small for word in ("--set", text)))
    assert "solved" in run(folder, "agentrl", "show", "runs/depot", "--worst")
    assert "pass^4" in run(folder, "agentrl", "eval", "runs/depot", "-k", "4", "--tasks", "2")
