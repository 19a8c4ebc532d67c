"""The learner's update: tokens/s against a plain padded loop (and TRL's loss), and what chunked logits save.

    pip install -e '.[train]'            # '.[train,bench]' adds TRL
    python bench/learner.py [--quick] [--json FILE]

All get the same rows, such as tool use gives: groups of episodes that share a long prompt and differ in length,
two turns each with an observation between them that does not train. One step is one optimizer step of PPO's
clipped loss with token-mean aggregation and no reference. The padded loop does what most scripts do: rows sorted
by length and right-padded, as many to a micro-batch as fit the same token budget, logits of all positions. TRL
runs its own GRPO loss on the same micro-batches. Each runs in a process of its own, in turn; medians of the steps
behind the first. `tokens` counts the rows' real tokens, prompts included, for all alike. `padding` is the share of
positions that are computed and hold no token. `tokens_per_cpu_s` depends less on what else runs on the machine.

Peak memory is measured with a larger vocabulary and more layers: the most bytes that PyTorch's allocator held in a
step, above what it held before. On a CPU, its profiler reports allocations; on a GPU, its counter. The optimizer's
state is there before. `peak_bytes_per_token` divides by the tokens of the rows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentrl.learner.pack import pack
from agentrl.types import Sample

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

GOAL = 1.3
GOAL_MEMORY = 0.6
"""Peak memory of an update relative to TRL's, on the same rows."""
LR = 1e-6


@dataclass(frozen=True)
class Shape:
    """What is trained, and on what."""

    vocab: int = 2048
    hidden: int = 128
    layers: int = 3
    groups: int = 4
    group_size: int = 8
    prompt: tuple[int, int] = (120, 260)
    answer: tuple[int, int] = (15, 130)
    observation: tuple[int, int] = (5, 40)
    tokens_per_micro_batch: int = 4096
    logits_at_once: int = 1024
    steps: int = 5


def make_rows(shape: Shape, seed: int = 0) -> list[Sample]:
    """The rows of one step, with advantages."""
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(shape.vocab) for _ in range(rng.randint(*bounds))]

    rows = []
    for group in range(shape.groups):
        prompt = tokens(shape.prompt)
        for index in range(shape.group_size):
            first, seen, second = tokens(shape.answer), tokens(shape.observation), tokens(shape.answer)
            ids = (*prompt, *first, *seen, *second)
            mask = [False] * len(prompt) + [True] * len(first) + [False] * len(seen) + [True] * len(second)
            rows.append(
                Sample(
                    ids=ids,
                    loss_mask=tuple(mask),
                    logprobs=tuple(-8.0 if on else 0.0 for on in mask),
                    advantages=(rng.uniform(-1, 1),) * len(ids),
                    versions=(0,) * len(ids),
                    episode_id=f"g{group}/e{index}",
                    group=group,
                )
            )
    return rows


def make_model(shape: Shape, directory: Path) -> None:
    """Write a random model of the Qwen3 architecture."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=shape.hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


# --- the three ---------------------------------------------------------------------------------------------------


def ours(shape: Shape, directory: Path) -> Callable[[Sequence[Sample]], None]:
    """agentrl's learner."""
    from agentrl.config.algorithm import AlgorithmConfig
    from agentrl.config.run import LearnerConfig, OptimConfig
    from agentrl.learner.memory import keep_freed_memory
    from agentrl.learner.policy_rank import local_learner
    from agentrl.learner.rank import LearnerSpec
    from agentrl.learner.split import StepRows

    keep_freed_memory()
    spec = LearnerSpec(
        directory,
        algorithm=AlgorithmConfig.model_validate({"kl": {"coef": 0.0}}),
        optim=OptimConfig(lr=LR, warmup_steps=0),
        config=LearnerConfig(
            tokens_per_micro_batch=shape.tokens_per_micro_batch, logits_at_once=shape.logits_at_once
        ),
        temperature=1.0,
        total_steps=100,
    )
    learner = local_learner(spec)
    step = vars(type(learner))["step"].__wrapped__  # in this thread: the profiler counts no allocations of another
    return lambda rows: step(learner, StepRows(rows)) and None


def padded_batches(shape: Shape, rows: Sequence[Sample]) -> list[list[Sample]]:
    """Rows by length, as many to a micro-batch as fit the token budget with padding."""
    batches: list[list[Sample]] = [[]]
    for row in sorted(rows, key=lambda r: len(r.ids)):
        if (len(batches[-1]) + 1) * len(row.ids) > shape.tokens_per_micro_batch:
            batches.append([])
        batches[-1].append(row)
    return batches


