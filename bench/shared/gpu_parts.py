"""Figures for `bench/gpu_all.py` that no other bench has: `python -m bench.shared.gpu_parts PART [--smoke]`.

Weights are random, in the shapes of Qwen3. Every measurement is one line of JSON.

- `pause`: from the learner's last update until the engine on the same device answers again. `idle_s`: fetch the
  learner's weights, bring them to the local engine, get one token. `in_flight_s`: the same until a sequence in the
  middle of decoding has its next token, for which its keys and values are computed again. A line per update, of
  which the first warms up.
- `delta`: `engine.sync: delta` against `tensor`, with layers of the shape of an 8B model. The receiver is in this
  process, takes weights through host memory, and checks each changed tensor by its hash; there is no server and no
  network.
- `trees`: an update on episodes that rewrite their history, with each attention, sharing prefixes or row by row.
- `drift`: log-probabilities of sampled tokens, learner minus sampler, both in bfloat16: before an update, across
  one (the sampler has the weights from before), and after it. The last norm is scaled by six, so that the random
  model's distributions have peaks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from agentrl.engine.base import GenerateOptions, TokenLogprob
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.engine.servers.client import InferenceServer
from agentrl.engine.servers.delta_sync import DeltaSync
from agentrl.engine.servers.inside.agentrl_weight_delta import changed
from agentrl.engine.servers.weight_sync import TensorSync
from agentrl.errors import ConfigError, EngineError
from agentrl.learner.split import StepRows
from agentrl.types import Completion, Sample, Sampling
from bench.delta import Stepper
from bench.gpu_rollout import make_model, synchronize
from bench.shared.qwen3_shapes import SHAPES
from bench.shared.random_policy import open_learner, write_config
from bench.shared.verdict import in_a_line
from bench.tree import WAYS, Episodes, forked_rows, packed_by

BUCKET = 1 << 29
UPDATES = 3
"""Of a case of `pause`."""
Line = dict[str, object]


def pause(device: torch.device) -> Iterator[Line]:
    gpu = device.type == "cuda"
    for train in ("full", "lora"):
        for shape in ("0.6B", "8B") if gpu else ("smoke",):
            found: Line = {"shape": shape, "train": train}
            try:
                for line in _one_by_one(_pauses(shape, train == "lora", device)):
                    yield found | line
            except (
                torch.OutOfMemoryError,
                EngineError,
                ConfigError,
            ) as e:  # no memory (in the engine's thread); no peft
                yield found | {"skipped": str(e).partition("\n")[0]}
            _free(device)


def _one_by_one(lines: AsyncIterator[Line]) -> Iterator[Line]:
    """Each line as soon as it is there."""

    async def following() -> Line | None:
        return await anext(lines, None)

    with asyncio.Runner() as runner:
        while (line := runner.run(following())) is not None:
            yield line


async def _pauses(shape: str, lora: bool, device: torch.device) -> AsyncIterator[Line]:
    context, sequences, prompt = 2048, 8, 512 if device.type == "cuda" else 16
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, SHAPES[shape][6], (sequences, prompt)).tolist()
    async with contextlib.AsyncExitStack() as stack:
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape, context, Path(folder))
            _, learner = open_learner(Path(folder), device=device.type, tokens=context, lora=lora)
        stack.push_async_callback(learner.close)
        engine = LocalEngine(make_model(shape, device, context), max_slots=2 * sequences, max_context=context)
        stack.push_async_callback(engine.close)
        for number in range(1, UPDATES + 1):
            synchronize(device)
            began = time.perf_counter()
            await engine.update_weights(await learner.weights(), 2 * number)
            await engine.generate(prompts[0], Sampling(max_tokens=1, seed=number))
            idle = time.perf_counter() - began

            async def update(number: int = number) -> None:
                await engine.update_weights(await learner.weights(), 2 * number + 1)

            in_flight = await _gap(engine, prompts, update, 2 * number + 1)
            yield {
                "update": number,
                "idle_s": round(idle, 4),
                "in_flight_s": round(in_flight, 4),
                "sequences": sequences,
                "prompt": prompt,
                "peak_gib": _peak(device),
            }


async def _gap(
    engine: LocalEngine, prompts: Sequence[list[int]], update: Callable[[], Awaitable[None]], version: int
) -> float:
    """Seconds from the begin of an update in the middle of decoding to the first token of its version."""
    started, answered = asyncio.Event(), asyncio.Event()

    def note(token: TokenLogprob) -> None:
        (answered if token.version == version else started).set()

    sampling, options = Sampling(max_tokens=1500), GenerateOptions(on_token=note)
    running = [asyncio.create_task(engine.generate_streaming(ids, sampling, options)) for ids in prompts]
    try:
        await _set_before_end(started, running)
        began = time.perf_counter()
        await update()
        await _set_before_end(answered, running)
        return time.perf_counter() - began
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _set_before_end(event: asyncio.Event, running: Sequence[asyncio.Task[Completion]]) -> None:
    """Wait for the event as long as all sequences decode.

    Raises:
        EngineError: one failed, or ended before.
    """
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not event.is_set():
        for task in running:
            if task.done():
                task.result()
        raise EngineError("the sequences ended before the update")


class Receiver:
    """Takes weights through host memory, as a server on another machine would, and holds them on the device."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.held = {name: tensor.clone() for name, tensor in weights.items()}

    @contextlib.asynccontextmanager
    async def updating(self, *, by_tensor: bool) -> AsyncIterator[None]:
        yield

    async def load_tensors(self, tensors: Mapping[str, Tensor], version: int) -> None:
        for name, tensor in tensors.items():
            self.held[name].copy_(tensor.cpu())

    async def load_changes(self, changes: Mapping[str, Tensor], version: int) -> None:
        for header, packed in changes.items():
            head = json.loads(header)
            old = self.held[head["name"]]
            self.held[head["name"]] = changed(head, packed.to(old.device), old)


