"""Faults planted into a running system: each short run leaves files in which the doctor names the fault."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.transcript import Transcript
from agentrl.config.run import RunConfig
from agentrl.doctor.examine import findings
from agentrl.errors import AgentRLError
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore
from agentrl.trainer import training_run
from agentrl.trainer.run import train_run
from agentrl.types import Completion, Message

ENV = '''
import random
from typing import Literal

from agentrl import ToolEnv, reward, tool
from agentrl.env.tasks import generated
from agentrl.types import Message, ToolCall

COLORS = ("red", "blue")


class Buttons(ToolEnv):
    """Press the button of the right color, then say done."""

    PROMPT = "Number {number}."

    def setup(self, number: int) -> str:
        self.pressed, self.right = None, COLORS[number % 2]
        return self.PROMPT.format(number=number, answer=self.right)

    @tool
    async def press(self, color: Literal["red", "blue"]) -> str:
        """Press a button."""
        self.pressed = color
        return f"It is {color}."

    @reward(solved=True)
    def solved(self) -> bool:
        return self.pressed == self.right

    @classmethod
    def tasks(cls, split, seed):
        base = 0 if split == "train" else 5000
        return generated("buttons", split, seed, 64, lambda rng: {"number": base + rng.randrange(5000)})

    @classmethod
    def demonstrations(cls, seed, num):
        rng = random.Random(seed)
        found = []
        for _ in range(num):
            number, color = rng.randrange(5000), rng.choice(COLORS)
            found.append([
                Message("system", Buttons.__doc__),
                Message("user", f"Number {number}."),
                Message("assistant", "", (ToolCall("call00000", "press", {"color": color}),)),
                Message("tool", f"It is {color}.", tool_call_id="call00000", name="press"),
                Message("assistant", "done"),
            ])
        return found


class Broken(Buttons):
    """The tool answers with an error."""

    @tool
    async def press(self, color: Literal["red", "blue"]) -> str:
        """Press a button."""
        raise RuntimeError("the button service is not available")


class Longer(Buttons):
    @reward
    def length(self, episode) -> float:
        return sum(len(segment.ids) for segment in episode.segments if segment.origin == "sampled") / 40


class Shrug(Buttons):
    @reward
    def judge(self) -> float:
        return 0.5


class NotANumber(Buttons):
    @reward
    def ratio(self) -> float:
        return float("nan") if self.right == "red" else 0.0


class Leaky(Buttons):
    @classmethod
    def tasks(cls, split, seed):
        return generated("buttons", "train", 1, 64, lambda rng: {"number": rng.randrange(5000)})


class Repeated(Buttons):
    @classmethod
    def tasks(cls, split, seed):
        base = 0 if split == "train" else 5000
        return generated("buttons", split, seed, 64, lambda rng: {"number": base + rng.randrange(4)})
'''
TINY = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}


def config(folder: Path, env: str = "Buttons", **changes: Any) -> RunConfig:
    (folder / "envs.py").write_text(ENV)
    return RunConfig.model_validate(
        {
            "name": "planted",
            "steps": 4,
            "env": f"{folder}/envs.py:{env}",
            "model": {"tiny": TINY},
            "warmup": {
                "num": 96,
                "max_epochs": 10,
                "probe_every": 20,
                "probe_tasks": 8,
                "until_pass": 1.0,
                "lr": 1e-2,
            },
            "rollout": {
                "groups_per_step": 8,
                "group_size": 4,
                "max_turns": 3,
                "max_tokens": 32,
                "token_budget": 400,
            },
            "optim": {"lr": 1e-3, "warmup_steps": 0},
            "algorithm": {"kl": {"coef": 0.01}},
            "eval": {"tasks": 16},
        }
        | changes
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned to press buttons, for all runs."""
    folder = tmp_path_factory.mktemp("cold")
    run = folder / "run"
    train(config(folder, steps=1), run)
    return run / "start"


def train(settings: RunConfig, folder: Path) -> None:
    """Train in this process; a run that stops itself leaves its files too."""
    with RunStore.open(settings, folder) as store, contextlib.suppress(AgentRLError):
        train_run(settings, store, Silent())