def padding_shares(shape: Shape, rows: Sequence[Sample]) -> dict[str, float]:
    """The share of padding in the positions that each computes; TRL pads prompts and completions apart."""
    tokens, padded, trl = sum(len(r.ids) for r in rows), 0, 0
    for batch in padded_batches(shape, rows):
        prompts = [r.loss_mask.index(True) for r in batch]
        padded += len(batch) * max(len(r.ids) for r in batch)
        trl += len(batch) * (max(prompts) + max(len(r.ids) - p for r, p in zip(batch, prompts, strict=True)))
    ours = pack(rows).ids_T.numel()  # what a group begins with lies there once: none, or less than none
    shares = {"ours": 1 - tokens / ours, "padded": 1 - tokens / padded, "trl": 1 - tokens / trl}
    return {name: round(max(share, 0.0), 3) for name, share in shares.items()}


def _padded(batch: Sequence[Sample], device: torch.device) -> dict[str, torch.Tensor]:
    width = max(len(r.ids) for r in batch)

    def table(values: Callable[[Sample], Sequence[Any]], dtype: torch.dtype) -> torch.Tensor:
        found = [[*values(r), *[0] * (width - len(r.ids))] for r in batch]
        return torch.tensor(found, dtype=dtype, device=device)

    return {
        "ids": table(lambda r: r.ids, torch.long),
        "real": table(lambda r: (1,) * len(r.ids), torch.long),
        "mask": table(lambda r: r.loss_mask, torch.float32),
        "advantages": table(lambda r: r.advantages, torch.float32),
    }


def padded(shape: Shape, directory: Path) -> Callable[[Sequence[Sample]], None]:
    """The loop that most scripts have."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(rows: Sequence[Sample]) -> None:
        total = sum(sum(r.loss_mask) for r in rows)
        for batch in padded_batches(shape, rows):
            b = _padded(batch, device)
            logits = model(input_ids=b["ids"], attention_mask=b["real"], use_cache=False).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(
                logits.transpose(1, 2).float(), b["ids"][:, 1:], reduction="none"
            )
            ratio = (logprobs - logprobs.detach()).exp()
            advantages = b["advantages"][:, 1:]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            ((loss * b["mask"][:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trl(shape: Shape, directory: Path) -> Callable[[Sequence[Sample]], None]:
    """TRL's GRPO loss on the same rows: prompt and completion side by side, each padded."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<pad>",
    )
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=2,
        num_generations=2,
        learning_rate=LR,
        beta=0.0,
        loss_type="dapo",
        epsilon_high=0.28,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")

    def nothing(completions: Sequence[Any], **_: Any) -> list[float | None]:
        return [0.0] * len(completions)

    trainer = GRPOTrainer(
        model,
        reward_funcs=nothing,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tokenizer,
    )
    device = trainer.accelerator.device
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(rows: Sequence[Sample]) -> None:
        total = torch.tensor(float(sum(sum(r.loss_mask) for r in rows)), device=device)
        trainer.current_gradient_accumulation_steps = 1
        for batch in padded_batches(shape, rows):
            starts = [r.loss_mask.index(True) for r in batch]
            prompts, ends = max(starts), max(len(r.ids) - s for r, s in zip(batch, starts, strict=True))

            def table(
                left: bool,
                cells: Callable[[Sample, int], Sequence[Any]],
                width: int,
                batch: Sequence[Sample] = batch,
                starts: Sequence[int] = starts,
            ) -> torch.Tensor:
                found = []
                for row, start in zip(batch, starts, strict=True):
                    values = list(cells(row, start))
                    blank = [0] * (width - len(values))
                    found.append(blank + values if left else values + blank)
                return torch.tensor(found, device=device)

            inputs = {
                "prompt_ids": table(True, lambda r, s: r.ids[:s], prompts),
                "prompt_mask": table(True, lambda r, s: (1,) * s, prompts),
                "completion_ids": table(False, lambda r, s: r.ids[s:], ends),
                "completion_mask": table(False, lambda r, s: (1,) * (len(r.ids) - s), ends),
                "tool_mask": table(False, lambda r, s: [int(on) for on in r.loss_mask[s:]], ends),
                "advantages": torch.tensor([r.advantages[0] for r in batch], device=device),
                "num_items_in_batch": total,
            }
            trainer._compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


LOOPS = {"ours": ours, "padded": padded, "trl": trl}


# --- measuring ---------------------------------------------------------------------------------------------------


