"""Every snippet of docs/environments.md runs, in its order, as printed."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

from agentrl.config.run import DataConfig, EnvConfig, RunConfig, SamplerConfig
from agentrl.env import ToolSettings
from agentrl.env.toolenv.dispatch import MISTAKES
from agentrl.envs import SHIPPED
from agentrl.types import StopReason

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
    found = [YAML(typ="safe", pure=True).load(block) for block in blocks("yaml")]
    (composed,) = [block["env"] for block in found if "env" in block]
    config = EnvConfig.model_validate(composed)
    assert config.use == "agentrl.env.compose:ComposedEnv"
    assert set(config.options) == {"tools", "reward", "system", "sandbox"}
    for block in found:
        RunConfig.model_validate({"env": "x:Y", "model": {"path": "m"}} | block)


def test_every_stop_reason_is_explained_in_its_order():
    assert re.findall(r"^\| `(\w+)` \|", TEXT.split("| stop reason |")[1].split("\n\n")[0], re.MULTILINE) == list(
        StopReason
    )


def test_every_key_of_an_environment_is_mentioned():
    fields = [*EnvConfig.model_fields, *DataConfig.model_fields, *SamplerConfig.model_fields]
    fields += ["overlong", "refill_zero_signal", "token_budget", "max_turns", "max_tokens", "timeout_s"]
    fields += [f.name for f in dataclasses.fields(ToolSettings) if f.name != "setup_timeout_s"]
    assert [name for name in fields if not re.search(rf"\b{name}\b", TEXT)] == []


def test_every_shipped_tool_is_mentioned():
    tools = [f.stem for f in (ROOT / "tools").glob("*.py") if "@tool" in f.read_text()]
    assert [name for name in tools if f"agentrl.tools.{name}" not in TEXT] == []


def test_every_mistake_is_explained():
    assert [name for name in MISTAKES if f"| `{name}` |" not in TEXT] == []


def test_every_shipped_env_has_a_page_with_its_reward_and_its_baselines():
    folders = {where.split(":")[0].rpartition(".")[2] for where in SHIPPED.values()}
    for folder in folders:
        page = (ROOT / "envs" / folder / "README.md").read_text()
        assert "**Reward** `solved`" in page
        assert "**Baselines**" in page
        assert f"(../envs/{folder}/README.md)" in TEXT
