"""Adapters: what they change, what they leave, and that a checkpoint holds both forms."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CTRLConfig, FalconConfig, GPT2Config, MambaConfig, PhimoeConfig

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.run import LearnerConfig, OptimConfig, RunConfig, TinyModel
from agentrl.engine.servers.weight_sync import AdapterSync
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tiny_model
from agentrl.preflight.shape import ModelShape
from agentrl.reporting.report import Silent
from agentrl.rollout.content import corpus, load_content
from agentrl.run_folder.store import RunStore
from agentrl.trainer.run import train_run
from tests.learner.direct import DirectLearner
from tests.learner.train_models import make_batch, padded_logprobs, plain_model

pytest.importorskip("peft", reason="peft is not installed (extra: lora)")


def make_learner(policy: Path, start: Path | None, **lora: Any) -> DirectLearner:
    return DirectLearner(
        policy,
        algorithm=AlgorithmConfig(kl={"coef": 0.05}),
        optim=OptimConfig(lr=1e-2, warmup_steps=0),
        config=LearnerConfig(device="cpu", tokens_per_micro_batch=150, lora={"rank": 4, "alpha": 8} | lora),
        temperature=1.0,
        total_steps=100,
        reference_dir=start,
    )


def randomize_adapters(learner: DirectLearner) -> None:
    """As if they had been trained: fresh ones add nothing."""
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.3)


@pytest.fixture
def trained(policy_dir: Path, tmp_path: Path) -> tuple[DirectLearner, Path]:
    learner = make_learner(policy_dir, policy_dir)
    for seed in range(2):
        learner.step(make_batch(seed))
    folder = tmp_path / "step-2"
    folder.mkdir()
    learner.save(folder)
    return learner, folder


def test_it_begins_as_the_base_and_trains_the_adapters_only(policy_dir: Path):
    learner = make_learner(policy_dir, policy_dir)
    before = plain_model(policy_dir).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in learner.weights().items())
    first, second = (learner.step(make_batch(0)).metrics["kl"] for _ in range(2))
    assert first == pytest.approx(0, abs=1e-9), "with the adapters off it is the reference"
    assert second > 1e-6
    after = learner.weights()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {name.split(".")[-2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert sum(p.requires_grad for p in learner.policy.parameters()) == 2 * 7 * 2


def test_merged_weights_and_the_saved_model_say_the_same_as_the_policy(trained: tuple[DirectLearner, Path]):
    learner, folder = trained
    samples = make_batch(5)
    own = learner.probe(samples)
    with torch.no_grad():
        merged = padded_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), samples)
    for ours, theirs in zip(own, merged, strict=True):
        assert torch.allclose(torch.tensor(ours), theirs, atol=1e-4)


@pytest.mark.parametrize("sent", [False, True])
def test_the_adapter_is_one_of_peft(
    trained: tuple[DirectLearner, Path], policy_dir: Path, tmp_path: Path, sent: bool
):
    """The one in a checkpoint, and the one that servers are given."""
    from peft import PeftModel

    learner, folder = trained
    adapter = folder / "adapter"
    if sent:
        adapter = tmp_path / "sync" / "weights-1"
        assert asyncio.run(AdapterSync(policy_dir, adapter.parent, alpha=8).push([], learner.adapter(), 1)) == {}
    samples = make_batch(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(plain_model(policy_dir), adapter)
    with torch.no_grad():
        theirs = padded_logprobs(model, samples)
    for ours, row in zip(learner.probe(samples), theirs, strict=True):
        assert torch.allclose(torch.tensor(ours), row, atol=1e-4)


def test_scoring_does_not_change_the_adapter_that_is_sent(policy_dir: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(policy_dir, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    learner = DirectLearner(
        tmp_path,
        algorithm=AlgorithmConfig(),
        optim=OptimConfig(lr=1e-2, warmup_steps=0),
        config=LearnerConfig(
            device="cpu", precision="bfloat16", lora={"rank": 4, "targets": ["q_proj", "lm_head"]}
        ),
        temperature=1.0,
        total_steps=8,
        reference_dir=tmp_path,
    )
    with contextlib.closing(learner):
        learner.step(make_batch(0))
        before = {name: tensor.clone() for name, tensor in learner.adapter().items()}
        learner.probe(make_batch(1))
        after = learner.adapter()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_going_on_is_the_same_to_the_bit(trained: tuple[DirectLearner, Path], policy_dir: Path):
    learner, folder = trained
    other = make_learner(folder, policy_dir)
    other.load_optimizer(folder)
    for seed in (2, 3):
        assert learner.step(make_batch(seed)).metrics == other.step(make_batch(seed)).metrics
    ours, theirs = learner.weights(), other.weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_adapter_of_another_run_can_be_continued(trained: tuple[DirectLearner, Path], policy_dir: Path):
    learner, folder = trained
    other = make_learner(policy_dir, policy_dir, adapter=str(folder / "adapter"))
    assert other.probe(make_batch(5)) == learner.probe(make_batch(5))
    for lora, said in (
        ({"rank": 8}, "has rank 4, learner.lora.rank is 8"),
        ({"targets": ["q_proj"]}, "adapts other layers than learner.lora.targets"),
    ):
        with pytest.raises(ConfigError, match=said):
            make_learner(policy_dir, policy_dir, adapter=str(folder / "adapter"), **lora)


def test_bad_targets_and_folders_are_one_error(policy_dir: Path, tmp_path: Path):
    for targets in (["nothing"], ["q_proj", "nothing"]):  # peft takes what it finds, and is silent about the rest
        with pytest.raises(
            ConfigError, match="targets: the model has no linear layer 'nothing'; its linear layers"
        ):
            make_learner(policy_dir, None, targets=targets)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_learner(policy_dir, None, adapter=str(tmp_path))


def peft_adapter(base: Path, folder: Path, **options: Any) -> Any:
    """An adapter that peft itself made of the model, every matrix of it random; the model with it."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = options.pop("config", None) or peft.LoraConfig(**{"task_type": "CAUSAL_LM", **options})
        model = peft.get_peft_model(plain_model(base), config)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "original_module" not in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_that_peft_made_is_continued_at_its_scale(policy_dir: Path, tmp_path: Path, rslora: bool):
    """The loaded policy, its merged weights, the saved adapter and the one for servers all say what peft says."""
    from peft import PeftModel

    targets = ["q_proj", "v_proj", "down_proj"]
    theirs = peft_adapter(policy_dir, tmp_path / "a", r=4, lora_alpha=6, use_rslora=rslora, target_modules=targets)
    learner = make_learner(
        policy_dir, policy_dir, alpha=6, rslora=rslora, targets=targets, adapter=str(tmp_path / "a")
    )
    samples = make_batch(5)
    with torch.no_grad():
        wanted = torch.cat(padded_logprobs(theirs, samples))

    def gap(found: Any) -> float:
        return float((torch.cat(list(found)) - wanted).abs().max())

    assert gap(torch.tensor(row) for row in learner.probe(samples)) < 1e-4
    learner.export(tmp_path)
    (tmp_path / "b").mkdir()
    learner.save(tmp_path / "b")
    sync = AdapterSync(policy_dir, tmp_path / "sync", alpha=learner.config.lora.plain_alpha)
    asyncio.run(sync.push([], learner.adapter(), 1))
    assert json.loads((tmp_path / "sync/weights-1/adapter_config.json").read_text()).get("use_rslora") is None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        assert gap(padded_logprobs(plain_model(tmp_path), samples)) < 1e-4
        for folder in (tmp_path / "b" / "adapter", tmp_path / "sync" / "weights-1"):
            assert gap(padded_logprobs(PeftModel.from_pretrained(plain_model(policy_dir), folder), samples)) < 1e-4
    with pytest.raises(ConfigError, match=rf"has rslora {str(rslora).lower()}, learner.lora.rslora is"):
        make_learner(policy_dir, None, alpha=6, rslora=not rslora, targets=targets, adapter=str(tmp_path / "a"))


