"""The planted faults: what is broken in the running system, and what the doctor has to say of the run.

`tests/doctor` and `bench/doctor.py` play them. Nothing here edits a record: each fault acts while a short run
trains, and the doctor sees only the files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agentrl.algo.metrics import sum_of
from agentrl.chat.transcript import Transcript
from agentrl.config.run import RunConfig
from agentrl.doctor.examine import findings
from agentrl.doctor.finding import Finding
from agentrl.errors import AgentRLError
from agentrl.learner import policy_loss, policy_rank, rank_pool
from agentrl.learner.rank_pool import RankWorker
from agentrl.reporting.report import Silent
from agentrl.run_folder.store import RunStore
from agentrl.trainer import algorithm, run, start, training_run
from agentrl.trainer.run import train_run
from agentrl.types import Completion, Message

ENVS = Path(__file__).with_name("planted_envs.py")
TINY = {"hidden": 32, "layers": 1, "heads": 2, "intermediate": 64, "vocab": 400}
BASE: Mapping[str, Any] = {
    "name": "planted",
    "steps": 4,
    "model": {"tiny": TINY},
    "warmup": {
        "num": 96,
        "max_epochs": 10,
        "probe_every": 20,
        "probe_tasks": 8,
        "until_pass": 1.0,
        "at_least": 0,
        "lr": 1e-2,
    },
    "rollout": {"groups_per_step": 8, "group_size": 4, "max_turns": 3, "max_tokens": 32, "token_budget": 400},
    "optim": {"lr": 1e-3, "warmup_steps": 0},
    "algorithm": {"kl": {"coef": 0.01}},
    "eval": {"tasks": 16},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `changes` set, at any depth."""
    found = dict(base)
    for key, value in changes.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def config(env: str = "Buttons", changes: Mapping[str, Any] | None = None) -> RunConfig:
    """A short run; `env` is a class of `planted_envs.py`, or a whole `module:Name`."""
    use = env if ":" in env else f"{ENVS}:{env}"
    return RunConfig.model_validate(merged({**BASE, "env": use}, changes or {}))


def train(settings: RunConfig, folder: Path) -> None:
    """Train in this process; a run that stops itself leaves its files too."""
    with RunStore.open(settings, folder) as store, contextlib.suppress(AgentRLError):
        train_run(settings, store, Silent())


def cold_start(folder: Path) -> Path:
    """A policy that has learned to press buttons, where all runs begin."""
    train(config(changes={"steps": 1}), folder)
    return folder / "start"


@dataclass(frozen=True)
class Planted:
    """One run with a fault in it.

    Attributes:
        number: of the fault in the public list; several runs may show the same one.
        expects: the findings that name it; one of them is enough.
        setting: what the finding has to recommend.
        changes: to the configuration.
        inject: what breaks while the run trains; it may return more settings.
        cold: start from scratch, without the shared policy.
    """

    number: int
    title: str
    expects: tuple[str, ...]
    setting: str
    env: str = "Buttons"
    changes: Mapping[str, Any] = field(default_factory=dict)
    inject: Callable[[], AbstractContextManager[Mapping[str, Any] | None]] = nullcontext
    cold: bool = False

    @property
    def ray(self) -> bool:
        """Whether the run starts Ray."""
        return bool(self.changes.get("rollout", {}).get("workers") or self.changes.get("learner", {}).get("ranks"))

    def play(self, policy: Path, folder: Path) -> list[Finding]:
        """What the doctor says of the run."""
        with self.inject() as settings:
            return play(policy, folder, self.env, merged(self.changes, settings or {}), cold=self.cold)

    def named(self, found: list[Finding]) -> bool:
        """Whether a finding above a hint names the fault, with the setting to change."""
        return any(f.name in self.expects and f.severity != "hint" and self.setting in f.setting for f in found)


def play(policy: Path, folder: Path, env: str, changes: Mapping[str, Any], *, cold: bool = False) -> list[Finding]:
    """What the doctor says of a short run that begins with a copy of `policy`."""
    began: dict[str, Any] = {"warmup": None}
    if not cold:
        shutil.copytree(policy, folder / "policy")
        began["model"] = {"path": str(folder / "policy"), "tiny": None}
    train(config(env, merged(began, changes)), folder / "run")
    return findings(folder / "run")


# -- what breaks -------------------------------------------------------------------------------------------------


@contextmanager
def weights_kept(lag: int | None = None, named: str = "") -> Iterator[None]:
    """The sampler gets the first update again and again, or each one `lag` updates late.

    `named` is in the names of the weights that this concerns.
    """
    original, sent = training_run.sent_weights, []

    async def old(*args: Any) -> Any:
        sent.append({name: value.clone() for name, value in (await original(*args)).items()})
        kept = sent[0] if lag is None else sent[max(0, len(sent) - 1 - lag)]
        return {name: (kept if named in name else sent[-1])[name] for name in kept}

    with patch.object(training_run, "sent_weights", old):
        yield


