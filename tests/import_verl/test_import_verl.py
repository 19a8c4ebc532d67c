import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from agentrl.cli import main
from agentrl.config.run import RunConfig
from agentrl.env.compose import ComposedEnv
from agentrl.errors import ConfigError
from agentrl.import_verl import import_verl, read_keys
from agentrl.import_verl.keys import ROWS, row_of
from agentrl.import_verl.page import page

DEFAULTS = Path(__file__).parent / "data" / "verl_defaults.yaml"
CONFIG = """
data:
  train_files: train.parquet
  val_files: [val.parquet, more.parquet]
  train_batch_size: 64
  max_prompt_length: 1024
  max_response_length: 2048
  prompt_key: question
  return_raw_chat: True
actor_rollout_ref:
  model: {path: models/small, use_remove_padding: True}
  actor:
    use_kl_loss: True
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    ppo_mini_batch_size: 32
    clip_ratio: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    loss_agg_mode: token-mean
    optim: {lr: 2e-6, lr_warmup_steps_ratio: 0.1}
    fsdp_config: {param_offload: False}
  rollout:
    name: sglang
    n: 8
    tensor_model_parallel_size: 1
    engine_kwargs: {sglang: {attention_backend: triton}}
    multi_turn:
      enable: True
      max_assistant_turns: 5
      max_user_turns: 3
      tool_config_path: tools.yaml
      max_parallel_calls: 4
algorithm: {adv_estimator: grpo, kl_ctrl: {kl_coef: 0.0}}
custom_reward_function: {path: reward.py, name: compute_score}
trainer:
  {total_training_steps: 200, test_freq: 10, save_freq: -1, experiment_name: "my run", n_gpus_per_node: 8,
   val_before_train: False}
"""
TOOLS = """
tools:
  - class_name: "my.tools.Search"
    config: {type: native}
    tool_schema: {type: function, function: {name: search, parameters: {type: object, properties: {}}}}
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS)
    path = tmp_path / "grpo.yaml"
    path.write_text(CONFIG)
    return path


def imported(tmp_path, **keys):
    """The configuration made from a few keys, given by their dotted names with `__` for the dot."""
    path = tmp_path / "some.yaml"
    lines = {"data.train_files": "a.jsonl", "actor_rollout_ref.model.path": "m", "actor_rollout_ref.rollout.n": 4}
    lines |= {"algorithm.adv_estimator": "grpo"} | {key.replace("__", "."): value for key, value in keys.items()}
    with path.open("w") as file:
        YAML().dump(lines, file)
    found = import_verl(path)
    RunConfig.model_validate(found.config)
    return found


def notes_of(found):
    return {note.key: note for note in found.notes}


def test_a_multi_turn_grpo_config_becomes_ours(source):
    found = import_verl(source)
    assert found.config == {
        "name": "my-run",
        "steps": 200,
        "model": {"path": "models/small"},
        "env": {
            "use": "agentrl.env.compose:ComposedEnv",
            "options": {
                "tools": [
                    {
                        "class_name": "my.tools.Search",
                        "config": {"type": "native"},
                        "tool_schema": {
                            "type": "function",
                            "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
                        },
                    }
                ],
                "reward": "reward.py:compute_score",
            },
            "settings": {"max_calls_per_turn": 4},
        },
        "data": {
            "train": "train.parquet",
            "held_out": ["val.parquet", "more.parquet"],
            "columns": {"prompt": "question"},
            "sampler": {"order": "shuffled"},
        },
        "rollout": {
            "groups_per_step": 64,
            "group_size": 8,
            "max_turns": 4,  # verl ends with the completion after the third observation
            "max_tokens": 2048,
            "token_budget": 3072,
        },
        "engine": {
            "kind": "sglang",
            "server": {
                "replicas": 8,
                "gpu_memory_utilization": 0.5,
                "sleep": True,
                "args": ["--attention-backend", "triton"],
            },
        },
        "algorithm": {
            "advantage": "grpo",
            "kl": {"coef": 0.001, "kind": "k3"},
            "loss": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
            "aggregation": "token-mean",
            "updates_per_step": 2,
        },
        "optim": {
            "lr": 2e-6,
            "betas": [0.9, 0.999],
            "weight_decay": 0.01,
            "warmup_ratio": 0.1,
            "schedule": "constant",
            "max_grad_norm": 1.0,
        },
        "learner": {
            "checkpoint_activations": True,
            "ranks": 8,
            "precision": "bfloat16",
            "tokens_per_micro_batch": 16384,
        },
        "eval": {"every": 10, "before_training": False},
        "checkpoint": {"every": 0},
    }
    RunConfig.model_validate(found.config)
    assert not [note for note in found.notes if note.kind in ("by hand", "refused")]
    assert set(notes_of(found)) == set(read_keys(source).values)


def test_every_documented_key_has_a_row_and_verls_defaults_need_next_to_nothing():
    keys = read_keys(DEFAULTS).values
    assert [key for key in keys if row_of(key) is None] == []
    found = import_verl(DEFAULTS)
    RunConfig.model_validate(found.config)
    asked = {note.key for note in found.notes if note.kind in ("by hand", "refused")}
    assert asked == {"trainer.total_epochs", "reward.custom_reward_function.path"}
    assert set(keys) <= set(notes_of(found))


def test_a_row_with_a_default_has_verls_own():
    keys = read_keys(DEFAULTS).values
    own = {"critic.model.path", "trainer.logger", "actor_rollout_ref.rollout.tensor_model_parallel_size"}
    for row in ROWS:
        value = keys.get(row.key)
        if row.default is not None and value is not None and row.key not in own:
            assert value in (row.default if isinstance(row.default, tuple) else (row.default,)), row.key


@pytest.mark.parametrize(
    ("given", "project", "loggers", "kind", "said"),
    [
        (["console", "wandb"], "p", [{"use": "wandb", "project": "p"}], "taken", "loggers: wandb"),
        (
            ["console", "tensorboard", "mlflow"],
            None,
            ["tensorboard", "mlflow"],
            "taken",
            "loggers: tensorboard, mlflow",
        ),
        ("console", "p", None, "same", "the live screen, and metrics.jsonl in the run folder"),
        (
            ["swanlab", "trackio"],
            None,
            ["trackio"],
            "by hand",
            "swanlab: write a logger of your own (docs/loggers.md); taken: trackio",
        ),
    ],
)
def test_dashboards_are_taken_over(
    tmp_path: Path, given: object, project: str | None, loggers: object, kind: str, said: str
):
    source = tmp_path / "run.yaml"
    source.write_text(json.dumps({"trainer": {"logger": given, "project_name": project}}))
    found = import_verl(source)
    assert found.config.get("loggers") == loggers
    assert [(n.kind, n.text) for n in found.notes if n.key == "trainer.logger"] == [(kind, said)]
    assert not [note for note in found.notes if "Field required" in note.text]


def test_the_end_of_a_cosine_schedule_is_told(tmp_path: Path):
    def said(**optim: object) -> list[tuple[str, str]]:
        source = tmp_path / "run.yaml"
        source.write_text(json.dumps({"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6, **optim}}}}))
        return [(n.kind, n.text) for n in import_verl(source).notes if n.key.endswith("min_lr_ratio")]

    differs = "verl's cosine ends at {} of the peak, agentrl's at a tenth of it"
    assert said(lr_scheduler_type="cosine") == [("by hand", differs.format(0))]
    assert said(lr_scheduler_type="cosine", min_lr_ratio=0.5) == [("by hand", differs.format(0.5))]
    assert said(lr_scheduler_type="cosine", min_lr_ratio=0.1) == [("same", "a cosine ends at a tenth of the peak")]
    assert said(min_lr_ratio=0.0) == [("no effect", "the schedule is constant")]
    assert said() == []


def test_no_key_has_two_rows_and_the_page_names_them_all():
    assert len({row.key for row in ROWS}) == len(ROWS)
    text = page()
    assert all(f"`{row.key.split('.')[-1]}`" in text or f"{row.key.split('.')[-1]}`" in text for row in ROWS)


@pytest.mark.parametrize(
    ("keys", "path", "wanted"),
    [
        ({"actor_rollout_ref__actor__clip_ratio": 0.1}, "algorithm.loss.clip_high", 0.1),
        ({"actor_rollout_ref__actor__clip_ratio_low": 0.1}, "algorithm.loss.clip_high", 0.2),
        ({}, "algorithm.kl.coef", 0.0),
        ({"algorithm__use_kl_in_reward": True}, "algorithm.kl", {"coef": 0.001, "kind": "k1", "where": "reward"}),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
            "algorithm.kl.control",
            "adaptive",
        ),
        ({"actor_rollout_ref__model__lora_rank": 8}, "learner.lora", {"rank": 8, "alpha": 16}),
        (
            {"actor_rollout_ref__actor__ppo_epochs": 3, "data__train_batch_size": 512},
            "algorithm.epochs",
            3,
        ),
        ({"data__train_batch_size": 512}, "algorithm.updates_per_step", 2),
        ({"algorithm__adv_estimator": "gae", "critic__ppo_epochs": 2}, "critic.epochs", 2),
        ({"algorithm__adv_estimator": "gae", "critic__ppo_mini_batch_size": 512}, "critic.updates_per_step", 2),
        (
            {"algorithm__adv_estimator": "gae", "critic__loss_agg_mode": "seq-mean-token-mean"},
            "critic.aggregation",
            "seq-mean-token-mean",
        ),
        ({"algorithm__rollout_correction__rollout_is": "token"}, "algorithm.correction.importance", "token"),
        (
            {
                "algorithm__rollout_correction__rollout_is": "sequence",
                "algorithm__rollout_correction__rollout_is_threshold": "0.5_5.0",
            },
            "algorithm.correction",
            {"importance": "sequence", "low": 0.5, "high": 5.0},
        ),
        (
            {
                "algorithm__rollout_correction__rollout_rs": "token_k1,seq_max_k2",
                "algorithm__rollout_correction__rollout_rs_threshold": "0.6_1.6,2.5",
            },
            "algorithm.correction.reject",
            {"token_k1": [0.6, 1.6], "seq_max_k2": 2.5},
        ),
        ({"algorithm__rollout_correction__bypass_mode": True}, "algorithm.old_logprobs", "sampler"),
        (
            {
                "algorithm__rollout_correction__bypass_mode": True,
                "algorithm__rollout_correction__loss_type": "reinforce",
            },
            "algorithm.loss",
            "reinforce",
        ),
        (
            {
                "actor_rollout_ref__actor__policy_loss__loss_mode": "cispo",
                "actor_rollout_ref__actor__clip_ratio_low": 10,
            },
            "algorithm.loss",
            {"name": "cispo", "ratio_max": 1.2, "ratio_min": 0.0},
        ),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "kl-cov"}, "algorithm.loss.kl_coef", 0.1),
        (
            {
                "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm",
                "data__max_response_length": 800,
            },
            "algorithm.aggregation_scale",
            800,
        ),
        *(
            (
                {
                    "actor_rollout_ref__actor__policy_loss__loss_mode": loss,
                    "actor_rollout_ref__actor__loss_agg_mode": mode,
                },
                "algorithm.aggregation",
                "seq-mean-token-mean",
            )
            for loss in ("gspo", "sapo", "geo_mean")
            for mode in (None, "token-mean", "seq-mean-token-sum-norm")
        ),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "algorithm.advantage", "dr_grpo"),
        ({"algorithm__adv_estimator": "gae", "algorithm__lam": 0.95}, "algorithm.advantage.lam", 0.95),
        ({"algorithm__adv_estimator": "gae"}, "critic.value_clip", 0.5),
        ({"reward_model__enable": True, "reward_model__model__path": "rm"}, "reward_model.path", "rm"),
        (
            {"reward__reward_model__enable": True, "reward__reward_model__model_path": "rm"},
            "reward_model.path",
            "rm",
        ),
        (
            {"algorithm__filter_groups__enable": True, "data__train_batch_size": 16},
            "rollout.refill_zero_signal",
            144,
        ),
        ({"actor_rollout_ref__actor__fsdp_config__optimizer_offload": True}, "learner.cpu_offload", True),
        ({"trainer__nnodes": 2, "trainer__n_gpus_per_node": 4}, "learner.ranks", 8),
        ({"actor_rollout_ref__rollout__name": "vllm"}, "engine.kind", "vllm"),
        ({"actor_rollout_ref__rollout__name": "vllm"}, "engine.server.gpu_memory_utilization", 0.5),
        ({"actor_rollout_ref__rollout__name": "hf"}, "engine.kind", "local"),
        (
            {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__enforce_eager": True},
            "engine.server.args",
            ["--enforce-eager"],
        ),
        ({"trainer__v1__trainer_mode": "separate_async"}, "rollout.max_staleness", 8),
        (
            {"data__apply_chat_template_kwargs": {"enable_thinking": False}},
            "model.template_options",
            {"enable_thinking": False},
        ),
        ({"trainer__test_freq": 5}, "eval.every", None),
        ({"trainer__test_freq": 5, "data__val_files": "v.jsonl"}, "eval.every", 5),
        ({"data__filter_overlong_prompts": True}, "data.overlong_prompts", "drop"),
        ({"custom_reward_function__path": "r.py"}, "env.options.reward", "r.py:compute_score"),
        (
            {"custom_reward_function__path": "r.py", "custom_reward_function__reward_kwargs": {"a": 1}},
            "env.options.reward",
            [{"use": "r.py:compute_score", "options": {"a": 1}}],
        ),
        ({}, "env.options.reward", "agentrl.env.verl_scores:compute_score"),
        (
            {"trainer__n_gpus_per_node": 8, "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 4},
            *("learner.sequence_ranks", 4),
        ),
        ({"trainer__val_before_train": False}, "eval.before_training", False),
    ],
)
def test_a_key_becomes_ours(tmp_path, keys, path, wanted):
    assert imported(tmp_path, **keys).get(path) == wanted


@pytest.mark.parametrize(
    ("key", "value", "kind", "said"),
    [
        ("data.custom_cls.path", "mine.py", "refused", "`tasks` classmethod"),
        ("reward_model.reward_manager", "dapo", "same", "a reward function sees one episode"),
        ("reward_model.launch_reward_fn_async", True, "same", "rewards are computed as episodes end"),
        ("reward_model.enable", False, "same", "verl's default"),
        ("reward_model.enable_resource_pool", True, "no effect", "reward_model.enable is off"),
        ("reward_model.overlong_buffer.enable", True, "by hand", "rollout.overlong: penalise"),
        ("actor_rollout_ref.actor.optim.optimizer", "AdamW", "same", "AdamW is the only"),
        ("actor_rollout_ref.actor.optim.optimizer", "Adam8bit", "by hand", "AdamW is the only"),
        ("async_training.staleness_threshold", 0.5, "by hand", "rollout.max_staleness"),
        ("rollout.total_rollout_steps", 5120, "by hand", "set steps"),
        ("data.sampler.class_path", "mine.py", "refused", "data.sampler.order"),
        ("data.collate_fn", "mine.py", "refused", "packed by the learner"),
        ("actor_rollout_ref.model.trust_remote_code", True, "refused", "never run"),
        ("trainer.resume_from_path", "ckpt/global_step_5", "refused", "verl.model_merger"),
        ("actor_rollout_ref.rollout.top_p", 0.9, "by hand", "whole distribution"),
        ("actor_rollout_ref.rollout.top_p", 1.0, "same", "verl's default"),
        ("actor_rollout_ref.actor.strategy", "fsdp2", "same", "FSDP2"),
        ("actor_rollout_ref.actor.strategy", "megatron", "by hand", "FSDP2"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 4, "refused", "no Megatron"),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 4, "by hand", "multiple of it: 4"),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, "taken", "rollout.max_turns"),
        ("data.train_batch_size", "$BATCH", "by hand", "must be a number"),
        ("actor_rollout_ref.actor.use_kl_loss", "$KL", "by hand", "must be true or false"),
        ("data.my_own", 1, "by hand", "not a key that verl documents"),
        ("trainer.device", "npu", "refused", "CUDA"),
        ("actor_rollout_ref.actor.profiler.ranks", [0], "refused", "profiler"),
    ],
)
def test_what_is_said_of_a_key_is_true(tmp_path, key, value, kind, said):
    note = notes_of(imported(tmp_path, **{key: value}))[key]
    assert note.kind == kind
    assert said in note.text


def test_losses_that_verl_always_averages_by_sequence_say_so(tmp_path):
    key = "actor_rollout_ref.actor.loss_agg_mode"
    gspo = {"actor_rollout_ref__actor__policy_loss__loss_mode": "gspo"}
    given = {**gspo, "actor_rollout_ref__actor__loss_agg_mode": "token-mean"}
    assert notes_of(imported(tmp_path, **given))[key].kind == "no effect"
    penalized = notes_of(imported(tmp_path, **gspo, actor_rollout_ref__actor__use_kl_loss=True))[key]
    assert penalized.kind == "by hand"
    assert "the penalties as token-mean" in penalized.text
    in_reward = imported(tmp_path, **gspo, algorithm__use_kl_in_reward=True)
    assert key not in notes_of(in_reward)


def test_a_value_that_agentrl_refuses_is_left_out_with_a_note(tmp_path):
    found = imported(tmp_path, actor_rollout_ref__actor__clip_ratio_low=1.5)
    assert found.get("algorithm.loss") == {"name": "ppo_clip", "clip_high": 0.2, "dual_clip": 3.0}
    assert "left out" in notes_of(found)["algorithm.loss.clip_low"].text


def test_the_names_of_earlier_releases_are_known(tmp_path):
    found = imported(
        tmp_path,
        actor_rollout_ref__model__use_rmpad=True,
        actor_rollout_ref__actor__fsdp_config__grad_offload=False,
        actor_rollout_ref__actor__use_gpg_loss=True,
        actor_rollout_ref__rollout__name="sglang_async",
        actor_rollout_ref__model__tokenizer_path="m",
        critic__model__use_rmpad=True,
    )
    assert (found.get("algorithm.loss"), found.get("engine.kind")) == ("gpg", "sglang")
    assert not [n.key for n in found.notes if n.kind == "by hand" and ("rmpad" in n.key or "_path" in n.key[-5:])]
    assert notes_of(found)["actor_rollout_ref.actor.fsdp_config.grad_offload"].kind == "same"


def test_the_tools_of_verl_itself_are_to_be_installed(tmp_path):
    (tmp_path / "tools.yaml").write_text(TOOLS.replace("my.tools.Search", "verl.tools.gsm8k_tool.Gsm8kTool"))
    found = imported(tmp_path, actor_rollout_ref__rollout__multi_turn__tool_config_path="tools.yaml")
    note = notes_of(found)["actor_rollout_ref.rollout.multi_turn.tool_config_path.class_name"]
    assert (note.kind, "verl.tools.gsm8k_tool.Gsm8kTool is verl's own class" in note.text) == ("by hand", True)


def test_held_out_tasks_are_sampled_as_verl_samples_them(tmp_path):
    val = "actor_rollout_ref__rollout__val_kwargs__"
    given = {f"{val}temperature": 1.0, f"{val}top_p": 0.7, f"{val}n": 4, f"{val}top_k": -1}
    found = imported(tmp_path, data__val_max_samples=64, **given)
    assert found.config["eval"] == {"every": 0, "tasks": 64, "temperature": 1.0, "attempts": 4, "top_p": 0.7} or (
        found.config["eval"] == {"tasks": 64, "temperature": 1.0, "attempts": 4, "top_p": 0.7}
    )
    greedy = imported(tmp_path, **given, **{f"{val}do_sample": False})
    assert greedy.get("eval.temperature") is None
    assert notes_of(greedy)["actor_rollout_ref.rollout.val_kwargs.n"].kind == "no effect"


def test_settings_that_do_not_fit_together_are_left_out_too(tmp_path):
    found = imported(tmp_path, actor_rollout_ref__actor__optim__lr_warmup_steps=200)  # of steps that are not known
    assert found.get("optim.warmup_steps") is None
    assert "left out" in notes_of(found)["optim.warmup_steps"].text


@pytest.mark.parametrize(("share", "sync"), [(True, None), (False, "broadcast")])
def test_servers_on_the_learners_gpus_get_no_broadcast(tmp_path, share, sync):
    names = ("rollout__name", "rollout__free_cache_engine", "rollout__checkpoint_engine__backend")
    values = ("sglang", share, "nccl")
    keys = {f"actor_rollout_ref__{name}": value for name, value in zip(names, values, strict=True)}
    found = imported(tmp_path, **keys)
    assert (found.get("engine.server.sleep") is True, found.get("engine.sync")) == (share, sync)
    assert "engine.server.sleep" not in notes_of(found)


@pytest.mark.parametrize("value", [[1, "a"], "$X", True, -1, 0.5, ""])
@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.optim.betas",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.n",
        "trainer.max_actor_ckpt_to_keep",
        "data.train_files",
        "data.train_batch_size",
    ],
)
def test_a_value_that_makes_no_sense_is_no_traceback(tmp_path, key, value):
    found = imported(tmp_path, **{key: value, "actor_rollout_ref.rollout.name": "sglang"})
    assert found.get("engine.kind") == "sglang"  # the rest of the file is still translated


def test_epochs_become_steps_where_the_rows_can_be_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' * 70)
    (tmp_path / "b.json").write_text('[{"prompt": "x"}, {"prompt": "y"}]')
    keys = {
        "trainer__total_epochs": 3,
        "data__train_batch_size": 16,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 16,
    }
    found = imported(tmp_path, data__train_files=["a.jsonl", "b.json"], **keys)
    assert found.get("steps") == 3 * (72 // 16)
    assert notes_of(found)["trainer.total_epochs"].kind == "taken"


def test_a_group_of_one_is_named(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(
        "algorithm: {adv_estimator: grpo}\ndata: {train_files: a}\nactor_rollout_ref: {model: {path: m}}\n"
    )
    said = [note.text for note in import_verl(path).notes if "group of one" in note.text]
    assert said
    assert "rollout.group_size" in said[0]


def test_the_command_writes_a_file_that_loads_and_names_every_key(source, capsys):
    out = source.parent / "tools-ours.yaml"
    for expected in (0, 2):  # the second time the file is there
        with pytest.raises(SystemExit) as left:
            main(["import-verl", str(source), "--out", str(out)])
        assert (left.value.code or 0) == expected
    said, noted = capsys.readouterr()
    assert f"next: agentrl check {out}" in said
    assert "same      data.return_raw_chat = True: messages are always kept" in noted
    assert noted.index("no effect ") < noted.index("\nsame ") < noted.index("\ntaken ")
    assert f"{out}: already exists" in noted
    assert YAML(typ="safe").load(out.read_text()) == import_verl(source).config
    with pytest.raises(SystemExit):
        main(["import-verl", str(source), "--out", str(source.parent / "none" / "x.yaml")])
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\n", "no verl key"),
        ("- a\n", "not a mapping"),
        ("env: env.py:E\nrollout: {group_size: 8}\n", "a configuration of agentrl already"),
        ("a: [\n", "not YAML"),
    ],
)
def test_what_is_no_verl_config_is_said(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        import_verl(path)
    with pytest.raises(ConfigError, match="no file"):
        import_verl(tmp_path / "missing.yaml")


def test_a_tools_file_that_is_not_here_is_noted(tmp_path):
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    note = notes_of(imported(tmp_path, **{key: "$PROJECT_DIR/none.yaml"}))[key]
    assert (note.kind, note.text) == (
        "by hand",
        "no file $PROJECT_DIR/none.yaml; list its entries under env.options.tools",
    )


def test_the_imported_tools_make_an_env(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.tools.base_tool import BaseTool\n"
        "class Search(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return 'found', 0.0, {}\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0\n"
    )
    (tmp_path / "tools.yaml").write_text(TOOLS.replace("my.tools.Search", "mine.py:Search"))
    (tmp_path / "grpo.yaml").write_text(CONFIG.replace("path: reward.py", "path: mine.py"))
    options = import_verl(tmp_path / "grpo.yaml").config["env"]["options"]
    env = ComposedEnv(**options, base=tmp_path)
    assert [t["function"]["name"] for t in env.tools] == ["search"]


def test_a_script_that_counts_on_verls_older_default_gets_servers(tmp_path):
    found = imported(tmp_path, actor_rollout_ref__rollout__tensor_model_parallel_size=4)
    assert (found.get("engine.kind"), found.get("engine.server.tensor_parallel")) == ("vllm", 4)
    assert "check engine.kind" in notes_of(found)["actor_rollout_ref.rollout.name"].text


def test_a_config_of_llama_factory_is_named_as_such(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text("model_name_or_path: m\nstage: ppo\nreward_model: saves/reward\nreward_model_type: lora\n")
    with pytest.raises(ConfigError, match=r"a configuration of LLaMA-Factory.*lora is not supported"):
        import_verl(path)
