"""TRL's `environment_factory` plays served envs, through `examples/trl`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.run import TinyModel
from agentrl.env_server.open_sessions import Sessions
from agentrl.env_server.serve import serving_env
from agentrl.models.tiny import make_tiny_model
from agentrl.types import Episode
from tests.env_server.test_env_server import HERE, played, source_of

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


async def run(url: str, asked: list[Any], *model: str) -> Any:
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, f"{HERE}/trl_player.py", url, *model]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    out, err = await process.communicate(json.dumps(asked).encode())
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


def as_calls(episode: Episode) -> tuple[list[Any], str | None]:
    """What TRL would do: the calls, one after another, and the final text if there is one."""
    steps: list[Any] = []
    for turn in episode.turns:
        steps += [(call.name, dict(call.arguments)) for call in turn.message.tool_calls]
        if not turn.message.tool_calls:
            steps.append(("send_message", {"text": str(turn.message.content)}))
    final = steps.pop()[1]["text"] if steps[-1][0] == "send_message" else None
    return steps, final


@needs_trl
@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "sqlite", "retail"])
async def test_100_seeds_earn_the_same(name: str):
    episodes = await played(name, 100)
    async with serving_env(Sessions(source_of(name))) as url:
        rewards, _ = await run(url, [as_calls(episode) for episode in episodes])
    assert rewards == [episode.reward for episode in episodes]


@needs_trl
@pytest.mark.slow
async def test_grpo_trainer_takes_a_step(tmp_path: Path):
    source = source_of("calculator")
    model = tmp_path / "model"
    make_tiny_model(
        model, ["Use the calculator, then answer with the number. Start with 63. Add 8."] * 20, TinyModel()
    )
    async with serving_env(Sessions(source)) as url:
        _, (reward, mean, tools) = await run(url, [], str(model))
    assert (reward, tools) == (mean, ["calculator"])
    assert 0.0 <= reward <= 1.0
