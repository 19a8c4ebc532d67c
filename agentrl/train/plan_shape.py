"""What a model costs, from its config.json alone: no weights are read and none are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.run import TinyModel
from agentrl.errors import ConfigError

FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder.

    Attributes:
        parameters: all of them, tied ones once.
        outer: parameters outside the blocks (embedding, output layer, last norm).
        trained_matrices: for LoRA: (inputs, outputs) of each linear layer in the blocks, by the end of its name.
    """

    kind: str
    parameters: int
    outer: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    linear: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of_directory(cls, directory: Path) -> ModelShape:
        """From the config.json of a Hugging Face model directory.

        Raises:
            ConfigError: it is missing, no JSON, or of a model that transformers does not know.
        """
        from transformers import AutoConfig

        if not (directory / "config.json").is_file():
            raise ConfigError(f"model directory {directory} has no config.json: give the folder of a model")
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as e:
            raise ConfigError(f"{directory / 'config.json'}: {str(e)[:300]}") from e
        return cls._of(config, str(directory))

    @classmethod
    def of_tiny(cls, tiny: TinyModel) -> ModelShape:
        """Of the model that a run makes itself; its tokenizer may end up with fewer tokens than `vocab`."""
        from transformers import Qwen3Config

        return cls._of(
            Qwen3Config(
                vocab_size=tiny.vocab,
                hidden_size=tiny.hidden,
                intermediate_size=tiny.intermediate,
                num_hidden_layers=tiny.layers,
                num_attention_heads=tiny.heads,
                num_key_value_heads=max(1, tiny.heads // 2),
                head_dim=tiny.hidden // tiny.heads,
                max_position_embeddings=tiny.max_context,
                tie_word_embeddings=True,
            ),
            "model.tiny",
        )

    @classmethod
    def _of(cls, config: Any, where: str) -> ModelShape:
        import torch
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        try:
            with torch.device("meta"):  # shapes without storage
                model = auto.from_config(config)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"{where}: is no causal language model that can be planned: {str(e)[:300]}") from e
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        blocks = {name: p.numel() for name, p in model.named_parameters() if ".layers." in name}
        total = sum(p.numel() for p in model.parameters())
        linear = tuple(
            (name.rpartition(".")[2], module.in_features, module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and ".layers." in name
        )
        return cls(
            kind=str(config.model_type),
            parameters=total,
            outer=total - sum(blocks.values()),
            layers=int(text.num_hidden_layers),
            hidden=int(text.hidden_size),
            intermediate=int(getattr(text, "intermediate_size", 0) or 4 * text.hidden_size),
            heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            vocab=int(text.vocab_size),
            max_context=int(text.max_position_embeddings),
            linear=linear,
        )

    @property
    def block(self) -> int:
        """Parameters of one block (of the average one)."""
        return (self.parameters - self.outer) // self.layers

    def kv_bytes_per_token(self, bytes_each: int) -> int:
        """Keys and values of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * bytes_each

    def activation_bytes_per_token(self, bytes_each: int) -> int:
        """What the backward pass of one block keeps for one token.

        Counted from the operations of a pre-norm block with gated feed-forward: inputs of norms and residuals
        (6 x hidden), queries, keys, values and their rotated and gathered copies, attention's result, and the
        feed-forward's four intermediates.
        """
        attention = (4 * self.heads + 6 * self.kv_heads) * self.head_dim
        return bytes_each * (6 * self.hidden + attention + 4 * self.intermediate)

    def lora_parameters(self, rank: int, targets: str | list[str]) -> int:
        """Trained parameters of adapters of this rank."""
        return sum(
            rank * (inputs + outputs)
            for name, inputs, outputs in self.linear
            if targets == "all-linear" or name in targets
        )


def classifier_parameters(directory: Path) -> int:
    """Parameters of a sequence-classification model, from the config.json of its directory.

    Raises:
        ConfigError: it is missing, no JSON, or of a model that has no such head.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):  # shapes without storage
            model = auto.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"reward_model.path {directory}: is no classifier that can be planned: {str(e)[:300]}"
        ) from e
    return sum(p.numel() for p in model.parameters())
