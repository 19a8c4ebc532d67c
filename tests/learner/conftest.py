"""Small random models, written once per test session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learner.train_models import write_model


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy."""
    return write_model(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="session")
def reference_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape."""
    return write_model(tmp_path_factory.mktemp("reference"), seed=1)
