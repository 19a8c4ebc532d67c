"""CPU cost of tokens: a 100-turn episode of about 59,000 tokens, ours and by rendering everything again each turn.

    python bench/transcript.py [--quick] [--tokenizer DIRECTORY] [--turns 100] [--tokens 59000]

Ours appends what is new and keeps the rest. The baseline is `apply_chat_template` of transformers on the whole
conversation before every completion, with the same template and tokenizer, and our parser. Both see the same
messages; only rendering, encoding, decoding and parsing are timed (process CPU time). `--quick` plays 30 turns of
the same length. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from agentrl.chat.proof import TOOLS
from agentrl.chat.template import Renderer
from agentrl.chat.transcript import Transcript
from agentrl.types import Completion, Message

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.shared.verdict import finish

QWEN3 = Path(__file__).parents[2] / "shared" / "tokenizers" / "qwen3"
WORDS = ["the", "sum", "of", "rows", "is", "checked", "against", "a", "table", "17", "42", "0.5", "error", "value"]
GOAL_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer", type=Path, help="a Hugging Face directory; by default Qwen3's, or a small one"
    )
    parser.add_argument("--template", default="chatml", help="'chatml', 'own' (the directory's), or a file")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=59_000)
    parser.add_argument("--quick", action="store_true", help="30 turns of the same length: a few seconds")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.tokens = 30, args.tokens * 30 // args.turns

    directory = args.tokenizer or (QWEN3 if QWEN3.is_dir() else small_tokenizer())
    renderer = Renderer.from_directory(directory, template=None if args.template == "own" else args.template)
    per_turn = args.tokens // args.turns
    ours, length = run_ours(renderer, args.turns, per_turn)
    baseline, other = run_baseline(renderer, directory, args.turns, per_turn)
    assert other == length, f"the two are not the same conversation: {length} tokens and {other}"
    print(f"{'turn':>5} {'ours ms':>9} {'all again ms':>13}")
    for turn in sorted({0, *range(9, args.turns, max(1, args.turns // 10)), args.turns - 1}):
        print(f"{turn + 1:>5} {ours[turn] * 1e3:>9.2f} {baseline[turn] * 1e3:>13.2f}")
    tenth = max(1, args.turns // 10)
    early, late = median(ours[1 : 1 + 2 * tenth]), median(ours[-2 * tenth :])
    print(f"{length} tokens in {args.turns} turns ({directory.name}, {args.template} template)")
    print(f"median turn, first fifth {early * 1e3:.2f} ms, last fifth {late * 1e3:.2f} ms: {late / early:.2f} x")
    finish(
        {
            "bench": "transcript",
            "ours": round(sum(ours), 3),
            "baseline": round(sum(baseline), 3),
            "ratio": round(sum(baseline) / sum(ours), 1),
            "unit": f"CPU s per {args.turns}-turn episode of {length} tokens",
            "goal": f"< {GOAL_SECONDS:g} s",
            "met": sum(ours) < GOAL_SECONDS,
        },
        timed=True,
    )


def script(turns: int, per_turn: int) -> list[tuple[str, str]]:
    """(what the policy says, what the tool answers) of each turn; about `per_turn` tokens together."""
    rng = random.Random(0)

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(words))

    said = []
    for _ in range(turns):
        call = json.dumps({"name": "look_up", "arguments": {"query": text(12), "limit": 3}})
        said.append((f"{text(per_turn // 5)}\n<tool_call>\n{call}\n</tool_call>", text(per_turn * 2 // 5)))
    return said


def run_ours(renderer: Renderer, turns: int, per_turn: int) -> tuple[list[float], int]:
    """Seconds of each turn, and the length at the end."""
    stop = next(iter(renderer.stop_ids))
    said = script(turns, per_turn)
    completions = [(*renderer.vocabulary.encode(text), stop) for text, _ in said]  # what the engine would sample
    seconds = []
    transcript = Transcript(renderer, TOOLS)
    new = [Message("system", "Answer with tools."), Message("user", "Check every row.")]
    for ids, (_, answer) in zip(completions, said, strict=True):
        started = time.process_time()
        transcript.extend(new)
        context = transcript.ids
        seconds.append(time.process_time() - started)
        completion = Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")
        started = time.process_time()
        message = transcript.complete(completion)
        seconds[-1] += time.process_time() - started
        [call] = message.tool_calls
        new = [Message("tool", answer, tool_call_id=call.id)]
        assert len(context) < len(transcript.ids)
    return seconds, len(transcript.ids)


def run_baseline(renderer: Renderer, directory: Path, turns: int, per_turn: int) -> tuple[list[float], int]:
    """Seconds of each turn when all is rendered and encoded again, and the completion parsed; the length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    stop = next(iter(renderer.stop_ids))
    messages = [Message("system", "Answer with tools."), Message("user", "Check every row.")]
    given = [renderer.data(message) for message in messages]
    options = {"tools": [dict(tool) for tool in TOOLS], "chat_template": renderer.template, "return_dict": False}
    seconds, length = [], 0
    for number, (text, answer) in enumerate(script(turns, per_turn)):
        ids = [*renderer.vocabulary.encode(text), stop]
        started = time.process_time()
        context = tokenizer.apply_chat_template(given, add_generation_prompt=True, **options)  # type: ignore[arg-type]
        message = renderer.parse(ids, tools=TOOLS, number=len(given))
        seconds.append(time.process_time() - started)
        given += [renderer.data(message), renderer.data(Message("tool", answer, tool_call_id=f"{number}"))]
        length = len(context) + len(ids)
    return seconds, length


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def small_tokenizer() -> Path:
    from agentrl.models.tiny import make_tokenizer

    directory = Path(tempfile.mkdtemp()) / "small"
    make_tokenizer(directory, [" ".join(WORDS)] * 50, vocab=1024, max_context=1 << 17)
    return directory


if __name__ == "__main__":
    main()
