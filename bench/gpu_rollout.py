"""Decode speed of the local engine on a GPU against what its memory bandwidth allows.

    python bench/gpu_rollout.py [--shapes 0.6B,1.7B,8B] [--sequences 1,64,256] [--context 512] [--tokens 256]
        [--quick] [--out bench/results/gpu_rollout.json]
    python bench/gpu_rollout.py --smoke          the same code with a tiny shape on the CPU

Random weights in the shapes of Qwen3, bfloat16. Each sequence has a prompt of its own that is computed before the
clock starts; then all of them decode at once, with CUDA graphs and without. The bound: a step reads all weights
once and the keys and values of every sequence, at the speed at which this device copies memory (measured). The
last line is JSON; "ours" is the smallest share of the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.types import Sampling

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is missing with `python -m` or when loaded by a path
from bench.shared.names import names_of
from bench.shared.qwen3_shapes import SHAPES, qwen3_config
from bench.shared.verdict import finish, in_a_line, no_gpu

OUT = Path(__file__).parent / "results" / "gpu_rollout.json"
ROUNDS = 3
GOAL_SHARE = 0.7
UNIT = "share of the memory-bandwidth bound, smallest cell"


def make_model(shape: str, device: torch.device, context: int) -> PreTrainedModel:
    """Random weights, made where they stay."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(qwen3_config(shape, context), dtype=torch.bfloat16)
    return model.eval()


def bytes_of_weights(model: PreTrainedModel) -> int:
    """What a step reads: everything, but of an embedding that is not the head's as well only some rows."""
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    unread = 0 if model.config.tie_word_embeddings else embedding.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - unread


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by the best of ten copies."""
    size = 1 << (31 if device.type == "cuda" else 24)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def decode_seconds(engine: LocalEngine, prompts: Sequence[list[int]], tokens: int) -> list[float]:
    """Seconds in which all prompts, computed before, get `tokens` more each; one value per round."""
    times = []
    for number in range(ROUNDS + 1):  # the first warms up, and records
        sessions = [f"{number}-{row}" for row in range(len(prompts))]
        first = await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(max_tokens=1, seed=row), session=session)
                for row, (prompt, session) in enumerate(zip(prompts, sessions, strict=True))
            )
        )
        begun = [[*prompt, *completion.ids] for prompt, completion in zip(prompts, first, strict=True)]
        started = time.perf_counter()
        done = await asyncio.gather(
            *(
                engine.generate(ids, Sampling(max_tokens=tokens, seed=row), session=session)
                for row, (ids, session) in enumerate(zip(begun, sessions, strict=True))
            )
        )
        times.append(time.perf_counter() - started)
        assert all(len(completion.ids) == tokens for completion in done)
        assert all(
            completion.cached_tokens == len(ids) - 1 for completion, ids in zip(done, begun, strict=True)
        ), "a prompt was computed again: the cache is too small for this many sequences"
        for session in sessions:
            await engine.release(session)
    return times[1:]


def measured(
    shape: str, sequences: int, graphs: bool, args: argparse.Namespace, device: torch.device, bandwidth: float
) -> dict[str, Any]:
    """One cell of the table."""
    context = args.context + args.tokens + 1
    model = make_model(shape, device, context)
    weights, vocabulary = bytes_of_weights(model), model.config.vocab_size
    engine = LocalEngine(model, max_slots=sequences, max_context=context, cuda_graphs=graphs)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, vocabulary, args.context).tolist() for _ in range(sequences)]

    async def play() -> list[float]:
        try:
            return await decode_seconds(engine, prompts, args.tokens)
        finally:
            await engine.close()

    seconds = statistics.median(asyncio.run(play()))
    kv = sequences * (args.context + args.tokens / 2) * engine._model.bytes_per_token
    bound = sequences * bandwidth / (weights + kv)
    speed = sequences * args.tokens / seconds
    return {
        "shape": shape,
        "sequences": sequences,
        "cuda_graphs": graphs and device.type == "cuda",
        "tokens_per_s": round(speed, 1),
        "ms_per_step": round(1000 * seconds / args.tokens, 3),
        "bytes_per_step": round(weights + kv),
        "bound_tokens_per_s": round(bound, 1),
        "share": round(speed / bound, 4),
    }


def tried(
    shape: str, sequences: int, graphs: bool, args: argparse.Namespace, device: torch.device, bandwidth: float
) -> dict[str, Any]:
    """One cell of the table, or why there is none; other cells are measured."""
    try:
        return measured(shape, sequences, graphs, args, device, bandwidth)
    except Exception as e:  # of memory, say
        return {"shape": shape, "sequences": sequences, "cuda_graphs": graphs, "failed": in_a_line(e)}


def graph_choices(args: argparse.Namespace, device: torch.device) -> tuple[bool, ...]:
    if device.type != "cuda":
        return (False,)
    return (True,) if args.graphs_only else (False, True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names_of(SHAPES), default="0.6B,1.7B,8B")
    parser.add_argument("--sequences", default="1,64,256")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens decoded after it")
    parser.add_argument("--graphs-only", action="store_true", help="not without CUDA graphs, which takes longest")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="0.6B at 1 and 64 sequences only; writes nothing")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU; writes nothing")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        return no_gpu("gpu_rollout", unit=UNIT, goal=GOAL_SHARE)
    if args.quick:
        args.shapes, args.sequences = "0.6B", "1,64"
    if args.smoke:
        args.shapes, args.sequences, args.context, args.tokens = "smoke", "1,4", 16, 8
    device = torch.device("cpu" if args.smoke else "cuda")
    bandwidth = copy_bandwidth(device)
    cells = []
    for shape in args.shapes.split(","):
        for sequences in map(int, args.sequences.split(",")):
            for graphs in graph_choices(args, device):
                cells.append(tried(shape, sequences, graphs, args, device, bandwidth))
                print(json.dumps(cells[-1]), file=sys.stderr, flush=True)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "copy_bytes_per_s": round(bandwidth),
        "context": args.context,
        "tokens": args.tokens,
        "cells": cells,
    }
    if not args.quick and not args.smoke:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    shares = [cell["share"] for cell in cells if "share" in cell and (cell["cuda_graphs"] or args.smoke)]
    failed = any("failed" in cell for cell in cells)
    line = {
        "bench": "gpu_rollout",
        "ours": min(shares, default=None),
        "unit": UNIT,
        "goal": GOAL_SHARE,
        **{key: value for key, value in result.items() if key != "cells"},
    }
    # A CPU says nothing about the goal.
    line["met"] = not failed and min(shares) >= GOAL_SHARE if device.type == "cuda" else None
    finish(line, timed=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
