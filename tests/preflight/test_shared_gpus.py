"""`agentrl plan --gpus`: what shares a GPU, what ranks send each other, and which setting saves most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import load_config
from agentrl.errors import ConfigError
from agentrl.preflight.estimate import Plan
from agentrl.preflight.machines import machine_of
from agentrl.preflight.phases import cache_parts
from agentrl.preflight.plan import make_plan
from agentrl.preflight.shape import ModelShape
from tests.preflight.test_machines import QWEN3, RECIPES, ROOT, folder, sizes

LONG, EIGHT, LORA = ("qwen3-8b-131k-8gpu", "8b-131k"), ("qwen3-8b-8gpu", "8b"), ("qwen3-4b-lora", "4b")
EXPERTS = ("qwen3-30b-a3b-16gpu", "30b-a3b")
PPO = ("algorithm.advantage=gae", "critic.ranks=0")
SHARD = 12 * 8_190_735_360 // 8  # parameters and both moments of a rank
CRITIC = 12 * 7_568_409_601 // 8  # without the output layer


def plan(tmp_path: Path, which: tuple[str, str], gpus: str, *settings: str, nodes: int = 1) -> Plan:
    recipe, model = which
    path = folder(tmp_path / "model", model)
    config = load_config(ROOT / f"configs/{recipe}.yaml", [f"model.path={path}", *settings])
    return make_plan(config, machine=machine_of(gpus, nodes))


def seconds(found: Plan) -> float:
    assert found.prediction is not None
    return found.prediction.together


def errors(found: Plan) -> dict[str, str]:
    return {finding.code: finding.text for finding in found.findings if finding.level == "error"}


def phase(found: Plan, name: str) -> Any:
    return next(one for one in found.phases if one.name == name)


@pytest.mark.parametrize(
    ("settings", "more", "fits"),
    [
        ((), 0, True),
        (("algorithm.kl.coef=0.001",), 4 * 8_190_735_360 // 8, True),
        (PPO, CRITIC, True),
        ((*PPO, "engine.server.gpu_memory_utilization=0.7"), CRITIC, False),
        (("engine.server.gpu_memory_utilization=0.95", "engine.max_slots=2"), 0, False),
    ],
)
def test_sleeping_servers_share_memory_with_all_that_the_learner_keeps(
    tmp_path: Path, settings: tuple[str, ...], more: int, fits: bool
):
    found = plan(tmp_path, LONG, "8xH100", *settings)
    shares = [float(one.rpartition("=")[2]) for one in settings if "utilization" in one] or [0.6]
    assert found.memory_bytes is not None
    wanted = shares[0] * found.memory_bytes + SHARD + more
    assert phase(found, "rollout").total == pytest.approx(wanted, rel=1e-3)
    assert ("PL01" in errors(found)) is not fits


def test_a_classifier_in_the_run_shares_memory_with_engine_and_learner(tmp_path: Path):
    scorer = folder(tmp_path / "scorer", "8b")
    own = json.loads((scorer / "config.json").read_text()) | {"architectures": ["Qwen3ForSequenceClassification"]}
    (scorer / "config.json").write_text(json.dumps(own))
    model = ("reward_model.kind=classifier", f"reward_model.path={scorer}")
    without, shared = plan(tmp_path, LORA, "H100"), plan(tmp_path, LORA, "H100", *model)
    weights = phase(shared, "both").parts["reward model"]
    assert phase(shared, "both").total == phase(without, "both").total + weights
    assert weights == pytest.approx(4 * 7.57e9, rel=0.01), "8B without the output layer"
    assert not errors(without)
    assert "both needs 86" in errors(shared)["PL01"]
    apart = plan(tmp_path, LORA, "2xH100", *model, "reward_model.workers=1")
    assert phase(apart, "scoring").parts == {"reward model": weights}
    assert not errors(apart)


def test_one_gpu_does_not_sample_and_learn_at_full_speed(tmp_path: Path):
    stale = plan(tmp_path, LORA, "H100", "rollout.max_staleness=1")
    assert stale.prediction is not None
    parts = (stale.prediction.rollout, stale.prediction.update, stale.prediction.publish)
    assert seconds(stale) == pytest.approx(sum(parts))
    advice = plan(tmp_path, LORA, "H100").saves_most
    assert advice is not None
    assert "rollout.max_staleness" not in advice.values


@pytest.mark.parametrize(("recipe", "model", "gpus", "nodes"), RECIPES)
def test_advice_can_be_followed_and_helps(tmp_path: Path, recipe: str, model: str, gpus: str, nodes: int):
    before = plan(tmp_path, (recipe, model), gpus, nodes=nodes)
    advice = before.saves_most
    if advice is None:
        return
    settings = [f"{key}={json.dumps(value)}" for key, value in advice.values.items()]
    after = plan(tmp_path, (recipe, model), gpus, *settings, nodes=nodes)
    assert errors(after) == {}
    assert advice.seconds == pytest.approx(seconds(after))
    assert seconds(after) < 0.98 * seconds(before)


def test_advice_names_no_gpus_that_are_not_there(tmp_path: Path):
    assert plan(tmp_path, EIGHT, "8xH100").saves_most is None
    more = plan(tmp_path, EIGHT, "16xH100").saves_most
    assert more is not None
    assert "engine.server.replicas" in more.values


def test_slots_beyond_the_memory_save_nothing(tmp_path: Path):
    some, many = (plan(tmp_path, LONG, "8xH100", f"engine.max_slots={slots}") for slots in (64, 512))
    assert seconds(some) == pytest.approx(seconds(many))
    assert some.kv_bytes == many.kv_bytes
    (waits,) = [finding for finding in many.findings if finding.code == "PL08"]
    assert waits.fix.startswith(
        "memory limits them: lower rollout.token_budget, or raise engine.server.gpu_memory"
    )


def test_the_cache_of_the_local_engine_is_half_of_what_is_free(tmp_path: Path):
    small = ("qwen3-0.6b-calculator", "0.6b")
    found = plan(tmp_path, small, "A10")
    weights = 596_049_920
    assert found.memory_bytes is not None
    assert found.kv_bytes == (found.memory_bytes - 2 * 4 * weights - 2 * weights) // 2  # with the reference
    assert found.kv_limited
    assert "both" in errors(found)["PL01"]
    assert not errors(plan(tmp_path, small, "A10", "engine.max_slots=6"))


def test_ranks_wait_for_slow_links(tmp_path: Path):
    wide = (
        *("learner.ranks=16", "engine.server.sleep=true", "engine.sync=tensor", "rollout.max_staleness=0"),
        *("engine.server.gpu_memory_utilization=0.5", "engine.server.replicas=8"),
    )

    def update(gpus: str, nodes: int, *more: str) -> float:
        found = plan(tmp_path, EXPERTS, gpus, *wide, *more, nodes=nodes).prediction
        assert found is not None
        return found.update

    # 16 micro-batches, half full: each gathers 61 GB twice and sums 122 GB, at 70 % of two ports of 50 GB/s
    moved = 16 * 30_532_122_624 * (2 * 2 + 4) * 15 / 16
    assert update("2xH100", 8) == pytest.approx(moved / (0.7 * 100e9), rel=0.01)
    assert update("8xH100", 2) < 0.5 * update("2xH100", 8)
    assert update("16xH100", 1) <= update("8xH100", 2)


def test_what_is_kept_in_host_memory_takes_time(tmp_path: Path):
    settings = ("learner.checkpoint_activations=true", "rollout.token_budget=4096")

    def update(*more: str) -> float:
        found = plan(tmp_path, ("qwen3-0.6b-calculator", "8b"), "B200", *settings, *more).prediction
        assert found is not None
        return found.update

    tokens = 128 * 4096 // 2
    each, updated = 4 * 8_190_735_360 / 25e9, 28 * 8_190_735_360 / 20e9
    for size in (4096, 16384):  # weights come twice for a micro-batch, and once for the reference
        often = tokens // size
        found = update("learner.cpu_offload=true", f"learner.tokens_per_micro_batch={size}")
        assert found == pytest.approx(often * 4 * each + updated, rel=0.01)
    assert update("learner.offload_activations=true") == update(), "as long as the operations take longer"


@pytest.mark.parametrize("again", [True, False])
def test_what_the_backward_pass_computes_again_is_not_offloaded(tmp_path: Path, again: bool):
    settings = ("learner.offload_activations=true", f"learner.checkpoint_activations={str(again).lower()}")
    found = plan(tmp_path, EIGHT, "8xH100", *settings).phases[1].parts
    block = 2 * (6 * 4096 + (4 * 32 + 6 * 8) * 128 + 4 * 12288)
    assert found.get("activations", 0) == (8192 * block if again else 0)


@pytest.mark.parametrize("split", [1, 4])
def test_every_gpu_of_a_server_reads_the_only_head_of_keys_and_values(tmp_path: Path, split: int):
    which = ("qwen3-8b-8gpu", "one-head")
    settings = (f"engine.server.tensor_parallel={split}", "engine.server.replicas=1")
    found = plan(tmp_path, which, "8xH100", *settings)
    assert found.prediction is not None
    cache = 128 * 2048 * 2 * 36 * 128 * 2  # of 128 episodes, halfway to the 4096 tokens that they have in the end
    each_reads = 2 * found.model.parameters / split + cache
    step_s = each_reads / (0.6 * 3.35e12)
    assert found.prediction.rollout == pytest.approx(512 / 128 * 4096 * step_s)


@pytest.mark.parametrize(
    ("gpus", "settings", "said"),
    [
        ("2xH100", [], ["the learner is on cuda:0 of the run's node, which Ray may also give to a server"]),
        ("2xH100", ["learner.device=cuda:1"], []),
        ("8xH100", ["learner.device=cuda:1", "engine.server.replicas=7"], ["the learner is on cuda:1"]),
        ("2xH100", ["algorithm.kl.coef=0.01", "learner.reference_ranks=1"], []),
    ],
)
def test_ray_does_not_know_which_gpu_the_process_of_the_run_has(
    tmp_path: Path, gpus: str, settings: list[str], said: list[str]
):
    given = ("engine.server.launch=ray", "engine.device=auto", "learner.device=auto")
    found = plan(tmp_path, ("qwen3-0.6b-sglang", "0.6b"), gpus, *given, *settings)
    texts = [f.text for f in found.findings if f.code == "PL17" and "Ray may also" in f.text]
    assert len(texts) == len(said)
    assert all(text.startswith(start) for text, start in zip(texts, said, strict=True))


@pytest.mark.parametrize("key", ["learner.device", "engine.device"])
def test_the_cpu_is_no_gpu(tmp_path: Path, key: str):
    with pytest.raises(ConfigError, match=rf"{key} is cpu, so it uses no GPU of --gpus: set it to auto"):
        plan(tmp_path, LORA, "H100", f"{key}=cpu")


def test_engine_and_learner_on_gpus_with_numbers_share_nothing(tmp_path: Path):
    found = plan(tmp_path, LORA, "2xH100", "engine.device=cuda:1", "learner.device=cuda:0")
    assert [one.name for one in found.phases] == ["rollout", "update"]
    assert "engine: in the process of the run, on cuda:1" in found.placement
    assert "so they are split: each has its own devices" in found.placement
    assert "PL17" not in {finding.code for finding in found.findings}
    advice = found.saves_most
    assert advice is not None
    assert advice.values == {"rollout.max_staleness": 1}


@pytest.mark.parametrize(
    ("which", "nodes", "settings", "said"),
    [
        (EXPERTS, 2, ["engine.server.launch=process"], "GPUs 0 to 7, which Ray may also give to the learner's"),
        (EXPERTS, 4, ["engine.server.launch=process", "engine.server.replicas=12"], "GPUs 0 to 23 of the run's"),
        (EIGHT, 2, ["learner.ranks=12"], "the ranks need 12 GPUs, and without `ray` they are on one node"),
        (EIGHT, 1, ["engine.server.replicas=5"], "the run needs 9 GPUs"),
    ],
)
def test_gpus_that_are_given_twice_are_an_error(
    tmp_path: Path, which: tuple[str, str], nodes: int, settings: list[str], said: str
):
    found = plan(tmp_path, which, "8xH100", *settings, nodes=nodes)
    assert any(said in f.text for f in found.findings if (f.code, f.level) == ("PL17", "error")), found.findings


@pytest.mark.parametrize("launch", ["process", "ray"])
def test_ranks_and_servers_of_this_machine_are_counted_together(tmp_path: Path, monkeypatch, launch: str):
    monkeypatch.setattr("agentrl.preflight.rules.gpus_here", lambda: 4)
    monkeypatch.setattr("agentrl.preflight.estimate.gpus_here", lambda: 4)
    path = folder(tmp_path / "model", "8b")
    settings = [
        f"model.path={path}",
        f"engine.server.launch={launch}",
        "engine.device=cuda",
        "learner.device=cuda",
    ]
    config = load_config(ROOT / "configs/qwen3-8b-8gpu.yaml", [f"model.path={path}", *settings])
    said = [f.text for f in make_plan(config).findings if f.code == "PL16"]
    assert "the sglang servers and the ranks need 8 GPUs (4 and 4), and this machine has 4" in said


def test_the_cluster_needs_gpus_for_servers_too(tmp_path: Path):
    said = plan(tmp_path, EIGHT, "8xH100").placement[-1]
    assert said == "so the Ray cluster needs 8 GPUs: 4 for the policy + 4 for the servers"


def shape_of(tmp_path: Path, **config: Any) -> ModelShape:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelShape.of_directory(tmp_path)


def test_a_token_passes_through_several_experts(tmp_path: Path):
    base = QWEN3 | sizes(64, 128, 2, 4) | {"vocab_size": 100, "head_dim": 16, "num_key_value_heads": 2}
    mixtral = base | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    assert shape_of(tmp_path, **mixtral, num_local_experts=8, num_experts_per_tok=2).intermediate == 256
    experts = base | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    counts = {"moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 4}
    assert shape_of(tmp_path, **experts, **counts).intermediate == 4 * 48


def test_latent_attention_keeps_less_on_servers(tmp_path: Path):
    shape = shape_of(
        tmp_path,
        model_type="deepseek_v2",
        architectures=["DeepseekV2ForCausalLM"],
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    assert shape.kv_bytes_per_token(2) == 3 * 4 * (16 + 8 + 12) * 2
    assert shape.kv_bytes_per_token(2, latent=True) == 3 * (32 + 8) * 2
    assert shape.intermediate == 3 * 32
    servers = ("engine.server.replicas=1", "engine.server.tensor_parallel=4")
    config = load_config(ROOT / "configs/qwen3-8b-8gpu.yaml", [f"model.path={tmp_path}", *servers])
    assert cache_parts(config, shape) == 1, "each GPU of a server keeps all of it"
    assert cache_parts(config, replace(shape, latent=0)) == 4


def test_attention_with_sinks_is_not_packed(tmp_path: Path):
    path = tmp_path / "sinks"
    shape_of(
        path,
        model_type="gpt_oss",
        architectures=["GptOssForCausalLM"],
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    config = load_config(ROOT / "configs/qwen3-8b-8gpu.yaml", [f"model.path={path}"])
    (found,) = [f for f in make_plan(config, machine=machine_of("8xH100")).findings if f.code == "PL18"]
    assert found.level == "note"
    assert found.text.startswith("gpt_oss has attention with sinks: rows are not packed but padded")
