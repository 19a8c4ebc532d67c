"""From the loop's page, the formulas of an algorithm are few calls away."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import agentrl
from agentrl.algo.advantages.grpo import grpo_advantages
from agentrl.algo.losses.ppo_clip import ppo_clip
from agentrl.config.run import AlgorithmConfig, LearnerConfig, OptimConfig
from agentrl.trainer.loop import train
from agentrl.trainer.samples import TrainingRows
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch, scored, write_model

PACKAGE = str(Path(agentrl.__file__).parent)


def path_to(formula: Callable[..., object], act: Callable[[], object]) -> list[str]:
    """The functions of agentrl from the first that `act` calls to the formula, without lambdas."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is formula.__code__ and not found:
            caller: FrameType | None = frame
            while caller is not None:
                code = caller.f_code
                if code.co_filename.startswith(PACKAGE) and "<" not in code.co_name:
                    found.insert(0, code.co_qualname)
                caller = caller.f_back

    before = sys.getprofile()
    threading.setprofile(watch)  # the learner's thread begins with its first call
    sys.setprofile(watch)
    try:
        act()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return found


def test_advantage_and_clip_are_near_the_page(tmp_path: Path):
    learner = DirectLearner(
        write_model(tmp_path / "policy", seed=0),
        algorithm=AlgorithmConfig(kl={"coef": 0.0}),
        optim=OptimConfig(),
        config=LearnerConfig(device="cpu"),
        temperature=1.0,
        total_steps=2,
    )
    samples, scores = scored(make_batch(0, groups=1))
    rows = TrainingRows(samples, scores=scores)
    to_advantage = path_to(grpo_advantages, lambda: learner.steps.advantages(rows))
    to_clip = path_to(ppo_clip, lambda: asyncio.run(learner.learner.step(learner.steps.advantages(rows))))
    learner.close()
    assert {"advantages", "step"} <= set(train.__code__.co_names)
    assert to_advantage == ["Algorithm.advantages", "grpo", "grpo_advantages"]
    assert to_clip == ["Learner.step", "LocalPolicyRank.update", "policy_loss", "ppo_clip"]
