"""A tokenizer for the rollout tests."""

from __future__ import annotations

import pytest

from agentrl.chat.template import Renderer
from agentrl.models.tiny import make_tokenizer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """ChatML with a byte-level vocabulary."""
    directory = tmp_path_factory.mktemp("tokenizer")
    text = '{"name": "calculator", "arguments": {"expression": "1+2"}} Use the calculator, then answer. '
    make_tokenizer(directory, [text] * 4, vocab=360, max_context=4096)
    return Renderer.from_directory(directory)
