"""Adapters on models with experts: every linear layer but the routers, loaded and merged as they were trained."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.preflight.shape import ModelShape
from bench.families import MLA, MOE, Family, config_of
from tests.learner.direct import DirectLearner
from tests.learner.test_lora import make_learner
from tests.learner.train_models import make_batch, padded_logprobs, plain_model

pytest.importorskip("peft", reason="peft is not installed (extra: lora)")

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
DENSE = {f"mlp.{end}_proj" for end in ("gate", "up", "down")}
SHARED = {f"shared_experts.{end}_proj" for end in ("gate", "up", "down")}

ADAPTED: dict[str, set[str]] = {
    "qwen3_moe": ATTENTION,
    "deepseek_v3": LATENT | DENSE | SHARED,
    "glm4_moe": ATTENTION | DENSE | SHARED,
    "dots1": ATTENTION | DENSE | SHARED,
    "ernie4_5_moe": ATTENTION | DENSE | SHARED,
    "afmoe": ATTENTION | DENSE | SHARED | {"self_attn.gate_proj"},
    "hunyuan_v1_moe": ATTENTION | {f"shared_mlp.{end}_proj" for end in ("gate", "up", "down")},
    "longcat_flash": LATENT | {f"mlps.N.{end}_proj" for end in ("gate", "up", "down")},
}
"""What `all-linear` adapts. The routers of the last three are plain linear layers."""
MORE = {
    "dots1": {"n_shared_experts": 1},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "zero_expert_num": 2},
}


def write(directory: Path, kind: str) -> Path:
    settings = MOE | (MLA if "q_a_proj" in ADAPTED[kind] else {}) | MORE.get(kind, {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(Family(kind, settings))).save_pretrained(directory)
    return directory


def with_random_adapter(base: Path, **lora: object) -> DirectLearner:
    learner = make_learner(base, base, **lora)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.1)
    return learner


def check_everywhere(learner: DirectLearner, base: Path, folder: Path) -> None:
    """The adapter changes the model, and says the same loaded by peft, merged, and loaded to be continued."""
    from peft import PeftModel

    samples, saved = make_batch(5), folder / "step-1"
    saved.mkdir()
    learner.save(saved)
    own = torch.cat([torch.tensor(row) for row in learner.probe(samples)])

    def gap(model: PreTrainedModel) -> float:
        return float((own - torch.cat(padded_logprobs(model, samples))).abs().max())

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # peft's warning about unmatched adapter weights stays an error
        theirs = PeftModel.from_pretrained(plain_model(base), saved / "adapter").eval()
        assert sum(p.numel() for name, p in theirs.named_parameters() if ".lora_" in name) == trained(learner)
        assert gap(plain_model(base)) > 0.1
        assert gap(theirs) < 1e-4
        assert gap(theirs.merge_and_unload()) < 1e-4
        assert gap(plain_model(saved)) < 1e-4
    lora = learner.config.lora.model_dump() | {"adapter": str(saved / "adapter")}
    assert torch.equal(
        torch.cat([torch.tensor(row) for row in make_learner(base, base, **lora).probe(samples)]), own
    )


def trained(learner: DirectLearner) -> int:
    return sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ADAPTED)
def test_every_linear_layer_but_the_routers_gets_an_adapter(kind: str, tmp_path: Path):
    base = write(tmp_path / "base", kind)
    learner = with_random_adapter(base, targets="all-linear")
    layers = {re.sub(r"\.\d+\.", ".N.", name.split(".lora_")[0]) for name in learner.adapter()}
    assert all(any(layer.endswith(f".{end}") for end in ADAPTED[kind]) for layer in layers), layers
    assert all(any(layer.endswith(f".{end}") for layer in layers) for end in ADAPTED[kind]), layers
    assert ModelShape.of_directory(base).lora_parameters(4, "all-linear") == trained(learner)
    check_everywhere(learner, base, tmp_path)


@pytest.mark.parametrize(
    ("kind", "targets", "modules", "weights"),
    [
        (
            "deepseek_v3",
            ["gate_proj"],
            [],
            ["gate_proj.weight"],
        ),  # peft alone moves it, or asks for up_proj as well
        (
            "deepseek_v3",
            ["shared_experts.up_proj", "o_proj"],
            ["o_proj"],
            ["shared_experts.up_proj.weight"],
        ),
        ("glm4_moe", ["layers.0.mlp.down_proj"], [], ["mlp.down_proj.weight"]),
        ("hunyuan_v1_moe", ["gate.wg"], ["wg"], None),
        ("qwen3_moe", ["lm_head", "q_proj"], ["lm_head", "q_proj"], None),
    ],
)
def test_named_layers_get_adapters_where_they_are(
    kind: str, targets: list[str], modules: list[str], weights: list[str] | None, tmp_path: Path
):
    base = write(tmp_path / "base", kind)
    learner = with_random_adapter(base, targets=targets)
    assert ModelShape.of_directory(base).lora_parameters(4, targets) == trained(learner)
    check_everywhere(learner, base, tmp_path)
    said = json.loads((tmp_path / "step-1" / "adapter" / "adapter_config.json").read_text())
    assert (sorted(said["target_modules"]), said["target_parameters"]) == (modules, weights)


def test_an_adapter_of_the_experts_is_not_continued(tmp_path: Path):
    """As peft makes it of the names that the experts had in an earlier transformers."""
    import peft

    base = write(tmp_path / "base", "deepseek_v3")
    options = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(plain_model(base), options).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="adapts other layers than") as caught:
        make_learner(base, base, adapter=str(tmp_path / "adapter"))
    assert "\n" not in str(caught.value)
