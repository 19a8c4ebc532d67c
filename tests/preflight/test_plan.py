"""`agentrl plan` on config files of known models, with numbers worked out by hand."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForTokenClassification
from typer.testing import CliRunner

from agentrl.cli import main
from agentrl.cli.app import app
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.learner.logprobs import token_stats
from agentrl.learner.pack import pack
from agentrl.learner.policy_model import load_policy
from agentrl.preflight.estimate import size
from agentrl.preflight.plan import GIB, make_plan
from agentrl.preflight.shape import ModelShape
from tests.learner.train_models import make_sample, write_model

SIZES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
SMALL, LARGE = 596_049_920, 8_190_735_360


def model(folder: Path, name: str) -> Path:
    """A folder with the config.json of a Qwen3 model, and no weights."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128}
    config |= {"num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": name == "0.6B"}
    (folder / "config.json").write_text(json.dumps(config | SIZES[name]))
    return folder


def run(folder: Path, name: str = "0.6B", **sections: Any) -> RunConfig:
    sections = {"rollout": {"groups_per_step": 16, "group_size": 8, "token_budget": 4096}} | sections
    return RunConfig(
        env="agentrl.envs.calculator:Calculator", model={"path": str(model(folder, name))}, **sections
    )


@pytest.mark.parametrize(
    ("name", "parameters", "block", "kv", "adapters"),
    # block: 2 x 1024 x 2048 + 2 x 1024 x 1024 + 3 x 1024 x 3072 + 2 x 128 + 2 x 1024
    [
        ("0.6B", SMALL, 15_730_944, 28 * 2 * 8 * 128 * 2, 10_092_544),
        ("8B", LARGE, 192_946_432, 147_456, 43_646_976),
    ],
)
def test_a_model_is_counted_from_its_config(tmp_path, name, parameters, block, kv, adapters):
    shape = ModelShape.of_directory(model(tmp_path, name))
    assert (shape.parameters, shape.block, shape.kv_bytes_per_token(2)) == (parameters, block, kv)
    assert shape.lora_parameters(16, "all-linear") == adapters
    heads = SIZES[name]["num_attention_heads"]
    q_proj = 16 * (shape.hidden + heads * 128) * shape.layers
    assert shape.lora_parameters(16, ["q_proj"]) == q_proj


def test_what_the_backward_pass_keeps_is_as_measured(tmp_path: Path):
    directory = write_model(tmp_path, seed=0, hidden=64, layers=4)
    policy = load_policy(directory, torch.device("cpu"))
    packed = pack([make_sample([90 - i, *range(1, 89), i], {89}, episode=str(i), group=i) for i in range(8)])
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stats = token_stats(policy, packed)
    assert stats.logprobs_N.requires_grad
    found = sum(kept.values()) / packed.ids_T.numel() / 4
    assert ModelShape.of_directory(directory).activation_bytes_per_token(4) == pytest.approx(found, rel=0.15)


def test_the_batch(tmp_path: Path):
    algorithm, learner = {"updates_per_step": 4}, {"ranks": 2, "tokens_per_micro_batch": 16384}
    batch = make_plan(run(tmp_path, algorithm=algorithm, learner=learner, steps=10), gpu=True).batch
    assert (batch.tasks, batch.episodes, batch.updates, batch.episodes_per_update) == (16, 128, 4, 32)
    assert batch.tokens == 128 * 4096
    assert batch.sampled_tokens == 128 * 8 * 256
    assert batch.micro_batches_per_rank == 128 * 4096 // 4 // 2 // 16384
    assert batch.episodes_in_all == 1280


