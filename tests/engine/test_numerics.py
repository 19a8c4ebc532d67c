"""The engine computes what transformers computes: same greedy tokens, same logprobs, on the same ids."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.fused import FusedDecoder
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.errors import ConfigError
from agentrl.types import Sampling
from tests.engine.engine_models import VOCABULARY, logprobs_of, reference


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
async def test_greedy_turns_of_a_mixed_batch_equal_transformers(models: dict[str, Path], kind: str):
    model = reference(models[kind])
    engine = LocalEngine.from_directory(models[kind], max_slots=12, prefill_chunk=40)
    assert (engine._model._fused is None) == (kind == "mistral")  # both ways through the model are held to this
    draw = random.Random(kind)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 2, 17, 60, 130]))] for _ in range(20)]

    async def episode(number: int) -> list[tuple[list[int], tuple[int, ...], tuple[float, ...]]]:
        ids, turns = list(prompts[number]), []
        for turn in range(3):
            sampling = Sampling(temperature=0.0, max_tokens=6 + 5 * (number % 4))
            completion = await engine.generate(ids, sampling, session=f"episode-{number}")
            turns.append((list(ids), completion.ids, completion.logprobs))
            ids += [*completion.ids, *((number * 7 + turn + i) % VOCABULARY for i in range(1 + number % 9))]
        return turns

    episodes = await asyncio.gather(*(episode(number) for number in range(len(prompts))))
    await engine.close()
    for turns in episodes:
        for prompt, ids, logprobs in turns:
            given = torch.tensor([prompt])
            greedy = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": len(ids)}
            expected = model.generate(given, attention_mask=torch.ones_like(given), **greedy)[0, len(prompt) :]
            assert list(ids) == expected.tolist()
            assert logprobs == pytest.approx(logprobs_of(model, prompt, ids), abs=1e-4)


async def test_bfloat16_stays_near_float32(models: dict[str, Path]):
    engine = LocalEngine.from_directory(models["qwen3"], dtype="bfloat16")
    prompt = [random.Random(3).randrange(VOCABULARY) for _ in range(60)]
    completion = await engine.generate(prompt, Sampling(max_tokens=40, seed=1))
    await engine.close()
    exact = logprobs_of(reference(models["qwen3"]), prompt, completion.ids)
    assert completion.logprobs == pytest.approx(exact, abs=0.4)
    assert sum(abs(a - b) for a, b in zip(completion.logprobs, exact, strict=True)) / len(exact) < 0.1


@torch.no_grad()
def test_the_fused_pass_in_bfloat16_is_as_near_to_float32_as_the_modules(models: dict[str, Path]):
    rows = [[(7 * i * i + 3 * row) % VOCABULARY for i in range(80)] for row in range(4)]
    half = FlatModel(load_model(models["qwen3"], dtype="bfloat16", device="cpu"))
    exact = FlatModel(load_model(models["qwen3"], dtype="float32", device="cpu"))
    exact.update({name: tensor.float() for name, tensor in half.module.state_dict().items()})

    def scored(model: FlatModel) -> torch.Tensor:
        return torch.cat([part for row in rows for part in model.scores(row)])

    truth = scored(exact)
    modules = (scored(half) - truth).abs().mean()
    half._fused = FusedDecoder(half.module)
    fused = (scored(half) - truth).abs().mean()
    assert 0 < fused < 1.3 * modules


def test_flat_batches_do_not_take_a_model_whose_state_is_not_keys_and_values(tmp_path: Path):
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    with pytest.raises(ConfigError, match="has layers of kind linear_attention"):
        FlatModel(AutoModelForCausalLM.from_config(config))
