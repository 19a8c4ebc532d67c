"""Fixtures of the endpoint's tests."""

from __future__ import annotations

import pytest

from agentrl.chat.template import Renderer
from tests.serve.serve_kit import make_renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """One tiny renderer for all tests."""
    return make_renderer(tmp_path_factory.mktemp("serve") / "tokenizer")