def test_memory_of_the_update_by_hand(tmp_path: Path):
    """8B over 8 ranks in bfloat16, with a reference: 2 copies, gradients and two moments, in float32 shards."""
    learner = {"ranks": 8, "precision": "bfloat16", "checkpoint_activations": True, "logits_at_once": 1024}
    plan = make_plan(run(tmp_path, "8B", learner=learner), memory_bytes=80 * GIB, gpu=True)
    parts = next(phase for phase in plan.phases if phase.name == "update").parts
    shard = LARGE * 4 // 8
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == (shard, shard, 2 * shard)
    assert parts["reference"] == shard
    outer = 2 * 1_244_663_808  # the reference's stays gathered, too
    assert parts["gathered"] == 2 * (outer + 2 * 192_946_432) + 4 * 192_946_432
    one_block = 2 * (6 * 4096 + (4 * 32 + 6 * 8) * 128 + 4 * 12288)
    assert parts["activations"] == 16384 * (36 * 4096 * 2 + one_block)
    assert parts["logits"] == 5 * 4 * 1024 * 151936
    assert plan.checkpoint_bytes == 12 * LARGE
    assert plan.checkpoints_bytes == 4 * plan.checkpoint_bytes


def test_whole_distributions_and_an_average_are_counted(tmp_path: Path):
    def planned(kl: dict[str, Any], **more: Any) -> Any:
        made = run(tmp_path, learner={"tokens_per_micro_batch": 8192}, algorithm={"kl": kl}, **more)
        return make_plan(made, memory_bytes=80 * GIB, gpu=True)

    plain = planned({"coef": 0.1})
    whole = planned({"coef": 0.1, "kind": "full", "top": 0})
    assert "distributions" not in plain.phases[1].parts
    assert whole.phases[1].parts["distributions"] == 44 * 8192 * 151936
    assert "set algorithm.kl.top" in next(f.fix for f in whole.findings if f.code == "PL01")
    few = planned({"coef": 0.1, "kind": "full", "top": 64})
    assert few.phases[1].parts["distributions"] == 44 * 8192 * 64
    average = planned({"coef": 0.1}, teacher={"policy": "average", "hint": "solved"})
    assert average.checkpoint_bytes == plain.checkpoint_bytes + 4 * SMALL


def test_the_largest_pass_on_a_rank_counts(tmp_path: Path):
    learner = {"ranks": 8, "precision": "bfloat16", "checkpoint_activations": True}
    kl, teacher = {"kl": {"coef": 1.0}}, str(model(tmp_path / "teacher", "8B"))
    plan = make_plan(
        run(tmp_path, learner=learner, algorithm=kl, teacher={"path": teacher}), memory_bytes=80 * GIB, gpu=True
    )
    parts = plan.phases[1].parts
    assert parts["reference"] == 4 * LARGE // 8
    assert parts["gathered"] == 2 * (1_244_663_808 + 2 * 192_946_432) + 4 * 192_946_432, "the teacher's"


