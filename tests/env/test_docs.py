"""Every snippet of docs/environments.md runs, in its order, as printed."""

import re
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from agentrl.config.run import EnvConfig
from agentrl.env.dispatch import MISTAKES
from agentrl.envs import SHIPPED

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_python_snippets_run(tmp_path):
    program = tmp_path / "snippets.py"
    program.write_text("\n".join(blocks("python")))
    done = subprocess.run([sys.executable, "-W", "error", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_yaml_snippets_are_valid():
    for block in blocks("yaml"):
        config = EnvConfig.model_validate(YAML(typ="safe").load(block)["env"])
        assert config.use == "agentrl.env.compose:ComposedEnv"
        assert set(config.options) == {"tools", "reward", "system", "sandbox"}


def test_every_mistake_is_explained():
    assert [name for name in MISTAKES if f"| `{name}` |" not in TEXT] == []


def test_every_shipped_env_has_a_page_with_its_reward_and_its_baselines():
    folders = {where.split(":")[0].rpartition(".")[2] for where in SHIPPED.values()}
    for folder in folders:
        page = (ROOT / "envs" / folder / "README.md").read_text()
        assert "**Reward** `solved`" in page
        assert "**Baselines**" in page
        assert f"(../envs/{folder}/README.md)" in TEXT
