"""Updates recomputed from the files of a run are those of the run, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import CheckpointError
from agentrl.run_folder.records import compress, episodes_file, read_records
from agentrl.trainer.replay import groups_of, replay
from tests.trainer.test_changed_runs import own_folder, run, settings, weights  # noqa: F401 - a fixture


def test_two_runs_of_the_same_file_have_the_same_weights():
    run(settings(steps=3), "one")
    run(settings(steps=3), "other")
    assert weights("one", 3) == weights("other", 3)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": {"kl": {"coef": 0.01}, "updates_per_step": 2, "epochs": 2, "loss": "gspo"}},
        {"algorithm": {"advantage": "gae", "kl": {"coef": 0.01, "where": "reward"}}},
        {"algorithm": {"advantage": "remax", "kl": {"coef": 0.01, "control": "adaptive"}}},
        {
            "rollout": {
                "refill_zero_signal": 2,
                "groups_per_step": 2,
                "group_size": 3,
                "max_turns": 1,
                "max_tokens": 6,
                "token_budget": 400,
            }
        },
    ],
)
def test_a_replay_reaches_the_weights_of_the_run(changes: dict[str, Any]):
    run(settings(steps=4, checkpoint={"every": 2}, **changes), "r")
    last = replay(Path("r"), 4)
    assert (last.from_step, last.step) == (2, 4)
    assert last.saved_digest == last.digest
    assert last.equal
    assert last.first_in == ""
    first = replay(Path("r"), 1)
    assert (first.from_step, first.saved_digest) == (0, None)
    assert first.equal, first.metrics


@pytest.mark.timeout(60)
def test_a_difference_is_narrowed_down():
    run(settings(steps=2, checkpoint={"every": 1, "keep": 5}), "r")
    shutil.copytree("r", "backward")
    config = Path("backward/config.yaml")
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 0.02"))
    found = replay(Path("backward"), 2)
    assert not found.equal
    assert found.tensor
    assert found.max_difference > 0
    assert found.metrics == {}, "losses and gradients are those of the run; the optimizer is not"
    assert found.first_in.startswith("optimizer")
    records = read_records(Path("r"), 2)
    for record in records:
        object.__setattr__(record.episode, "reward", 1.0 - (record.episode.reward or 0.0) * 3)
    episodes_file(Path("r"), 2).write_bytes(compress(records))
    forged = CliRunner().invoke(app, ["replay", "r", "--json"])
    assert forged.exit_code == 1
    body = json.loads(forged.stdout)
    assert body["first_in"] in ("forward pass of step 2", "backward pass of step 2")


@pytest.mark.timeout(120)
def test_steps_are_replayed_with_the_settings_that_they_were_taken_with():
    decaying = {"lr": 1e-2, "warmup_steps": 1, "schedule": "linear"}
    kept: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 9}}
    run(settings(steps=2, optim=decaying, **kept), "r")
    run(settings(steps=4, optim=decaying, **kept), "r")  # free, and changes the learning rate of the same steps
    run(settings(steps=6, optim={"lr": 1e-4, "warmup_steps": 1}, **kept), "r")
    for step in range(1, 7):
        assert replay(Path("r"), step).equal, step
    for step in (2, 4):
        shutil.rmtree(f"r/checkpoints/step-{step}")
    whole = replay(Path("r"), 6)
    assert (whole.from_step, whole.equal) == (0, True), "two changes between the checkpoint and the step"


def test_what_cannot_be_replayed_says_why():
    run(settings(), "r")
    with pytest.raises(CheckpointError, match="the run has the steps 1 to 2"):
        replay(Path("r"), 3)
    assert len(groups_of(read_records(Path("r"), 1))) == 2
    told = CliRunner().invoke(app, ["replay", "r"])
    assert told.exit_code == 0
    assert told.stdout.splitlines()[-1] == "equal"
