"""Programs with the real SDKs, trained for two steps: openai-agents, LangGraph, and the official SDK in Node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_episodes
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run
from tests.agents.test_recorder_training import FILES, WARMUP
from tests.serve.test_clients import PYTHON, needs_clients

PROGRAMS = Path(__file__).parent / "programs"
TINY = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}


def train(folder: Path, steps: int, agent: dict[str, Any], **more: Any) -> tuple[Any, list[dict[str, Any]]]:
    (folder / "files.py").write_text(FILES)
    config = RunConfig(
        name="buttons",
        steps=steps,
        env=f"{folder}/files.py:Buttons",
        agent={"crash": "score", "max_running": 2, **agent},
        rollout={"groups_per_step": 2, "group_size": 2, "max_turns": 4, "max_tokens": 32, "token_budget": 600},
        optim={"lr": 1e-3, "warmup_steps": 0},
        eval={"tasks": 1, "before_training": False},  # a start of a program with an SDK takes seconds
        **more,
    )
    with RunStore.open(config, folder / "run") as store:
        summary = train_run(config, store, Silent())
        return summary, store.metrics()[1:]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that presses buttons."""
    folder = tmp_path_factory.mktemp("start")
    train(folder, 1, {"use": f"{folder}/files.py:solve"}, model={"tiny": TINY}, warmup=WARMUP)
    return folder / "run" / "start"


def trains(folder: Path, start: Path, command: list[str], **agent: Any) -> None:
    """Every episode is recorded whole: nothing is replayed, every turn is recognized, and it trains."""
    summary, lines = train(folder, 2, {"command": command, **agent}, model={"path": str(start)})
    assert summary.infra_failures == 0
    assert summary.episodes == 8
    assert sum(line.get("env/agent/forks") or 0.0 for line in lines) == 0
    assert sum(line["trained_tokens"] for line in lines) > 0
    assert max(line["drift/mean_abs"] for line in lines if line["trained_tokens"]) < 1e-4
    episodes = [episode for step in (1, 2) for episode in read_episodes(folder / "run", step)]
    assert max(len(episode.turns) for episode in episodes) > 1, "some went on after a tool"
    assert all(len([s for s in e.segments if s.parent == -1]) == 1 for e in episodes)


@needs_clients
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["with_openai_agents", "with_langgraph"])
def test_a_program_with_an_agent_framework_trains(tmp_path: Path, start: Path, program: str):
    trains(tmp_path, start, [str(PYTHON), str(PROGRAMS / f"{program}.py")])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_with_the_node_sdk_trains_in_a_sandbox(tmp_path: Path, start: Path):
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    shutil.copy(PROGRAMS / "with_openai.mjs", tmp_path)
    command = [npm, "install", "--no-audit", "--no-fund", "openai@6"]
    installed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"the SDK could not be installed: {installed.stderr.strip()[-300:]}")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    sandbox = {"readonly": [str(tmp_path)], "memory_mb": 4096}
    trains(tmp_path, start, ["node", str(tmp_path / "with_openai.mjs")], sandbox=sandbox)
