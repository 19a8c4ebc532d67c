"""The env of the documentation, as printed: a user's own file that a tiny model is trained on."""

import json
import random
import subprocess
import sys

import pytest

from agentrl.env.load import load_env
from agentrl.run_folder.records import read_episodes
from agentrl.testing.policy import ScriptedPolicy, call, calls, play
from agentrl.types import Task

LEDGER = '''\
from typing import Literal
from agentrl import Stop, ToolEnv, reward, tool

class Ledger(ToolEnv):
    """Bring the ledger to the target balance with the tools, then call submit."""     # the system prompt

    def setup(self, start: int, target: int) -> str:          # one dataset row as keyword arguments
        self.balance, self.target, self.ops = start, target, 0
        return f"The balance is {start}. Make it {target}."

    @tool
    def apply(self, op: Literal["add", "double"], n: int = 1) -> str:
        """Change the balance: "add" adds n, "double" doubles it n times."""
        self.ops += 1
        self.balance = self.balance + n if op == "add" else self.balance * 2**n
        return f"balance={self.balance}"

    @tool
    def submit(self) -> Stop:
        """End the episode."""
        return Stop()

    @reward
    def solved(self) -> bool: return self.balance == self.target

    @reward(weight=-0.01)
    def cost(self) -> int: return self.ops
'''
YAML = """\
env: ledger.py:Ledger
model: {tiny: {hidden: 48, layers: 2, heads: 2, intermediate: 96, vocab: 420}}
data: {train: train.jsonl, held_out: held_out.jsonl, sampler: {order: weighted}, overlong_prompts: refuse}
warmup: {demonstrations: demonstrations.jsonl, max_epochs: 24, lr: 3e-3, at_least: 0.0, probe_tasks: 2}
steps: 3
rollout:
  {groups_per_step: 4, group_size: 4, max_turns: 4, max_tokens: 48, token_budget: 700, refill_zero_signal: 2}
checkpoint: {every: 1}
eval: {tasks: 4}
"""


def wire(message):
    found = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
    if message.tool_call_id:
        found |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return json.dumps(found)


@pytest.mark.timeout(180)
async def test_the_printed_ledger_trains(tmp_path):
    (tmp_path / "ledger.py").write_text(LEDGER)
    (tmp_path / "tools.yaml").write_text(YAML)
    rng = random.Random(0)
    rows = [{"start": (s := rng.randint(1, 9)), "target": s + rng.randint(1, 9)} for _ in range(130)]
    for name, part in (("train", rows[:120]), ("held_out", rows[120:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    ledger = load_env("ledger.py:Ledger", base=tmp_path)
    assert [name for name in vars(ledger) if hasattr(vars(ledger)[name], "__agentrl_tool__")] == [
        "apply",
        "submit",
    ]
    lines = []
    for row in rows[:120]:
        by = row["target"] - row["start"]
        episode = await play(
            ledger(), Task("t", row), ScriptedPolicy([call("apply", op="add", n=by), calls(("submit", {}))])
        )
        assert episode.rewards == {"solved": 1.0, "cost": -0.01}
        lines.append(f'{{"messages": [{", ".join(map(wire, episode.messages))}]}}\n')
    (tmp_path / "demonstrations.jsonl").write_text("".join(lines))

    command = [sys.executable, "-W", "error", "-m", "agentrl", "train", "tools.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)  # noqa: ASYNC221
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    aside = sum(line["refilled_episodes"] for line in lines[1:])
    assert (summary["steps"], summary["episodes"], summary["infra_failures"]) == (3, 48 + aside, 0)
    assert all(0 <= line["refilled_groups"] <= 2 for line in lines[1:])
    state = json.loads((run / "checkpoints" / "step-3" / "sampler.json").read_text())
    assert state["drawn"] == 12 + sum(line["refilled_groups"] for line in lines[1:])
    episodes = [e for step in (1, 2, 3) for e in read_episodes(run, step)]
    assert all(set(e.rewards) == {"solved", "cost"} for e in episodes)
    called = [record for e in episodes for turn in e.turns for record in turn.calls]
    assert called, "after the cold start the model calls tools"
