"""One rank or server that is always slow, and differences that nobody has to look at."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from agentrl.doctor.examine import findings
from agentrl.types import Sampling
from tests.engine.test_served import engine_over, servers, weights
from tests.engine.test_served import model as model  # the fixture

STEPS = 6


def run(folder: Path, steps: list[dict[str, float]], *, urls: list[str] | None = None) -> Path:
    """A run folder with the metrics of some steps."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": number, "seconds": 1.0, **step}) for number, step in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "config.yaml").write_text(json.dumps({"engine": {"server": {"urls": urls or []}}}))
    return folder


async def test_a_server_that_samples_slowly_is_named(model: Path, tmp_path: Path):
    """Three servers on the loopback, one of which takes its time for each token."""
    steps = []
    async with servers(3, token_s=0.001) as three, engine_over(model, *three) as engine:
        three[1].token_s = 0.05
        engine.server_timing()
        for version in range(1, STEPS + 1):
            asked = [engine.generate([n], Sampling(max_tokens=4), session=f"{version}/{n}") for n in range(9)]
            await asyncio.gather(*asked)
            steps.append(dict(engine.server_timing()))
            await engine.update_weights(weights(version), version)
        assert engine.server_timing() == {
            f"server/{n}/{what}": 0.0 for n in range(3) for what in ("busy_seconds", "tokens")
        }
    for step in steps:
        assert sum(step[f"server/{n}/tokens"] for n in range(3)) == 9 * 4
        assert step["server/1/busy_seconds"] >= 4 * 0.05
    (found,) = findings(run(tmp_path, steps, urls=["http://a", "http://b", "http://c"]))
    assert (found.name, found.severity, found.step) == ("slow-server", "warning", STEPS)
    assert found.text.startswith("inference server 1 (http://b) takes ")
    assert "server 1" in found.setting
    assert found.series[0] == "server/1/token_seconds"


def ranks(per_token: list[list[float]]) -> list[dict[str, float]]:
    """Steps of ranks with uneven work."""
    rng = random.Random(0)
    found = []
    for step in per_token:
        found.append({})
        for rank, seconds in enumerate(step):
            tokens = rng.randrange(1000, 3000)
            found[-1] |= {f"rank/{rank}/tokens": tokens, f"rank/{rank}/forward_seconds": tokens * seconds}
    return found


def test_more_work_is_not_slowness(tmp_path: Path):
    assert findings(run(tmp_path, ranks([[0.001, 0.001]] * 10))) == []


@pytest.mark.parametrize(
    "steps",
    [
        [[0.001, 0.0012, 0.001]] * 10,  # a little
        [[0.001, 0.003], [0.003, 0.001]] * 5,  # now one, now the other
        [[0.001, 0.009]] + [[0.001, 0.001]] * 9,  # only while it warms up
        [[0.001, 0.009]] * 4,  # too few steps
        [[0.001, 0.009]] * 4 + [[0.001, float("nan")]] * 6,
        [[0.002]] * 10,
    ],
)
def test_what_is_not_always_slow_is_no_finding(tmp_path: Path, steps: list[list[float]]):
    assert findings(run(tmp_path, ranks(steps))) == []


def test_a_rank_that_is_always_slow(tmp_path: Path):
    (found,) = findings(run(tmp_path, ranks([[0.001, 0.001, 0.002, 0.001]] * 10)))
    assert found.name == "slow-rank"
    assert found.text.startswith("learner rank 2 takes 2 times as long per token as the others (2 s per 1,000")
