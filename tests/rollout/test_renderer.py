"""A checkpoint knows the renderer that it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.chat.template import CHATML_TEMPLATE, Renderer
from agentrl.errors import CheckpointError
from agentrl.models.tiny import make_tokenizer
from agentrl.rollout.renderer import RENDERER_FILE, check_renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory, ["some text"] * 4, vocab=320, max_context=512)
    return Renderer.from_directory(directory)


def test_the_same_renderer_is_accepted_and_so_is_a_bare_model(renderer: Renderer, tmp_path: Path):
    check_renderer(renderer, tmp_path)
    (tmp_path / RENDERER_FILE).write_text(json.dumps({"hash": renderer.hash}))
    check_renderer(renderer, tmp_path)


def test_another_template_is_refused_with_both_hashes(renderer: Renderer, tmp_path: Path):
    other = Renderer(renderer.vocabulary, CHATML_TEMPLATE.replace("# Tools", "# Functions"))
    (tmp_path / RENDERER_FILE).write_text(json.dumps({"hash": other.hash}))
    with pytest.raises(CheckpointError, match=f"renderer hash {other.hash}, here {renderer.hash}") as refused:
        check_renderer(renderer, tmp_path)
    assert str(refused.value).endswith("start the run over with --fresh, in Python fresh=True")
