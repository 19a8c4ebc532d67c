"""Whether a sparse gradient of the input embedding would save memory: peak of an update, dense and sparse.

    python -m bench.embedding [--quick] [--json bench/results/embedding.json]

Two micro-batches of bench/learner.py's rows run forward and backward on a model with separate input and output
embeddings, as agentrl's learner computes them (chunked logits). The peak is counted as in bench/learner.py.
With tied embeddings there is nothing to save: the output layer's gradient is dense. `share` is what the input
embedding's gradient is of everything that is kept per parameter, for the models named. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import load_policy
from bench.learner import Shape, make_model, make_rows, peak_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

LARGE = {  # vocabulary, hidden size, parameters
    "Qwen3-8B": (151_936, 4096, 8_190_735_360),
    "Llama-3.1-8B": (128_256, 4096, 8_030_261_248),
    "Qwen3-32B": (151_936, 5120, 32_762_123_264),
}


def untie(directory: Path) -> None:
    """Give the model an output layer of its own."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = model.config
    config.tie_word_embeddings = False
    apart = AutoModelForCausalLM.from_config(config)
    apart.save_pretrained(directory)


def peak(shape: Shape, directory: Path, *, sparse: bool, batches: int) -> int:
    """Bytes at the peak of so many micro-batches, whose gradients add up."""
    model = load_policy(directory, torch.device("cpu"))
    embedding: Any = model.get_input_embeddings()
    embedding.sparse = sparse
    packed = [pack(make_rows(shape, seed=seed)) for seed in range(batches)]

    def work() -> None:
        for batch in packed:
            (-token_stats(model, batch, chunk=shape.logits_at_once).logprobs_N.sum()).backward()

    work()  # gradients of an earlier step are freed before each update, as the learner frees them
    model.zero_grad(set_to_none=True)
    found = peak_bytes(work)
    assert embedding.weight.grad.is_sparse == sparse
    return found


GOAL_SAVED = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model: under a minute")
    parser.add_argument("--json", type=Path, help="write the result there as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vocab, groups = (8192, 1) if arguments.quick else (32_768, 2)
    shape = Shape(vocab=vocab, layers=4, groups=groups)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(shape, directory)
        untie(directory)
        peaks = {
            f"{kind}, {count} micro-batch{'es' if count > 1 else ''}": peak(
                shape, directory, sparse=kind == "sparse", batches=count
            )
            for count in (1, 2)
            for kind in ("dense", "sparse")
        }
    table = vocab * shape.hidden * 4
    dense, last = (round(value / 1e6, 1) for value in [*peaks.values()][-2:])
    kept = {name: round(4 * v * h / (16 * total), 4) for name, (v, h, total) in LARGE.items()}
    line = {
        "bench": "embedding",
        "unit": "MB at the peak of an update's gradients, input embedding apart from the output layer",
        "ours": last,
        "baseline": dense,
        "ratio": round(last / dense, 3),
        "goal": f"a sparse gradient would save less than {GOAL_SAVED:.0%}, so a dense one is right",
        "met": 1 - last / dense < GOAL_SAVED,
        "peak_mb": {name: round(value / 1e6, 1) for name, value in peaks.items()},
        "embedding_gradient_mb": round(table / 1e6, 1),
        "saved_share": {
            str(n): round(1 - b / a, 3)
            for n, (a, b) in enumerate(zip([*peaks.values()][::2], [*peaks.values()][1::2], strict=True), 1)
        },
        "share_of_parameter_memory": kept,
        "vocabulary": vocab,
        "quick": arguments.quick,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(line, indent=1) + "\n")
    finish(line)


if __name__ == "__main__":
    main()
