"""Tokenizer directories for the tests: small ones made here, and the real Qwen3 one where it is at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat.template import Renderer

QWEN3 = Path(__file__).parents[2].parent / "shared" / "tokenizers" / "qwen3"
needs_qwen3 = pytest.mark.skipif(not (QWEN3 / "tokenizer.json").is_file(), reason="no Qwen3 tokenizer at hand")

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


@lru_cache
def qwen3(template: str | None = None) -> Renderer:
    """The renderer of the real Qwen3 tokenizer, with its own template or the one named."""
    return Renderer.from_directory(QWEN3, template=template)


_CORPUS = [
    "The quick brown fox asks a tool and the tool answers with a number.",
    '{"name": "calculator", "arguments": {"expression": "12 + 30"}}\n',
    "user assistant system tool tools function description parameters type object properties string required",
    "<name> </name> <arg_key> <parameter=x> </parameter> functions. commentary analysis final",
    "Is this right? Yes, it is. No, it is not!\n\n    return x\n",
]


def make(
    folder: Path,
    template: str,
    special: Sequence[str] = CHATML_SPECIAL,
    markers: Sequence[str] = CHATML_MARKERS,
    eos: str = "<|im_end|>",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a byte-level BPE tokenizer with these added tokens, and the template, to `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in markers])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **(config or {})}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
