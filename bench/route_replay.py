"""Drift between sampler and learner in models with experts, with and without replayed routes.

    python -m bench.route_replay [--quick] [--json bench/results/route_replay.json]

Random models of three families sample with the local engine, in float32 and in bfloat16; the learner, in float32
as always, evaluates the same tokens with the experts that its own routers choose, and with those that the
sampler's routers chose (`learner.replay_routes`). Drift is the absolute difference of a sampled token's
log-probabilities. `tokens_differ` is the share of tokens of which a router of the learner would choose other
experts, given the sampler's in the layers before, and `experts_differ` the share of all experts. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, OlmoeConfig, PretrainedConfig, Qwen3MoeConfig

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import Packed, pack
from agentrl.learner.policy_model import load_policy
from agentrl.models.routers import RouteReplay
from agentrl.types import Completion, Sample, Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

VOCABULARY, EXPERTS, TOP_K = 512, 32, 4
GOAL_EXACT, GOAL_TIMES = 1e-4, 1.5
"""Largest drift in float32, and how many times smaller replay makes the mean drift in bfloat16."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE | {"head_dim": 32},
        num_key_value_heads=2,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=EXPERTS,
        norm_topk_prob=True,
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_key_value_heads=4, intermediate_size=64, num_experts=EXPERTS),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE,
        num_key_value_heads=4,
        intermediate_size=256,
        moe_intermediate_size=64,
        n_routed_experts=EXPERTS,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    ),
}


def row_of(prompt: list[int], completion: Completion, number: int) -> Sample:
    """One sampled row; the route of its last token is not known."""
    ids, routes = (*prompt, *completion.ids), completion.routes
    assert routes is not None
    data = routes.data + b"\xff" * (routes.layers * routes.top_k * routes.width)
    return Sample(
        ids,
        tuple(place >= len(prompt) for place in range(len(ids))),
        (*(0.0,) * len(prompt), *completion.logprobs),
        (0.0,) * len(ids),
        (0,) * len(ids),
        episode_id=str(number),
        routes=replace(routes, data=data),
    )


async def sample(directory: Path, dtype: str, rows: int, tokens: int) -> list[Sample]:
    """Rows of different prompts, all in one batch."""
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCABULARY, (16 + n,), generator=rng).tolist() for n in range(rows)]
    engine = LocalEngine.from_directory(directory, dtype=dtype, routes=True)
    found = await asyncio.gather(
        *(engine.generate(p, Sampling(max_tokens=tokens, seed=n)) for n, p in enumerate(prompts))
    )
    await engine.close()
    return [row_of(p, c, n) for n, (p, c) in enumerate(zip(prompts, found, strict=True))]


@torch.no_grad()
def drift(directory: Path, packed: Packed) -> dict[str, float]:
    """What the learner finds."""
    policy = load_policy(directory, torch.device("cpu"))
    replay = RouteReplay(policy, str(directory))
    plain_N = (token_stats(policy, packed).logprobs_N - packed.sampler_logprobs_N).abs()
    with replay.replaying(packed.routes_TLk):
        replayed_N = (token_stats(policy, packed).logprobs_N - packed.sampler_logprobs_N).abs()
        counts = replay.counts()
    assert counts is not None
    experts = float(counts.tokens) * replay.shape.layers * replay.top_k
    return {
        "mean": float(plain_N.mean()),
        "max": float(plain_N.max()),
        "replayed_mean": float(replayed_N.mean()),
        "replayed_max": float(replayed_N.max()),
        "tokens_differ": float(counts.tokens_differ) / float(counts.tokens),
        "experts_differ": float(counts.experts_differ) / experts,
    }


def measure(rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """By family and type of the sampler."""
    found: dict[str, dict[str, float]] = {}
    for name, config in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            for dtype in ("float32", "bfloat16"):
                packed = pack(asyncio.run(sample(Path(folder), dtype, rows, tokens)))
                found[f"{name} {dtype}"] = one = drift(Path(folder), packed)
                print(
                    f"{name:12} {dtype:9}",
                    "  ".join(f"{key} {value:.2g}" for key, value in one.items()),
                    flush=True,
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows: under a minute")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    arguments = parser.parse_args()
    found = measure(*((8, 48) if arguments.quick else (32, 192)))
    exact = max(one["replayed_max"] for name, one in found.items() if name.endswith("float32"))
    rough = [one for name, one in found.items() if name.endswith("bfloat16")]
    ours = sum(one["replayed_mean"] for one in rough) / len(rough)
    baseline = sum(one["mean"] for one in rough) / len(rough)
    times = min(one["mean"] / one["replayed_mean"] for one in rough)
    line = {
        "bench": "route_replay",
        "ours": round(ours, 5),
        "baseline": round(baseline, 5),
        "ratio": round(baseline / ours, 2),
        "unit": "nats of mean absolute drift with a bfloat16 sampler, replayed against the learner's own routes",
        "goal": f"{GOAL_TIMES}x less in each family; float32 within {GOAL_EXACT:g} of the sampler",
        "least_ratio": round(times, 2),
        "float32_max": float(f"{exact:.2g}"),
        "met": times >= GOAL_TIMES and exact <= GOAL_EXACT,
        "models": {
            name: {key: float(f"{value:.3g}") for key, value in one.items()} for name, one in found.items()
        },
        "experts": f"{TOP_K} of {EXPERTS}",
        "quick": arguments.quick,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(line, indent=1) + "\n")
    finish(line, timed=True)


if __name__ == "__main__":
    main()
