"""Updates recomputed from the files of a run are those of the run, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import CheckpointError, ConfigError, InfraError
from agentrl.run_folder.checkpoints import _seal
from agentrl.run_folder.records import compress, episodes_file, read_groups, read_metrics, read_records
from agentrl.trainer.replay import replay
from tests.trainer.test_changed_runs import own_folder, run, settings, weights  # noqa: F401 - a fixture


def test_two_runs_of_the_same_file_have_the_same_weights():
    run(settings(steps=3), "one")
    run(settings(steps=3), "other")
    assert weights("one", 3) == weights("other", 3)


def test_a_run_with_other_batches_has_the_same_weights():
    """Two sequences at a time instead of all: the rounding of the sampler's logits differs, its tokens do not."""
    run(settings(steps=3), "one")
    run(settings(steps=3, engine={"max_slots": 2}), "other")
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


TURNS = '''
from agentrl import Message, Task, TextEnv, ToolResult


class Turns(TextEnv):
    """Say letters; the policy also answers itself."""

    @classmethod
    def tasks(cls, split, seed, size=20):
        return [Task(f"{split}-{n}", {"number": n}) for n in range(size)]

    async def setup(self, number: int) -> str:
        await self.model.chat([Message("user", f"Think about {number}")], train=True)
        return f"Say something about {number}"

    async def reply(self, text):
        said = await self.model.chat([Message("user", text)], train=True)
        return ToolResult(str(said.content)[:9], reward=sum(c in "aeiou" for c in text) / 10)
'''


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}},
        {"algorithm": {"advantage": "turn_level", "observation_coef": 0.1}},
    ],
)
def test_rewards_of_turns_are_where_they_were(changes: dict[str, Any]):
    Path("turns.py").write_text(TURNS)
    env = {"use": f"{Path.cwd()}/turns.py:Turns"}
    rollout = {"groups_per_step": 6, "group_size": 4, "max_turns": 3, "max_tokens": 80, "token_budget": 900}
    run(settings(env=env, rollout=rollout, checkpoint={"every": 2}, **changes), "r")
    paid = [turn.reward for record in read_records(Path("r"), 1) for turn in record.episode.turns[:-1]]
    assert any(paid), "of turns before the last"
    found = replay(Path("r"), 2)
    assert found.equal, found.metrics
    assert ("observation_loss" in read_metrics(Path("r"))[-1]) == ("observation_coef" in changes["algorithm"])


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


def planted(run: Path, name: str, part: str, *, drop: bool = False) -> None:
    """Change a number of a tensor in the checkpoint of step 2, or drop the tensor, and seal it again."""
    checkpoint = run / "checkpoints/step-2"
    (file,) = checkpoint.glob(part)
    with safe_open(file, framework="pt") as tensors:
        metadata = tensors.metadata()
    tensors = load_file(file)
    if drop:
        del tensors[name]
    else:
        tensors[name].view(-1)[0] += 0.25
    save_file(tensors, file, metadata=metadata)
    (checkpoint / "manifest.json").unlink()
    _seal(checkpoint, 2)


@pytest.mark.timeout(120)
def test_every_part_of_a_checkpoint_is_compared():
    run(settings(algorithm={"advantage": "gae", "kl": {"coef": 0.01}}), "r")
    weight, last = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"
    for part, name, found in (
        ("model.safetensors", last, last),
        ("critic/model.safetensors", last, f"critic/{last}"),
        ("optimizer.safetensors", f"{last}/exp_avg", f"optimizer/{last}/exp_avg"),
    ):
        shutil.copytree("r", "other", symlinks=True)
        planted(Path("other"), name, part)
        result = replay(Path("other"), 2)
        assert (result.equal, result.tensor, result.metrics) == (False, found, {})
        assert result.max_difference == pytest.approx(0.25)
        assert (result.digest == result.saved_digest) is (part != "model.safetensors")
        planted(Path("other"), weight, "critic/model.safetensors", drop=True)
        assert CliRunner().invoke(app, ["replay", "other"]).exit_code == 1
        shutil.rmtree("other")
    planted(Path("r"), last, "model.safetensors", drop=True)
    told = CliRunner().invoke(app, ["replay", "r"])
    assert f"first tensor that differs: {last}, which only one of them has in this shape" in told.stdout
    assert json.loads(CliRunner().invoke(app, ["replay", "r", "--json"]).stdout)["max_difference"] is None


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


ON_RANKS = """
import json, ray
from pathlib import Path
from agentrl.trainer.replay import replay
from tests.trainer.test_changed_runs import run, settings

ppo = {"algorithm": {"advantage": "gae", "kl": {"coef": 0.01}}, "critic": {"ranks": 1}, "learner": {"ranks": 2}}
run(settings(steps=2, checkpoint={"every": 2}, **ppo), "r")
found = replay(Path("r"), 2)
print(json.dumps([found.from_step, found.digest == found.saved_digest, found.equal, ray.is_initialized()]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_ray_ranks_replays_and_leaves_no_ray():
    pytest.importorskip("ray", reason="Ray is not installed (extra: ray)")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ON_RANKS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0, True, True, False]


def test_what_cannot_be_replayed_says_why():
    run(settings(), "r")
    with pytest.raises(CheckpointError, match="the run has the steps 1 to 2"):
        replay(Path("r"), 3)
    shutil.copytree("r", "cut", symlinks=True)
    Path("cut/checkpoints/step-2/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-2: model.safetensors is missing"):
        replay(Path("cut"), 2)
    Path("cut/metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"its metrics.jsonl has no steps"):
        replay(Path("cut"), 2)
    assert len(read_groups("r", 1)) == 2
    told = CliRunner().invoke(app, ["replay", "r"])
    assert told.exit_code == 0
    assert told.stdout.splitlines()[-1] == "equal"


def test_a_teacher_that_is_down_ends_a_replay_at_once():
    run(settings(algorithm={"kl": {"coef": 0.01}}), "r")
    config, teacher = Path("r/config.yaml"), "\nteacher: {url: 'http://127.0.0.1:9/v1', model: t}\n"
    config.write_text(config.read_text().replace("\nteacher: null\n", teacher))
    with pytest.raises(InfraError, match=r"teacher\.url http://127.0.0.1:9/v1: nothing accepts connections"):
        replay(Path("r"), 2)
    with pytest.raises(InfraError, match=r"teacher\.url http://127.0.0.1:7/v1: nothing accepts connections"):
        replay(Path("r"), 2, ["teacher.url=http://127.0.0.1:7/v1"])
    with pytest.raises(ConfigError, match=r"teacher\.model=u: a replay repeats the run"):
        replay(Path("r"), 2, ["teacher.model=u"])