@pytest.mark.parametrize("targets", ["q_proj", "self_attn.q_proj", "model.layers.0.self_attn.q_proj"])
def test_adapters_of_named_layers_are_counted_as_they_are_made(tmp_path: Path, targets: str):
    from agentrl.config.run import LoRAConfig
    from agentrl.learner.lora import add_adapter

    directory = write_model(tmp_path, seed=0, hidden=64, layers=2)
    adapted = add_adapter(
        load_policy(directory, torch.device("cpu")), LoRAConfig(rank=4, targets=[targets]), None, values=True
    )
    made = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert made == ModelShape.of_directory(directory).lora_parameters(4, [targets])


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_an_adapter_of_the_output_layer_is_counted(tmp_path: Path, family: str):
    """Of one with its own weights; a shared one cannot have an adapter."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128, "head_dim": 16}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sizes | {"model_type": family, "tie_word_embeddings": False}))
    shape = ModelShape.of_directory(tmp_path)
    assert shape.lora_parameters(4, ["lm_head"]) == 4 * (64 + 320)
    assert shape.lora_moment_bytes(4, ["lm_head"], "float32") == 8 * 4 * (64 + 320)
    attention = 3 * 4 * (2 * (64 + 64) + 2 * (64 + 32))
    assert shape.lora_parameters(4, ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj"]) == attention + 4 * 384
    if family == "mixtral":
        assert shape.lora_parameters(4, "all-linear") == attention, "not the output layer"
    file.write_text(json.dumps(sizes | {"model_type": family, "tie_word_embeddings": True}))
    assert ModelShape.of_directory(tmp_path).lora_parameters(4, ["lm_head"]) == 0


def test_adapters_of_layers_that_the_model_lacks_are_refused(tmp_path: Path):
    lora = {"lora": {"targets": ["q_proj", "query"]}}
    with pytest.raises(
        ConfigError, match="no linear layer 'query'; its linear layers are down_proj, gate_proj, k_"
    ):
        make_plan(run(tmp_path, "8B", learner=lora), memory_bytes=80 * GIB, gpu=True)


def test_blocks_and_adapters_of_older_models_are_counted(tmp_path: Path):
    AutoConfig.for_model("gpt2", n_embd=64, n_layer=4, n_head=4, vocab_size=1000).save_pretrained(tmp_path)
    shape = ModelShape.of_directory(tmp_path)
    assert shape.block == 12 * 64 * 64 + 13 * 64
    assert shape.lora_parameters(2, "all-linear") == 4 * 2 * (4 + 2 + 5 + 5) * 64


def test_what_text_does_not_reach_is_held_and_not_trained(tmp_path: Path):
    """A model of images and text is planned as its text decoder alone, with the weights of its tower."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = sizes | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 128}
    tower = sizes | {"image_size": 32, "patch_size": 16, "mm_tokens_per_image": 1}
    for folder, config in {
        "seeing": AutoConfig.for_model("gemma3", text_config=text, vision_config=tower),
        "text": AutoConfig.for_model("gemma3_text", **text),
    }.items():
        config.save_pretrained(tmp_path / folder)
    seeing, plain = (ModelShape.of_directory(tmp_path / folder) for folder in ("seeing", "text"))
    assert plain.frozen == 0
    assert seeing.frozen == seeing.parameters - plain.parameters > 0
    for name in ("trained", "active", "outer", "block", "linear"):
        wanted = getattr(plain, name)
        found = getattr(seeing, name)
        assert (len(found), len(wanted)) == (14, 14) if name == "linear" else found == wanted, name
    assert seeing.moment_bytes("float32") == plain.moment_bytes("float32") == 8 * plain.parameters
    learnt = RunConfig(env="agentrl.envs.calculator:Calculator", model={"path": str(tmp_path / "seeing")})
    plan = make_plan(learnt, memory_bytes=80 * GIB, gpu=True)
    parts = next(phase for phase in plan.phases if phase.name == "update").parts
    assert (parts["parameters"], parts["gradients"]) == (4 * seeing.parameters, 4 * plain.parameters)
    assert plan.checkpoint_bytes == 4 * seeing.parameters + 8 * plain.parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_a_critic_is_counted_as_it_is_made(tmp_path: Path, family: str, tied: bool):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 500, "head_dim": 16}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=2, num_labels=1)
    config.tie_word_embeddings = tied
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        made = AutoModelForTokenClassification.from_config(config)
    assert ModelShape.of_directory(tmp_path).as_critic().parameters == sum(p.numel() for p in made.parameters())


def test_adapters_cost_little(tmp_path: Path):
    plan = make_plan(run(tmp_path, "8B", learner={"lora": {"rank": 16}}), memory_bytes=80 * GIB, gpu=True)
    parts = next(phase for phase in plan.phases if phase.name == "update").parts
    assert parts["optimizer"] == 8 * 43_646_976
    assert "reference" not in parts
    assert plan.checkpoint_bytes == 4 * LARGE + 12 * 43_646_976


