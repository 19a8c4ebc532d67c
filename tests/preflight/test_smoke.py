"""`agentrl train --smoke`: every recipe runs two small steps on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner, Result

from agentrl.cli.app import app
from agentrl.errors import ConfigError
from agentrl.learner.policy_model import load_policy
from agentrl.preflight.smoke import make_smoke_model, smoke_config
from tests.preflight.test_machines import MODELS, RECIPES, ROOT, folder

BY_RECIPE = {recipe: model for recipe, model, *_ in RECIPES}


def smoke(file: Path, run: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["train", str(file), "--smoke", "--run-dir", str(run), *flags])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_a_recipe_trains_two_steps_with_tiny_weights_of_its_architecture(tmp_path: Path, recipe: str):
    model = BY_RECIPE[recipe]
    path, run = folder(tmp_path / "model", model), tmp_path / "smoke"
    result = smoke(ROOT / f"configs/{recipe}.yaml", run, "--set", f"model.path={path}")
    assert result.exit_code == 0, result.output
    assert f"a tiny, random {MODELS[model]['architectures'][0]} are done" in result.stdout
    steps = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert all(line.get("drift/mean_abs", 0.0) < 1e-4 for line in steps)
    made = json.loads((run / "model/config.json").read_text())
    assert made["num_hidden_layers"] == 2
    experts = made.get("num_experts", made.get("num_local_experts", 0))
    assert experts == (4 if "num_experts" in MODELS[model] else 0)


@pytest.mark.parametrize("example", sorted(path.parent.name for path in (ROOT / "examples").glob("*/tools.yaml")))
def test_every_example_has_a_small_form(tmp_path: Path, example: str):
    installed = [f"agent.sandbox.readonly=[{tmp_path}]"] if example == "mini_swe_agent" else []  # by the user
    small = smoke_config(ROOT / f"examples/{example}/tools.yaml", installed, tmp_path)
    assert small.steps == 2
    assert small.warmup is None or (small.warmup.max_epochs, small.warmup.anneal_epochs) == (1, 0)


@pytest.mark.slow
def test_without_a_model_folder_its_name_says_the_architecture_and_a_smoke_run_is_replaced(tmp_path: Path):
    run = tmp_path / "smoke"
    for name, made in (("Qwen3-30B-A3B", "Qwen3MoeForCausalLM"), ("Qwen3-8B", "Qwen3ForCausalLM")):
        result = smoke(ROOT / "configs/qwen3-8b-8gpu.yaml", run, "--set", f"model.path={tmp_path / name}")
        assert result.exit_code == 0, result.output
        assert f"random {made}" in result.stdout


@pytest.mark.slow
def test_what_is_no_smoke_run_stays(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("all of it")
    result = smoke(ROOT / "configs/qwen3-8b-8gpu.yaml", tmp_path)
    assert "is not the folder of a smoke run" in str(result.exception)
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "own/model").mkdir(parents=True)
    result = smoke(ROOT / "configs/qwen3-8b-8gpu.yaml", tmp_path / "own")
    assert "is not the folder of a smoke run" in str(result.exception)
    assert (tmp_path / "own/model").exists()
    result = smoke(ROOT / "configs/qwen3-8b-8gpu.yaml", tmp_path / "thesis.txt/run")
    assert "thesis.txt/run cannot hold a run: Not a directory; give another --run-dir" in str(result.exception)
    both = CliRunner().invoke(app, ["train", str(ROOT / "configs/qwen3-8b-8gpu.yaml"), "--smoke", "--fresh"])
    assert "--smoke excludes" in str(both.exception)


@pytest.mark.slow
def test_a_mistake_in_the_file_is_an_error_of_the_file(tmp_path: Path):
    result = smoke(ROOT / "configs/qwen3-8b-8gpu.yaml", tmp_path / "smoke", "--set", "engine.server.replica=2")
    assert "engine.server.replica: unknown key" in str(result.exception)


@pytest.mark.slow
def test_what_only_many_episodes_and_a_whole_critic_allow_is_made_small_too(tmp_path: Path):
    """Eight updates of 512 episodes, and a critic that begins with another model's weights, which are not here."""
    critic, run = folder(tmp_path / "critic", "0.6b"), tmp_path / "smoke"
    settings = [
        f"model.path={folder(tmp_path / 'model', '8b')}", f"critic.path={critic}",
        "algorithm.updates_per_step=8", "algorithm.advantage=gae",
    ]  # fmt: skip
    flags = [part for one in settings for part in ("--set", one)]
    result = smoke(ROOT / "configs/qwen3-8b-8gpu.yaml", run, *flags)
    assert result.exit_code == 0, result.exception
    line = json.loads((run / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 2
    assert "critic/value_error" in line


@pytest.mark.slow
def test_every_env_of_several_is_made_small(tmp_path: Path):
    use = "agentrl.envs.calculator:Calculator"
    (tmp_path / "run.yaml").write_text(
        f"envs:\n  a: {{use: '{use}'}}\n  b: {{use: '{use}', rollout: {{group_size: 16, max_tokens: 8192, "
        f"max_turns: 1, token_budget: 32768}}}}\nmodel: {{path: {folder(tmp_path / 'model', '0.6b')}}}\n"
    )
    config = smoke_config(tmp_path / "run.yaml", [], tmp_path / "smoke")
    of_b = config.by_env["b"].rollout
    assert (of_b.group_size, of_b.max_tokens, of_b.max_turns, of_b.token_budget) == (2, 16, 1, 4096)


@pytest.mark.parametrize(
    "settings",
    [
        "optim.warmup_steps=20",
        "optim.warmup_ratio=0.5 optim.schedule=cosine",
        "algorithm.advantage=gae critic.warmup_steps=5 critic.updates_per_step=8",
        "rollout.max_staleness=2 rollout.groups_ahead=50",
        "eval.every=10 eval.sets.x.every=1",
        "eval.every=10 eval.sets.x.tasks=2 eval.sets.x.options.max_operations=3",
        "eval.attempts=4 eval.temperature=1 eval.sets.x.attempts=2",
        "eval.every=10 eval.background=true",
    ],
)
def test_what_fits_a_long_run_alone_is_made_small(tmp_path: Path, settings: str):
    file = tmp_path / "run.yaml"
    file.write_text("env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\n")
    assert smoke_config(file, settings.split(), tmp_path / "smoke").steps == 2


@pytest.mark.parametrize("settings", ["rollout.group_size=1", "rollout.group_size=8", "algorithm.kl.top=9"])
def test_a_run_with_a_teacher_is_tried_without_it(tmp_path: Path, settings: str):
    file = tmp_path / "run.yaml"
    file.write_text(
        "env: agentrl.envs.calculator:Calculator\nmodel: {tiny: {}}\nteacher: {path: elsewhere}\n"
        "algorithm: {advantage: none, kl: {coef: 1.0}}\n"
    )
    config = smoke_config(file, [settings], tmp_path / "smoke")
    assert (config.teacher, config.steps) == (None, 2)


def test_a_run_with_a_teacher_for_each_env_is_tried_without_them(tmp_path: Path):
    env, teacher = "agentrl.envs.calculator:Calculator", "{url: 'http://10.0.0.1:8000/v1', model: expert}"
    file = tmp_path / "run.yaml"
    file.write_text(
        f"envs:\n  a: {{use: '{env}', teacher: {teacher}}}\n  b: {{use: '{env}', teacher: {teacher}}}\n"
        "model: {tiny: {}}\nalgorithm: {advantage: none, kl: {coef: 1.0}}\n"
    )
    config = smoke_config(file, [], tmp_path / "smoke")
    assert (config.teachers_on_servers, config.steps) == ({}, 2)


def test_envs_that_have_their_own_evaluation_are_made_small(tmp_path: Path):
    use, file = "agentrl.envs.calculator:Calculator", tmp_path / "run.yaml"
    own = "eval: {every: 5, tasks: 4, sets: {x: {every: 10}}}"
    file.write_text(f"envs:\n  a: {{use: '{use}', {own}}}\n  b: {{use: '{use}', {own}}}\nmodel: {{tiny: {{}}}}\n")
    config = smoke_config(file, [], tmp_path / "smoke")
    assert [(view.eval.every, view.eval.tasks) for view in config.by_env.values()] == [(1, 2)] * 2


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("exaone_moe", {}),  # dense and sparse layers by name
        ("falcon_h1", {}),  # heads of states that are small already
        ("falcon_mamba", {}),  # kinds of layers that cannot be set
        ("gemma3n_text", {}),  # a width and a sparsity of each layer
        ("gemma4_text", {"num_kv_shared_layers": 20, "num_hidden_layers": 35}),  # larger heads in some layers
        ("granitemoehybrid", {}),
        ("jamba", {"num_experts": 16}),
        ("laguna", {}),  # a number of heads for each layer
        ("longcat_flash", {}),  # two layers in one
        ("zamba2", {}),
        ("aria", {}),  # a table of numbers among the settings of its tower
        ("got_ocr2", {}),  # a tower with a window, which no text reaches
        ("mllama", {}),  # ids that must be given
        ("gptj", {}),  # rotations of a part of each head
    ],
)
def test_layers_that_differ_are_made_small_each(tmp_path: Path, family: str, settings: dict[str, int]):
    given = AutoConfig.for_model(family, **settings)
    given.save_pretrained(tmp_path)
    make_smoke_model(tmp_path / "small", tmp_path, ["some text for the tokenizer"])
    assert (tmp_path / "small/model.safetensors").stat().st_size < 20_000_000
    policy = load_policy(tmp_path / "small", torch.device("cpu"))
    assert policy.config.get_text_config().num_hidden_layers in (2, 4)
    kinds = set(getattr(given.get_text_config(), "layer_types", None) or ())
    assert set(getattr(policy.config.get_text_config(), "layer_types", None) or ()) == kinds


