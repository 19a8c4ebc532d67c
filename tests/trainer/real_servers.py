"""What the tests of real inference servers share: a server under its guard, transformers' own answers, a run.

The servers: `scripts/ci-sglang`, `scripts/ci-vllm`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentrl.config.run import LoRAConfig, RunConfig, TinyModel
from agentrl.engine.servers.launch import guard
from agentrl.engine.servers.launch.hosts import Recipe
from agentrl.models.tiny import make_tiny_model
from agentrl.ports import reserved_port
from agentrl.reporting.report import Silent, Summary
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run
from agentrl.types import Completion

PROMPT = [5, 6, 7, 8, 9, 100, 40, 41]
AGREE = 1e-4


def two_policies(root: Path, hidden: int) -> list[Path]:
    """Two policies of one shape with different weights."""
    shape = TinyModel(hidden=hidden, layers=2, vocab=320, max_context=256)
    for seed in (0, 1):
        make_tiny_model(root / str(seed), ["one two three 1 2 3"] * 20, shape, seed=seed)
    return [root / "0", root / "1"]


@contextmanager
def serving(recipe: Recipe, log: Path) -> Iterator[str]:
    """A server that is up, by its URL; its guard ends it with the tests."""
    with (
        reserved_port() as port,
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, guard.__file__, *recipe.command(port)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **recipe.environment},
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            while not _healthy(url):
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
            yield url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def gap(completion: Completion, by_version: Mapping[int, Path]) -> float:
    """The largest difference to the log-probabilities of transformers, each token under its own weights."""
    worst = 0.0
    for version, folder in by_version.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *completion.ids]])).logits[0, len(PROMPT) - 1 : -1]
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.ids)[:, None])[:, 0].tolist()
        rows = zip(completion.logprobs, wanted, completion.versions, strict=True)
        worst = max([worst, *(abs(a - b) for a, b, v in rows if v == version)])
    return worst


def logprobs_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens but the first."""
    row = torch.tensor([ids])
    with torch.no_grad():
        return torch.log_softmax(model(row).logits[0, :-1], -1).gather(1, row[0, 1:, None])[:, 0]


def random_adapter(model: Path, lora: LoRAConfig, merged: Path) -> dict[str, torch.Tensor]:
    """A LoRA for some layers of each block; `merged` gets the model with it."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, layer in policy.named_modules():
        if name.endswith(tuple(lora.targets)):
            a_RI = torch.randn(lora.rank, layer.in_features, generator=generator)
            b_OR = torch.randn(layer.out_features, lora.rank, generator=generator) * 0.1
            layer.weight.data += lora.alpha / lora.rank * (b_OR @ a_RI)
            found |= {f"base_model.model.{name}.lora_{key}.weight": t for key, t in (("A", a_RI), ("B", b_OR))}
    policy.save_pretrained(merged)
    return found


def calculator(**changes: Any) -> RunConfig:
    """A run on the calculator."""
    return RunConfig.model_validate(
        {
            "name": "calculator",
            "env": "agentrl.envs.calculator:Calculator",
            "data": {"options": {"max_operations": 1}},
            "rollout": {
                "groups_per_step": 8,
                "group_size": 8,
                "max_turns": 4,
                "max_tokens": 40,
                "token_budget": 300,
                "timeout_s": 900.0,
            },
            "algorithm": {"kl": {"coef": 0.003}},
            "optim": {"lr": 4e-4, "warmup_steps": 0},
            "eval": {"tasks": 48},
            "learner": {"device": "cpu"},
        }
        | changes
    )


def train(config: RunConfig, folder: Path, reporter: Silent | None = None) -> tuple[Summary, list[dict[str, Any]]]:
    """Train, and return the summary and the metrics of each step."""
    with RunStore.open(config, folder) as store:
        summary = train_run(config, store, reporter or Silent())
        return summary, [dict(line) for line in store.metrics()]


class Killer(Silent):
    """Kills the server that the run has started, in the middle of the step after the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[int] = []

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        if metrics.get("step") == 2:  # steps of a cold start have none
            self.timer = threading.Timer(0.3, self._kill)
            self.timer.start()

    def _kill(self) -> None:
        for child in children_of(os.getpid()):
            if guard.__file__ in Path(f"/proc/{child}/cmdline").read_text():
                for server in children_of(child):
                    os.kill(server, signal.SIGKILL)
                    self.killed.append(server)


def children_of(parent: int) -> list[int]:
    """Processes that a process has started."""
    tasks = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for task in tasks for pid in task.read_text().split()]
