"""What a turn costs does not depend on what came before it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from tests.chat.chat_tokenizers import make, needs_qwen3, qwen3


def bench() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "transcript.py"
    spec = importlib.util.spec_from_file_location("bench_transcript", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokenizer", ["small", pytest.param("qwen3", marks=needs_qwen3)])
def test_a_long_episode_costs_under_a_second_and_each_turn_the_same(tokenizer: str, tmp_path: Path):
    renderer = (
        qwen3("chatml") if tokenizer == "qwen3" else Renderer.from_directory(make(tmp_path, CHATML_TEMPLATE))
    )
    module = bench()
    runs = [module.run_ours(renderer, 100, 600) for _ in range(3)]
    seconds, length = min(runs, key=lambda run: sum(run[0]))
    assert length > 58_000
    assert sum(seconds) < 1.0
    early, late = module.median(seconds[1:21]), module.median(seconds[-20:])
    assert late < 3 * early  # rendering everything again: more than 30 times
