"""Every YAML file that is shipped loads, and names an env that imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.env.load import load_env
from agentrl.envs import SHIPPED
from agentrl.preflight.dry_run import rehearse

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").glob("*/tools.yaml")])


def test_there_are_shipped_files():
    assert len(FILES) >= 8


def test_every_shipped_env_has_an_example():
    configs = [load_config(path, check_paths=False) for path in FILES]
    used = {view.env.use.partition(":")[0] for config in configs for view in config.by_env.values()}
    shipped = {where.partition(":")[0] for where in SHIPPED.values()}
    assert shipped <= used


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_shipped_file_loads_and_its_env_imports(path: Path):
    for view in load_config(path, check_paths=False).by_env.values():
        assert load_env(view.env.use).__name__


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/tools.yaml")), ids=lambda p: p.parent.name)
def test_an_example_passes_check_and_its_demonstrations_fit(path: Path):
    config = load_config(path, ["warmup.num=2"])
    if config.agent is not None:
        pytest.skip("a program plays it, which needs a model")
    for view in config.by_env.values():
        found = rehearse(view)
        assert not found.findings
        assert found.num_demonstrations == 2
        assert found.demonstration_tokens is not None
        assert found.demonstration_tokens <= view.rollout.token_budget
        assert (found.episodes[0].episode.reward or 0) > 0  # the oracle, within the limits of the file
