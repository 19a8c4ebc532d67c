"""Models that cannot pack their rows compute each apart: the same numbers, gradients and steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5TextConfig,
)

from agentrl.config.algorithm import AlgorithmConfig, CriticConfig, KLConfig
from agentrl.config.run import LearnerConfig, LoRAConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.learner import policy_model
from agentrl.learner.apart import compute_apart, padded_rows, rows_apart
from agentrl.learner.attention.packed import Spans
from agentrl.learner.critic import load_critic
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import longest_ids, micro_batches, pack
from agentrl.learner.policy_model import empty_policy, load_policy
from agentrl.learner.prefix_tree import prefix_tree
from agentrl.models.linear import targeted
from agentrl.models.stored import as_saved
from tests.learner.direct import DirectLearner
from tests.learner.train_models import (
    SHAPE,
    gradients,
    make_batch,
    make_sample,
    observed,
    one_by_one,
    relative,
    scored,
)

CPU = torch.device("cpu")
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}
FAMILIES: dict[str, PretrainedConfig] = {
    "sinks": GptOssConfig(
        **SHAPE,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "bounded scores and logits": Gemma2Config(**SHAPE, sliding_window=8),
    "convolutions": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "linear attention": Qwen3_5TextConfig(
        **SHAPE,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "chunks": Llama4TextConfig(**SHAPE, intermediate_size_mlp=64, attention_chunk_size=16, num_local_experts=2),
}


def write(config: PretrainedConfig, directory: Path, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [0, 7])
def test_logprobs_and_gradients_are_those_of_each_row_alone(tmp_path: Path, family: str, chunk: int):
    """Groups with common beginnings, forks, and logits that are made in chunks."""
    directory, samples = write(FAMILIES[family], tmp_path), sorted(make_batch(1), key=lambda s: s.group)
    model = load_policy(directory, CPU)
    plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    assert rows_apart(model)
    found_N, wanted_N = token_stats(model, pack(samples), chunk=chunk).logprobs_N, one_by_one(plain, samples)
    assert relative(found_N, wanted_N) < 1e-5
    weights_N = torch.linspace(-1, 1, len(wanted_N))
    (found_N * weights_N).sum().backward()
    (wanted_N * weights_N).sum().backward()
    assert relative(gradients(model), gradients(plain)) < 1e-4


def test_a_tree_is_unfolded_into_its_rows():
    """Rows that are the beginning of others are part of them; what is shared is read from the first row."""
    rows = [(1, 2, 3, 4), (1, 2, 5), (1, 2), (7,), (1, 2, 3, 4)]
    tree = prefix_tree(rows)
    found = padded_rows(Spans(tree.spans, CPU))
    lines = torch.from_numpy(tree.ids_T)[found.flat_BL].tolist()
    assert lines == [[1, 2, 3, 4], [1, 2, 5, 5], [7, 7, 7, 7]]
    assert torch.from_numpy(tree.ids_T)[found.flat_BL].flatten()[found.place_T].tolist() == tree.ids_T.tolist()
    assert found.place_T[torch.from_numpy(tree.positions(1))].tolist() == [0, 1, 6]


def learner(directory: Path, **given: Any) -> DirectLearner:
    config = LearnerConfig(device="cpu", tokens_per_micro_batch=200, **given.pop("config", {}))
    algorithm = AlgorithmConfig(**{"kl": KLConfig(coef=0.05), "updates_per_step": 2} | given.pop("algorithm", {}))
    given = {
        "optim": OptimConfig(lr=1e-2),
        "temperature": 0.8,
        "total_steps": 9,
        "reference_dir": directory,
    } | given
    return DirectLearner(directory, algorithm=algorithm, config=config, **given)


WAYS: Mapping[str, dict[str, Any]] = {
    "penalty": {},
    "whole distributions": {"algorithm": {"kl": KLConfig(coef=0.05, kind="full", top=8)}},
    "observation loss": {"algorithm": {"observation_coef": 0.1, "entropy_coef": 0.01}},
    "adapters": {"config": {"lora": LoRAConfig(rank=2, alpha=4)}},
    "checkpointed blocks": {"config": {"checkpoint_activations": True, "logits_at_once": 16}},
    "bfloat16": {"config": {"precision": "bfloat16"}, "optim": OptimConfig(lr=1e-3)},
}
SINGLE = ("clip_fraction", "log_ratio_max")
"""Metrics that one token changes, by the end of their names: how bfloat16 is rounded depends on the processor."""


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_those_of_packed_rows(policy_dir: Path, way: str, monkeypatch: pytest.MonkeyPatch):
    """One model, both ways: every setting that changes the forward pass or what is read from it."""
    batches = [observed(make_batch(seed)) for seed in range(3)]
    curves = []
    for kinds in ((), ("Qwen3ForCausalLM",)):
        driver = learner(policy_dir, **dict(WAYS[way]))
        assert driver.rank.rows_apart == kinds
        curves.append([driver.step(batch).metrics for batch in batches])
        driver.rank.close()
        monkeypatch.setattr(policy_model, "settle_rows", lambda model, where: compute_apart(model))
    wanted, found = curves
    close = {"rel": 0.1, "abs": 2e-2} if way == "bfloat16" else {"rel": 1e-3, "abs": 1e-5}
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if way != "bfloat16" or not name.endswith(SINGLE):
                assert ours[name] == pytest.approx(theirs[name], **close)


def test_a_critic_computes_its_values_apart(tmp_path: Path):
    directory, rows = write(FAMILIES["bounded scores and logits"], tmp_path), make_batch(2)
    driver = learner(directory, critic=CriticConfig(lr=1e-2), critic_dir=directory, algorithm={"advantage": "gae"})
    assert driver.rank.rows_apart == ("Gemma2ForCausalLM", "Gemma2ForTokenClassification")
    torch.nn.init.normal_(driver.rank.critic.model.get_parameter("score.weight"))
    values_N = driver.rank.critic.values(pack(rows))
    samples = sorted(rows, key=lambda s: s.group)
    found = []
    for sample in samples:
        out = driver.rank.critic.model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0, :, 0]
        found += [out[t - 1] for t, on in enumerate(sample.loss_mask) if on]
    assert torch.allclose(values_N, torch.stack(found), atol=1e-5)
    metrics = driver.step(*scored(rows)).metrics
    assert metrics["critic/grad_norm"] > 0


def test_micro_batches_of_padded_rows_hold_their_padding():
    rows = make_batch(3, groups=4, size=6)
    for room in (60, 100, 400):
        parts = micro_batches(rows, room, apart=True)
        assert sorted(id(row) for part in parts for row in part) == sorted(map(id, rows))
        for part in parts:
            padded = len(part) * max(len(longest_ids(row)) for row in part)
            assert padded <= room or len({row.episode_id for row in part}) == 1, "rows of an episode stay together"
    long = make_sample(range(40), {39})
    with pytest.raises(ConfigError, match="episode e has 40 tokens, and a micro-batch takes 39"):
        micro_batches([long], 39, apart=True)


def test_a_sharded_model_knows_it(tmp_path: Path):
    """Rank 0 loads the values; the other ranks compute as it does."""
    driver = learner(write(FAMILIES["convolutions"], tmp_path), config={"precision": "bfloat16"})
    try:
        assert driver.rank.world.mesh is not None
        assert driver.rank.rows_apart == ("Lfm2ForCausalLM",)
        assert driver.step(make_batch(1)).metrics["grad_norm"] > 0
    finally:
        driver.rank.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"attention": "sdpa"}, "learner.attention sdpa: Lfm2ForCausalLM computes each row apart"),
        ({"replay_routes": True}, "learner.replay_routes: Lfm2ForCausalLM computes each row apart"),
    ],
)
def test_settings_of_packed_rows_are_refused(tmp_path: Path, config: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        learner(write(FAMILIES["convolutions"], tmp_path), config=config)


def images_and_text() -> Qwen2_5_VLConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**SHAPE, "head_dim": 8, "rope_parameters": rope}
    return Qwen2_5_VLConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(images_and_text()).save_pretrained(directory)
    return directory


def test_the_text_decoder_of_a_model_of_images_and_text_is_trained(seeing: Path, tmp_path: Path):
    """The rest stays as it is, in the step and in the checkpoint, which is a model of images and text again."""
    driver, rows = learner(seeing), sorted(make_batch(1), key=lambda s: s.group)
    plain = AutoModelForImageTextToText.from_pretrained(seeing)
    before = {name: value.clone() for name, value in driver.weights().items()}
    found = torch.tensor([value for row in driver.probe(rows) for value in row])
    assert relative(found, one_by_one(plain, rows)) < 1e-5
    driver.step(make_batch(1))
    changed = {name for name, value in driver.weights().items() if not torch.equal(value, before[name])}
    assert changed
    assert not any("visual" in name for name in changed)
    assert {name for name in before if "visual" not in name} == changed
    (tmp_path / "saved").mkdir()
    driver.save(tmp_path / "saved")
    names = [set(load_file(folder / "model.safetensors")) for folder in (seeing, tmp_path / "saved")]
    assert names[0] == names[1] == set(as_saved(driver.weights(), seeing)), "what servers are sent, too"
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    found = torch.tensor([value for row in driver.probe(rows) for value in row])
    assert relative(found, one_by_one(again, rows)) < 1e-5


def test_adapters_leave_out_what_text_does_not_reach(seeing: Path):
    model = load_policy(seeing, CPU)
    names = targeted(model, "all-linear")
    assert names
    assert all("language_model" in name for name in names)
    assert not targeted(model, ["qkv"]), "a layer of the vision tower"
    frozen = {name for name, p in empty_policy(seeing).named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("visual" in name for name in frozen)
    driver = learner(seeing, config={"lora": LoRAConfig(rank=2, alpha=4)})
    assert driver.step(make_batch(1)).metrics["grad_norm"] > 0


def test_a_critic_of_a_model_of_images_and_text_is_one_line(seeing: Path):
    with pytest.raises(ConfigError, match="critic: ") as caught:
        load_critic(seeing)
    assert "\n" not in str(caught.value)