def test_models_apart_have_devices_and_memory_of_their_own(tmp_path: Path):
    """8B in bfloat16: what a rank of the policy no longer holds is held by those of the others."""
    learner = {"ranks": 4, "precision": "bfloat16", "checkpoint_activations": True}
    sections = {"algorithm": {"advantage": "gae"}, "rollout": {"token_budget": 4096}}
    scorer = tmp_path / "scorer"
    model(scorer, "0.6B")
    more = {"reward_model": {"kind": "classifier", "path": str(scorer), "workers": 2}}
    beside = make_plan(run(tmp_path, "8B", learner=learner, **sections, **more), gpu=True)
    apart = make_plan(
        run(tmp_path, "8B", learner=learner | {"reference_ranks": 2}, critic={"ranks": 3}, **sections, **more),
        gpu=True,
    )
    held, left = ({phase.name: phase.parts for phase in plan.phases} for plan in (beside, apart))
    assert held["update"].keys() - left["update"].keys() == {"reference", "critic"}
    assert left["reference"]["parameters"] == LARGE * 4 // 2
    assert "optimizer" not in left["reference"]
    one_block = 2 * (6 * 4096 + (4 * 32 + 6 * 8) * 128 + 4 * 12288)
    assert left["reference"]["activations"] == 16384 * one_block, "nothing is kept for a backward pass"
    critic = (LARGE - 151_936 * 4096 + 4096 + 1) * 4  # a number instead of the output layer
    assert (left["critic"]["parameters"], left["critic"]["optimizer"]) == (critic // 3, 2 * critic // 3)
    weights = held["scoring"]["reward model"]
    assert weights == 4 * (SMALL + 2 * 1024), "the body, and a head of two labels"
    assert "reference: 2 ranks, one GPU and 1/2 of the model each, its own" in apart.placement
    assert "critic: 3 ranks, one GPU and 1/3 of the model each, its own" in apart.placement
    assert "reward model: 2 Ray workers, each with one GPU and the whole model" in apart.placement
    needs = (
        "so the Ray cluster needs 11 GPUs: 4 for the policy + 2 for the reference + 3 for the critic + 2 for the"
    )
    assert apart.placement[-1] == f"{needs} reward model"
    assert beside.placement[-1] == "so the Ray cluster needs 6 GPUs: 4 for the policy + 2 for the reward model"
    one = make_plan(run(tmp_path, "8B", learner={"reference_ranks": 1}), gpu=False)
    assert "learner: 1 rank, one CPU, on a Ray cluster on this machine" in one.placement
    assert "both" not in {phase.name for phase in one.phases}


def codes(plan) -> set[str]:
    return {finding.code for finding in plan.findings}


@pytest.mark.parametrize(
    ("code", "name", "sections"),
    [
        ("PL01", "8B", {}),
        ("PL02", "0.6B", {"learner": {"tokens_per_micro_batch": 1024}}),
        ("PL03", "0.6B", {"rollout": {"token_budget": 50_000}, "learner": {"tokens_per_micro_batch": 50_000}}),
        ("PL04", "0.6B", {"rollout": {"max_turns": 40}}),
        ("PL05", "0.6B", {"algorithm": {"updates_per_step": 128}, "learner": {"ranks": 2}}),
        ("PL06", "0.6B", {"algorithm": {"kl": {"where": "both"}}}),
        ("PL07", "0.6B", {}),
        ("PL08", "0.6B", {"engine": {"max_slots": 8}}),
        ("PL09", "0.6B", {"algorithm": {"old_logprobs": "sampler"}}),
        ("PL09", "0.6B", {"rollout": {"max_staleness": 1}}),
        ("PL10", "0.6B", {"optim": {"lr": 1e-3}}),
        ("PL10", "0.6B", {"optim": {"lr": 1e-6}, "learner": {"lora": {}}}),
        ("PL11", "0.6B", {}),
        ("PL13", "0.6B", {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3}}),
        ("PL14", "0.6B", {"rollout": {"group_size": 2}}),
    ],
)
def test_a_rule_speaks_where_it_should_and_not_elsewhere(tmp_path, code, name, sections):
    good = {
        "rollout": {"groups_per_step": 16, "group_size": 8, "token_budget": 4096, "max_tokens": 512},
        "algorithm": {"kl": {"coef": 0.0}},
        "learner": {"precision": "bfloat16", "checkpoint_activations": True},
        "engine": {"dtype": "bfloat16", "max_slots": 64},
    }
    quiet = make_plan(run(tmp_path, **good), memory_bytes=80 * GIB, gpu=True)
    assert codes(quiet) <= {"PL12"}, quiet.findings
    loud = make_plan(run(tmp_path, name, **sections), memory_bytes=80 * GIB, gpu=True)
    assert code in codes(loud)
    assert all(finding.fix and finding.text for finding in loud.findings)