@contextmanager
def weights_every_other_step() -> Iterator[None]:
    """The sampler gets only every second update."""
    original, sent = training_run.sent_weights, []

    async def old(*args: Any) -> Any:
        sent.append({name: value.clone() for name, value in (await original(*args)).items()})
        return sent[(len(sent) - 1) // 2 * 2]

    with patch.object(training_run, "sent_weights", old):
        yield


@contextmanager
def learner_made(**changes: Any) -> Iterator[None]:
    """The learner is made with other values than the run's; those of the algorithm by their own names."""
    original = start.LearnerSpec

    def made(*args: Any, **named: Any) -> Any:
        spec = original(*args, **named)
        own = {name: value for name, value in changes.items() if hasattr(spec, name)}
        rest = {name: value for name, value in changes.items() if name not in own}
        return replace(spec, **own, algorithm=spec.algorithm.model_copy(update=rest))

    with patch.object(start, "LearnerSpec", made):
        yield


@contextmanager
def mask_shifted(by: int) -> Iterator[None]:
    """The loss mask of every row moves by some tokens."""
    original = algorithm.to_samples

    def shifted(*args: Any, **named: Any) -> Any:
        samples, scores = original(*args, **named)
        return [replace(s, loss_mask=(*s.loss_mask[by:], *s.loss_mask[:by])) for s in samples], scores

    with patch.object(algorithm, "to_samples", shifted):
        yield


@contextmanager
def no_call_read() -> Iterator[None]:
    """The parser reads every completion as text."""
    original = Transcript.complete

    def blind(self: Transcript, completion: Completion, *, message: Message | None = None) -> Message:
        text = self.renderer.decode([id for id in completion.ids if id not in self.renderer.stop_ids])
        return original(self, completion, message=Message("assistant", text))

    with patch.object(Transcript, "complete", blind):
        yield


@contextmanager
def call_not_read(name: str) -> Iterator[None]:
    """The parser reads calls of one tool as text."""
    original = Transcript.complete

    def blind(self: Transcript, completion: Completion, *, message: Message | None = None) -> Message:
        text = self.renderer.decode([id for id in completion.ids if id not in self.renderer.stop_ids])
        said = Message("assistant", text) if f'"{name}"' in text else message
        return original(self, completion, message=said)

    with patch.object(Transcript, "complete", blind):
        yield


class SlowRank(RankWorker):
    """A rank whose layers take longer than those of the first one."""

    def join(self, *arguments: Any) -> None:
        super().join(*arguments)
        if self.rank > 0:
            held: Any = self._held
            held.policy.model.layers[0].register_forward_pre_hook(lambda module, args: time.sleep(0.2))


@contextmanager
def rank_slowed() -> Iterator[None]:
    """All ranks of the learner but the first are slow."""
    with patch.object(rank_pool, "RankWorker", SlowRank):
        yield


@contextmanager
def wrong_sign(**without: float) -> Iterator[None]:
    """The loss subtracts the term that it should add; `without` sets what leaves the term out.

    What is logged of the term stays right.
    """
    original = policy_loss.policy_loss

    def wrong(configured: Any, *args: Any, **named: Any) -> Any:
        found = original(configured, *args, **named)
        plain = replace(configured, config=configured.config.model_copy(update=without))
        rest = original(plain, *args, **{**named, **{k: v for k, v in without.items() if k in named}})
        value = 2 * rest.value - found.value
        return found._replace(value=value, metrics={**found.metrics, "loss": sum_of(value)})

    with patch.object(policy_rank, "policy_loss", wrong):
        yield


@contextmanager
def bound_ignored() -> Iterator[None]:
    """Groups are admitted with weights up to three steps old, whatever the run allows."""
    original = run.make_admission

    def loose(*args: Any, **named: Any) -> Any:
        found = original(*args, **named)
        found.max_staleness, found.groups_ahead = 3, 3 * found.groups_per_step
        return found

    with patch.object(run, "make_admission", loose):
        yield


@contextmanager
def slow_process() -> Iterator[None]:
    """The first process that plays an episode of `SlowProcess` is slow from then on."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AGENTRL_TEST_SLOW"] = f"{folder}/first"
        try:
            yield
        finally:
            del os.environ["AGENTRL_TEST_SLOW"]


# -- the list ----------------------------------------------------------------------------------------------------

_ANY_DRIFT = {"drift_gate": {"mean_abs": None}}
_make = functools.partial
FAULTS: tuple[Planted, ...] = (
    Planted(
        1,
        "weights never reach the sampler",
        ("weights-not-reaching-sampler",),
        "engine.sync",
        changes={"optim": {"lr": 1e-2}, "algorithm": _ANY_DRIFT, "steps": 8},
        inject=weights_kept,
    ),
    Planted(2, "wrong parser", ("no-tool-called",), "model.parser", changes={"steps": 2}, inject=no_call_read),
    Planted(3, "tool answers are one error", ("tool-always-fails",), "press", "Broken"),
    Planted(4, "loss mask shifted by one", ("tokens-shifted",), "loss mask", inject=_make(mask_shifted, 1)),
    Planted(5, "reward grows with length", ("reward-follows-length",), "reward", "Longer"),
    Planted(6, "reward ignores the tool", ("reward-ignores-tools",), "reward", "Polite"),
    Planted(7, "judge always says 0.5", ("reward-part-constant",), "judge", "Shrug"),
    Planted(8, "answer in the prompt", ("answer-in-prompt",), "prompt", "Told"),
    Planted(8, "answer in reach of a tool", ("answer-in-reach",), "reach", "Peek"),
    Planted(9, "duplicate tasks", ("duplicate-tasks",), "data.train", "Repeated"),
    Planted(10, "tasks leaked into held-out", ("held-out-leak",), "data.held_out", "Leaky"),
    Planted(
        11,
        "no signal in nearly all groups",
        ("no-signal",),
        "rollout.group_size",
        changes={"rollout": {"temperature": 0.01}},
    ),
    Planted(
        12,
        "KL with the wrong sign",
        ("kl-sign",),
        "algorithm.kl",
        changes={"steps": 8, "optim": {"lr": 1e-2}, "algorithm": {"kl": {"coef": 0.5}}},
        inject=_make(wrong_sign, kl_coef=0.0),
    ),
    Planted(
        13,
        "learning rate x100",
        ("learning-rate-too-high",),
        "optim.lr",
        changes={"steps": 10, "optim": {"lr": 1.0}},
    ),
    Planted(
        13,
        "learning rate /100",
        ("learning-rate-too-low",),
        "optim.lr",
        changes={"steps": 10, "optim": {"lr": 1e-7}},
    ),
    Planted(
        14,
        "temperature mismatch",
        ("temperature-mismatch",),
        "rollout.temperature",
        inject=_make(learner_made, temperature=0.5),
    ),
    Planted(
        15,
        "stale weights",
        ("stale-weights",),
        "max_staleness",
        changes={"steps": 6},
        inject=bound_ignored,
    ),
    Planted(
        16,
        "entropy collapse",
        ("entropy-collapse",),
        "algorithm.kl.coef",
        changes={
            "steps": 40,
            "optim": {"lr": 3e-3},
            "algorithm": {"entropy_coef": 2.0, "kl": {"coef": 0.0001}},
        },
        inject=_make(wrong_sign, entropy_coef=0.0),
    ),
    Planted(
        17,
        "length explosion",
        ("length-explosion",),
        "rollout.overlong",
        "OnlyLonger",
        changes={"steps": 16, "optim": {"lr": 1e-2}, "rollout": {"max_tokens": 64}},
    ),
    Planted(
        18,
        "truncated observations",
        ("observations-truncated",),
        "env.settings.observation_tokens",
        "Verbose",
        changes={"env": {"use": f"{ENVS}:Verbose", "settings": {"observation_tokens": 64}}, "steps": 2},
    ),
    Planted(19, "context always full", ("context-full",), "rollout.token_budget", "Chatty"),
    Planted(
        20,
        "no cold start where nothing is solved",
        ("never-solved", "no-tool-called"),
        "warmup",
        changes={"steps": 3},
        cold=True,
    ),
    Planted(
        21,
        "one worker always slow",
        ("slow-worker",),
        "rollout.workers",
        "SlowProcess",
        changes={"steps": 2, "rollout": {"workers": 2}},
        inject=slow_process,
    ),
    Planted(
        22,
        "redraws that favor failures",
        ("redraws-favor-failures",),
        'Sandbox(on_death="score")',
        "Dies",
        changes={"steps": 6, "rollout": {"redrawn_stop_above": None, "infra_retries": 20}},
    ),
    Planted(
        23,
        "reward hacking",
        ("reward-hacking",),
        "reward",
        "Hackable",
        changes={"steps": 16, "optim": {"lr": 5e-3}, "eval": {"tasks": 32, "every": 8}},
    ),
    Planted(24, "NaN in one reward part", ("reward-at-fault",), "ratio", "NotANumber"),
)
"""The issue's list by number."""
