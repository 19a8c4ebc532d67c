"""Credentials in addresses are used, and shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import config_diff, load_config
from agentrl.config.address import hide_credentials
from agentrl.engine.servers.http import HttpServer, ServerLost
from agentrl.engine.servers.launch.hosts import GivenHost
from agentrl.engine.servers.vllm import VLLMServer
from agentrl.env.judge import Judge, RewardApi
from agentrl.env.mcp import McpServer
from agentrl.errors import ConfigError, JudgeError
from agentrl.preflight.plan import make_plan
from agentrl.testing.sglang_server import LoopbackServer
from agentrl.trainer.in_step import starting_engine

SECRET = "http://me:hush@127.0.0.1:9"
RUN = f"""\
env: nemo_gym:{SECRET}
model: {{tiny: {{}}}}
engine: {{kind: vllm, server: {{urls: ["{SECRET}"]}}}}
reward_model: {{kind: http, url: "{SECRET}/score"}}
"""


def test_only_credentials_are_hidden():
    assert hide_credentials("a@b http://u:p@ss@h/x@y, ws://v@h") == "a@b http://(hidden)@h/x@y, ws://(hidden)@h"
    assert hide_credentials("  x: http://u:p@h # 1", "*") == "  x: http://***@h # 1"


def test_a_run_does_not_show_those_of_its_addresses(tmp_path: Path):
    path = tmp_path / "tools.yaml"
    path.write_text(RUN)
    config, plain = load_config(path), load_config(path, ["reward_model.url=http://h:1", "engine.server.urls=[]"])
    texts = [starting_engine(config), config.env_names, config_diff(config, plain), *make_plan(config).placement]
    assert not [text for text in texts if "hush" in text]
    assert config.engine.server.urls == [SECRET]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f'["{SECRET}"]', f'["{SECRET}/v1"]'),
        (f'["{SECRET}"]', f'"{SECRET}"'),
        (f'["{SECRET}"]', f'["{SECRET}", "{SECRET}/"]'),
        (f"{SECRET}/score", "ftp://me:hush@h"),
    ],
)
def test_an_error_in_the_file_does_not_show_them(tmp_path: Path, old: str, new: str):
    path = tmp_path / "tools.yaml"
    path.write_text(RUN.replace(old, new))
    with pytest.raises(ConfigError, match=r"\(hidden\)@") as refused:
        load_config(path)
    assert "hush" not in str(refused.value)


async def test_a_server_gets_them_and_its_errors_do_not_show_them():
    async with LoopbackServer() as there:
        server = HttpServer(there.url.replace("://", "://me:hush@"), timeout_s=20)
        assert await server.get("/server_info")
        await server.close()
    server = HttpServer(SECRET, timeout_s=20)
    with pytest.raises(ServerLost, match=r"^http://\(hidden\)@127.0.0.1:9/x") as lost:
        await server.get("/x")
    await server.close()
    assert "hush" not in str(lost.value)
    host = GivenHost(SECRET, lambda url: VLLMServer(url), start_timeout_s=1)
    assert host.name == "http://(hidden)@127.0.0.1:9"


async def test_a_judge_and_a_reward_server_do_not_show_them():
    async with LoopbackServer() as there:
        url = there.url.replace("://", "://me:hush@") + "/nowhere"
        for asked in (Judge(SECRET, "m", retries=0).ask("?"), RewardApi(url, retries=0).score(["t"])):
            with pytest.raises(JudgeError, match=r"http://\(hidden\)@127") as error:
                await asked
            assert "hush" not in str(error.value)
    assert McpServer(url=SECRET).where == "http://(hidden)@127.0.0.1:9"