def test_what_a_model_lacks_or_has_smaller_stays(tmp_path: Path):
    """Without experts, without inputs per layer, with a single head of keys and values."""
    for family, key, value in [
        ("qwen3_next", "num_experts", 0),
        ("gemma4_text", "hidden_size_per_layer_input", 0),
        ("llama", "num_key_value_heads", 1),
        ("qwen3", "num_attention_heads", 3),
    ]:
        heads = {"num_key_value_heads": 3} if value == 3 else {}
        AutoConfig.for_model(family, **{key: value, **heads}).save_pretrained(tmp_path / family)
        make_smoke_model(tmp_path / "small", tmp_path / family, ["some text"])
        load_policy(tmp_path / "small", torch.device("cpu"))
        assert json.loads((tmp_path / "small/config.json").read_text())[key] == value


def test_rotations_of_images_fit_heads_that_rotate_in_part(tmp_path: Path):
    """As in the published GLM-4.5V: half of each head, of which 8, 12 and 12 pairs belong to an axis."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    AutoConfig.for_model("glm4v_moe", text_config={"rope_parameters": rope}).save_pretrained(tmp_path)
    make_smoke_model(tmp_path / "small", tmp_path, ["some text"])
    text = load_policy(tmp_path / "small", torch.device("cpu")).config.get_text_config()
    assert sum(text.rope_parameters["mrope_section"]) == text.hidden_size // text.num_attention_heads // 4


def test_what_cannot_be_trained_or_made_is_one_error(tmp_path: Path):
    AutoConfig.for_model("qwen2_audio").save_pretrained(tmp_path / "audio")
    with pytest.raises(ConfigError, match="without a text decoder that agentrl can train"):
        make_smoke_model(tmp_path / "small", tmp_path / "audio", ["some text"])
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "rope_theta": 1e4}
    AutoConfig.for_model("phi3", rope_parameters=rope).save_pretrained(tmp_path / "rope")
    with pytest.raises(ConfigError, match="rotary embeddings of type 'longrope' change with"):
        make_smoke_model(tmp_path / "small", tmp_path / "rope", ["some text"])
    AutoConfig.for_model("qwen3", quantization_config={"quant_method": "fp8"}).save_pretrained(tmp_path / "fp8")
    with pytest.raises(ConfigError, match=r"fp8: the weights are quantized \(fp8\)"):
        make_smoke_model(tmp_path / "small", tmp_path / "fp8", ["some text"])
    AutoConfig.for_model("lfm2_moe").save_pretrained(tmp_path / "odd")  # without kinds of layers
    with pytest.raises(ConfigError, match="a tiny model of its architecture cannot be made: ") as caught:
        make_smoke_model(tmp_path / "small", tmp_path / "odd", ["some text"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_made_small_as_a_whole(tmp_path: Path, family: str):
    AutoConfig.for_model(family, num_experts_per_tok=6).save_pretrained(tmp_path)
    make_smoke_model(tmp_path / "small", tmp_path, ["some text for the tokenizer"])
    policy = load_policy(tmp_path / "small", torch.device("cpu"))
    assert policy.config.num_key_value_heads == policy.config.num_attention_heads == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "model"), [("lfm2", "Lfm2ForCausalLM"), ("qwen3_5", "Qwen3_5ForConditionalGeneration")]
)
def test_a_model_that_cannot_be_packed_runs_and_says_so(tmp_path: Path, family: str, model: str):
    """LFM2 has convolutions, Qwen3.5 linear attention and a vision tower; learner and engine agree."""
    kinds = {"layer_types": ["conv", "full_attention"] * 16} if family == "lfm2" else {}
    AutoConfig.for_model(family, **kinds).save_pretrained(tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text("env: agentrl.envs.calculator:Calculator\nmodel: {path: model, chat_template: chatml}\n")
    result = smoke(file, tmp_path / "smoke")
    assert result.exit_code == 0, result.exception
    assert f"with a tiny, random {model} are done" in result.output
    run = tmp_path / "smoke/run"
    assert f"{model}: rows are padded instead of packed" in " ".join(result.output.split())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["drift/max_abs"] < 1e-4 for line in lines[1:])
