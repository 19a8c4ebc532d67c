"""The chat templates that trl ships: each is used, or refused for the reason that is expected."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from agentrl.chat.demonstrate import imitate
from agentrl.chat.proof import prove, shapes
from agentrl.chat.roundtrip import TOOL
from agentrl.chat.template import Renderer
from agentrl.chat.token_check import check_tokens
from agentrl.errors import TemplateError
from agentrl.types import Message, ToolCall
from tests.chat.chat_tokenizers import make

found = importlib.util.find_spec("trl")
FOLDER = Path(((found and found.submodule_search_locations) or ["none"])[0]) / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
"""Those with _training differ in what stays of earlier turns."""
SPECIAL = re.compile(
    r"<\|[^\s|'\"<>]+\|?>|<[^\s|'\"<>/]+\|>|<｜[^\s｜'\"]+｜>|<(?:start|end)_[a-z_]+>|\[gMASK\]|<sop>|<bos>|<\|\"\|>"
)
MARKERS = re.compile(r"</?(?:tool_call|tool_response|think|arg_key|arg_value)>")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<turn|>", "<end_of_turn>", "<|return|>", "<|end|>")
EOS = {"glm4moe": "<|endoftext|>"}
READ = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "nemotron_3": "qwen3_coder",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "muse_glimmer": "muse_glimmer",
    "gemma4": "gemma",
    "diffusion_gemma": "gemma",
    "lfm2": "lfm2",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
}
"""Parsers, by the beginning of the names of templates that offer tools; the longest beginning counts."""
WITHOUT_TOOLS = ("cohere", "deepseek", "gemma", "gemma3", "llama3", "phi3", "qwen2_5_vl")
FOR_IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Their texts are lists of parts."""

TOLD = [
    Message("user", "Go."),
    Message("assistant", "", tool_calls=(ToolCall("call00000", "look_up", {"query": 'a "b"\nc', "limit": 2}),)),
    Message("tool", "r1", tool_call_id="call00000", name="look_up"),
    Message("assistant", "", tool_calls=(ToolCall("call00001", "look_up", {"query": "7"}),)),
    Message("tool", "r2", tool_call_id="call00001", name="look_up"),
    Message("assistant", "Done."),
]


def longest(name: str, beginnings: tuple[str, ...]) -> str:
    return max((b for b in beginnings if name.startswith(b)), key=len, default="")


def load(name: str, folder: Path) -> Renderer:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    markers = tuple(dict.fromkeys(MARKERS.findall(source)))
    special = tuple(dict.fromkeys(SPECIAL.findall(source)))
    eos = "<|endoftext|>" if name == "glm4moe" else next((end for end in ENDS if end in special), "</s>")
    special = tuple(dict.fromkeys([*special, eos]))
    return Renderer.from_directory(make(folder, source, special, markers, eos, {"bos_token": special[0]}))


@pytest.mark.skipif(not TEMPLATES, reason="trl is not installed")
def test_every_template_is_used_or_refused_as_expected(tmp_path: Path):
    for name in TEMPLATES:
        if name in FOR_IMAGES:
            with pytest.raises(TemplateError):
                load(name, tmp_path / name)
            continue
        renderer = load(name, tmp_path / name)
        proof = prove(renderer, shapes(0))
        assert proof.wrong == (), name
        if len(longest(name, WITHOUT_TOOLS)) > len(longest(name, tuple(READ))):
            with pytest.raises(TemplateError, match="ignores tools"):
                proof.require(tools=True)
            continue
        proof.require(tools=True)
        assert renderer.parser.name == READ[longest(name, tuple(READ))], name
        if name in ("lfm2_2_5", "lfm2_2_5_v2"):
            continue  # they write quotes in text as they are
        transcript = imitate(renderer, TOLD, [TOOL])
        assert not check_tokens(transcript, "ignore_strippable").failed, name
        text = renderer.decode(transcript.ids)
        assert 0 < text.find("Look something up.") < text.rfind("r1") < text.rfind("r2"), name