OTHER_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "has use_dora true, which is not trained: merge it into its base"),
    "bias": ({"bias": "all"}, 'has bias "all"'),
    "lora_bias": ({"lora_bias": True}, "has lora_bias true"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, 'has modules_to_save ["lm_head"]'),
    "ranks": ({"rank_pattern": {"q_proj": 2}}, 'has rank_pattern {"q_proj": 2}'),
    "alphas": ({"alpha_pattern": {"q_proj": 2}}, 'has alpha_pattern {"q_proj": 2}'),
    "tokens": ({"trainable_token_indices": [3, 5]}, "has trainable_token_indices"),
    "layers": ({"layers_to_transform": [1]}, "adapts other layers than learner.lora.targets"),
    "pissa": ({"init_lora_weights": "pissa"}, 'has init_lora_weights "pissa"'),
    "ia3": ({"config": "IA3Config"}, "is of kind IA3; agentrl trains LoRA adapters only"),
    "loha": ({"config": "LoHaConfig"}, "is of kind LOHA"),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_adapters_of_other_kinds_are_refused_with_the_reason(policy_dir: Path, tmp_path: Path, kind: str):
    import peft

    options, said = OTHER_KINDS[kind]
    targets = ["q_proj"]
    if name := options.get("config"):
        more = {"feedforward_modules": []} if name == "IA3Config" else {}
        options = {"config": getattr(peft, name)(task_type="CAUSAL_LM", target_modules=targets, **more)}
    else:
        options = {"r": 4, "lora_alpha": 8, "target_modules": targets, **options}
    peft_adapter(policy_dir, tmp_path, **options)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        make_learner(policy_dir, None, targets=targets, adapter=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_adapter_with_numbers_that_are_not_finite_is_refused(policy_dir: Path, tmp_path: Path):
    peft_adapter(policy_dir, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    state = load_file(file)
    state["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][3, 2] = float("nan")
    save_file(state, file)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.self_attn\.q_proj\.lora_B\.weight has numbers that are not"
    ):
        make_learner(policy_dir, None, targets=["q_proj"], adapter=str(tmp_path))


def test_a_key_that_a_later_peft_may_add_is_refused(policy_dir: Path, tmp_path: Path):
    peft_adapter(policy_dir, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj"])
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_newlora": True}))
    with pytest.raises(ConfigError, match="has use_newlora true, which is not trained"):
        make_learner(policy_dir, None, targets=["q_proj"], adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("target", "said"),
    [("lm_head", "lm_head shares its weights"), ("embed_tokens", "has no linear layer 'embed_tokens'")],
)
def test_layers_whose_adapter_could_not_be_sampled_with_are_refused(policy_dir: Path, target: str, said: str):
    with pytest.raises(ConfigError, match=said):
        make_learner(policy_dir, None, targets=[target])


def test_routers_that_are_linear_by_name_only_get_no_adapter(tmp_path: Path):
    config = PhimoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        sliding_window=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    learner = make_learner(tmp_path, tmp_path, targets="all-linear")
    learner.step(make_batch(0))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in learner.adapter()}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trained = sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)
    assert ModelShape.of_directory(tmp_path).lora_parameters(4, "all-linear") == trained
    with pytest.raises(ConfigError, match="the model has no linear layer 'router'"):
        make_learner(tmp_path, tmp_path, targets=["router"])


def test_layers_that_are_read_and_not_called_get_no_adapter(tmp_path: Path):
    """Mamba multiplies by the weight of `dt_proj` itself: an adapter there would be merged but never computed."""
    config = MambaConfig(vocab_size=97, hidden_size=32, state_size=8, num_hidden_layers=2)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    learner = make_learner(tmp_path / "base", tmp_path / "base")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in learner.adapter()} == {
        *("in_proj", "x_proj", "out_proj")
    }
    randomize_adapters(learner)
    samples = make_batch(5)
    learner.export(tmp_path / "merged")
    merged, own = make_learner(tmp_path / "merged", None), learner.probe(samples)
    for ours, found in zip(own, merged.probe(samples), strict=True):
        assert ours == pytest.approx(found, abs=1e-4)
    with pytest.raises(ConfigError, match="the model has no linear layer 'dt_proj'"):
        make_learner(tmp_path / "base", tmp_path / "base", targets=["dt_proj"])


