"""Launch scripts as people write them: read without being run."""

import pytest

from agentrl.config.run import RunConfig
from agentrl.import_verl import import_verl, read_keys
from agentrl.import_verl.expand import Variables, arithmetic, expand

PLAIN = r"""
set -x
# a comment with data.seed=3
train_files=data/train.parquet
max_len=$((1024 * 2))
n=5
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files="$train_files" \
    data.val_files=$HOME/test.parquet \
    data.max_prompt_length=$max_len \
    data.max_response_length=$((max_len + 512)) \
    actor_rollout_ref.model.path=owner/model \
    actor_rollout_ref.rollout.n=${n} \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_kl_loss=False \
    trainer.logger='["console","wandb"]' \
    +trainer.total_training_steps=7 $@
"""
ARRAYS = r"""#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-owner/model}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-grpo_${DEVICE}_$(date +%Y%m%d_%H%M)}
case "${DEVICE}" in
    npu) gpus=16 ;;
    gpu)
        gpus=${NGPUS:-8}
        if [ -z "${QUIET:-}" ]; then
            test_freq=5
        fi
        ;;
    *)
        echo "unknown" >&2
        exit 1
        ;;
esac
DATA=(
    data.train_files="['$HOME/a.parquet', '$HOME/b.parquet']"   # two files
    data.val_files=v.parquet
    # data.seed=x
    data.train_batch_size=64
)
TRAINER=(
    trainer.n_gpus_per_node=${gpus}
    trainer.test_freq=${test_freq}
    trainer.experiment_name=${EXPERIMENT_NAME}
    trainer.total_training_steps=9
)
EXTRA=(
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    uv sync --frozen
    LAUNCH=(uv run python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.n=4 \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_rs=\'token_k1,seq_max_k2\' \
    algorithm.rollout_correction.rollout_rs_threshold=\'0.6_1.6,2.5\' \
    "${TRAINER[@]}" "${EXTRA[@]}" "$@" 2>&1 | tee -a log.txt
"""
STRINGS = r'''
PROJECT_DIR="$(cd "$(dirname "$0")/.." && pwd)"
LOSS_MODE=${LOSS_MODE:-"dppo_tv"}
"""
Why: a note in quotes.
"""
if [[ $LOSS_MODE == "dppo_kl" ]]; then
    clip=0.05
elif [[ $LOSS_MODE == "dppo_tv" ]]; then
    clip=0.15
else
    exit 1
fi
function now() {
    date '+%d-%H-%M'
}
cat <<EOF > note.txt
data.seed=99
EOF
ACTOR="
    actor_rollout_ref.actor.clip_ratio_low=$clip \
    actor_rollout_ref.actor.clip_ratio_high=$clip
    actor_rollout_ref.actor.policy_loss.loss_mode=${LOSS_MODE}"
CRITIC="${ACTOR//actor_rollout_ref.actor/critic}"
ray job submit --working-dir "${PWD}" -- python3 -m verl.trainer.main_ppo \
    --config-path=./config --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files=$PROJECT_DIR/train.parquet \
    data.truncation='left' \
    data.truncation='error' \
    ~trainer.logger \
    # trainer.nnodes=4 \
    actor_rollout_ref.model.path=m \  
    actor_rollout_ref.rollout.n=8 \ # with a note
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/tools.yaml" \
    trainer.logger=['console','wandb'] \
    trainer.experiment_name="run-$(now)" trainer.n_gpus_per_node=$GPUS \
    $ACTOR trainer.total_epochs=1
'''
COMMENTED = """
python -m verl.trainer.main_ppo data.train_files=a.jsonl actor_rollout_ref.model.path=m \\
    # data.seed=3
    trainer.total_training_steps=4
"""
INSIDE = """
bash -c "python -m verl.trainer.main_ppo data.train_files=a.jsonl \\
    actor_rollout_ref.model.path=m trainer.total_training_steps=4"
"""


def script(tmp_path, text):
    path = tmp_path / "scripts" / "run.sh"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_variables_and_continued_lines(tmp_path):
    config = import_verl(script(tmp_path, PLAIN)).config
    RunConfig.model_validate(config)
    assert config["algorithm"]["advantage"] == "rloo"
    assert config["data"]["train"] == "data/train.parquet"
    assert config["data"]["held_out"] == "~/test.parquet"
    assert config["rollout"]["group_size"] == 5
    assert config["rollout"]["token_budget"] == 2048 + 2560
    assert (config["steps"], config["optim"]["lr"]) == (7, 1e-6)
    assert "seed" not in config


def test_arrays_cases_and_probes(tmp_path):
    config = import_verl(script(tmp_path, ARRAYS)).config
    RunConfig.model_validate(config)
    assert config["name"] == "grpo_gpu"
    assert config["model"] == {"path": "owner/model"}
    assert config["data"]["train"] == ["~/a.parquet", "~/b.parquet"]
    assert config["data"]["held_out"] == "v.parquet"
    assert "seed" not in config
    assert (config["learner"]["ranks"], config["eval"]["every"], config["steps"]) == (8, 5, 9)
    assert config["algorithm"]["correction"] == {"reject": {"token_k1": [0.6, 1.6], "seq_max_k2": 2.5}}


