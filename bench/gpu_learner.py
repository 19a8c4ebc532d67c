"""The learner's update on a GPU: tokens/s and model FLOPs utilisation, the whole model and adapters.

    python bench/gpu_learner.py [--shapes 0.6B,1.7B,8B] [--lengths 8192,32768] [--train full,lora]
        [--attention auto] [--quick] [--out bench/results/gpu_learner.json]
    python bench/gpu_learner.py --smoke          the same code with a tiny shape on the CPU

Random weights in the shapes of Qwen3, made on the device. A step is one update by the learner as `agentrl train`
runs it: bfloat16 with float32 parameters and AdamW, activations checkpointed, PPO's clipped loss, no reference.
Its rows are of one length and share nothing, so that every token that is counted is computed; all but the prompt
train. One step warms up, the median of the others counts. What does not fit into the device's memory is computed
in micro-batches of one row; if that does not fit either, or fails otherwise, its cell says so.

Model FLOPs of a step, where a multiplication with an addition is 2, and recomputing is not counted:

- linear layers of the blocks: 2 a parameter and token forward, as many each for the gradients of inputs and of
  weights: 6 in all; 4 where the weights are frozen. Adapters: 6 a parameter of theirs.
- output layer: the same, for trained tokens only, as no others have logits. Looking up embeddings is free.
- attention: scores and sums over values are 2 x 2 x heads x head size a pair of tokens, half of the pairs are
  causal: 2 x heads x head size x length^2 a row and layer forward, three times that with the backward pass.

MFU = model FLOPs a second / peak of the device in dense bfloat16 (data sheets; `--peak-tflops` for others).
Source: PaLM, arXiv:2204.02311, appendix B. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.learner.attention.packed import NAMES
from agentrl.learner.split import StepRows
from agentrl.preflight.shape import ModelShape
from agentrl.types import Sample

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is missing with `python -m` or when loaded by a path
from bench.shared.names import names_of
from bench.shared.qwen3_shapes import SHAPES
from bench.shared.random_policy import LORA, open_learner, write_config
from bench.shared.verdict import finish, in_a_line, no_gpu

OUT = Path(__file__).parent / "results" / "gpu_learner.json"
GOAL = 0.5
# TFLOP/s in dense bfloat16; the first name that the device's holds
PEAKS = {
    **{"H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "H200 NVL": 835.0, "H200": 989.4},
    **{"GB200": 2500.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0},
}


def make_rows(number: int, length: int, vocabulary: int, seed: int) -> list[Sample]:
    """Rows of one length, of which the first sixteenth is the prompt."""
    rng = random.Random(seed)
    prompt = max(1, length // 16)
    return [
        Sample(
            ids=tuple(rng.randrange(vocabulary) for _ in range(length)),
            loss_mask=(False,) * prompt + (True,) * (length - prompt),
            logprobs=(0.0,) * prompt + (-10.0,) * (length - prompt),
            advantages=(rng.uniform(-1, 1),) * length,
            versions=(0,) * length,
            episode_id=f"{seed}/{row}",
            group=row,
        )
        for row in range(number)
    ]


def model_flops(shape: ModelShape, rows: Sequence[Sample], lora: bool) -> float:
    """What one update on these rows takes; see the top of this file."""
    tokens, trained = sum(len(row.ids) for row in rows), sum(sum(row.loss_mask) for row in rows)
    linear = sum(inputs * outputs for _, inputs, outputs in shape.linear)
    each = 4 if lora else 6
    blocks = each * linear * tokens + each * shape.hidden * shape.vocab * trained
    adapters = 6 * shape.lora_parameters(LORA.rank, LORA.targets) * tokens if lora else 0
    pairs = sum(len(row.ids) ** 2 for row in rows)
    return float(blocks + adapters + 3 * 2 * shape.heads * shape.head_dim * pairs * shape.layers)


def peak_tflops(args: argparse.Namespace) -> float | None:
    """Of this device; None where it is not known."""
    if args.peak_tflops or args.smoke:
        return args.peak_tflops
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def measured(shape: str, length: int, lora: bool, args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """One cell of the table, computed in micro-batches of so many tokens."""
    cell: dict[str, Any] = {"shape": shape, "length": length, "train": "lora" if lora else "full"}
    number_of_rows = args.micro_batches * max(args.micro_batch_tokens, length) // length
    gpu = not args.smoke
    with tempfile.TemporaryDirectory() as temp:
        sizes = write_config(shape, length, Path(temp))
        rank, learner = open_learner(
            Path(temp), device="cuda" if gpu else "cpu", tokens=tokens, attention=args.attention, lora=lora
        )
        if gpu:
            torch.cuda.reset_peak_memory_stats()  # that of the updates counts, not of loading
        try:
            names = {name: kind for kind, name in NAMES.items()}
            cell["attention"] = names[rank.policy.config._attn_implementation]
            seconds, flops = [], 0.0
            for number in range(args.steps + 1):  # the first warms up, and compiles
                rows = make_rows(number_of_rows, length, sizes.vocab, number)
                flops = model_flops(sizes, rows, lora)
                started = time.perf_counter()
                asyncio.run(learner.step(StepRows(rows)))
                if gpu:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
        finally:
            asyncio.run(learner.close())
    step_s, peak = statistics.median(seconds[1:]), peak_tflops(args)
    cell |= {
        "tokens": sum(len(row.ids) for row in rows),
        "micro_batch_tokens": tokens,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(sum(len(row.ids) for row in rows) / step_s, 1),
        "tflops": round(flops / step_s / 1e12, 6),
        "mfu": None if peak is None else round(flops / step_s / 1e12 / peak, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if gpu else None,
    }
    return cell


def fitting(shape: str, length: int, train: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cell, in micro-batches of one row if those that were asked for do not fit; it says if neither does."""
    what = {"shape": shape, "length": length, "train": train}
    for tokens in dict.fromkeys((max(args.micro_batch_tokens, length), length)):
        try:
            return measured(shape, length, train == "lora", args, tokens)
        except torch.OutOfMemoryError:
            pass
        except ConfigError as e:  # a package is missing
            return {**what, "skipped": str(e)}
        except Exception as e:  # a kernel that does not compile here, say; other cells are measured
            return {**what, "failed": in_a_line(e)}
        free(args)
    return {**what, "fits": False}