@pytest.mark.parametrize("several", [{"rollout": {"compact": {}}}, {"model": {"history": "fork"}}])
def test_an_episode_with_several_contexts_is_bounded_by_its_budget_alone(tmp_path, several):
    room, rollout = {"learner": {"tokens_per_micro_batch": 45_000}}, {"token_budget": 50_000}
    one = run(tmp_path, rollout=rollout, **room)
    changed = {key: getattr(one, key).model_dump(exclude_unset=True) | more for key, more in several.items()}
    branching = RunConfig.model_validate(one.model_dump(exclude_unset=True) | changed)
    assert {"PL02", "PL03"} & codes(make_plan(one, gpu=False)) == {"PL03"}
    assert {"PL02", "PL03"} & codes(make_plan(branching, gpu=False)) == {"PL02"}


def server(**more: Any) -> dict[str, Any]:
    return {"kind": "sglang", "dtype": "bfloat16", "max_slots": 1024, "server": more}


def test_the_cache_of_a_server_is_what_its_share_of_the_memory_leaves(tmp_path: Path):
    rollout = {"groups_per_step": 128, "group_size": 8, "token_budget": 4096}
    for share, tensor_parallel in ((0.9, 1), (0.5, 1), (0.5, 2)):
        engine = server(gpu_memory_utilization=share, tensor_parallel=tensor_parallel, replicas=2)
        plan = make_plan(run(tmp_path, "8B", rollout=rollout, engine=engine), memory_bytes=80 * GIB, gpu=True)
        cache = int(share * 80 * GIB) - 2 * LARGE // tensor_parallel
        assert plan.kv_bytes == 2 * tensor_parallel * cache
        (phase,) = (p for p in plan.phases if p.name == "rollout")
        assert phase.total == pytest.approx(share * 80 * GIB, rel=1e-6)
        said = [f for f in plan.findings if f.code == "PL01" and "rollout" in f.text]
        assert not said
        assert "PL08" in codes(plan) or share * tensor_parallel > 0.9, "what does not fit waits"
    small = make_plan(run(tmp_path, "8B", engine=server()), memory_bytes=15 * GIB, gpu=True)
    assert any(f.code == "PL01" and f.text.startswith("rollout") for f in small.findings), "weights must fit"
    given = run(tmp_path, "8B", engine=server(urls=["http://127.0.0.1:1"]))
    elsewhere = make_plan(given, memory_bytes=15 * GIB, gpu=True)
    assert not any(f.text.startswith("rollout") for f in elsewhere.findings if f.code == "PL01")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learner": {"ranks": 100_000}}, "the ranks need 100,000 CPU cores, and this machine has"),
        ({"learner": {"device": "cuda:7"}}, "learner.device is cuda:7, and this machine has 0 GPUs"),
        ({"learner": {"device": "cpu"}, "engine": {"device": "cuda"}}, "engine.device is cuda, and this machine"),
    ],
)
def test_devices_that_this_machine_has_not_are_errors(tmp_path, monkeypatch, sections, said):
    monkeypatch.setattr("agentrl.preflight.rules.gpus_here", lambda: 0)
    (found,) = [f for f in make_plan(run(tmp_path, **sections)).findings if f.code == "PL16"]
    assert (found.level, found.text.startswith(said)) == ("error", True)
    assert "PL16" not in codes(make_plan(run(tmp_path, **sections), memory_bytes=80 * GIB, gpu=True))


