"""Create a small model: Qwen3 architecture, seeded weights, a tokenizer trained on the env's own text.

It learns to call a tool in minutes on a laptop. The result is an ordinary Hugging Face model directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.clean import clean_text
from agentrl.config.run import TinyModel
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Qwen3Config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens, left out of decoded text."""
MARKER_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that decode to their text, as in Qwen3."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words, single digits, punctuation, white space: the pre-tokenization of the Qwen family."""


def make_tokenizer(directory: Path, corpus: Iterable[str], *, vocab: int, max_context: int) -> None:
    """Train a byte-level BPE tokenizer on `corpus` and write it, with the ChatML template, to `directory`.

    Any text can be encoded: the alphabet contains all 256 bytes. Digits remain single tokens.
    """
    from importlib.resources import files

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(SPECIAL_TOKENS) + len(MARKER_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(clean_text, corpus), trainer)  # rows may hold half a surrogate pair
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKER_TOKENS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (directory / "chat_template.jinja").write_text((files("agentrl.chat") / "chatml.jinja").read_text())


def make_tiny_model(
    directory: Path, corpus: Iterable[str], config: TinyModel, *, seed: int = 0, tokenizer_of: Path | None = None
) -> None:
    """Write a randomly initialized model and its tokenizer to `directory`; the same seed gives the same bytes.

    Args:
        tokenizer_of: a folder whose tokenizer is taken instead of one trained on the corpus.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    from agentrl.models.loading import LOADING

    if tokenizer_of is None:
        make_tokenizer(directory, corpus, vocab=config.vocab, max_context=config.max_context)
        known: dict[str, int] = {}
    else:
        known = _copy_tokenizer(tokenizer_of, directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    shape = tiny_config(
        config,
        vocab=max([tokenizer.get_vocab_size(), *(id + 1 for id in tokenizer.get_vocab().values())]),
        end=known.get("eos_token_id", tokenizer.token_to_id("<|im_end|>")),
        padding=known.get("pad_token_id", tokenizer.token_to_id("<|endoftext|>")),
    )
    with LOADING, torch.random.fork_rng(devices=[]):  # the generator is that of all threads
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
    model.save_pretrained(directory)


def _copy_tokenizer(source: Path, directory: Path) -> dict[str, int]:
    """Copy the files of a tokenizer; returns the end-of-text and padding ids from the config.json next to them.

    Raises:
        ConfigError: there is no tokenizer.
    """
    if not (source / "tokenizer.json").is_file():
        raise ConfigError(f"{source}: has no tokenizer.json: copy it from the model's repository")
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    try:
        found = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: found[key] for key in ("eos_token_id", "pad_token_id") if isinstance(found.get(key), int)}


def tiny_config(
    config: TinyModel, *, vocab: int, end: int | None = None, padding: int | None = None
) -> Qwen3Config:
    """The architecture of a tiny model, with the ids of its control tokens."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=max(1, config.heads // 2),
        head_dim=config.hidden // config.heads,
        max_position_embeddings=config.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=config.hidden**-0.5 / 2,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