def delta(device: torch.device) -> Iterator[Line]:
    hidden, inner, layers, heads, kv_heads, head, _, _ = SHAPES["8B" if device.type == "cuda" else "smoke"]
    shapes = {"q": (heads * head, hidden), "k": (kv_heads * head, hidden), "v": (kv_heads * head, hidden)}
    shapes |= {
        "o": (hidden, heads * head),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    torch.manual_seed(0)
    weights = {
        f"layers.{layer}.{name}.weight": torch.randn(shape, device=device) * 0.02
        for layer in range(min(layers, 4))
        for name, shape in shapes.items()
    }
    stepper = Stepper(weights)
    first = stepper.step()
    total = sum(tensor.nbytes for tensor in first.values())
    for name in ("tensor", "delta"):
        receiver = Receiver(first)
        servers = [cast(InferenceServer, receiver)]
        way = (
            DeltaSync(bucket_bytes=BUCKET, full_every=100) if name == "delta" else TensorSync(bucket_bytes=BUCKET)
        )
        asyncio.run(way.push(servers, first, 1))
        for version in range(2, 5):
            now = stepper.step()
            synchronize(device)
            began = time.perf_counter()
            failures = asyncio.run(way.push(servers, now, version))
            synchronize(device)
            seconds = time.perf_counter() - began
            size = way.bytes_sent if isinstance(way, DeltaSync) else total
            same = not failures and all(torch.equal(receiver.held[key], now[key]) for key in now)
            yield {"sync": name, "update": version, "bytes": size, "seconds": round(seconds, 4), "same": same}
        first = stepper.step()


def trees(device: torch.device) -> Iterator[Line]:
    gpu = device.type == "cuda"
    shape, episodes = ("0.6B", Episodes(2, 4, 20, prompt=1000)) if gpu else ("smoke", Episodes(1, 2, 4))
    rows = forked_rows(episodes, SHAPES[shape][6])
    for kind in ("sdpa", "flash", "flex"):
        for way in ("tree", "rows"):
            found: Line = {"shape": shape, "attention": kind, "packed": way, "rows": len(rows)}
            try:
                yield found | _update(shape, kind, way, rows, device)
            except torch.OutOfMemoryError:
                yield found | {"fits": False}
            except ConfigError as e:  # this attention does not work here
                yield found | {"skipped": str(e)}
            except ValidationError as e:
                yield found | {"skipped": e.errors()[0]["msg"]}
            except Exception as e:  # a kernel that does not compile here; the others are measured
                yield found | {"failed": in_a_line(e)}
            _free(device)


def _update(shape: str, kind: str, way: str, rows: Sequence[Sample], device: torch.device) -> Line:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, 4096, Path(folder))
        _, learner = open_learner(Path(folder), device=device.type, tokens=16384, attention=kind)
    seconds, norms = [], []
    try:
        for _ in range(3 if device.type == "cuda" else 2):  # the first warms up
            began = time.perf_counter()
            with packed_by(WAYS[way]):
                result = asyncio.run(learner.step(StepRows(rows)))
            synchronize(device)
            seconds.append(time.perf_counter() - began)
            norms.append(result.metrics["grad_norm"])
    finally:
        asyncio.run(learner.close())
    return {
        "step_s": round(statistics.median(seconds[1:]), 4),
        "first_step_s": round(seconds[0], 3),
        "tokens_of_rows": result.tokens,
        "grad_norm": float(f"{norms[0]:.6g}"),
        "peak_gib": _peak(device),
    }


