"""The page about Python, the notebook and the example for another trainer, run as they are."""

from __future__ import annotations

import ast
import asyncio
import inspect
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl
from tests.docs.blocks import blocks_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_blocks_of_the_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of(ROOT / "docs/python.md") if block.language == "python"]
    assert len(blocks) >= 5
    names: dict[str, Any] = {"__name__": "__main__"}

    async def notebook() -> None:
        for block in blocks:
            code = compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            made = eval(code, names)
            if inspect.iscoroutine(made):
                await made

    asyncio.run(notebook())
    assert (tmp_path / "runs/adder/summary.json").is_file()
    assert names["summary"].run.endswith("adder-own")
    assert len(names["groups"]) == 4
    assert len(names["recorded"]) == 2
    assert names["curve"][-1]["step"] == 2
    assert names["run"].cancelled()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "examples/notebook/first_policy.ipynb", as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    last = notebook.cells[-1].outputs[-1]["data"]["text/plain"]
    assert last.startswith("[(0,")
    (cell,) = (cell for cell in notebook.cells if "await agentrl.train(" in cell.source)
    kinds = [each["output_type"] for each in cell.outputs]
    assert set(kinds) == {"stream", "execute_result"}, "no output for each line"
    assert not any("\x1b" in each.get("text", "") for each in cell.outputs), "a cell is no terminal"
    assert (tmp_path / "runs/adder-1/summary.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_trl_trains_on_the_rows_of_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples/other_trainer/rejection_sampling.py"))
    groups = list(agentrl.rollouts(example["CONFIG"], 2, model=_model(tmp_path)))
    every = [
        {"input_ids": list(row.ids), "completion_mask": [int(on) for on in row.loss_mask]}
        for row in agentrl.training_rows(groups, example["CONFIG"])
    ]
    assert example["solved_rows"](groups) == [], "an untrained model solves nothing"
    out = example["fine_tune"](every, _model(tmp_path), tmp_path / "tuned")
    assert (out / "model.safetensors").is_file()
    assert list(agentrl.rollouts(example["CONFIG"], 1, model=out))


def _model(folder: Path) -> Path:
    from agentrl.config.run import TinyModel
    from agentrl.models.tiny import make_tiny_model

    path = folder / "model"
    if not path.is_dir():
        text: Sequence[str] = ["What is 1 + 2?"] * 50
        make_tiny_model(path, text, TinyModel(hidden=32, layers=1, heads=2, vocab=400), seed=0)
    return path
