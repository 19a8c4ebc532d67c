"""The published shapes of Qwen3, for benches that make their weights at random."""

from __future__ import annotations

from transformers import Qwen3Config

# hidden, intermediate, layers, query heads, key-value heads, head size, vocabulary, tied (as published)
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "smoke": (64, 128, 2, 4, 2, 16, 500, True),
}


def qwen3_config(shape: str, context: int) -> Qwen3Config:
    """The configuration of one shape, for sequences of up to `context` tokens."""
    hidden, intermediate, layers, heads, kv_heads, head, vocabulary, tied = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
    )
