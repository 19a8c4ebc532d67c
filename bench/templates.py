"""Chat templates of public models: accepted, refused with a reason, or wrong.

A template is wrong where a run would start with it and something would then go wrong in silence: a call that the
policy makes is not read, or an episode fails the token check. Each accepted template plays tool episodes in which
the policy samples what the template itself would have written. `--quick` runs all of it in under a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from agentrl.chat.demonstrate import imitate
from agentrl.chat.roundtrip import TOOL, calls_of
from agentrl.chat.template import Renderer
from agentrl.chat.token_check import check_tokens
from agentrl.chat.transcript import Transcript
from agentrl.errors import AgentRLError, TemplateError
from agentrl.rollout.renderer import require_template
from agentrl.types import Message, ToolCall

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

FOLDER = Path(__file__).parent / "templates"
MARKER = re.compile(
    r"<\|[\w ./\"-]{1,60}\|?>|<\w{1,40}\|>|<｜[^｜<>{}]{1,60}｜>|\[/?[A-Z][A-Z_]{2,30}\]|</?s>|<bos>|<eos>"
    r"|\]~!?b\]?\[?|\[e~\[|<end_of_sentence>|<beginning_of_sentence>|\[gMASK\]|<sop>|｜DSML｜"
    r"|</?(?:tool_calls?|tool_response|think|arg_key|arg_value|minimax:tool_call|seed:\w+)>"
)
ENDS = (
    "<|return|>", "<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end_of_text|>", "<turn|>", "<|end|>", "<|endoftext|>",
    "<｜end▁of▁sentence｜>", "<seed:eos>", "[e~[", "<end_of_sentence>",
)  # fmt: skip
PLAIN = ("<tool", "</tool", "<think", "</think", "<arg", "</arg", "<minimax", "</minimax")


def directory(template: str, folder: Path) -> Path:
    """A small tokenizer with the control tokens that the template writes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    found = dict.fromkeys(match.group() for match in MARKER.finditer(template))
    eos = "</s>" if "[INST]" in template else next((end for end in ENDS if end in template), "</s>")
    tokens = [*found, *(token for token in ("<s>", eos) if token not in found)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["a tool"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    special = [token for token in tokens if not token.startswith(PLAIN)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in tokens if t not in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": eos}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def episodes(renderer: Renderer) -> list[list[Message]]:
    """Tool episodes with and without a system prompt."""
    found = []
    for system in ([], [Message("system", "Be brief.")]):
        ids = [renderer.parser.call_id("look_up", 0), renderer.parser.call_id("look_up", 1)]
        turns = []
        for id, arguments in zip(
            ids, ({"query": "one", "limit": 2}, {"query": "Grüße", "exact": True}), strict=True
        ):
            turns.append(Message("assistant", "", tool_calls=(ToolCall(id, "look_up", arguments),)))
            turns.append(Message("tool", "It is 3.", tool_call_id=id, name="look_up"))
        found.append([*system, Message("user", "Go."), *turns, Message("assistant", "Three.")])
    return found


def judged(template: str) -> tuple[str, str]:
    """(accepted | refused | wrong, why)."""
    with tempfile.TemporaryDirectory() as temp:
        try:
            renderer = Renderer.from_directory(directory(template, Path(temp)))
            require_template(renderer, [TOOL])
        except AgentRLError as e:
            return "refused", str(e)
        played, loud = 0, ""
        for episode in episodes(renderer):
            try:
                transcript = imitate(renderer, episode, [TOOL])
            except TemplateError as e:  # a run stops there and says so: a template without system prompts, say
                loud = str(e)
                continue
            played += 1
            if why := _trouble(renderer, transcript):
                return "wrong", why
        return ("accepted", renderer.parser.name) if played else ("wrong", loud)


def _trouble(renderer: Renderer, transcript: Transcript) -> str:
    for segment in transcript.branch:
        if segment.origin == "sampled" and segment.message is not None:
            read = renderer.parse(segment.ids, tools=[TOOL])
            if calls_of(read) != calls_of(transcript.messages[segment.message]):
                return f"a call is read as {read}"
            if segment.ids[-1] not in renderer.stop_ids or any(id in renderer.stop_ids for id in segment.ids[:-1]):
                return f"no policy samples {renderer.decode(segment.ids)!r}"
    report = check_tokens(transcript, "ignore_strippable")
    return "; ".join(map(str, report.differences)) if report.failed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same templates; the whole run is quick")
    parser.parse_args()
    counts: Counter[str] = Counter()
    for file in sorted(FOLDER.glob("*.jinja")):
        verdict, why = judged(file.read_text(encoding="utf-8"))
        counts[verdict] += 1
        print(f"{file.stem:48} {verdict:9} {why[:150]}")
    total = sum(counts.values())
    wrong = counts["wrong"]
    line = {
        "bench": "templates",
        "ours": wrong,
        "baseline": total,
        "ratio": wrong / total,
        "unit": "templates that are accepted and wrong, of all",
        "goal": "wrong = 0",
        "met": wrong == 0,
        "accepted": counts["accepted"],
        "refused": counts["refused"],
        "wrong": wrong,
    }
    finish(line, timed=True)
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
