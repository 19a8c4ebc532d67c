"""Parameters that a request may have and its dialect does not follow, although they would change the answer.

Every dialect refuses them by name: those of other servers, and those that only another dialect follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentrl.serve.api_errors import unsupported

HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "container": (),
    "continue_final_message": (False,),
    "conversation": (),
    "custom_logit_processor": (),
    "detokenize": (True,),
    "do_sample": (True,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "echo": (False,),
    "enable_thinking": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "extra_body": ({},),
    "format": ("",),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_decoding": ({},),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "input": ("", []),
    "input_ids": (),
    "instructions": ("",),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "lora_path": (),
    "max_completion_tokens": (),
    "max_length": (),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "max_thinking_tokens": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "mcp_servers": ([],),
    "messages": ([],),
    "min_length": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_predict": (),
    "no_stop_trim": (False,),
    "num_beams": (1,),
    "num_predict": (),
    "options": ({},),
    "output_config": ({},),
    "output_format": (),
    "parallel_tool_calls": (True,),
    "penalty_alpha": (0,),
    "presence_penalty": (0,),
    "previous_response_id": (),
    "prompt": ("",),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "samplers": ([],),
    "seed": (),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_regex": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "system": ("", []),
    "template": (),
    "tfs_z": (1,),
    "thinking_budget": (),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto", {"type": "none"}, {"type": "auto"}),
    "tools": ([],),
    "top_a": (0,),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Parameters that would change the answer, with the values (besides null) that have no effect."""

INSTEAD = {
    "conversation": "conversation objects are not supported; continue with `previous_response_id`",
    "instructions": "this dialect has no instructions; send a system message",
    "system": "this dialect has no such parameter; send a system message",
    "enable_thinking": 'is a variable of the chat template; send chat_template_kwargs: {"enable_thinking": ...}',
}

SAME = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict"),
    ("messages", "input", "prompt"),
    ("stop", "stop_sequences"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    ("response_format", "text", "output_config"),
)
"""Parameters with the same purpose in different dialects."""


def check_unknown(given: Mapping[str, Any] | None, known: Collection[str]) -> None:
    """Raise ApiError for a parameter that the dialect of a request does not follow, unless it has no effect.

    Args:
        given: the parameters that are not among those of the dialect.
        known: the parameters of the dialect.
    """
    for name, value in (given or {}).items():
        if name in HARMLESS and value is not None and value not in HARMLESS[name]:
            same = next((other for names in SAME if name in names for other in names if other in known), None)
            why = f"is not a parameter here; send `{same}`" if same else "is not supported here; leave it out"
            raise unsupported(name, INSTEAD.get(name, why))