def drift(device: torch.device) -> Iterator[Line]:
    for shape in ("0.6B", "1.7B") if device.type == "cuda" else ("smoke",):
        for line in _one_by_one(_drifts(shape, device)):
            yield {"shape": shape, **line}
        _free(device)


async def _drifts(shape: str, device: torch.device) -> AsyncIterator[Line]:
    gpu = device.type == "cuda"
    number, prompt, tokens = (64, 256, 512) if gpu else (4, 8, 16)
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, prompt + tokens, Path(folder))
        rank, learner = open_learner(Path(folder), device=device.type, tokens=16384)
    with torch.no_grad():
        rank.policy.get_decoder().norm.weight.mul_(6.0)
    engine = LocalEngine(make_model(shape, device, prompt + tokens), max_slots=number, max_context=prompt + tokens)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, SHAPES[shape][6], (number, prompt)).tolist()
    try:
        await engine.update_weights(await learner.weights(), 1)
        rows = await _sampled(engine, prompts, tokens)
        yield {"when": "before", **_difference(rows, await learner.probe(rows))}
        await learner.step(StepRows(rows))
        yield {"when": "across", **_difference(rows, await learner.probe(rows))}
        await engine.update_weights(await learner.weights(), 2)
        rows = await _sampled(engine, prompts, tokens)
        yield {"when": "after", **_difference(rows, await learner.probe(rows))}
    finally:
        await engine.close()
        await learner.close()


async def _sampled(engine: LocalEngine, prompts: Sequence[list[int]], tokens: int) -> list[Sample]:
    """A row of each prompt with the tokens that the engine sampled; advantages of both signs."""
    done = await asyncio.gather(
        *(engine.generate(ids, Sampling(max_tokens=tokens, seed=row)) for row, ids in enumerate(prompts))
    )
    rows = []
    for row, (ids, completion) in enumerate(zip(prompts, done, strict=True)):
        before, length = len(ids), len(ids) + len(completion.ids)
        rows.append(
            Sample(
                ids=(*ids, *completion.ids),
                loss_mask=(False,) * before + (True,) * (length - before),
                logprobs=(0.0,) * before + completion.logprobs,
                advantages=(1.0 - 2.0 * (row % 2),) * length,
                versions=(0,) * before + completion.versions,
                episode_id=str(row),
                group=row,
            )
        )
    return rows


def _difference(rows: Sequence[Sample], learner: Sequence[Sequence[float]]) -> Line:
    sampler = [p for row in rows for p, on in zip(row.logprobs, row.loss_mask, strict=True) if on]
    log_ratio = np.concatenate([np.asarray(row) for row in learner]) - np.asarray(sampler)
    size = np.abs(log_ratio)
    found = {
        "mean_abs": size.mean(),
        "p99_abs": np.quantile(size, 0.99),
        "max_abs": size.max(),
        "kl": np.mean(np.exp(log_ratio) - 1 - log_ratio),
        "mean_logprob": np.mean(sampler),
    }
    return {"tokens": len(sampler), **{name: float(f"{value:.4g}") for name, value in found.items()}}


def _peak(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


PARTS = {"pause": pause, "delta": delta, "trees": trees, "drift": drift}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    args = parser.parse_args()
    for line in PARTS[args.part](torch.device("cpu" if args.smoke else "cuda")):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
