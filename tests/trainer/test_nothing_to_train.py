"""Steps that leave no token under the loss: they are told, change nothing, and the run goes on as planned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.run import RunConfig
from agentrl.reporting.report import Silent
from agentrl.run_folder.records import read_metrics
from agentrl.run_folder.redraws import Redraws
from agentrl.run_folder.store import RunStore
from agentrl.trainer.examiner import Examiner
from agentrl.trainer.logging import logging
from agentrl.trainer.run import train_run
from agentrl.trainer.step_log import StepLog

GENTLE = {"optim": {"lr": 0.1, "weight_decay": 0.1, "warmup_steps": 2}}


class Told(Silent):
    """Keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def train(folder: Path, steps: int, **sections: Any) -> Told:
    (folder / "mine.py").write_text("def score(episode):\n    return {'solved': 1.0}\n")
    (folder / "rows.jsonl").write_text('{"prompt": "Say."}\n{"prompt": "Say it."}\n')
    config = RunConfig(
        name="nothing",
        steps=steps,
        env={"use": "agentrl.env.compose:ComposedEnv", "options": {"reward": f"{folder}/mine.py:score"}},
        model={"tiny": {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 32, "vocab": 300}},
        data={"train": f"{folder}/rows.jsonl"},
        checkpoint={"every": 1, "keep": 9},
        **{"rollout": ROLLOUT, **GENTLE, **sections},
    )
    told = Told()
    with RunStore.open(config, folder / "run") as store:
        train_run(config, store, told)
    return told


ROLLOUT = {"groups_per_step": 2, "group_size": 2, "max_tokens": 4, "token_budget": 400}
DROPPED = {"algorithm": {"drop_zero_signal_groups": True}}
MASKED = {"rollout": {**ROLLOUT, "overlong": "mask"}}
WHY_DROPPED = "all 2 groups were dropped (algorithm.drop_zero_signal_groups); the policy is unchanged"
WHY_MASKED = (
    "no token is left to train: every episode was masked (rollout.overlong) or failed the token check; the policy "
    "is unchanged"
)
REJECTED = {"algorithm": {"kl": {"coef": 0.01}, "correction": {"reject": {"token_k1": [0.1, 0.2]}}}}
WHY_REJECTED = "every token was rejected (algorithm.correction: reject or veto); the policy is unchanged"


def test_images_that_the_policy_cannot_read_are_noted(tmp_path: Path):
    config, told = RunConfig(name="seen", env={"use": "a:B"}, model={"tiny": {}}), Told()
    disk = ThreadPoolExecutor(1)
    with (
        RunStore.open(config, tmp_path / "run") as store,
        logging(config, store, told.note) as loggers,
        Examiner(store.path, 1) as doctor,
    ):
        log = StepLog(config, store, told, {}, Redraws(), disk, doctor, loggers)
        line = {"groups_with_signal": 1.0, "trained_tokens": 5.0}
        log.step(1, line)
        assert told.notes == []
        log.step(2, {**line, "env/images_left_out": 8.0})
    disk.shutdown()
    assert told.notes == ["step 2: 8 tool results had images, which the policy cannot read; it saw a note instead"]


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (DROPPED, WHY_DROPPED),
        ({"algorithm": {**DROPPED["algorithm"], "epochs": 2, "updates_per_step": 2}}, WHY_DROPPED),
        ({"algorithm": {**DROPPED["algorithm"], "kl": {"control": "adaptive"}, "entropy_top": 0.5}}, WHY_DROPPED),
        ({**DROPPED, "learner": {"lora": {"rank": 2}}}, WHY_DROPPED),
        ({**DROPPED, "optim": {**GENTLE["optim"], "state": "int8"}}, WHY_DROPPED),
        (MASKED, WHY_MASKED),
        ({**MASKED, "algorithm": {"advantage": "gae"}}, WHY_MASKED),
        ({**MASKED, "algorithm": {"advantage": "opo", "old_logprobs": "sampler"}}, WHY_MASKED),
        (REJECTED, WHY_REJECTED),
    ],
    ids=["dropped", "epochs", "kl", "lora", "int8", "masked", "gae", "opo", "rejected"],
)
def test_a_step_without_a_token_to_train_changes_nothing_and_is_told(
    tmp_path: Path, sections: dict[str, Any], why: str
):
    told = train(tmp_path, 2, **sections)
    assert [note for note in told.notes if why in note] == [f"step {step}: {why}" for step in (1, 2)]
    again = train(tmp_path, 3, **sections)
    assert [note for note in again.notes if why in note] == [f"step 3: {why}"], "resumed at its third step"

    lines = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]
    assert [line["trained_tokens"] for line in lines] == [0, 0, 0]
    assert [line["grad_norm"] for line in lines] == [0, 0, 0]
    assert lines[1]["lr"] > lines[0]["lr"], "the schedule counts the step"
    start = load_file(tmp_path / "run" / "start" / "model.safetensors")
    for step in (1, 2, 3):
        saved = load_file(tmp_path / "run" / "checkpoints" / f"step-{step}" / "model.safetensors")
        assert saved.keys() == start.keys()
        assert all(torch.equal(saved[name], start[name]) for name in start)
