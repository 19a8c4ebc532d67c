"""Rejection sampling with TRL: play an env with agentrl, fine-tune on the solved episodes with TRL's SFTTrainer.

    pip install 'agentrl-train[train,bench]'
    python examples/other_trainer/rejection_sampling.py MODEL [--out DIR] [--groups N]

MODEL is a model directory, a run folder or a checkpoint. The rows that TRL gets hold the sampled token ids and a
mask of the policy's own tokens, so nothing is rendered or tokenized a second time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import agentrl
from agentrl import Group
from agentrl.run_folder.store import find_checkpoint

CONFIG = {
    "env": "agentrl.envs.calculator:Calculator",
    "data": {"options": {"max_operations": 1}},
    "model": {"tiny": {}},  # not used: the model is given
    "rollout": {"groups_per_step": 8, "group_size": 4, "max_turns": 4, "max_tokens": 64, "token_budget": 1024},
}


def solved_rows(groups: Sequence[Group]) -> list[dict[str, list[int]]]:
    """The rows of solved episodes, in the columns of TRL's tokenized datasets."""
    solved = {episode.id for group in groups for episode in group.episodes if episode.solved}
    return [
        {"input_ids": list(row.ids), "completion_mask": [int(on) for on in row.loss_mask]}
        for row in agentrl.training_rows(groups, CONFIG)
        if row.episode_id in solved
    ]


def fine_tune(rows: list[dict[str, list[int]]], model: Path, out: Path) -> Path:
    """One epoch of TRL's SFTTrainer on these rows; returns the folder of the new model."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(out),
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=1e-4,
        completion_only_loss=True,
        max_length=None,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(str(out))
    return out


def main() -> None:
    """Play, keep what is solved, fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("models/rejection-sampling"))
    parser.add_argument("--groups", type=int, default=64)
    args = parser.parse_args()
    model = args.model if (args.model / "config.json").is_file() else find_checkpoint(args.model).path
    groups = list(agentrl.rollouts(CONFIG, args.groups, model=model))
    rows = solved_rows(groups)
    print(f"{len(rows)} of {sum(len(group.episodes) for group in groups)} episodes are solved")
    if rows:
        print("saved", fine_tune(rows, model, args.out))


if __name__ == "__main__":
    main()
