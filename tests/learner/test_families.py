"""Families of models are computed exactly, beyond every boundary of their configs, or refused in one line."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, CTRLConfig, LlamaConfig

from agentrl.config import load_config
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.config.run import LearnerConfig, OptimConfig
from agentrl.engine.local.flat_model import FlatModel, load_model
from agentrl.engine.local.local_engine import LocalEngine
from agentrl.errors import ConfigError
from agentrl.learner.critic import load_critic
from agentrl.learner.lora import refuse_unknown_targets
from agentrl.learner.policy_model import checkpoint_activations, empty_policy, load_policy
from agentrl.models.trial import boundaries, with_near_boundaries
from agentrl.preflight.shape import ModelShape
from agentrl.rollout.rewards.classifier import Classifier
from tests.learner.direct import DirectLearner

BENCH = Path(__file__).parents[2] / "bench" / "families.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


bench = _load()

RIGHT = {("qwen2", "sliding window"), ("ministral3", "yarn, scaled queries"), ("deepseek_v3", "")}
APART = {
    ("qwen2_moe", "sliding window"),
    ("llama4_text", "boundaries at 8,192"),
    ("granitemoehybrid", ""),
    ("nemotron", ""),
    ("bloom", "alibi"),
    ("qwen3_5", "images and text"),
}
REFUSED = {
    ("gemma3_text", "dynamic rope in full layers"): "rotary embeddings of type 'dynamic'",
    ("phi3", "longrope"): "rotary embeddings of type 'longrope'",
    (
        "deepseek_v32",
        "",
    ): "computes different results in a padded batch than on separate rows beyond index_topk 24",
    ("falcon", "alibi"): "computes different results in a padded batch than on separate rows",
    ("qwen2_audio", "sound and text"): "qwen2_audio is a model of sound and text (audio_config in config.json)",
    ("t5", "encoder-decoder"): "t5 is an encoder-decoder model",
}


def measured(model_type: str, about: str, folder: Path) -> bench.Finding:
    (family,) = (f for f in bench.FAMILIES if (f.model_type, f.about) == (model_type, about))
    return bench.measure(family, folder / "model")


@pytest.mark.parametrize(("model_type", "about"), sorted(RIGHT))
def test_a_family_is_computed_exactly_in_learner_and_engine(model_type: str, about: str, tmp_path: Path):
    found = measured(model_type, about, tmp_path)
    assert (found.learner, found.engine) == ("right", "right"), (found.reason, found.engine_reason)
    assert found.difference < 1e-4


@pytest.mark.parametrize(("model_type", "about"), sorted(APART))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_family_that_cannot_be_packed_is_exact_too(model_type: str, about: str, tmp_path: Path):
    found = measured(model_type, about, tmp_path)
    assert (found.learner, found.engine) == ("right", "right"), (found.reason, found.engine_reason)
    assert (found.apart, found.turns) == (True, True)
    assert found.difference < 1e-4


@pytest.mark.parametrize(("model_type", "about"), sorted(REFUSED))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_family_is_refused_with_its_reason(model_type: str, about: str, tmp_path: Path):
    found = measured(model_type, about, tmp_path)
    assert (found.learner, found.engine) == ("refused", "refused")
    assert REFUSED[model_type, about] in found.reason
    assert "\n" not in found.reason + found.engine_reason


def test_a_layer_that_attends_twice_is_not_sampled_from_one_cache(tmp_path: Path):
    found = measured("diffllama", "", tmp_path)
    assert (found.learner, found.engine) == ("right", "right")
    assert (found.apart, found.turns) == (False, True)
    with pytest.raises(ConfigError, match="a layer attends more than once"):
        FlatModel(load_model(tmp_path / "model", dtype="float32", device="cpu"))


def test_the_boundaries_of_a_config_are_found_and_brought_near(tmp_path: Path):
    """In sections and in tables; counts and what is near already stay."""
    (family,) = (f for f in bench.FAMILIES if (f.model_type, f.about) == ("ministral3", "yarn, scaled queries"))
    config = bench.config_of(family)
    config.sliding_window, config.max_window_layers = 4096, 28
    assert boundaries(config) == {"original_max_position_embeddings": bench.NEAR, "sliding_window": 4096}
    model = AutoModelForCausalLM.from_config(config)
    near = with_near_boundaries(model)
    assert (near.config.sliding_window, near.config.max_window_layers) == (8, 28)
    assert near.config.rope_parameters["original_max_position_embeddings"] == 8
    assert model.config.sliding_window == 4096
    ours, theirs = dict(near.named_parameters()), dict(model.named_parameters())
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in theirs), "weights exist once"


@pytest.mark.parametrize(
    ("model_type", "noise"),
    [
        ("starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5, "sliding_window": None}),
        ("phimoe", {**bench.MOE, "router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "sliding_window": None}),
        ("opt", {"dropout": 0.5, "layerdrop": 0.5, "word_embed_proj_dim": 32, "ffn_dim": 64}),
    ],
)
def test_checkpointed_blocks_are_not_random(model_type: str, noise: dict[str, object], tmp_path: Path):
    """Transformers checkpoints blocks in training mode only, in which these families sample."""
    config = bench.config_of(bench.Family(model_type, noise))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, packed = load_policy(tmp_path, torch.device("cpu")), bench.pack(bench.samples())
    wanted = bench.token_stats(model, packed).logprobs_N
    checkpoint_activations(model)
    found = bench.token_stats(model, packed).logprobs_N
    assert torch.equal(found, wanted)


def test_blocks_that_cannot_be_recomputed_are_one_error(tmp_path: Path):
    config = CTRLConfig(vocab_size=97, n_embd=32, dff=64, n_layer=1, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot recompute the blocks of CTRLLMHeadModel"):
        checkpoint_activations(load_policy(tmp_path, torch.device("cpu")))


def test_what_is_no_model_to_load_is_one_line(tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}})
    )
    with pytest.raises(ConfigError, match=r"brings its own code \(auto_map in config.json\)") as caught:
        load_policy(tmp_path, torch.device("cpu"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="brings its own code"):
        LocalEngine.from_directory(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter"):
        load_policy(tmp_path, torch.device("cpu"))


def test_own_code_beside_a_known_model_is_not_run(tmp_path: Path):
    """Phi-3 and others still ship the code from before transformers had them."""
    config = LlamaConfig(
        **bench.SHAPE, auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text("raise RuntimeError('run')")
    assert "auto_map" in json.loads((tmp_path / "config.json").read_text())
    assert type(load_policy(tmp_path, torch.device("cpu"))).__name__ == "LlamaForCausalLM"


def test_kernels_that_a_config_names_are_not_loaded(tmp_path: Path):
    """Transformers would download code from the Hub and run it."""
    AutoModelForCausalLM.from_config(bench.config_of(bench.Family("gemma", {}))).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    named = {"attn_implementation": "some/kernel", "experts_implementation": "some/kernel"}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    assert ModelShape.of_directory(tmp_path).layers == bench.SHAPE["num_hidden_layers"]
    for model in (load_policy(tmp_path, torch.device("cpu")), load_critic(tmp_path)):
        assert "some/kernel" not in (model.config._attn_implementation, model.config._experts_implementation)
    with torch.device("meta"):
        assert empty_policy(tmp_path).config._experts_implementation != "some/kernel"
    with pytest.raises(ConfigError, match="has 2 labels"):
        Classifier.load(RewardModelConfig(kind="classifier", path=str(tmp_path), device="cpu"), tmp_path)


class Planted:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_in_a_model_folder_is_not_run(tmp_path: Path):
    model = AutoModelForCausalLM.from_config(bench.config_of(bench.Family("gemma", {})))
    model.config.num_labels = 1
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict() | {"planted": Planted(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot load a causal language model: "):
        load_policy(tmp_path, torch.device("cpu"))
    with pytest.raises(ConfigError, match="cannot be loaded as a value model: "):
        load_critic(tmp_path)
    with pytest.raises(ConfigError, match=r"reward_model\.path .* cannot be loaded: "):
        Classifier.load(RewardModelConfig(kind="classifier", path=str(tmp_path), device="cpu"), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_is_neither_critic_nor_reward_model(tmp_path: Path):
    """Transformers would load the base that it names, from wherever that is, and put the adapter on it."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
    with pytest.raises(ConfigError, match=r"critic: .* holds an adapter .*merge the adapter into its base"):
        load_critic(tmp_path)
    with pytest.raises(ConfigError, match=r"reward_model\.path .* holds an adapter"):
        Classifier.load(RewardModelConfig(kind="classifier", path=str(tmp_path), device="cpu"), tmp_path)


