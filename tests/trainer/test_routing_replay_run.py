"""A run of a model with experts whose routes are replayed: several turns, forks, groups, from YAML to metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.models.tiny import make_tokenizer
from agentrl.run_folder.records import read_episodes
from agentrl.trainer.replay import replay
from tests.trainer.test_run import ENVS, run

NOISE = """

class Noise(Buttons):
    @reward
    def noise(self, episode) -> float:
        return len(final_answer(episode) or "") % 7 / 7
"""


def write_moe(folder: Path, **shape: object) -> Path:
    """A random Qwen3-MoE with a tokenizer."""
    make_tokenizer(folder, ["Press a button. Number 7. It is red. It is blue. done"], vocab=400, max_context=512)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 16}
    config = Qwen3MoeConfig(
        vocab_size=Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(),
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        **({"num_hidden_layers": 2} | sizes | shape),
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def moe_run(folder: Path, **more: object) -> RunConfig:
    (folder / "envs.py").write_text(ENVS + NOISE)
    return RunConfig.model_validate(
        {
            "name": "moe",
            "steps": 3,
            "env": f"{folder}/envs.py:Noise",
            "model": {"path": str(write_moe(folder / "model"))},
            "learner": {"replay_routes": True},
            "rollout": {
                "groups_per_step": 2,
                "group_size": 4,
                "max_turns": 3,
                "max_tokens": 24,
                "token_budget": 500,
            },
            "algorithm": {"kl": {"coef": 0.01}},
            "optim": {"lr": 1e-3},
            "eval": {"tasks": 2, "every": 100},
        }
        | more
    )


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "rollout": {
                "groups_per_step": 8,  # enough for an engine in its own process, and updates while it samples
                "group_size": 4,
                "max_turns": 3,
                "max_tokens": 24,
                "token_budget": 500,
                "max_staleness": 1,
            }
        },
    ],
)
def test_a_run_replays_routes(tmp_path: Path, more: dict[str, object]):
    _, lines = run(moe_run(tmp_path, **more), tmp_path / "run")
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == 3
    for line in steps:
        assert 0.9 < line["routes/replayed"] < 1.0
    assert steps[0]["routes/tokens_differ"] == 0.0, "the same weights choose the same experts in float32"
    assert steps[0]["drift/max_abs"] < 1e-4
    if more:
        assert max(line["staleness/max"] for line in steps) > 0
        assert steps[-1]["routes/experts_differ"] > 0.0, "older weights chose other experts"
    else:
        assert max(line["drift/max_abs"] for line in steps) < 1e-4
    assert all(s.routes is None for episode in read_episodes(tmp_path / "run", 1) for s in episode.segments)


def test_a_model_without_experts_is_refused_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"learner\.replay_routes needs a model with experts, and model\.tiny"):
        run(moe_run(tmp_path, model={"tiny": {}}), tmp_path / "run")


def test_a_run_that_replayed_routes_has_no_record_of_them_to_replay(tmp_path: Path):
    run(moe_run(tmp_path, steps=1), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"updates with learner\.replay_routes cannot be replayed: "):
        replay(tmp_path / "run", 1)
