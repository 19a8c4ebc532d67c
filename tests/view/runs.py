"""Run folders for tests: written with the code that writes them in a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agentrl.models.tiny import make_tokenizer
from agentrl.run_folder.records import EpisodeRecord, compress, episodes_file
from agentrl.types import CallRecord, Episode, Image, Message, Segment, StopReason, Task, ToolCall, Turn

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da63fccff0bf1e000686028"
    "0b5a8d5c40000000049454e44ae426082"
)
TOOLS = ({"type": "function", "function": {"name": "calculator", "parameters": {}}}, {"function": {"name": "web"}})


def episode(id: str, reward: float | None = 1.0, *, text: str = "What is 1+2?", task: str = "t0") -> Episode:
    """Two turns: a call and an answer, with an image in the question."""
    call = ToolCall("c0", "calculator", {"expression": "1+2"})
    failed = reward is None
    messages = (
        Message("system", "Use the tool."),
        Message("user", (text, Image(PNG))),
        Message("assistant", "I call.", (call,), reasoning="Let me think."),
        Message("tool", "3", tool_call_id="c0", name="calculator"),
        Message("assistant", "3"),
    )
    record = CallRecord(call, "3", "ok" if reward else "tool_exception", 0.25)
    turns = (
        Turn(messages[2], (messages[3],), 0.5, "stop", 4, 1.0, 0.5, (record,)),
        Turn(messages[4], (), 0.0, "stop", 2, 0.5, 0.0),
    )
    segments = (
        Segment((5, 6, 7), "prompt", -1, 1),
        Segment((8, 9, 10, 11), "sampled", 0, 2, (-0.5, -1.0, -0.25, -2.0), (3, 3, 3, 4)),
        Segment((12, 13), "observation", 1, 3),
        Segment((14, 15), "sampled", 2, 4, (-0.5, -0.125), (4, 4)),
        Segment((16,), "sampled", 0, 4, (-3.0,), (4,)),
    )
    stop = StopReason.INFRA if failed else StopReason.ANSWERED
    return Episode(
        *(
            id,
            Task(task, {"question": text}),
            messages,
            turns,
            segments,
            stop,
            reward,
            {"solved": (reward or 0) - 0.5},
        ),
        metrics={"reward/progress": 0.5},
        error="the engine is lost" if failed else None,
        seconds=2.0,
        tools=TOOLS,
    )


def write_step(run: Path, step: int, records: Sequence[EpisodeRecord]) -> None:
    """The episodes file of a step."""
    episodes_file(run, step).parent.mkdir(parents=True, exist_ok=True)
    episodes_file(run, step).write_bytes(compress(records))


def make_run(folder: Path, name: str = "calc", *, steps: int = 3, env: str = "m:E", seed: int = 0) -> Path:
    """A finished run with two groups of two episodes a step."""
    run = folder / name
    (run / "episodes").mkdir(parents=True)
    config = {
        **{"name": name, "seed": seed, "steps": steps, "env": {"use": env}},
        **{
            "model": {"tiny": {"hidden": 64, "layers": 2}},
            "algorithm": {"advantage": "grpo", "loss": {"name": "gspo"}},
        },
    }
    (run / "config.yaml").write_text(json.dumps(config))
    lines = [{"step": 0, "held_out": 0.25, "held_out_reward": 0.3}]
    for step in range(1, steps + 1):
        rewards = (1.0, 0.0, 1.0, 1.0)
        records = [
            EpisodeRecord(
                step,
                n // 2,
                episode(f"s{step}/g{n // 2}/e{n % 2}", r, task=f"t{n // 2}"),
                (0.5, -0.5, 0.25) if n < 2 else (),
            )
            for n, r in enumerate(rewards)
        ]
        records.append(EpisodeRecord(step, 1, episode(f"s{step}/g1/e2", None, task="t1")))
        write_step(run, step, records)
        lines.append(
            {"step": step, "reward": 0.75 + step / 100, "kl": None, "rollout_seconds": 2.0, "episodes": 4}
        )
    lines[-1]["held_out"] = 0.75
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "events.log").write_text("2026-11-01T10:00:00Z created\n2026-11-01T10:05:00Z step 2: no signal\n")
    (run / "summary.json").write_text(json.dumps({"finished": True, "wall_seconds": 300.0}))
    make_tokenizer(run / "start", ["What is 1+2? Use the tool."] * 9, vocab=300, max_context=128)
    return run
