"""GRPO on an agent that knows only the `openai` client: what is rewarded is done more often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_episodes
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run

FILES = '''
import json
import random
from typing import Literal

from agentrl import ToolEnv, reward, tool
from agentrl.env.tasks import generated
from agentrl.types import Message, ToolCall

COLOURS = ("red", "blue")


class Buttons(ToolEnv):
    """Press a button, then say done."""

    def setup(self, number: int) -> str:
        return f"Number {number}."

    @tool
    async def press(self, colour: Literal["red", "blue"]) -> str:
        """Press a button."""
        raise AssertionError("the agent has its own")

    @reward
    def solved(self) -> bool:
        return self.outcome == "red"

    @classmethod
    def tasks(cls, split, seed):
        return generated("buttons", split, seed, 8, lambda rng: {"number": rng.randrange(10)})

    @classmethod
    def demonstrations(cls, seed, num):
        """Three in ten press the right one."""
        rng = random.Random(seed)
        episodes = []
        for _ in range(num):
            colour = COLOURS[rng.random() > 0.3]
            call = ToolCall("call00000", "press", {"colour": colour})
            episodes.append(
                [
                    Message("system", cls.__doc__),
                    Message("user", f"Number {rng.randrange(10)}."),
                    Message("assistant", "", (call,)),
                    Message("tool", f"It is {colour}.", tool_call_id="call00000", name="press"),
                    Message("assistant", "done"),
                ]
            )
        return episodes


async def solve(task, access):
    """A while-loop with a tool; the last button pressed is the outcome."""
    pressed, messages = "nothing", list(task["messages"])
    client = access.client()
    while True:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=task["tools"])
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return pressed
        for call in message.tool_calls:
            pressed = str(json.loads(call.function.arguments).get("colour"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"It is {pressed}."})
'''


WARMUP: dict[str, Any] = {
    "num": 160,
    "max_epochs": 12,
    "until_pass": 1.0,
    "at_least": 0.0,
    "probe_every": 60,
    "probe_tasks": 1,
    "probe_samples": 2,
    "lr": 1e-2,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_rewarded_is_done_more_often(tmp_path: Path):
    (tmp_path / "files.py").write_text(FILES)
    config = RunConfig(
        name="buttons",
        steps=8,
        env=f"{tmp_path}/files.py:Buttons",
        agent={"use": f"{tmp_path}/files.py:solve", "crash": "score"},  # its json.loads meets calls that were cut
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}},
        warmup=WARMUP,
        rollout={"groups_per_step": 4, "group_size": 8, "max_turns": 3, "max_tokens": 32, "token_budget": 400},
        optim={"lr": 3e-3, "warmup_steps": 0},
        eval={"tasks": 8},
    )
    with RunStore.open(config, tmp_path / "run") as store:
        summary = train_run(config, store, Silent())
        lines = store.metrics()[1:]
    solved = [line["solved"] for line in lines]
    assert 0.1 < solved[0] < 0.7
    assert sum(solved[-2:]) / 2 > 0.85
    assert summary.held_out_before == 0.0
    assert summary.held_out_after == 1.0
    assert summary.infra_failures == 0
    assert max(line["drift/mean_abs"] for line in lines if line["trained_tokens"]) < 1e-4
    assert sum(line.get("env/agent/forks") or 0.0 for line in lines) == 0
    episode = read_episodes(tmp_path / "run", 1)[0]
    versions = {v for s in episode.segments if s.origin == "sampled" for v in s.versions}
    assert versions == {0}
    assert {v for e in read_episodes(tmp_path / "run", 8) for s in e.segments for v in s.versions} == {7}
