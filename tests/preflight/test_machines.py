"""`agentrl plan --gpus`: machines that are not here, and the shipped recipes on theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.load import load_config
from agentrl.errors import ConfigError
from agentrl.preflight.machines import CARDS, machine_of
from agentrl.preflight.plan import make_plan
from agentrl.preflight.shape import ModelShape

ROOT = Path(__file__).parents[2]
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def sizes(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return QWEN3 | dict(zip(names, (hidden, intermediate, layers, heads), strict=True)) | more


MODELS = {
    "0.6b": sizes(1024, 3072, 28, 16, tie_word_embeddings=True),
    "4b": sizes(2560, 9728, 36, 32, tie_word_embeddings=True),
    "8b": sizes(4096, 12288, 36, 32),
    "one-head": sizes(4096, 12288, 36, 32, num_key_value_heads=1),
    "8b-131k": sizes(4096, 12288, 36, 32, max_position_embeddings=131072),
    "32b": sizes(5120, 25600, 64, 64),
    "30b-a3b": sizes(
        *(2048, 6144, 48, 32),
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_key_value_heads=4,
    ),
}
RECIPES = [
    ("qwen3-0.6b-calculator", "0.6b", "H100-80GB", 1),
    ("qwen3-0.6b-sglang", "0.6b", "2xH100-80GB", 1),
    ("qwen3-4b-lora", "4b", "H100-80GB", 1),
    ("qwen3-8b-8gpu", "8b", "8xH100-80GB", 1),
    ("qwen3-8b-131k-8gpu", "8b-131k", "8xH100-80GB", 1),
    ("qwen3-32b-lora-8gpu", "32b", "8xH100-80GB", 1),
    ("qwen3-30b-a3b-16gpu", "30b-a3b", "8xH100-80GB", 2),
]


def folder(path: Path, model: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    return path


@pytest.mark.parametrize(("recipe", "model", "gpus", "nodes"), RECIPES)
def test_a_recipe_fits_its_machine(tmp_path: Path, recipe: str, model: str, gpus: str, nodes: int):
    path = folder(tmp_path / "model", model)
    command = ["plan", str(ROOT / f"configs/{recipe}.yaml"), "--gpus", gpus, "--nodes", str(nodes)]
    result = CliRunner().invoke(app, [*command, "--set", f"model.path={path}", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [f for f in plan["findings"] if f["level"] == "error" or f["code"] == "PL17"] == []
    assert plan["prediction"]["together"] > 0
    assert "GPU" in " ".join(plan["placement"])
    told = CliRunner().invoke(app, [*command, "--set", f"model.path={path}"]).stdout
    assert "predicted" in told
    assert "saves most" in told


def plan_of(tmp_path: Path, gpus: str, *overrides: str) -> Any:
    path = folder(tmp_path / "model", "8b")
    config = load_config(ROOT / "configs/qwen3-8b-8gpu.yaml", [f"model.path={path}", *overrides])
    return make_plan(config, machine=machine_of(gpus))


def test_gpus_that_are_missing_or_idle_are_named(tmp_path: Path):
    few = {f.code: f for f in plan_of(tmp_path, "4xH100-80GB").findings}
    assert few["PL17"].level == "error"
    assert "needs 8 GPUs (4 to learn, 4 to sample), and there are 4 x H100-80GB" in few["PL17"].text
    many = {f.code: f for f in plan_of(tmp_path, "16xH100-80GB").findings}
    assert (many["PL17"].level, "8 of the 16" in many["PL17"].text) == ("warning", True)
    small = plan_of(tmp_path, "8xA100-40GB")
    assert any(f.code == "PL01" for f in small.findings)
    wide = plan_of(tmp_path, "8xH100-80GB", "engine.server.tensor_parallel=16", "engine.server.replicas=1")
    assert any("a node has 8" in f.text for f in wide.findings)


def test_rows_of_131k_tokens_need_ranks_that_share_them(tmp_path: Path):
    def plan(*overrides: str) -> Any:
        path = f"model.path={folder(tmp_path / 'model', '8b-131k')}"
        config = load_config(ROOT / "configs/qwen3-8b-131k-8gpu.yaml", [path, *overrides])
        made = make_plan(config, machine=machine_of("8xH100-80GB"))
        return made, {f.code: f for f in made.findings if f.level == "error"}

    split, errors = plan()
    assert errors == {}
    assert "rows: 8 ranks compute each together, at most 131,072 tokens at once" in split.placement
    update = split.phases[1]
    assert update.total < 0.5 * split.memory_bytes
    # 16,384 tokens of 32 heads and twice 8, of 128 numbers of 2 bytes, on their way out and in
    assert update.parts["exchange"] == 16384 * 2 * (32 + 2 * 8) * 128 * 2
    wide, _ = plan("learner.ranks=32", "learner.sequence_ranks=16", "learner.tokens_per_micro_batch=16384")
    assert wide.phases[1].parts["exchange"] == 16384 * 2 * (32 + 2 * 16) * 128 * 2  # keys and values twice
    assert wide.phases[1].parts["activations"] > update.parts["activations"]
    few = plan("learner.sequence_ranks=4")[1]
    assert "learner.sequence_ranks to 8 or more" in few["PL02"].fix
    whole = plan("learner.sequence_ranks=null", "learner.tokens_per_micro_batch=131072")[1]
    assert "raise learner.sequence_ranks so that episodes still fit" in whole["PL01"].fix
    assert (
        "set learner.sequence_ranks to 32 or less"
        in plan("learner.ranks=64", "learner.sequence_ranks=64")[1]["PL15"].fix
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.sequence_ranks=3"], "learner.ranks is 8, not a multiple of it: set learner.ranks to 9"),
        (["learner.ranks=1"], "learner.ranks is 1, not a multiple of it: set learner.ranks to 8"),
        (
            ["learner.reference_ranks=2", "algorithm.kl.coef=0.1"],
            "learner.reference_ranks is 2, not a multiple of it: set learner.reference_ranks to 8",
        ),
        (["algorithm.advantage=gae", "critic.ranks=4"], "critic.ranks is 4, not a multiple of it"),
    ],
)
def test_sequence_ranks_that_cannot_be_are_refused(overrides: list[str], said: str):
    with pytest.raises(ConfigError, match=said):
        load_config(ROOT / "configs/qwen3-8b-131k-8gpu.yaml", overrides)


def test_predictions_follow_the_machine(tmp_path: Path):
    slow, quick = plan_of(tmp_path, "8xA100-80GB"), plan_of(tmp_path, "8xB200-180GB")
    assert slow.prediction.rollout > 2 * quick.prediction.rollout
    assert slow.prediction.update > 4 * quick.prediction.update
    ranks = plan_of(tmp_path, "16xH100-80GB", "learner.ranks=8").prediction
    assert ranks.update == pytest.approx(plan_of(tmp_path, "16xH100-80GB").prediction.update / 2)
    waits = plan_of(tmp_path, "8xH100-80GB", "rollout.max_staleness=0")
    synchronous = waits.prediction
    parts = (synchronous.rollout, synchronous.update, synchronous.publish)
    assert synchronous.together == pytest.approx(sum(parts))
    assert waits.saves_most.values == {"rollout.max_staleness": 1}
    assert waits.saves_most.seconds == pytest.approx(plan_of(tmp_path, "8xH100-80GB").prediction.together)
    assert synchronous.dollars == pytest.approx(synchronous.together * 8 * 3.0 / 3600)


def test_the_arithmetic_by_hand(tmp_path: Path):
    """One token of an 8B model at batch 1: 16.4 GB at 60 % of 3.35 TB/s are 8.1 ms."""
    path = folder(tmp_path / "model", "8b")
    overrides = [
        *(f"model.path={path}", "rollout.groups_per_step=1", "rollout.group_size=2", "engine.max_slots=1"),
        *(
            "rollout.max_turns=1",
            "rollout.max_tokens=1024",
            "rollout.token_budget=1024",
            "rollout.max_staleness=0",
        ),
        *("engine.server.replicas=2",),
    ]
    config = load_config(ROOT / "configs/qwen3-8b-8gpu.yaml", overrides)
    plan = make_plan(config, machine=machine_of("8xH100-80GB"))
    found = plan.prediction
    per_token = (2 * 8_190_735_360 + 256 * 147_456) / (3.35e12 * 0.6)
    assert found.rollout == pytest.approx(512 * per_token, rel=1e-6)


def test_greedy_episodes_take_their_time_in_the_rollout(tmp_path: Path):
    shared = ("rollout.groups_per_step=512", "algorithm.kl.coef=0", "rollout.token_budget=8192")
    one = plan_of(tmp_path, "8xH100-80GB", *shared, "rollout.group_size=1", "algorithm.advantage=remax")
    two = plan_of(tmp_path, "8xH100-80GB", *shared, "rollout.group_size=2", "algorithm.advantage=rloo")
    assert one.prediction.rollout == pytest.approx(two.prediction.rollout)
    assert one.prediction.update < two.prediction.update
    said = [next(f.text for f in plan.findings if f.code == "PL08") for plan in (one, two)]
    assert said[0].startswith("1,024 episodes, if all are as long as they may be, share ")
    assert said[0] == said[1]


def test_experts_that_a_token_does_not_meet_cost_no_time(tmp_path: Path):
    shape = ModelShape.of_directory(folder(tmp_path / "model", "30b-a3b"))
    assert shape.parameters == pytest.approx(30.5e9, rel=0.02)
    assert shape.active == pytest.approx(3.3e9, rel=0.05)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH1000", "unknown card 'H1000'.*; for another card, give its memory with --memory GIB"),
        ("8xA100", "say which: A100-40GB or A100-80GB"),
        ("1xH100-94GB", "unknown card 'H100-94GB'"),
        ("8xH20-141GB", "unknown card 'H20-141GB'"),
        ("0xH100", "write NUMBERxCARD"),
        ("eight H100s", "write NUMBERxCARD"),
    ],
)
def test_a_machine_that_nobody_knows(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        machine_of(text)


def test_small_machines_have_a_price(tmp_path: Path):
    path = folder(tmp_path / "model", "0.6b")
    command = ["plan", str(ROOT / "configs/qwen3-0.6b-calculator.yaml"), "--set", f"model.path={path}", "--gpus"]
    assert "1 x RTX4090, $0.50 per hour" in CliRunner().invoke(app, [*command, "RTX4090"]).stdout
    assert "2 x L4, $1.60 per hour" in CliRunner().invoke(app, [*command, "2xL4"]).stdout


def test_a_reference_does_not_slow_the_critic(tmp_path: Path):
    ppo = ("algorithm.advantage=gae", "learner.checkpoint_activations=false")
    shared = plan_of(tmp_path, "8xH100-80GB", "learner.checkpoint_activations=false").prediction.update
    critic = plan_of(tmp_path, "8xH100-80GB", *ppo).prediction.update - shared
    one = plan_of(tmp_path, "8xH100-80GB", "learner.checkpoint_activations=false", "algorithm.kl.coef=0.01")
    both = plan_of(tmp_path, "8xH100-80GB", *ppo, "algorithm.kl.coef=0.01")
    assert both.prediction.update - one.prediction.update == pytest.approx(critic)


def test_the_page_names_every_card():
    page = " ".join((ROOT / "docs/distributed.md").read_text().split())
    listed = page.partition("Known cards are ")[2].partition(".")[0]
    assert listed.replace(" and ", ", ").split(", ") == list(CARDS)


def test_names_of_machines():
    assert str(machine_of("8XH100")) == "8 x H100-80GB"
    assert str(machine_of("8xh100", 2)) == "2 nodes of 8 x H100-80GB"
    assert machine_of("H200-141GB").total == 1
    assert machine_of("2xRTX-4090") == machine_of("2xRTX4090")
    assert machine_of("RTX_6000-Ada").name == "RTX6000Ada"
    assert machine_of("RTX-PRO-6000").name == "RTXPRO6000"
    assert machine_of("RTX3090-24GB").name == "RTX3090"
    assert machine_of("8xb200-192gb").name == "B200-180GB"
    assert machine_of("A100-80G").name == "A100-80GB"
    assert all(machine_of(name).name == name for name in CARDS)
    for wrong in (["--nodes", "2"], ["--gpus", "H100", "--memory", "80"]):
        result = CliRunner().invoke(app, ["plan", str(ROOT / "examples/calculator/tools.yaml"), *wrong])
        assert result.exit_code != 0


def planned(tmp_path: Path, recipe: str, model: str, gpus: str, *settings: str) -> Any:
    """The plan of a recipe, and whether the command failed."""
    path = folder(tmp_path / "model", model)
    overrides = [part for one in (f"model.path={path}", *settings) for part in ("--set", one)]
    result = CliRunner().invoke(
        app, ["plan", str(ROOT / f"configs/{recipe}.yaml"), "--gpus", gpus, "--json", *overrides]
    )
    assert result.exit_code in (0, 2), result.exception
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("recipe", "model", "gpus", "settings", "code", "said"),
    [
        ("qwen3-0.6b-sglang", "0.6b", "2xH100", ["engine.device=cuda:0"], "PL17", "are both on cuda:0"),
        ("qwen3-0.6b-sglang", "0.6b", "2xH100", ["engine.device=auto"], "PL17", "are both on cuda:0"),
        ("qwen3-0.6b-sglang", "0.6b", "2xH100", ["engine.device=cuda:7"], "PL17", "a node has 2 GPUs"),
        ("qwen3-8b-8gpu", "8b", "8xH100", ["engine.server.launch=process"], "PL17", "which Ray may also give"),
        (
            *("qwen3-8b-8gpu", "8b", "8xH100"),
            ["engine.kind=local", "engine.sync=null", "engine.server=null", "learner.ranks=8"],
            *("PL17", "needs 9 GPUs"),
        ),
        ("qwen3-8b-8gpu", "8b", "16xH100", ["engine.server.tensor_parallel=3"], "PL19", "32 heads"),
        (
            "qwen3-8b-8gpu",
            "8b",
            "8xH100",
            ["engine.server.gpu_memory_utilization=0.15"],
            "PL19",
            "one episode may need",
        ),
        (
            *("qwen3-8b-131k-8gpu", "8b-131k", "8xH100"),
            ["engine.server.gpu_memory_utilization=0.88"],
            *("PL01", "rollout needs 81"),
        ),
    ],
)
def test_what_would_fail_on_the_machine_is_an_error(
    tmp_path: Path, recipe: str, model: str, gpus: str, settings: list[str], code: str, said: str
):
    found = planned(tmp_path, recipe, model, gpus, *settings)["findings"]
    assert any(f["code"] == code and f["level"] == "error" and said in f["text"] for f in found), found


def test_a_batch_reads_all_experts_that_its_tokens_choose(tmp_path: Path):
    shape = ModelShape.of_directory(folder(tmp_path / "model", "30b-a3b"))
    assert shape.touched(1) == shape.active
    assert shape.touched(128) > 0.99 * shape.parameters
    found = planned(tmp_path, "qwen3-30b-a3b-16gpu", "30b-a3b", "16xH100")["prediction"]
    assert found["rollout"] > 60, "61 GB of weights and 26 GB of keys and values, at 2 TB/s, for 2,000 tokens"


def test_what_changed_is_sent_sooner_than_everything(tmp_path: Path):
    arguments = (tmp_path, "qwen3-8b-8gpu", "8b", "8xH100")
    delta, whole = (
        planned(*arguments, f"engine.sync={sync}")["prediction"]["publish"] for sync in ("delta", "tensor")
    )
    assert delta < whole < 60


def test_sending_only_the_adapter_is_suggested(tmp_path: Path):
    whole = planned(tmp_path, "qwen3-32b-lora-8gpu", "32b", "8xH100", "engine.sync=tensor")
    assert whole["saves_most"]["values"] == {"engine.sync": "lora"}
    adapter = planned(tmp_path, "qwen3-32b-lora-8gpu", "32b", "8xH100")
    assert whole["saves_most"]["seconds"] == pytest.approx(adapter["prediction"]["together"])


def test_vllm_gets_tensors_by_value(tmp_path: Path):
    arguments = (tmp_path, "qwen3-0.6b-sglang", "0.6b", "2xH100", "engine.sync=tensor")
    by_handle, by_value = (planned(*arguments, f"engine.kind={kind}")["prediction"] for kind in ("sglang", "vllm"))
    assert by_value["publish"] == pytest.approx(2 * 596_049_920 / 3e9)
    assert by_handle["publish"] < 0.1 * by_value["publish"]
    whole = planned(*arguments, "engine.kind=vllm", "engine.dtype=float32")["prediction"]
    assert whole["publish"] == pytest.approx(4 * 596_049_920 / 3e9)


@pytest.mark.parametrize(
    ("gpus", "nodes", "split", "replicas", "said"),
    [
        ("4xH100", 4, 8, 1, "a server of 8 GPUs runs on one node, and a node has 4"),
        (
            "6xH100",
            3,
            4,
            4,
            "4 servers of 4 GPUs, each on one node, do not fit on 3 nodes of 6 x H100-80GB, which",
        ),
        ("6xH100", 3, 4, 3, None),
    ],
)
def test_a_server_is_on_one_node(
    tmp_path: Path, gpus: str, nodes: int, split: int, replicas: int, said: str | None
):
    path = folder(tmp_path / "model", "8b")
    overrides = [f"engine.server.tensor_parallel={split}", f"engine.server.replicas={replicas}", "ray=auto"]
    overrides += [f"model.path={path}", "learner.ranks=2"]
    plan = make_plan(load_config(ROOT / "configs/qwen3-8b-8gpu.yaml", overrides), machine=machine_of(gpus, nodes))
    found = [f.text for f in plan.findings if f.code == "PL17" and f.level == "error"]
    assert found == [] if said is None else any(text.startswith(said) for text in found), found


def test_models_with_ranks_of_their_own_take_their_time(tmp_path: Path):
    arguments = (tmp_path, "qwen3-8b-8gpu", "8b", "8xH100")
    shared = planned(*arguments, "algorithm.kl.coef=0.01")["prediction"]["update"]
    apart = planned(*arguments, "algorithm.kl.coef=0.01", "learner.reference_ranks=1", "learner.ranks=3")[
        "prediction"
    ]["update"]
    assert apart > 1.5 * shared, "one rank runs the reference pass that four ranks shared"
    small = folder(tmp_path / "small", "0.6b")
    ppo = planned(*arguments, "algorithm.advantage=gae", f"critic.path={small}")["prediction"]["update"]
    assert ppo < 1.3 * shared, "the critic is a tenth of the policy's size"


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-5", "1e300", "1e-12"])
def test_memory_that_nothing_has(size: str):
    result = CliRunner().invoke(app, ["plan", str(ROOT / "examples/calculator/tools.yaml"), f"--memory={size}"])
    assert "give a positive number of GiB" in str(result.exception)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"])
def test_a_model_of_nothing_is_one_error(tmp_path: Path, key: str):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["8b"] | {key: 0}))
    with pytest.raises(ConfigError, match=f"says {key}: 0"):
        ModelShape.of_directory(tmp_path)


def test_quantized_weights_are_refused(tmp_path: Path):
    config = MODELS["8b"] | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"the weights are quantized \(fp8\)"):
        ModelShape.of_directory(tmp_path)


def test_the_longest_episodes_of_several_envs_count(tmp_path: Path):
    path = folder(tmp_path / "model", "8b")
    use = "agentrl.envs.calculator:Calculator"
    long = "{max_turns: 30, max_tokens: 4096, token_budget: 32768}"
    (tmp_path / "run.yaml").write_text(
        f"envs:\n  a: {{use: '{use}'}}\n  b: {{use: '{use}', rollout: {long}}}\nmodel: {{path: {path}}}\n"
        "rollout: {groups_per_step: 2, group_size: 8, max_turns: 4, max_tokens: 256, token_budget: 2048}\n"
        "learner: {tokens_per_micro_batch: 8192}\n"
    )
    config = load_config(tmp_path / "run.yaml", [])
    plan = make_plan(config, machine=machine_of("8xH100"))
    assert [f for f in plan.findings if f.code == "PL02"]
    roomy = make_plan(config, memory_bytes=1 << 40, gpu=True)
    assert roomy.kv_bytes == 16 * 32768 * roomy.kv_bytes_per_token
    assert plan.prediction.rollout > 60
