"""Play a served env through the classes of `examples/trl`: `trl_player.py URL [MODEL]`.

Reads [[call, ...], final text] of each task from stdin and plays it as TRL's loop does, then runs one step of
`GRPOTrainer` with MODEL, if given. Writes the rewards, and the rewards and log of the training step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/trl"))

import train as example


def replay(url: str, asked: list[Any]) -> list[float]:
    environment = example.served_env(url, send_message=True)()
    found = []
    for index, (calls, text) in enumerate(asked):
        environment.reset(split="train", index=index)
        messages = []
        for name, arguments in calls:
            try:
                content = getattr(environment, name)(**arguments)
            except Exception as e:
                content = str({"error": str(e)})
            messages.append({"role": "tool", "name": name, "content": content})
        messages.append({"role": "assistant", "content": text} if text is not None else {"role": "tool"})
        found += example.reward([messages], [environment])
    environment._session.socket.close()
    return found


def train(url: str, model: str) -> list[Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=example.reward,
        train_dataset=Dataset.from_list(example.rows(url, 4)),
        environment_factory=example.served_env(url),
        args=GRPOConfig(
            output_dir=f"{model}-trl",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=24,
            max_steps=1,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [log[0]["reward"], log[0]["rewards/reward/mean"], sorted(trainer._sync_tool_dicts[0])]


def main() -> None:
    out = sys.stdout
    sys.stdout = sys.stderr
    asked = json.load(sys.stdin)
    rewards = replay(sys.argv[1], asked)
    trained = train(sys.argv[1], sys.argv[2]) if len(sys.argv) > 2 else None
    json.dump([rewards, trained], out)


if __name__ == "__main__":
    main()