def free(args: argparse.Namespace) -> None:
    """Give back what the last learner held."""
    gc.collect()
    if not args.smoke:
        torch.cuda.empty_cache()


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The table."""
    found = []
    for shape in args.shapes.split(","):
        for length in map(int, args.lengths.split(",")):
            for train in args.train.split(","):
                found.append(fitting(shape, length, train, args))
                free(args)
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names_of(SHAPES), default="0.6B,1.7B,8B")
    parser.add_argument("--lengths", default="8192,32768", help="tokens of a row")
    parser.add_argument("--train", type=names_of(("full", "lora")), default="full,lora")
    parser.add_argument("--attention", default="auto", help="learner.attention")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768, help="a row at least")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, help="of the device in dense bfloat16")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="0.6B at 8192 tokens, two steps; writes nothing")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU; writes nothing")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        return no_gpu("gpu_learner", unit="MFU in dense bfloat16", goal=GOAL)
    if args.quick:
        args.shapes, args.lengths, args.steps = "0.6B", "8192", 2
    if args.smoke:
        args.shapes, args.lengths, args.micro_batch_tokens, args.steps = "smoke", "64", 128, 1
    found = cells(args)
    best = max((cell for cell in found if cell.get("mfu")), key=lambda c: _rank(c, found), default=None)
    peak = peak_tflops(args)
    line = {
        "bench": "gpu_learner",
        "ours": best and best["mfu"],
        "baseline": None,
        "ratio": None,
        "unit": "MFU in dense bfloat16"
        + (f", {best['shape']} at {best['length']}, {best['train']}" if best else ""),
        "goal": GOAL,
        "met": None if args.smoke or peak is None else bool(best and best["mfu"] >= GOAL),
        "device": "cpu" if args.smoke else torch.cuda.get_device_name(),
        "peak_tflops": peak,
    }
    if not args.quick and not args.smoke:
        args.out.write_text(json.dumps({**line, "torch": torch.__version__, "cells": found}, indent=1) + "\n")
    finish(line, timed=True)
    return 1 if any("failed" in cell for cell in found) else 0


def _rank(cell: dict[str, Any], found: Sequence[dict[str, Any]]) -> tuple[bool, bool, float]:
    """What is reported: the largest shape at the shortest length, trained as it is faster."""
    largest = [name for name in SHAPES if any(other["shape"] == name for other in found)][-1]
    return cell["shape"] == largest, cell["length"] == min(c["length"] for c in found), cell["mfu"]


if __name__ == "__main__":
    raise SystemExit(main())