def test_devices_of_a_cluster_are_not_those_of_this_machine(tmp_path: Path):
    assert "PL16" not in codes(make_plan(run(tmp_path, learner={"ranks": 64}, ray="10.0.0.1:6379")))


def test_an_attention_that_cannot_work_here_is_an_error(tmp_path: Path):
    plan = make_plan(run(tmp_path, learner={"attention": "flex"}), memory_bytes=80 * GIB, gpu=False)
    found = next(finding for finding in plan.findings if finding.code == "PL15")
    assert (found.level, plan.attention) == ("error", "flex")
    assert "flex needs a GPU, and the learner computes on the CPU" in found.text
    assert make_plan(run(tmp_path), memory_bytes=80 * GIB, gpu=False).attention == "sdpa"


def test_a_plan_counts_the_optimizer_state(tmp_path: Path):
    def planned(state: str, **learner: Any) -> Any:
        made = run(tmp_path, "8B", optim={"state": state}, learner=learner)
        return make_plan(made, memory_bytes=80 * GIB, gpu=True)

    parts = {s: planned(s, ranks=8).phases[1].parts["optimizer"] for s in ("float32", "bfloat16", "int8")}
    assert parts["float32"] == 8 * LARGE // 8
    assert parts["bfloat16"] == 4 * LARGE // 8
    assert parts["int8"] == pytest.approx((2 + 8 / 256) * LARGE / 8, rel=1e-6)
    checkpoints = {s: planned(s).checkpoint_bytes for s in ("float32", "int8")}
    assert checkpoints["float32"] - checkpoints["int8"] == 8 * LARGE - 8 * parts["int8"]
    lora = {"lora": {"rank": 16, "targets": ["q_proj"]}}
    q_proj = 36 * 2 * (16 * (4096 + 4 * 4096 // 256) + 4096 * (16 + 4))  # a scale per 256 numbers of a row
    assert planned("int8", **lora).phases[1].parts["optimizer"] == q_proj


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "mamba"])
def test_rows_of_layers_with_a_state_cannot_be_split_in_the_plan(tmp_path: Path, family: str):
    def planned(**learner: int) -> RunConfig:
        made = run(tmp_path, learner=learner)
        AutoConfig.for_model(family, num_hidden_layers=4, hidden_size=64).save_pretrained(tmp_path)
        return made

    split = planned(ranks=4, sequence_ranks=4)
    (found,) = [f for f in make_plan(split, memory_bytes=80 * GIB, gpu=True).findings if f.code == "PL18"]
    assert found.level == "error"
    assert found.text.startswith(
        f"learner.sequence_ranks is 4, and {family} has layers of kind linear_attention, which carry a state"
    )
    assert "use a model with plain attention" in found.fix
    alone = make_plan(planned(), memory_bytes=80 * GIB, gpu=True).findings
    assert [f.level for f in alone if f.code == "PL18" and "rows are not packed but padded" in f.text] == ["note"]


def test_the_command_says_it_all_and_fails_where_the_run_would(tmp_path: Path):
    yaml = tmp_path / "tools.yaml"
    model(tmp_path / "model", "8B")
    yaml.write_text("env: agentrl.envs.calculator:Calculator\nmodel: {path: model}\n")
    done = CliRunner().invoke(app, ["plan", str(yaml), "--memory", "80"])
    assert done.exit_code == 2
    assert "8,190,735,360 parameters" in done.output
    assert "error   PL01  " in done.output
    assert "so engine and learner are colocated" in done.output
    assert re.search(r"^both .*: rollout [\d.]+ GiB, update [\d.]+ GiB$", done.output, re.MULTILINE)
    found = json.loads(CliRunner().invoke(app, ["plan", str(yaml), "--memory", "80", "--json"]).output)
    assert found["model"]["parameters"] == LARGE
    assert {phase["name"] for phase in found["phases"]} == {"rollout", "update", "both"}
    assert "PL01" in {finding["code"] for finding in found["findings"]}
    tiny = "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\noptim: {lr: 4.0e-4}\n"
    yaml.write_text(tiny)
    assert CliRunner().invoke(app, ["plan", str(yaml)]).exit_code == 0


