"""From the loop's page, the formulas of an algorithm are few calls away."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch

import agentrl
from agentrl.algo.advantages.grpo import grpo_advantages
from agentrl.algo.losses.ppo_clip import ppo_clip
from agentrl.config.run import AlgorithmConfig, LearnerConfig, OptimConfig
from agentrl.trainer.loop import train
from agentrl.trainer.samples import TrainingRows
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch, scored, write_model

PACKAGE = str(Path(agentrl.__file__).parent)


def path_to(monkeypatch: pytest.MonkeyPatch, formula: FunctionType, act: Callable[[], object]) -> list[str]:
    """The functions of agentrl from the first that `act` calls to the formula, without those inside of others."""
    found: list[str] = []
    original = FunctionType(formula.__code__, formula.__globals__, closure=formula.__closure__)
    original.__defaults__, original.__kwdefaults__ = formula.__defaults__, formula.__kwdefaults__

    def watched(*args: object, **options: object) -> object:
        caller = None if found else sys._getframe(1)
        while caller is not None:
            code = caller.f_code
            if code.co_filename.startswith(PACKAGE) and "<" not in code.co_qualname:
                found.insert(0, code.co_qualname)
            caller = caller.f_back
        return original(*args, **options)

    with monkeypatch.context() as patch:  # others hold the function itself, so its code is what changes
        patch.setitem(formula.__globals__, "_watched", watched)
        patch.setattr(formula, "__code__", (lambda *args, **options: _watched(*args, **options)).__code__)  # noqa: F821
        act()
    return [*found, formula.__qualname__]


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, parts of the rows are computed in threads, whose callers are not seen
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
def test_advantage_and_clip_are_near_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    to_advantage = path_to(monkeypatch, grpo_advantages, lambda: learner.steps.advantages(rows))
    step = learner.learner.step
    to_clip = path_to(monkeypatch, ppo_clip, lambda: asyncio.run(step(learner.steps.advantages(rows))))
    learner.close()
    assert {"advantages", "step"} <= set(train.__code__.co_names)
    assert to_advantage == ["Algorithm.advantages", "grpo", "grpo_advantages"]
    assert to_clip == ["Learner.step", "LocalPolicyRank.update", "Lanes.run", "policy_loss", "ppo_clip"]