@pytest.mark.parametrize("model_type", ["falcon", "gptj"])
def test_a_critic_that_cannot_be_exact_or_made_is_one_line(model_type: str, tmp_path: Path):
    settings = {"gptj": {"rotary_dim": 8}, "falcon": {"alibi": True}}[model_type]
    config = bench.config_of(bench.Family(model_type, settings))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="critic: ") as caught:
        load_critic(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_that_transformers_cannot_compute_is_one_line_from_the_engine(tmp_path: Path):
    """Gemma 4 with shared keys and values and no inputs per layer fails in transformers' own forward."""
    settings = {
        "sliding_window": bench.NEAR,
        "layer_types": bench.ALTERNATING,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    }
    config = bench.config_of(bench.Family("gemma4_text", settings))
    model = AutoModelForCausalLM.from_config(config)
    with contextlib.suppress(Exception):
        model(torch.tensor([[1, 2, 3]]))
        pytest.skip("this version of transformers computes it")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot") as caught:
        LocalEngine.from_directory(tmp_path, max_slots=2, cache_mb=16)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_package_that_transformers_lacks_is_one_error(tmp_path: Path):
    """The vision tower of Gemma 3n comes from timm, which agentrl does not install."""
    AutoConfig.for_model("gemma3n").save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"cannot load a causal language model: .*requires the timm library"):
        load_policy(tmp_path, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"that can be planned: .*requires the timm library"):
        ModelShape.of_directory(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(
        "env: agentrl.envs.calculator:Calculator\nmodel: {path: .}\nlearner: {lora: {targets: [q_proj]}}\n"
    )
    with pytest.raises(ConfigError, match=r"cannot make the model: .*requires the timm library"):
        refuse_unknown_targets(load_config(file))


def test_heads_may_be_wider_in_some_layers(tmp_path: Path):
    """As in the published Gemma 4: transformers raises an error for a setting that differs between layers."""
    settings = {
        "sliding_window": bench.NEAR,
        "layer_types": bench.ALTERNATING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": bench.VOCABULARY,
        "global_head_dim": 32,
    }
    config = bench.config_of(bench.Family("gemma4_text", settings))
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    assert ModelShape.of_directory(tmp_path).head_dim == 32, "planned for the widest"
    learner = DirectLearner(
        tmp_path,
        algorithm=AlgorithmConfig(),
        optim=OptimConfig(),
        config=LearnerConfig(device="cpu"),
        temperature=1.0,
        total_steps=1,
    )
    rows = bench.samples()
    found = torch.tensor([value for row in learner.probe(rows) for value in row])
    with torch.no_grad():
        wanted = bench.plain_logprobs(plain, rows)
    assert torch.allclose(found, wanted, atol=bench.TOLERANCE)