def test_strings_of_settings_removals_and_comments_in_a_command(tmp_path):
    path = script(tmp_path, STRINGS)
    found = import_verl(path)
    RunConfig.model_validate(found.config)
    keys = read_keys(path).values
    assert keys["trainer.logger"] == ["console", "wandb"]
    assert keys["data.train_files"] == str(tmp_path / "train.parquet")
    assert keys["data.truncation"] == "error"
    assert "data.seed" not in keys
    assert "trainer.nnodes" not in keys
    assert "critic.clip_ratio_low" not in keys
    assert found.config["algorithm"]["loss"] == {
        **{"name": "dppo_tv", "divergence_low": 0.15, "divergence_high": 0.15, "ratio_max": 3.0}
    }
    assert found.config["rollout"]["max_turns"] > 1
    assert found.config["name"] == "run"
    said = {note.key: note for note in found.notes}
    assert said["trainer.n_gpus_per_node"].kind == "by hand"  # $GPUS is not set in the script
    assert said["actor_rollout_ref.rollout.multi_turn.tool_config_path"].kind == "by hand"


@pytest.mark.parametrize("text", [COMMENTED, INSIDE])
def test_a_command_that_is_cut_by_a_comment_or_stands_in_quotes(tmp_path, text):
    assert import_verl(script(tmp_path, text)).config["steps"] == 4


def test_the_named_config_is_read_below_the_command_line(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer]\n"
        "data: {max_prompt_length: 100, max_response_length: 50, shuffle: False}\n"
        "actor_rollout_ref: {rollout: {response_length: '${data.max_response_length}', name: sglang}}\n"
    )
    line = "python -m verl.trainer.main_ppo --config-path ../config --config-name mine data.max_response_length=60"
    found = import_verl(script(tmp_path, f"{line} data.train_files=a actor_rollout_ref.model.path=m\n"))
    assert found.config["rollout"]["token_budget"] == 160
    assert found.config["engine"]["kind"] == "sglang"
    missing = import_verl(script(tmp_path, f"{line.replace('name mine', 'name none')} data.train_files=a\n"))
    assert any("--config-name none: there is no file" in note.text for note in missing.notes)


@pytest.mark.parametrize(
    "text", ["", "echo hello\n", "x=(", "if [ 1", "'", '"$(', "case x in\n", "a=${b", "$((1/0))"]
)
def test_what_is_no_launch_script_is_one_line(tmp_path, text):
    from agentrl.errors import ConfigError

    with pytest.raises(ConfigError, match="no verl key"):
        read_keys(script(tmp_path, text))


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("$A-b", ["1-b"]),
        ("'$A'", ["$A"]),
        ('"$L"', ["x y"]),
        ("$L", ["x", "y"]),
        ('"${W[@]}"', ["p q", "r"]),
        ("${W[1]}", ["r"]),
        ("${#W[@]}", ["2"]),
        ("${N:-d}", ["d"]),
        ("${A:-d}", ["1"]),
        ("${A:+e}", ["e"]),
        ("${N:+e}", []),
        ("${P%.txt}", ["a/b"]),
        ("${P##*/}", ["b.txt"]),
        ("${P/b/c}", ["a/c.txt"]),
        ("${L^^}", ["X", "Y"]),
        ("${P:2:1}", ["b"]),
        ("$(basename $P)", ["b.txt"]),
        ("`pwd`", ["."]),
        ("$((A + 2 * 3))", ["7"]),
        ("$(( ${A} - 3 ))", ["-2"]),
        ("$N/x", ["$N/x"]),
        ("${data.seed}", ["${data.seed}"]),
        ("$(nvidia-smi -L | wc -l)", ["$(nvidia-smi)"]),
        ('""', [""]),
        ("$", ["$"]),
        ("${A", ["${A"]),
    ],
)
def test_a_word_expands_as_in_a_shell(word, wanted):
    from agentrl.import_verl.shell import Script

    reader = Script("run.sh")
    reader.variables.values |= {"A": "1", "L": "x y", "W": ["p q", "r"], "P": "a/b.txt"}
    assert expand(word, reader.variables) == wanted


def test_arithmetic_is_of_whole_numbers_and_never_fails():
    variables = Variables(values={"a": "7", "b": "a"})
    assert arithmetic("(a + 1) / 3 % 2", variables) == 0
    assert arithmetic("-a / 2", variables) == -3
    for text in ("a / 0", "a ** 9999", "b + 1", "a ? 1 : 2", "", "x = 5", "__import__('os')"):
        assert arithmetic(text, variables) is None