def test_groups_of_unlike_size_are_not_multiplied(tmp_path: Path):
    yaml = tmp_path / "tools.yaml"
    use = "use: agentrl.envs.calculator:Calculator"
    yaml.write_text(
        f"envs:\n  a: {{{use}, share: 2}}\n  b: {{{use}, rollout: {{group_size: 3}}}}\n"
        "model: {tiny: {}}\nrollout: {groups_per_step: 6, group_size: 4}\nalgorithm: {kl: {coef: 0}}\n"
    )
    done = CliRunner().invoke(app, ["plan", str(yaml)])
    assert "\nstep        6 tasks, 22 episodes on average, in 1 update of 22\n" in done.output
    some = CliRunner().invoke(app, ["plan", str(yaml), "--set", "envs.a.algorithm.advantage=remax"])
    assert "\nstep        6 tasks, 22 episodes and 4 greedy ones on average, in 1 update of 22\n" in some.output
    every = ["--set", "algorithm.advantage=remax", "--set", "envs.b.rollout=null"]
    done = CliRunner().invoke(app, ["plan", str(yaml), *every])
    assert "\nstep        6 tasks x 4 = 24 episodes and 6 greedy ones, in 1 update of 24\n" in done.output
    two = ["--set", "envs.a.rollout.group_size=2", "--set", "envs.b.share=2", "--set", "envs.b.rollout=null"]
    done = CliRunner().invoke(app, ["plan", str(yaml), *two])  # no group has the 3 episodes of the mean
    assert "\nstep        6 tasks, 18 episodes on average, in 1 update of 18\n" in done.output
    done = CliRunner().invoke(app, ["plan", str(yaml), *every, "--set", "envs.a.algorithm.advantage=grpo"])
    assert "\nstep        6 tasks, 24 episodes and 2 greedy ones on average, in 1 update of 24\n" in done.output
    one = ["--set", "rollout.groups_per_step=1", "--set", "envs.b.rollout=null"]
    done = CliRunner().invoke(app, ["plan", str(yaml), *one])
    assert "\nstep        1 task x 4 = 4 episodes, in 1 update of 4\n" in done.output


def test_a_model_that_is_none_is_one_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        ModelShape.of_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(ConfigError, match=r"config\.json cannot be used: "):
        ModelShape.of_directory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary embeddings of type 'dynamic'"),
        ({"max_position_embeddings": 0}, "says max_position_embeddings: 0"),
        ({"intermediate_size": 0}, "says intermediate_size: 0"),
        ({"quantization_config": ["fp8"]}, "cannot be used: AttributeError"),
        ({"model_type": "smollm3", "pad_token_id": 200_000}, "Padding_idx must be within"),
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
    ],
)
def test_models_that_do_not_train_are_not_planned(tmp_path: Path, changes: dict[str, Any], said: str):
    file = model(tmp_path, "0.6B") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=said):
        ModelShape.of_directory(tmp_path)


def test_sizes_of_layers_or_parts_are_planned_by_the_largest_and_others_are_one_error(tmp_path: Path):
    """Gemma 3n has a width for each layer, BLT sizes for each of its four models."""
    given = AutoConfig.for_model("gemma3n_text", num_hidden_layers=20)
    given.intermediate_size = [512] * 10 + [1024] * 10
    given.save_pretrained(tmp_path / "layers")
    assert ModelShape.of_directory(tmp_path / "layers").intermediate == 1024
    AutoConfig.for_model("blt").save_pretrained(tmp_path / "parts")
    with pytest.raises(ConfigError, match="blt has no single num_hidden_layers, so it cannot be planned"):
        ModelShape.of_directory(tmp_path / "parts")


