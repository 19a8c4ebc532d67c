"""A GRPO step of agentrl against TRL's GRPOTrainer on one device: `python -m bench.shared.gpu_grpo [--smoke]`.

The comparison of `bench/vs_trl.py` (same weights, prompts, limits and groups, taking turns in processes of their
own) with random weights in the shape of Qwen3-0.6B, whole vocabulary included, both in bfloat16 with float32
parameters. The random policy never calls the tool and hardly ever ends: both sample all tokens that an episode may
have and train on them. Most tokens read as numbers, so that rewards differ within groups. TRL generates with
transformers; a server behind it is not compared. Where TRL is not installed, agentrl's steps are measured alone.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.models.tiny import make_tokenizer
from bench.shared.qwen3_shapes import SHAPES, qwen3_config
from bench.vs_trl import (
    SHORT_WARMUP,
    SMALL,
    UNTIMED,
    Shape,
    Short,
    Worker,
    compare,
    figures,
    make_tool,
    run_ours,
    same_prompts,
)

CONTEXT = 2048


def make_model(shape: str, folder: Path, device: str) -> None:
    """Random weights of this shape, and a tokenizer of its vocabulary whose further tokens read as numbers."""
    texts = [
        "Start with 12. Add 3. Subtract 4. Multiply by 5.",
        "Use the calculator, then answer with the number.",
    ]
    make_tokenizer(folder, texts * 20, vocab=400, max_context=CONTEXT)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary: dict[str, int] = content["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    size = SHAPES[shape][6]
    vocabulary |= {str(10 + number): number for number in range(len(vocabulary), size)}
    assert sorted(vocabulary.values()) == list(range(size))
    file.write_text(json.dumps(content))
    config = qwen3_config(shape, CONTEXT)
    config.eos_token_id, config.pad_token_id = vocabulary["<|im_end|>"], vocabulary["<|endoftext|>"]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)


def alone(shape: Shape, model: str, runs: Path) -> dict[str, object]:
    """Steps of agentrl without TRL's."""
    prompt_tokens = same_prompts(shape, model, AutoTokenizer.from_pretrained(model), make_tool(shape))
    with Worker(run_ours, shape, str(runs / "ours")) as ours:
        ours.pipe.send((model, prompt_tokens))
        steps = [ours.step() for _ in range(UNTIMED + shape.steps)][UNTIMED:]
    return {
        "prompt_tokens": prompt_tokens,
        "agentrl": figures(steps),
        "trl": None,
        "skipped": "trl: not installed",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    args = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    size = {"groups": 2, "group_size": 2, "steps": 1} if args.smoke else {"groups": 4, "group_size": 8, "steps": 2}
    tokens = 16 if args.smoke else 192
    shape = Shape(Short, 1, 1, tokens, SMALL, SHORT_WARMUP, goal=1.0, device=device, **size)
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "models" / f"{shape.model}-{shape.operations}" / "start"
        make_model("smoke" if args.smoke else "0.6B", start, device)
        if find_spec("trl") and find_spec("datasets"):
            result = compare(shape, Path(folder) / "models", Path(folder) / "runs", threads=1)
        else:
            result = alone(shape, str(start), Path(folder) / "runs")
    print(json.dumps({"shape": "smoke" if args.smoke else "0.6B", "completion_tokens": tokens, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
