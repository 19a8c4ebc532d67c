"""An endpoint that is down is reported at once, before anything relies on it."""

from __future__ import annotations

import asyncio
import socket

import pytest

import agentrl.engine.servers.launch.hosts as hosts
from agentrl.config.reward_model import RewardModelConfig
from agentrl.engine.servers.launch.hosts import GivenHost
from agentrl.engine.servers.sglang import SGLangServer
from agentrl.env.judge import Judge
from agentrl.env.toolenv.declare import reward
from agentrl.env.toolenv.env import ToolEnv
from agentrl.errors import EngineError, InfraError, JudgeError
from agentrl.reachable import unreachable, unreachable_of
from agentrl.rollout.content import Content, require_endpoints
from agentrl.types import Task


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


DOWN = f"http://127.0.0.1:{free_port()}/v1"


class Judged(ToolEnv):
    """Write."""

    def setup(self) -> str:
        return "Write."

    @reward(judge=Judge(DOWN, "m"))
    def quality(self, episode: object) -> str:
        return "How good is it?"


async def test_a_port_without_a_server_and_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        assert await unreachable(url) == ""
        assert await unreachable_of([url, DOWN, DOWN]) == {DOWN: "Connection refused"}
    assert await unreachable("http://no-such-host.invalid/v1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # what a proxy reaches, this process cannot tell
    monkeypatch.delenv("no_proxy", raising=False)
    assert await unreachable("http://no-such-host.invalid/v1") == ""
    assert await unreachable("http://no-such-host.invalid/v1", through_proxy=False)


async def test_a_judge_or_reward_model_that_is_down_is_refused_before_the_first_episode():
    content = Content(Judged, [Task("t")], [], [])
    with pytest.raises(InfraError, match=f"Judged needs {DOWN}, but nothing accepts connections there"):
        await require_endpoints(content)
    model = RewardModelConfig(kind="judge", url=DOWN, model="m")
    with pytest.raises(JudgeError, match=f"reward_model.url {DOWN}: nothing accepts connections"):
        await require_endpoints(Content(ToolEnv, [], [], []), model)


async def test_a_given_server_that_is_down_is_waited_for_with_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "SAY_AFTER_S", 0.0)
    said: list[str] = []
    url = DOWN.removesuffix("/v1")
    host = GivenHost(url, lambda url: SGLangServer(url, timeout_s=5.0), start_timeout_s=2.0, tell=said.append)
    with pytest.raises(EngineError, match="did not answer within 2 s"):
        await asyncio.wait_for(host.start(), 30)
    assert said == [
        f"{url} does not answer (Connection refused); waiting for it, at most 2 s (engine.server.start_timeout_s)"
    ]