def planted(start: Path, folder: Path, env: str = "Buttons", **changes: Any) -> dict[str, Any]:
    """What the doctor says of a short run that begins from the cold-started policy."""
    policy = folder / "policy"
    shutil.copytree(start, policy)
    settings = config(folder, env, **({"model": {"path": str(policy)}, "warmup": None} | changes))
    train(settings, folder / "run")
    return {finding.name: finding for finding in findings(folder / "run")}


def test_a_healthy_run_has_no_finding_above_a_hint(start: Path, tmp_path: Path):
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = planted(start, folder, seed=seed, steps=5)
        assert [finding.line() for finding in found.values() if finding.severity != "hint"] == []


def test_weights_that_never_reach_the_sampler(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original, first = training_run.sent_weights, []

    async def the_first(*args: Any) -> Any:
        if not first:
            first.append({name: value.clone() for name, value in (await original(*args)).items()})
        return first[0]

    monkeypatch.setattr(training_run, "sent_weights", the_first)
    found = planted(
        start,
        tmp_path,
        optim={"lr": 3e-2, "warmup_steps": 0},
        algorithm={"drift_gate": {"mean_abs": None}, "entropy_coef": 0.02},
        steps=8,
    )
    assert found["weights-not-reaching-sampler"].severity == "error"
    assert "engine.sync" in found["weights-not-reaching-sampler"].setting


def test_another_temperature_in_the_learner(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from agentrl.trainer import start as made

    original = made.LearnerSpec
    monkeypatch.setattr(made, "LearnerSpec", lambda *a, **k: replace(original(*a, **k), temperature=0.5))
    found = planted(start, tmp_path)
    assert "rollout.temperature" in found["temperature-mismatch"].setting


def test_a_loss_mask_that_is_shifted_by_one(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from agentrl.trainer import algorithm

    original = algorithm.to_samples

    def shifted(*args: Any, **named: Any) -> Any:
        samples, scores = original(*args, **named)
        return [replace(s, loss_mask=(*s.loss_mask[1:], s.loss_mask[0])) for s in samples], scores

    monkeypatch.setattr(algorithm, "to_samples", shifted)
    found = planted(start, tmp_path)
    assert "tokens-shifted" in found


def test_a_parser_that_reads_no_call(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = Transcript.complete

    def blind(self: Transcript, completion: Completion, *, message: Message | None = None) -> Message:
        text = self.renderer.decode([id for id in completion.ids if id not in self.renderer.stop_ids])
        return original(self, completion, message=Message("assistant", text))

    monkeypatch.setattr(Transcript, "complete", blind)
    found = planted(start, tmp_path, steps=2)
    assert "model.parser" in found["no-tool-called"].setting


@pytest.mark.parametrize(
    ("env", "name", "setting"),
    [
        ("Broken", "tool-always-fails", "press"),
        ("Shrug", "reward-part-constant", "judge"),
        ("NotANumber", "reward-at-fault", "ratio"),
        ("Leaky", "held-out-leak", "data.held_out"),
        ("Repeated", "duplicate-tasks", "data.train"),
    ],
)
def test_an_env_with_a_fault(start: Path, tmp_path: Path, env: str, name: str, setting: str):
    found = planted(start, tmp_path, env, steps=3)
    assert name in found, list(found)
    assert setting in found[name].setting


def test_a_run_without_a_cold_start_where_nothing_is_solved(tmp_path: Path):
    settings = config(tmp_path, warmup=None, steps=3)
    train(settings, tmp_path / "run")
    found = {finding.name: finding for finding in findings(tmp_path / "run")}
    assert "warmup" in (found.get("never-solved") or found["no-tool-called"]).setting


def test_a_learning_rate_a_hundred_times_too_high_or_low(start: Path, tmp_path: Path):
    for rate, name in ((1.0, "learning-rate-too-high"), (1e-7, "learning-rate-too-low")):
        folder = tmp_path / name
        folder.mkdir()
        found = planted(start, folder, optim={"lr": rate, "warmup_steps": 0}, steps=10)
        assert "optim.lr" in found[name].setting