def test_a_nested_config_is_one_error(tmp_path: Path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be used: RecursionError"):
        ModelShape.of_directory(tmp_path)


CODE = {"AutoModelForCausalLM": "own.Model", "AutoModelForSequenceClassification": "own.Model"}


@pytest.mark.parametrize("command", [["plan"], ["train", "--smoke"]])
@pytest.mark.parametrize(
    ("own", "role"),
    [
        ({"model_type": "own", "auto_map": CODE | {"AutoConfig": "own.Own"}}, "model"),
        (
            {"model_type": "vit", "num_hidden_layers": 1, "layer_types": ["linear_attention"], "auto_map": CODE},
            "model",
        ),
        ({"model_type": "codegen", "auto_map": CODE}, "reward_model"),
    ],
    ids=["config", "model", "reward model"],
)
def test_code_of_a_model_folder_is_never_run(
    tmp_path: Path,
    command: list[str],
    own: dict[str, Any],
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """transformers would ask whether to, and run it after a yes."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "own.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\nclass Own(PretrainedConfig):\n    model_type = 'own'\n"
    )
    yaml = tmp_path / "tools.yaml"
    models = {"model": "{path: model}", "reward_model": "{kind: classifier, path: model}"}
    roles = "".join(f"{key}: {value}\n" for key, value in models.items() if key == role)
    roles += "" if role == "model" else "model: {tiny: {}}\n"
    yaml.write_text(f"env: agentrl.envs.calculator:Calculator\n{roles}name: own\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(SystemExit) as left:
        main([command[0], str(yaml), *command[1:]])
    assert not ran.exists()
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert ("agentrl runs no code from model folders" in printed.err) == (own["model_type"] == "own")
    assert "Do you wish" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("number", "text"), [(12, "12 B"), (2048, "2 KiB"), (3 * GIB, "3 GiB"), (1536 * GIB, "1.5 TiB")]
)
def test_sizes_are_for_people(number: int, text: str):
    assert size(number) == text


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "mistral", "head_dim": 24},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen2", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "head_dim": None},
    ],
)
def test_arithmetic_counts_what_transformers_counts(tmp_path: Path, config: dict[str, Any], monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(sizes | config))

    def counted() -> ModelShape | str:
        try:
            return ModelShape.of_directory(tmp_path)
        except ConfigError as e:
            return str(e)

    quick = counted()
    monkeypatch.setattr("agentrl.preflight.shape.KNOWN", ())
    assert counted() == quick


@pytest.mark.parametrize("heads", [4, 1, 3])
def test_a_tiny_model_is_counted_as_it_is_made(tmp_path: Path, heads: int):
    from agentrl.config.run import TinyModel
    from agentrl.models.tiny import make_tiny_model

    tiny = TinyModel(hidden=48, heads=heads, layers=2, intermediate=64, vocab=320)
    made = make_tiny_model(tmp_path / "made", ["some text for the tokenizer"], tiny, seed=0)
    directory = made if isinstance(made, Path) else tmp_path / "made"
    found, planned = ModelShape.of_directory(directory), ModelShape.of_tiny(tiny)
    assert (found.block, found.linear, found.named) == (planned.block, planned.linear, planned.named)
    assert found.parameters - planned.parameters == (found.vocab - planned.vocab) * 48


def test_planning_imports_neither_torch_nor_transformers(tmp_path: Path):
    yaml = tmp_path / "tools.yaml"
    model(tmp_path / "model", "0.6B")
    yaml.write_text("env: agentrl.envs.calculator:Calculator\nmodel: {path: model}\n")
    code = (
        "import sys\nfrom agentrl.cli.app import app\n"
        f"app(['plan', {str(yaml)!r}], standalone_mode=False)\n"
        "print('imported', sorted({'torch', 'transformers', 'openai', 'numpy'} & sys.modules.keys()))\n"
    )
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr
