"""Updates of a server by changed weights against full updates: `python bench/delta.py [--quick]`.

Starts a real SGLang on the CPU (AGENTRL_SGLANG_PYTHON; see scripts/ci-sglang) with layers of the shape of an 8B
model, and sends it the weights after each of several steps of AdamW at a learning rate of 1e-6: once with
`engine.sync: tensor`, once with `delta`. The server compares a hash of every tensor. Seconds are those of a whole
update, from comparing the weights to the server's answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.config.engine import EngineConfig, ServerConfig
from agentrl.config.run import TinyModel
from agentrl.engine.open import open_engine
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.server_engine import ServedEngine
from agentrl.models.tiny import make_tiny_model
from bench.shared.verdict import finish

LEARNING_RATE = 1e-6
UNSERVED = {
    "bench": "delta",
    "ours": None,
    "unit": "s per update",
    "goal": "fewer bytes and less time than a full update",
    "met": None,
    "why": "AGENTRL_SGLANG_PYTHON is not set",
}
MIN_BYTES, MIN_TIME = 10.0, 3.0
"""Goals: a full update has at least this many times the bytes, and takes at least this many times as long."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update: bytes of weights sent, and seconds."""

    size: int
    seconds: float


def make_model(folder: Path, layers: int) -> None:
    """Layers of the shape of Qwen3-8B with a small vocabulary, in bfloat16; weights are normal."""
    make_tiny_model(folder, ["one two three"] * 20, TinyModel(hidden=64, layers=1, vocab=320, max_context=256))
    tokens = json.loads((folder / "config.json").read_text())
    config = Qwen3Config(
        vocab_size=tokens["vocab_size"],
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=tokens["eos_token_id"],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


class Stepper:
    """Weights under updates of the size that AdamW makes: the learning rate times a number of either sign."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.master = {name: tensor.float() for name, tensor in weights.items()}
        device = next(iter(self.master.values())).device
        self._generator = torch.Generator(device).manual_seed(1)

    def step(self) -> dict[str, Tensor]:
        """Update all weights once, and return them in bfloat16."""
        for tensor in self.master.values():
            noise = torch.randn(tensor.shape, generator=self._generator, device=tensor.device)
            tensor.add_(noise.clamp_(-3, 3), alpha=LEARNING_RATE)
        return {name: tensor.bfloat16() for name, tensor in self.master.items()}


async def updates(
    model: Path, python: str, sync: str, weights: Callable[[], Mapping[str, Tensor]], count: int
) -> list[Update]:
    """Start a server, bring it all weights once, and time the updates after that."""
    config = EngineConfig.model_validate(
        {
            "kind": "sglang",
            "device": "cpu",
            "dtype": "bfloat16",
            "sync": sync,
            "server": ServerConfig(python=python),
        }
    )
    engine = await open_engine(config, model)
    assert isinstance(engine, ServedEngine)
    found = []
    try:
        await engine.update_weights(weights(), version=1)
        for version in range(2, 2 + count):
            now = weights()
            began = time.perf_counter()
            await engine.update_weights(now, version=version)
            seconds = time.perf_counter() - began
            way = engine._sync
            size = way.bytes_sent if isinstance(way, DeltaSync) else sum(t.nbytes for t in now.values())
            found.append(Update(size, seconds))
            print(f"{sync:<7} update {version}: {size / 1e6:8.1f} MB, {seconds:6.2f} s", flush=True)
    finally:
        await engine.close()
    return found


def main() -> None:
    """Measure, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one layer and two updates")
    args = parser.parse_args()
    python = os.environ.get("AGENTRL_SGLANG_PYTHON")
    if not python:
        finish(UNSERVED, timed=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_model(model, 1 if args.quick else 2)
        first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
        runs = {}
        for sync in ("tensor", "delta"):
            stepper = Stepper(first)
            runs[sync] = asyncio.run(updates(model, python, sync, stepper.step, 2 if args.quick else 4))
    size = {sync: median(u.size for u in done) for sync, done in runs.items()}
    seconds = {sync: median(u.seconds for u in done) for sync, done in runs.items()}
    fewer, faster = size["tensor"] / size["delta"], seconds["tensor"] / seconds["delta"]
    weights = sum(tensor.numel() for tensor in first.values())
    line = {
        "bench": "delta",
        "ours": round(seconds["delta"], 3),
        "baseline": round(seconds["tensor"], 3),
        "ratio": round(faster, 2),
        "unit": "s per update",
        "goal": MIN_TIME,
        "fewer_bytes": round(fewer, 1),
        "goal_fewer_bytes": MIN_BYTES,
        "megabytes": {sync: round(value / 1e6, 2) for sync, value in size.items()},
        "weights": weights,
        "met": faster >= MIN_TIME and fewer >= MIN_BYTES,
    }
    finish(line, timed=True)


if __name__ == "__main__":
    main()
