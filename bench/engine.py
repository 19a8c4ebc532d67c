"""Sampled tokens per second on multi-turn work: the local engine against what transformers offers.

    python bench/engine.py [--quick] [--threads N]

The same random-weight model (Qwen3 architecture, 0.67 M parameters), the same prompts, the same number of tokens
to sample in every turn, temperature 1; three players alternate in one run: our engine, `generate` on padded
batches, and continuous batching. Episodes come in groups of eight with one prompt (70 tokens common to all, 30 of
the task); a turn samples 8 to 96 tokens, then 25 tokens of observation follow. Tools answer at once, which favours
the padded baseline: it waits for the slowest of the batch in any case. The baselines return no logprobs (ours
does). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, Qwen3Config
from transformers.utils import logging

from agentrl.engine.local.local_engine import LocalEngine
from agentrl.types import Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

VOCABULARY, GROUP, GOAL = 600, 8, 3.0


@dataclass(frozen=True)
class Work:
    """prompts[e] of each episode; lengths[e][t] tokens to sample and observations[e][t] after it, turn by turn."""

    prompts: list[list[int]]
    lengths: list[list[int]]
    observations: list[list[list[int]]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))


def make_work(episodes: int, turns: int, seed: int) -> Work:
    draw = np.random.default_rng(seed)
    system = draw.integers(1, VOCABULARY, 70).tolist()
    tasks = [system + draw.integers(1, VOCABULARY, 30).tolist() for _ in range(-(-episodes // GROUP))]
    lengths = np.clip(draw.lognormal(np.log(32), 0.6, (episodes, turns)).astype(int), 8, 96)
    observations = draw.integers(1, VOCABULARY, (episodes, turns, 25))
    return Work([tasks[e // GROUP] for e in range(episodes)], lengths.tolist(), observations.tolist())


def make_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def ours(path: Path, threads: int) -> Callable[[Work], None]:
    engine = LocalEngine.from_directory(path, threads=threads)
    state = {name: tensor.clone() for name, tensor in engine._model.module.state_dict().items()}

    async def episode(work: Work, number: int) -> None:
        ids = list(work.prompts[number])
        for length, observation in zip(work.lengths[number], work.observations[number], strict=True):
            sampling = Sampling(max_tokens=length, seed=number)
            completion = await engine.generate(ids, sampling, session=str(number))
            assert len(completion.ids) == length
            ids += [*completion.ids, *observation]
        await engine.release(str(number))

    async def play(work: Work) -> None:
        await engine.update_weights(state, engine.policy_version + 1)  # nothing is kept from the round before
        await asyncio.gather(*(episode(work, number) for number in range(len(work.prompts))))

    return lambda work: asyncio.run(play(work))


def padded(path: Path, threads: int) -> Callable[[Work], None]:
    """All episodes in one left-padded batch, turn by turn: each turn lasts as long as its longest completion."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()

    def play(work: Work) -> None:
        torch.set_num_threads(threads)
        contexts = [list(prompt) for prompt in work.prompts]
        for turn in range(len(work.lengths[0])):
            width = max(map(len, contexts))
            ids = torch.tensor([[0] * (width - len(context)) + context for context in contexts])
            mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
            longest = max(lengths[turn] for lengths in work.lengths)
            options = GenerationConfig(max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0)
            out = model.generate(ids, attention_mask=mask, generation_config=options)[:, width:].tolist()
            for number, context in enumerate(contexts):
                length = work.lengths[number][turn]
                context += [*out[number][:length], *work.observations[number][turn]]

    return play


def continuous(path: Path, threads: int) -> Callable[[Work], None]:
    """transformers' continuous batching: one manager, prefix sharing on, the next turn submitted as one ends."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    options = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=96, eos_token_id=-1, pad_token_id=0)

    def play(work: Work) -> None:
        torch.set_num_threads(threads)
        episodes = len(work.prompts)
        settings = ContinuousBatchingConfig(  # on CPU its cost grows with the square of the batch: 32 was best
            page_size=32, num_blocks=1024, max_batch_tokens=256, max_requests_per_batch=32
        )
        manager = model.init_continuous_batching(options, continuous_batching_config=settings)
        manager.start()
        try:
            contexts = [list(prompt) for prompt in work.prompts]
            turns = [0] * episodes
            for number, context in enumerate(contexts):
                manager.add_request(context, f"{number}-0", max_new_tokens=work.lengths[number][0])
            running = episodes
            while running:
                result = manager.get_result(timeout=60)
                assert result is not None, "no result within a minute"
                assert result.error is None, result.error
                number, turn = (int(part) for part in result.request_id.split("-"))
                assert len(result.generated_tokens) == work.lengths[number][turn]
                contexts[number] += [*result.generated_tokens, *work.observations[number][turn]]
                turns[number] += 1
                if turns[number] == len(work.lengths[number]):
                    running -= 1
                    continue
                length = work.lengths[number][turns[number]]
                manager.add_request(contexts[number], f"{number}-{turns[number]}", max_new_tokens=length)
        finally:
            manager.stop(block=True)
            manager.destroy()

    return play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="64 episodes and two rounds instead of 256 and three")
    parser.add_argument("--threads", type=int, default=1, help="torch threads, for all three alike")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    episodes, rounds = (64, 2) if arguments.quick else (256, 3)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        make_model(path)
        players = {make.__name__: make(path, arguments.threads) for make in (ours, padded, continuous)}
        speeds: dict[str, list[float]] = {name: [] for name in players}
        for play in players.values():
            play(make_work(16, 2, seed=99))
        for number in range(rounds):
            work = make_work(episodes, 3, seed=number)
            for name, play in players.items():
                start = time.perf_counter()
                play(work)
                speeds[name].append(work.tokens / (time.perf_counter() - start))
                print(f"round {number} {name:10} {speeds[name][-1]:8.0f} sampled tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["ours"] / medians["padded"]
    result = {
        "bench": "engine",
        "ours": round(medians["ours"]),
        "baseline": round(medians["padded"]),
        "ratio": round(ratio, 2),
        "unit": "sampled tokens/s, baseline: padded generate",
        "goal": GOAL,
        "met": ratio >= GOAL,
        "continuous_batching": round(medians["continuous"]),
        "ratio_to_continuous_batching": round(medians["ours"] / medians["continuous"], 2),
        "episodes": episodes,
        "threads": arguments.threads,
    }
    finish(result, timed=True)


if __name__ == "__main__":
    main()
