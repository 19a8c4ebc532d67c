"""The tutorial works as printed: its environment trains, and can be changed as shown."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.docs.blocks import ROOT, Block, blocks_of

TEMPLATE = files("agentrl.cli") / "template"


def shown(language: str) -> list[Block]:
    return [block for block in blocks_of(ROOT / "docs/tutorial.md") if block.language == language]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_shows_the_files_that_agentrl_new_makes():
    (config,) = shown("yaml")
    made = YAML(typ="safe").load((TEMPLATE / "tools.yaml").read_text())
    assert YAML(typ="safe").load(config.text) == made
    code = (TEMPLATE / "env.py").read_text()
    methods = [line for line in shown("python")[0].text.splitlines() if line.startswith("    ")]
    assert [line for line in methods if line not in code and '"""' not in line] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_its_environment_trains_and_can_be_changed(tmp_path: Path):
    run(tmp_path, "agentrl", "new", "shop")
    small = ("steps=1", "warmup.num=16", "warmup.max_epochs=1", "warmup.at_least=0", "rollout.groups_per_step=2")
    run(tmp_path, "agentrl", "train", "shop/tools.yaml", *(word for text in small for word in ("--set", text)))
    assert "solved" in run(tmp_path, "agentrl", "show", "runs/shop", "--worst")
    file = tmp_path / "shop/env.py"
    changed = shown("python")[1].text
    file.write_text(file.read_text().replace("    @reward(solved=True)", f"{changed}\n    @reward(solved=True)"))
    checked = run(tmp_path, "agentrl", "check", "shop/tools.yaml")
    assert "good  next: agentrl train shop/tools.yaml" in checked
    assert "calls" in checked