def test_a_model_without_linear_layers_is_one_error(tmp_path: Path):
    """Falcon uses a custom linear layer."""
    config = FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="FalconForCausalLM has no plain linear layers"):
        make_learner(tmp_path, tmp_path)


def test_layers_with_a_number_for_a_name_are_told_from_the_blocks(tmp_path: Path):
    """CTRL's feed-forward layers are `ffn.0` and `ffn.2`; its blocks have numbers, too."""
    from peft import PeftModel

    base, folder = tmp_path / "base", tmp_path / "step-1"
    config = CTRLConfig(vocab_size=97, n_embd=32, dff=64, n_layer=3, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    learner = make_learner(base, base, targets="all-linear")
    learner.step(make_batch(0))
    folder.mkdir()
    learner.save(folder)
    assert len(learner.adapter()) == 2 * 3 * 6
    samples = make_batch(5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(plain_model(base), folder / "adapter").eval()
        for ours, row in zip(learner.probe(samples), padded_logprobs(model, samples), strict=True):
            assert torch.allclose(torch.tensor(ours), row, atol=1e-4)


def test_layers_that_keep_their_weights_transposed_are_merged_rightly(tmp_path: Path):
    """GPT-2's are inputs by outputs, and some are square."""
    config = GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    learner = make_learner(tmp_path / "base", tmp_path / "base")
    randomize_adapters(learner)
    samples = make_batch(5)
    learner.export(tmp_path / "merged")
    with torch.no_grad():
        found = torch.cat(padded_logprobs(plain_model(tmp_path / "merged"), samples))
        base = torch.cat(padded_logprobs(plain_model(tmp_path / "base"), samples))
    own = torch.cat([torch.tensor(row) for row in learner.probe(samples)])
    assert torch.allclose(own, found, atol=1e-4)
    assert float((own - base).abs().max()) > 0.2


LENGTHS = '''
from agentrl import ToolEnv, reward
from agentrl.env.read import final_answer
from agentrl.env.tasks import generated


class Lengths(ToolEnv):
    """Say much."""

    def setup(self, number: int) -> str:
        return f"Number {number}."

    @reward
    def length(self, episode) -> float:
        return float(len(final_answer(episode) or ""))

    @classmethod
    def tasks(cls, split, seed):
        return generated("lengths", split, seed, 4, lambda rng: {"number": rng.randrange(10)})
'''


def test_a_given_adapter_samples_from_the_first_step_on(tmp_path: Path):
    """The step compares what the engine said of its tokens with what the learner says of them."""
    (tmp_path / "envs.py").write_text(LENGTHS)
    settings: dict[str, Any] = {
        "env": f"{tmp_path}/envs.py:Lengths",
        "rollout": {"groups_per_step": 1, "group_size": 4, "max_tokens": 8, "max_turns": 1, "token_budget": 200},
        "steps": 1,
        "eval": {"tasks": 1},
        "engine": {"device": "cpu"},
    }
    tiny = TinyModel(hidden=32, layers=1, heads=2, intermediate=64, vocab=400)
    base, given = tmp_path / "base", tmp_path / "given"
    make_tiny_model(base, corpus(load_content(RunConfig(model={"tiny": tiny}, **settings))), tiny)
    other = make_learner(base, base)
    with torch.no_grad():
        for parameter in other.policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.0, 0.5)
    given.mkdir()
    other.save(given)
    lora = {"rank": 4, "alpha": 8, "adapter": str(given / "adapter")}
    config = RunConfig(model={"path": str(base)}, learner={"device": "cpu", "lora": lora}, **settings)
    with RunStore.open(config, tmp_path / "run") as store:
        train_run(config, store, Silent())
        (step,) = [line for line in store.metrics() if line["step"] == 1]
    assert step["trained_tokens"] > 8
    assert step["drift/max_abs"] < 1e-3
    rows = make_batch(5)
    plain, adapted = (
        torch.tensor([v for row in learner.probe(rows) for v in row])
        for learner in (make_learner(base, base), other)
    )
    assert float((plain - adapted).abs().max()) > 0.5, "without it the engine would say something else"