def peak_bytes(work: Callable[[], None]) -> int:
    """The most memory that PyTorch held while it did the work, above what it held before."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))  # freed ones are negative
    peak = max(accumulate(sizes), default=0)
    if not peak:
        raise RuntimeError("the profiler saw no allocation: peak memory is unknown")
    return peak


class Step(NamedTuple):
    """What a step took: tokens per second, or, where memory is measured, its peak."""

    tokens_per_s: float = 0.0
    tokens_per_cpu_s: float = 0.0
    peak_bytes: int = 0


def run(pipe: Connection, name: str, shape: Shape, directory: Path, threads: int, memory: bool) -> None:
    """In a process of its own: a step for each set of rows received; answers with what it took (`Step`)."""
    torch.set_num_threads(threads)
    step = LOOPS[name](shape, directory)
    pipe.send("ready")
    while (rows := pipe.recv()) is not None:
        if memory:
            pipe.send(Step(peak_bytes=peak_bytes(functools.partial(step, rows))))
            continue
        started, worked = time.perf_counter(), time.process_time()
        step(rows)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
        tokens = sum(len(r.ids) for r in rows)
        pipe.send(Step(tokens / seconds, tokens / cpu_seconds))


def measure(
    names: Sequence[str], shapes: Sequence[Shape], directory: Path, threads: int, *, memory: bool = False
) -> list[list[Step]]:
    """The steps behind the first of each name with its shape; they take turns."""
    context = get_context("spawn")
    workers = []
    for name, shape in zip(names, shapes, strict=True):
        here, there = context.Pipe()
        process = context.Process(target=run, args=(there, name, shape, directory, threads, memory))
        process.start()
        workers.append((here, process))
    for here, _ in workers:
        here.recv()
    steps: list[list[Step]] = [[] for _ in workers]
    for number in range(shapes[0].steps + 1):
        rows = make_rows(shapes[0], seed=number)
        for index, (here, _) in enumerate(workers):
            here.send(rows)
            steps[index].append(here.recv())
    for here, process in workers:
        here.send(None)
        process.join()
    return [taken[1:] for taken in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps: under a minute")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result there as well")
    arguments = parser.parse_args()
    speed = Shape(groups=2, layers=2, steps=3) if arguments.quick else Shape()
    names = ["ours", "padded", *(["trl"] if find_spec("trl") and find_spec("datasets") else [])]
    with tempfile.TemporaryDirectory() as temp:
        make_model(speed, Path(temp) / "speed")
        found = measure(names, [speed] * len(names), Path(temp) / "speed", arguments.threads)
        sides = dict(zip(names, found, strict=True))
        medians = {name: statistics.median(s.tokens_per_s for s in steps) for name, steps in sides.items()}
        per_cpu = {
            name: round(statistics.median(s.tokens_per_cpu_s for s in steps)) for name, steps in sides.items()
        }
        for name, value in medians.items():
            print(f"{name:8} {value:8.0f} tokens/s, {per_cpu[name]:8} tokens per CPU second", flush=True)
        vocab = 16_384 if arguments.quick else 32_768
        large: dict[str, Any] = {"vocab": vocab, "layers": 4, "groups": 1 if arguments.quick else 2, "steps": 1}
        sizes = {"ours": Shape(**large), "all logits": Shape(**large, logits_at_once=0)}
        sizes |= {name: Shape(**large) for name in names if name == "trl" or not arguments.quick}
        make_model(sizes["ours"], Path(temp) / "large")
        loops = [name if name in LOOPS else "ours" for name in sizes]
        taken = measure(loops, [*sizes.values()], Path(temp) / "large", arguments.threads, memory=True)
        counted = sum(len(r.ids) for r in make_rows(sizes["ours"], seed=1))
    rows = make_rows(speed)
    per_token = {
        name: round(max(s.peak_bytes for s in steps) / counted) for name, steps in zip(sizes, taken, strict=True)
    }
    against = round(per_token["ours"] / per_token["trl"], 2) if "trl" in per_token else None
    print(f"padding: {padding_shares(speed, rows)}")
    print(f"peak bytes per token, {counted} tokens, vocabulary {vocab}: {per_token}")
    ratio = medians["ours"] / medians["padded"]
    result = {
        "bench": "learner",
        "ours": round(medians["ours"]),
        "baseline": round(medians["padded"]),
        "ratio": round(ratio, 2),
        "unit": "tokens/s of the update, baseline: padded rows",
        "goal": GOAL,
        "met": ratio >= GOAL and (against is None or against <= GOAL_MEMORY),
        "trl": round(medians["trl"]) if "trl" in medians else None,
        "ratio_to_trl": round(medians["ours"] / medians["trl"], 2) if "trl" in medians else None,
        "tokens_per_cpu_s": per_cpu,
        "padding": {name: share for name, share in padding_shares(speed, rows).items() if name in medians},
        "peak_bytes_per_token": per_token,
        "memory_to_trl": against,
        "goal_memory": GOAL_MEMORY,
        "vocabulary": vocab,
        "rows": len(rows),
        "tokens": sum(len(r.ids) for r in rows),
        "steps": speed.steps,
        "quick": arguments.quick,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "threads": arguments.threads,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[1], 1),
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    finish(result, timed=True)


if __name__ == "__main__":
    main()
