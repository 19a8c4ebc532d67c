import pytest
from ruamel.yaml import YAML

from agentrl.cli import main
from agentrl.config.run import RunConfig
from agentrl.env.compose import ComposedEnv
from agentrl.env.import_verl import import_verl, read_keys
from agentrl.errors import ConfigError

CONFIG = """
data:
  train_files: train.parquet
  val_files: [val.parquet, more.parquet]
  train_batch_size: 64
  max_prompt_length: 1024
  max_response_length: 2048
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
    loss_agg_mode: token-mean
    optim: {lr: 1e-6}
    fsdp_config: {param_offload: False}
  rollout:
    name: sglang
    n: 8
    tensor_model_parallel_size: 1
    multi_turn:
      enable: True
      max_assistant_turns: 5
      tool_config_path: tools.yaml
      max_parallel_calls: 4
algorithm: {adv_estimator: grpo, kl_ctrl: {kl_coef: 0.0}}
custom_reward_function: {path: reward.py, name: compute_score}
trainer: {total_training_steps: 200, test_freq: 10, save_freq: -1, experiment_name: "my run", n_gpus_per_node: 8}
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


def test_a_multi_turn_grpo_config_becomes_ours(source):
    imported = import_verl(source)
    assert imported.config == {
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
        },
        "data": {"train": "train.parquet", "held_out": "val.parquet"},
        "rollout": {
            "groups_per_step": 64,
            "group_size": 8,
            "max_turns": 5,
            "max_tokens": 2048,
            "token_budget": 3072,
        },
        "algorithm": {
            "advantage": "grpo",
            "kl": {"coef": 0.001, "kind": "k3"},
            "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28},
            "aggregation": "token-mean",
            "updates_per_step": 2,
        },
        "optim": {"lr": 1e-6},
        "eval": {"every": 10},
        "checkpoint": {"every": 0},
    }
    RunConfig.model_validate(imported.config)


def test_every_key_is_accounted_for(source):
    notes = {note.key: note for note in import_verl(source).notes}
    idle = {key for key, note in notes.items() if note.kind == "no effect"}
    assert idle == {
        "data.return_raw_chat",
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.multi_turn.enable",
        "algorithm.kl_ctrl.kl_coef",
        "trainer.n_gpus_per_node",
    }
    assert notes["actor_rollout_ref.rollout.multi_turn.max_parallel_calls"].kind == "by hand"
    assert notes["data.val_files"].kind == "by hand"
    assert str(notes["data.train_files"]) == "taken     data.train_files = 'train.parquet': data.train"
    assert set(notes) == set(read_keys(source))


def test_the_command_writes_a_file_that_loads_and_names_every_key(source, capsys):
    out = source.parent / "tools-ours.yaml"
    for expected in (0, 2):  # the second time the file is there
        with pytest.raises(SystemExit) as left:
            main(["import-verl", str(source), "--out", str(out)])
        assert (left.value.code or 0) == expected
    said, noted = capsys.readouterr()
    assert f"next: agentrl check {out}" in said
    assert "no effect trainer.n_gpus_per_node = 8: has no counterpart here" in noted
    assert noted.index("\nby hand ") < noted.index("\nno effect ") < noted.index("\ntaken ")
    assert f"{out}: is there already" in noted
    assert YAML(typ="safe").load(out.read_text()) == import_verl(source).config


def test_a_launch_script_is_read_as_well(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\n# a comment with data.seed=3\npython3 -m verl.trainer.main_ppo \\\n"
        "    algorithm.adv_estimator=rloo \\\n    data.train_files=$HOME/train.parquet \\\n"
        "    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_kl_loss=False \\\n"
        "    +trainer.total_training_steps=7 $@\n"
    )
    config = import_verl(script).config
    assert config["algorithm"] == {"advantage": "rloo", "kl": {"coef": 0.0}}
    assert (config["steps"], config["optim"]) == (7, {"lr": 1e-6})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\n", "no verl key"),
        ("- a\n", "not a mapping"),
        ("a: [\n", "not YAML"),
        ("actor_rollout_ref: {rollout: {multi_turn: {tool_config_path: none.yaml}}}", "no file none.yaml"),
    ],
)
def test_what_is_no_verl_config_is_said(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        import_verl(path)
    with pytest.raises(ConfigError, match="no file"):
        import_verl(tmp_path / "missing.yaml")


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
